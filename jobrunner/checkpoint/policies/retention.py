"""Retention policies: which recorded epochs a run keeps. They do no I/O."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from jobrunner.define import (
    COUNT,
    FLAG,
    INTERVAL,
    Rule,
    check_call,
    checked,
    number,
    one_of,
    or_none,
)
from jobrunner.errors import DefinitionError
from jobrunner.positions import Position, PublicPosition

Metrics = Mapping[PublicPosition, Mapping[str, Any]]
"""Recorded epoch -> the metrics that its tasks reported; read from the log on first use."""


Unfinished = Callable[[Sequence[PublicPosition]], Collection[PublicPosition]]
"""Which of some epochs are in the middle of one."""


Times = Mapping[PublicPosition, float]
"""Recorded epoch -> when it was recorded, in Unix seconds; NaN if its record cannot be read."""


@runtime_checkable
class RetentionPolicy(Protocol):
    """Decides which epochs to retire after each commit.

    A run always keeps the newest recorded epoch, the one that it resumed from, and pinned ones.
    """

    def retires(
        self, epochs: Sequence[PublicPosition], metrics: Metrics
    ) -> Collection[PublicPosition]:
        """Which of `epochs`, the recorded ones in ascending order, to retire.

        Checkpoints in the middle of an epoch are among them, each as a `Position`.

        It gets more if it has parameters of these names. ``unfinished(epochs)`` are those of
        `epochs` whose checkpoints were saved in the middle of the epoch. ``times[epoch]`` is when
        the epoch was recorded, in Unix seconds.
        """


def retired_by(
    policy: RetentionPolicy,
    epochs: Sequence[PublicPosition],
    metrics: Metrics,
    unfinished: Unfinished | None = None,
    times: Times | None = None,
) -> Collection[PublicPosition]:
    """Call the policy's `retires` with what it takes of `unfinished` and `times`."""
    taken = inspect.signature(policy.retires).parameters
    offered = {"unfinished": unfinished, "times": times}
    given: dict[str, Any] = {name: it for name, it in offered.items() if name in taken}
    return policy.retires(epochs, metrics, **given)


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
        self,
        epochs: Sequence[PublicPosition],
        metrics: Metrics,
        unfinished: Unfinished | None = None,
        times: Times | None = None,
    ) -> Collection[PublicPosition]:
        """See `RetentionPolicy`."""
        retired = set(epochs)
        for policy in self.policies:
            retired.intersection_update(retired_by(policy, epochs, metrics, unfinished, times))
        return [epoch for epoch in epochs if epoch in retired]


@checked(partial=FLAG)
@dataclass(frozen=True, slots=True)
class KeepAll(_JoinsRetention):
    """Keep every epoch.

    Parameters
    ----------
    partial : bool
        Whether to keep every checkpoint saved in the middle of an epoch, too.
    """

    partial: bool = False

    def retires(
        self, epochs: Sequence[PublicPosition], metrics: Metrics
    ) -> Collection[PublicPosition]:
        """See `RetentionPolicy`."""
        return () if self.partial else [epoch for epoch in epochs if isinstance(epoch, Position)]


_METRIC = Rule(
    "the name of a metric, or a function of all metrics of an epoch",
    lambda it: it != "" if isinstance(it, str) else callable(it),
)


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
        self,
        epochs: Sequence[PublicPosition],
        metrics: Metrics,
        unfinished: Unfinished | None = None,
    ) -> Collection[PublicPosition]:
        """See `RetentionPolicy`."""
        kept: set[PublicPosition] = set()
        stop = len(epochs)
        while len(kept) < self.n and stop > 0:
            start = max(0, stop - self.n + len(kept))
            kept.update(_ranked(epochs[start:stop], self.partial, unfinished))
            stop = start
        return [epoch for epoch in epochs if epoch not in kept]


@checked(n=COUNT, partial=FLAG, seconds=INTERVAL)
@dataclass(frozen=True, slots=True)
class KeepEvery(_JoinsRetention):
    """Keep epochs at intervals: of their numbers, of the time when they were recorded, or both.

    Parameters
    ----------
    n : int, optional
        Keep the epochs whose number is a multiple of this; at least 1. A `Position` within an epoch
        is no multiple.
    partial : bool
        Whether checkpoints saved in the middle of an epoch count too, for `seconds`.
    seconds : float, optional
        Keep the oldest epoch, and each that was recorded this long or longer after the last one
        kept so.

    Raises
    ------
    DefinitionError
        There is no interval, or one is not positive.

    Examples
    --------
    >>> (KeepEvery(10) | KeepLast(2)).retires([0, 8, 9, 10, 11, 12, 13], {})
    [8, 9, 11]
    >>> KeepEvery(seconds=3600).retires([5, 6, 7], {}, times={5: 0.0, 6: 1800.0, 7: 3600.0})
    [6]
    """

    n: int | None = None
    partial: bool = False
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.n is None and self.seconds is None:
            raise DefinitionError(
                "KeepEvery needs an interval: KeepEvery(10) or KeepEvery(seconds=3600)."
            )

    def retires(
        self,
        epochs: Sequence[PublicPosition],
        metrics: Metrics,
        unfinished: Unfinished | None = None,
        times: Times | None = None,
    ) -> Collection[PublicPosition]:
        """See `RetentionPolicy`."""
        kept: set[PublicPosition] = set()
        if self.n is not None:
            whole = [epoch for epoch in epochs if not isinstance(epoch, Position)]
            multiples = [epoch for epoch in whole if epoch % self.n == 0]
            kept.update(_ranked(multiples, self.partial, unfinished))
        if self.seconds is not None:
            if times is None:
                raise DefinitionError("KeepEvery(seconds=) needs the times of the epochs.")
            kept.update(_spaced(_ranked(epochs, self.partial, unfinished), times, self.seconds))
        return [epoch for epoch in epochs if epoch not in kept]


