"""When a run saves. Pure: decides, writes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jobrunner.errors import DefinitionError


@dataclass(frozen=True, slots=True)
class Moment:
    """A point between two runs of the epoch group, at which the workspaces could be saved.

    Attributes
    ----------
    epoch : int
        The epoch that is under way, or has just ended.
    step : int
        How many of its `steps_per_epoch` runs of the group are done, from 1 on.
    steps_per_epoch : int
    seconds_since_save : float
        Since the last save began, or since the run did.
    seconds_to_save : float or None
        How long the epochs waited for a save, on average of the last few; None before the first.
    is_saving : bool
        Whether a save in the background is still being written; the next one would wait for it.
    """

    epoch: int
    step: int
    steps_per_epoch: int
    seconds_since_save: float
    seconds_to_save: float | None = None
    is_saving: bool = False

    @property
    def is_boundary(self) -> bool:
        """Whether the epoch has ended."""
        return self.step == self.steps_per_epoch

    @property
    def total_steps(self) -> int:
        """How often the epoch group has run since epoch 0, resumed runs included."""
        return (self.epoch - 1) * self.steps_per_epoch + self.step


@runtime_checkable
class SavePolicy(Protocol):
    """Says when to save.

    Epoch 0, the last epoch and what `JobRunner.save_now` asks for are saved whatever it says. A
    policy that also has ``epochs_until(epoch, steps_per_epoch)`` lets workers run short epochs on
    their own up to the one it gives; see `epochs_until`.
    """

    def is_due(self, moment: Moment) -> bool:
        """Whether to save now; the answer depends on `moment` alone."""


def epochs_until(policy: SavePolicy, epoch: int, steps_per_epoch: int) -> int | None:
    """How many epochs may run, `epoch` the first, before the policy must be asked again.

    Returns
    -------
    int or None
        None: it goes by time; ask it now and then. 1 for a policy that does not say.
    """
    ask = getattr(policy, "epochs_until", None)
    return 1 if ask is None else ask(epoch, steps_per_epoch)


class _Composable:
    """Lets save policies be joined: the whole saves when any part does."""

    __slots__ = ()

    def __or__(self, other: SavePolicy) -> AnyOf:
        if not isinstance(other, SavePolicy):
            return NotImplemented
        return AnyOf((self, other))  # type: ignore[arg-type]  # every subclass has `is_due`


@dataclass(frozen=True, slots=True)
class AnyOf(_Composable):
    """Save when any of `policies` says so; ``a | b`` makes one."""

    policies: tuple[SavePolicy, ...]

    def is_due(self, moment: Moment) -> bool:
        """See `SavePolicy`."""
        return any(policy.is_due(moment) for policy in self.policies)

    def epochs_until(self, epoch: int, steps_per_epoch: int) -> int | None:
        """See `epochs_until`."""
        return _least(epochs_until(policy, epoch, steps_per_epoch) for policy in self.policies)


@dataclass(frozen=True, slots=True)
class SaveEvery(_Composable):
    """Save at intervals; of several, whichever is over first.

    Parameters
    ----------
    epochs : int, optional
        After epochs whose number is a multiple of it.
    steps : int, optional
        After so many runs of the epoch group, counted since epoch 0; with
        ``Job(steps_per_epoch=)`` that is in mid-epoch too.
    seconds : float, optional
        After the first step that ends so long after the last save began.

    Raises
    ------
    DefinitionError
        None of them is given, or one is not positive.

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
        for what, count in (("epochs", self.epochs), ("steps", self.steps)):
            is_count = isinstance(count, int) and not isinstance(count, bool) and count >= 1
            if count is not None and not is_count:
                raise DefinitionError(f"SaveEvery: {what} is an int from 1 on; got {count!r}.")
        if self.seconds is not None and not _is_positive(self.seconds):
            raise DefinitionError(f"SaveEvery: seconds is a positive number; got {self.seconds!r}.")
        if self.epochs is None and self.steps is None and self.seconds is None:
            raise DefinitionError(
                "SaveEvery needs an interval: SaveEvery(epochs=1), SaveEvery(steps=100) or "
                "SaveEvery(seconds=600)."
            )

    def is_due(self, moment: Moment) -> bool:
        """See `SavePolicy`."""
        if self.epochs is not None and moment.is_boundary and not moment.epoch % self.epochs:
            return True
        if self.steps is not None and not moment.total_steps % self.steps:
            return True
        return self.seconds is not None and moment.seconds_since_save >= self.seconds

    def epochs_until(self, epoch: int, steps_per_epoch: int) -> int | None:
        """See `epochs_until`."""
        intervals = [] if self.epochs is None else [self.epochs]
        if self.steps is not None:
            epochs, rest = divmod(self.steps, steps_per_epoch)
            intervals.append(1 if rest else epochs)
        return _least(interval - (epoch - 1) % interval for interval in intervals)


@dataclass(frozen=True, slots=True)
class Auto(_Composable):
    """Save as often as a share of the run's time allows, judged by what saves have cost.

    Parameters
    ----------
    max_overhead : float
        Of the time between two saves, the share that the epochs may wait for one.
    """

    max_overhead: float = 0.03

    def __post_init__(self) -> None:
        if not _is_positive(self.max_overhead) or self.max_overhead >= 1:
            raise DefinitionError(
                f"Auto: max_overhead is a share of time between 0 and 1, such as 0.03; got "
                f"{self.max_overhead!r}."
            )

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


def _is_positive(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    )
