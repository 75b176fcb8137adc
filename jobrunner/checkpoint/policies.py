"""Policies: when a run saves, and which recorded epochs it keeps. They do no I/O."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from jobrunner.define import COUNT, FLAG, INTERVAL, Rule, checked, number, one_of
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
    steps_per_epoch : int
    seconds_since_save : float
        Time since the last save began, or since the run began.
    seconds_to_save : float or None
        Mean time that the epochs waited for each of the last few saves; None before the first.
    is_saving : bool
        Whether a save in the background is still being written; another one would wait for it.
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
        """The number of steps since epoch 0, including those before a resume."""
        return (self.epoch - 1) * self.steps_per_epoch + self.step


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
        ``Job(steps_per_epoch=)`` this also saves in the middle of an epoch.
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


Metrics = Mapping[int, Mapping[str, Any]]
"""Recorded epoch -> the metrics that its tasks reported; read from the log on first use."""


Unfinished = Callable[[Sequence[int]], Collection[int]]
"""Which of some epochs have mid-epoch checkpoints; their records are read on first use."""


@runtime_checkable
class RetentionPolicy(Protocol):
    """Decides which epochs to retire after each commit.

    A run always keeps the newest recorded epoch, the one that it resumed from, and pinned ones.
    """

    def retires(self, epochs: Sequence[int], metrics: Metrics) -> Collection[int]:
        """Which of `epochs`, the recorded ones in ascending order, to retire.

        With a third parameter, `unfinished`, it gets a function: ``unfinished(epochs)`` are those
        of `epochs` whose checkpoints were saved in the middle of the epoch.
        """


def retired_by(
    policy: RetentionPolicy, epochs: Sequence[int], metrics: Metrics, unfinished: Unfinished | None
) -> Collection[int]:
    """Call the policy's `retires`, with `unfinished` if it takes that."""
    if "unfinished" in inspect.signature(policy.retires).parameters:
        return policy.retires(epochs, metrics, unfinished)  # type: ignore[call-arg]
    return policy.retires(epochs, metrics)


class _JoinsRetention:
    """Joins retention policies with ``|``."""

    __slots__ = ()

    def __or__(self, other: RetentionPolicy) -> KeepAny:
        if not isinstance(other, RetentionPolicy):
            return NotImplemented
        return KeepAny((self, other))  # type: ignore[arg-type]  # every subclass has `retires`


@dataclass(frozen=True, slots=True)
class KeepAny(_JoinsRetention):
    """Keep each epoch that any of `policies` keeps; ``a | b`` makes one."""

    policies: tuple[RetentionPolicy, ...]

    def retires(
        self, epochs: Sequence[int], metrics: Metrics, unfinished: Unfinished | None = None
    ) -> Collection[int]:
        """See `RetentionPolicy`."""
        each = [set(retired_by(it, epochs, metrics, unfinished)) for it in self.policies]
        return sorted(set.intersection(*each))


@dataclass(frozen=True, slots=True)
class KeepAll(_JoinsRetention):
    """Keep every epoch."""

    def retires(self, epochs: Sequence[int], metrics: Metrics) -> Collection[int]:
        """See `RetentionPolicy`."""
        return ()


_METRIC = Rule("the name of a metric", lambda it: isinstance(it, str) and it != "")


@checked(n=COUNT, partial=FLAG)
@dataclass(frozen=True, slots=True)
class KeepLast(_JoinsRetention):
    """Keep the newest `n` epochs.

    Parameters
    ----------
    n : int
        At least 1.
    partial : bool
        Whether checkpoints saved in the middle of an epoch count too.

    Examples
    --------
    >>> list(KeepLast(2).retires([0, 1, 2, 3], {}))
    [0, 1]
    """

    n: int
    partial: bool = False

    def retires(
        self, epochs: Sequence[int], metrics: Metrics, unfinished: Unfinished | None = None
    ) -> Collection[int]:
        """See `RetentionPolicy`."""
        kept: set[int] = set()
        stop = len(epochs)
        while len(kept) < self.n and stop > 0:
            start = max(0, stop - self.n + len(kept))
            kept.update(_ranked(epochs[start:stop], self.partial, unfinished))
            stop = start
        return [epoch for epoch in epochs if epoch not in kept]


@checked(n=COUNT, partial=FLAG)
@dataclass(frozen=True, slots=True)
class KeepEvery(_JoinsRetention):
    """Keep the epochs whose number is a multiple of `n`.

    Parameters
    ----------
    n : int
        At least 1.
    partial : bool
        Whether checkpoints saved in the middle of an epoch count too.

    Examples
    --------
    >>> (KeepEvery(10) | KeepLast(2)).retires([0, 8, 9, 10, 11, 12, 13], {})
    [8, 9, 11]
    """

    n: int
    partial: bool = False

    def retires(
        self, epochs: Sequence[int], metrics: Metrics, unfinished: Unfinished | None = None
    ) -> Collection[int]:
        """See `RetentionPolicy`."""
        kept = set(_ranked([e for e in epochs if not e % self.n], self.partial, unfinished))
        return [epoch for epoch in epochs if epoch not in kept]


@checked(metric=_METRIC, n=COUNT, mode=one_of("min", "max"), partial=FLAG)
@dataclass(frozen=True, slots=True)
class KeepBest(_JoinsRetention):
    """Keep the `n` epochs with the best values of a metric.

    Parameters
    ----------
    metric : str
        A name that a task reported: "loss" for ``current_task().report(loss=...)``.
    n : int
        At least 1.
    mode : "min" or "max"
        Whether smaller or larger values are better.
    partial : bool
        Whether checkpoints saved in the middle of an epoch count too.

    Notes
    -----
    NaN ranks worst, as does an epoch without the metric. Of equal values the newer epoch is
    better. A run that retires epochs warns, once, if no recorded epoch has the metric.

    Examples
    --------
    >>> losses = {0: {}, 1: {"loss": 0.5}, 2: {"loss": float("nan")}, 3: {"loss": 0.7}}
    >>> KeepBest("loss").retires(list(losses), losses)
    [0, 2, 3]
    """

    metric: str
    n: int = 1
    mode: Literal["min", "max"] = "min"
    partial: bool = False

    def retires(
        self, epochs: Sequence[int], metrics: Metrics, unfinished: Unfinished | None = None
    ) -> Collection[int]:
        """See `RetentionPolicy`."""
        found = _ranked(epochs, self.partial, unfinished)
        ranked = sorted(found, key=lambda epoch: (self._badness(metrics[epoch]), -epoch))
        kept = set(ranked[: self.n])
        return [epoch for epoch in epochs if epoch not in kept]

    def _badness(self, metrics: Mapping[str, Any]) -> tuple[bool, float]:
        try:
            value = float(metrics[self.metric])
        except OverflowError:  # an int too large for a float
            value = math.inf if metrics[self.metric] > 0 else -math.inf
        except (KeyError, TypeError, ValueError):
            value = math.nan
        if math.isnan(value):
            return True, 0.0
        return False, value if self.mode == "min" else -value


def _ranked(epochs: Sequence[int], partial: bool, unfinished: Unfinished | None) -> Sequence[int]:
    left_out = () if partial or unfinished is None else unfinished(epochs)
    return [epoch for epoch in epochs if epoch not in left_out] if left_out else epochs