@checked(
    metric=_METRIC,
    n=or_none(COUNT)._replace(expected="an int >= 1, or None"),
    mode=one_of("min", "max"),
    partial=FLAG,
    threshold=number("a finite number", lambda it: abs(it) < math.inf),
)
@dataclass(frozen=True, slots=True)
class KeepBest(_JoinsRetention):
    """Keep the `n` epochs with the best values of a metric.

    Parameters
    ----------
    metric : str or callable
        A name that a task reported: "loss" for ``current_task().report(loss=...)``. Or a function
        that gets all metrics of an epoch, a mapping, and returns a number; it must depend on these
        alone. If it raises `KeyError`, the epoch counts as one without the metric.
    n : int or None
        At least 1. None: all that reach `threshold`.
    mode : "min" or "max"
        Whether smaller or larger values are better.
    partial : bool
        Whether checkpoints saved in the middle of an epoch count too.
    threshold : float, optional
        Keep only epochs with this value or a better one.

    Raises
    ------
    DefinitionError
        An argument is invalid, or `n` is None and there is no `threshold`.

    Notes
    -----
    NaN ranks worst, as does an epoch without the metric. Of equal values the newer epoch is
    better. A run that retires epochs warns, once, if no recorded epoch has the metric.

    Examples
    --------
    >>> losses = {0: {}, 1: {"loss": 0.5}, 2: {"loss": float("nan")}, 3: {"loss": 0.7}}
    >>> KeepBest("loss").retires(list(losses), losses)
    [0, 2, 3]
    >>> KeepBest("loss", n=None, threshold=0.7).retires(list(losses), losses)
    [0, 2]
    >>> KeepBest(lambda metrics: abs(metrics["loss"] - 0.7)).retires(list(losses), losses)
    [0, 1, 2]
    """

    metric: str | Callable[[Mapping[str, Any]], float]
    n: int | None = 1
    mode: Literal["min", "max"] = "min"
    partial: bool = False
    threshold: int | float | None = None  # any finite number

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str):
            check_call(self.metric, 1, (), "KeepBest: metric")
        if self.n is None and self.threshold is None:
            raise DefinitionError(
                f"{self} would keep all epochs. Give it a threshold, or a number of epochs, n."
            )

    def retires(
        self,
        epochs: Sequence[PublicPosition],
        metrics: Metrics,
        unfinished: Unfinished | None = None,
    ) -> Collection[PublicPosition]:
        """See `RetentionPolicy`."""
        found = _ranked(epochs, self.partial, unfinished)
        badness = {epoch: self._badness(metrics[epoch]) for epoch in found}
        ranked = list(reversed(found))
        ranked.sort(key=badness.__getitem__)
        if self.threshold is not None:
            most = self._signed(self.threshold)
            ranked = [epoch for epoch in ranked if badness[epoch] <= (False, most)]
        kept = set(ranked[: self.n])
        return [epoch for epoch in epochs if epoch not in kept]

    def _value(self, metrics: Mapping[str, Any]) -> Any:
        if isinstance(self.metric, str):
            return metrics.get(self.metric)
        try:
            return self.metric(metrics)
        except KeyError:
            return None

    def _badness(self, metrics: Mapping[str, Any]) -> tuple[bool, float]:
        found = self._value(metrics)
        try:
            value = float(found)
        except OverflowError:  # an int too large for a float
            value = math.inf if found > 0 else -math.inf
        except (TypeError, ValueError):
            value = math.nan
        return (True, 0.0) if math.isnan(value) else (False, self._signed(value))

    def _signed(self, value: float) -> float:
        return value if self.mode == "min" else -value


def find_unreported(policy: RetentionPolicy, metrics: Metrics) -> list[str]:
    """The metrics of a policy's `KeepBest` parts that no recorded epoch has reported."""
    if isinstance(policy, KeepAny):
        found = [name for part in policy.policies for name in find_unreported(part, metrics)]
        return list(dict.fromkeys(found))
    if isinstance(policy, KeepBest):
        if any(policy._value(reported) is not None for reported in metrics.values()):
            return []
        metric = policy.metric
        return [metric if isinstance(metric, str) else getattr(metric, "__name__", repr(metric))]
    return []


def find_best(policy: RetentionPolicy) -> tuple[str, str] | None:
    """The metric by which a policy keeps the best epochs, and its mode; None if there is none."""
    if isinstance(policy, KeepBest):
        return (policy.metric, policy.mode) if isinstance(policy.metric, str) else None
    parts = policy.policies if isinstance(policy, KeepAny) else ()
    return next(filter(None, map(find_best, parts)), None)


def _ranked(
    epochs: Sequence[PublicPosition], partial: bool, unfinished: Unfinished | None
) -> Sequence[PublicPosition]:
    left_out = () if partial or unfinished is None else unfinished(epochs)
    return [epoch for epoch in epochs if epoch not in left_out] if left_out else epochs


def _spaced(epochs: Sequence[PublicPosition], times: Times, seconds: float) -> list[PublicPosition]:
    """The first epoch, and each recorded at least that long after the last of these."""
    kept, last = [], -math.inf
    for epoch in epochs:
        # Also if the clock was set back in between, or the time is unknown.
        if not 0 <= times[epoch] - last < seconds:
            kept.append(epoch)
            last = last if math.isnan(times[epoch]) else times[epoch]
    return kept
