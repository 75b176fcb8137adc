"""Save policies: when a run saves. They do no I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jobrunner.define import COUNT, INTERVAL, checked, number
from jobrunner.errors import DefinitionError


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time between two steps (runs of the epoch group), when a save is possible.

    Attributes
    ----------
    epoch : int
        The epoch that is running, or has just ended.
    step : int
        The number of steps of this epoch that have ended, at least 1.
    steps_per_epoch : int or None
        None if it is not known; see `Job.end_epoch_when`.
    seconds_since_save : float
        Time since the last save began, or since the run began.
    seconds_to_save : float or None
        Mean time that the epochs waited for each of the last few saves; None before the first.
    is_saving : bool
        Whether a save in the background is still being written; another one would wait for it.
    has_ended : bool
        Whether this step was the last of an epoch whose number of steps was not known.
    """

    epoch: int
    step: int
    steps_per_epoch: int | None
    seconds_since_save: float
    seconds_to_save: float | None = None
    is_saving: bool = False
    has_ended: bool = False

    @property
    def is_boundary(self) -> bool:
        """Whether the epoch has ended."""
        return self.has_ended or self.step == self.steps_per_epoch

    @property
    def total_steps(self) -> int:
        """The number of steps since epoch 0, including those before a resume.

        If `steps_per_epoch` is None, the number of steps of this epoch.
        """
        return (self.epoch - 1) * (self.steps_per_epoch or 0) + self.step


@runtime_checkable
class SavePolicy(Protocol):
    """Decides when to save.

    A run also saves epoch 0, the last epoch, and when `JobRunner.save_now` asks for it. A policy
    may also have a method ``epochs_until(epoch, steps_per_epoch)``: how many epochs, from `epoch`
    on, may run before `is_due` must be asked; None if only time decides. It lets workers run
    several short epochs without asking the client.
    """

    def is_due(self, moment: Moment) -> bool:
        """Whether to save now; must depend on `moment` alone."""


def epochs_until(policy: SavePolicy, epoch: int, steps_per_epoch: int) -> int | None:
    """Call the policy's ``epochs_until``; 1 if it has none. See `SavePolicy`."""
    ask = getattr(policy, "epochs_until", None)
    return 1 if ask is None else ask(epoch, steps_per_epoch)


class _JoinsSaves:
    """Joins save policies with ``|``."""

    __slots__ = ()

    def __or__(self, other: SavePolicy) -> AnyOf:
        if not isinstance(other, SavePolicy):
            return NotImplemented
        return AnyOf((self, other))  # type: ignore[arg-type]  # every subclass has `is_due`


@dataclass(frozen=True, slots=True)
class AnyOf(_JoinsSaves):
    """Save when any of `policies` is due; ``a | b`` makes one."""

    policies: tuple[SavePolicy, ...]

    def is_due(self, moment: Moment) -> bool:
        """See `SavePolicy`."""
        return any(policy.is_due(moment) for policy in self.policies)

    def epochs_until(self, epoch: int, steps_per_epoch: int) -> int | None:
        """See `epochs_until`."""
        return _least(epochs_until(policy, epoch, steps_per_epoch) for policy in self.policies)


@checked(epochs=COUNT, steps=COUNT, seconds=INTERVAL)
@dataclass(frozen=True, slots=True)
class SaveEvery(_JoinsSaves):
    """Save at intervals: whenever one of them ends.

    Parameters
    ----------
    epochs : int, optional
        Save after each epoch whose number is a multiple of this.
    steps : int, optional
        Save each time the epoch group has run this often, counted from epoch 0. With
        ``Job(steps_per_epoch=)`` this also saves in the middle of an epoch. If the number of steps
        is not known, count from the start of each epoch, and save at the end of each.
    seconds : float, optional
        Save after the first step that ends this long or longer after the last save began.

    Raises
    ------
    DefinitionError
        There is no interval, or one is not positive.

    Examples
    --------
    >>> every_other = SaveEvery(epochs=2) | SaveEvery(seconds=600)
    >>> every_other.is_due(Moment(3, step=1, steps_per_epoch=1, seconds_since_save=5))
    False
    """

    epochs: int | None = None
    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.epochs is None and self.steps is None and self.seconds is None:
            raise DefinitionError(
                "SaveEvery needs an interval: SaveEvery(epochs=1), SaveEvery(steps=100) or "
                "SaveEvery(seconds=600)."
            )

    def is_due(self, moment: Moment) -> bool:
        """See `SavePolicy`."""
        if self.epochs is not None and moment.is_boundary and not moment.epoch % self.epochs:
            return True
        if self.steps is not None and self._is_step_due(moment, self.steps):
            return True
        return self.seconds is not None and moment.seconds_since_save >= self.seconds

    def epochs_until(self, epoch: int, steps_per_epoch: int) -> int | None:
        """See `epochs_until`."""
        intervals = [] if self.epochs is None else [self.epochs]
        if self.steps is not None:
            epochs, rest = divmod(self.steps, steps_per_epoch)
            intervals.append(1 if rest else epochs)
        return _least(interval - (epoch - 1) % interval for interval in intervals)

    @staticmethod
    def _is_step_due(moment: Moment, steps: int) -> bool:
        done = moment.total_steps
        return not done % steps or moment.has_ended


@checked(max_overhead=number("a number > 0 and < 1, for example 0.03", lambda it: 0 < it < 1))
@dataclass(frozen=True, slots=True)
class Auto(_JoinsSaves):
    """Save as often as possible while saves take only a small share of the run's time.

    Parameters
    ----------
    max_overhead : float
        The share of the run's time, between 0 and 1, that epochs may wait for saves. The times of
        the last few saves decide.
    """

    max_overhead: float = 0.03

    def is_due(self, moment: Moment) -> bool:
        """See `SavePolicy`."""
        if moment.is_saving:
            return False
        if moment.seconds_to_save is None:
            return moment.is_boundary
        return moment.seconds_since_save * self.max_overhead >= moment.seconds_to_save

    def epochs_until(self, epoch: int, steps_per_epoch: int) -> int | None:
        """See `epochs_until`."""
        return None


def _least(counts: Iterable[int | None]) -> int | None:
    return min((count for count in counts if count is not None), default=None)
