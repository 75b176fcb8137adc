"""Retention policies: which recorded epochs a run keeps. They do no I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, runtime_checkable

from jobrunner.define import COUNT, Count, Interval, Rule, check_call, checked, number
from jobrunner.errors import DefinitionError
from jobrunner.positions import EpochLike, Position
from jobrunner.texts import printable


@dataclass(frozen=True, slots=True)
class SavedEpoch:
    """A recorded checkpoint, as retention policies see it.

    Parameters
    ----------
    at : EpochLike
        Its position; an int is a whole epoch.
    time : float
        When it was recorded, in Unix seconds; NaN if its record cannot be read.
    metrics : mapping
        What the tasks of the epoch reported, by name.
    is_pinned : bool
        Whether it is pinned; a run keeps it whatever a policy says.
    """

    at: Position
    time: float = math.nan
    metrics: Mapping[str, Any] = field(default_factory=dict)
    is_pinned: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.at, Position):
            object.__setattr__(self, "at", Position.of(self.at))

    @property
    def epoch(self) -> int:
        """The number of whole epochs that it contains."""
        return self.at.epoch

    @property
    def step(self) -> int:
        """The number of steps of the next epoch that it contains; 0 after a whole epoch."""
        return self.at.step


@runtime_checkable
class RetentionPolicy(Protocol):
    """Decides which epochs to retire after each commit.

    A run always keeps the newest recorded epoch, the one that it resumed from, and pinned ones.

    Examples
    --------
    >>> class DropDiverged:
    ...     def retires(self, saved):
    ...         return [row.at for row in saved if row.metrics.get("loss", 0) > 100]
    >>> DropDiverged().retires([SavedEpoch(1, metrics={"loss": 1e6}), SavedEpoch(2)])
    [Position(1)]
    """

    def retires(self, saved: Sequence[SavedEpoch]) -> Collection[EpochLike]:
        """Which of the recorded epochs, given in ascending order, to retire.

        Checkpoints in the middle of an epoch are among them; their `step` is not 0. The answer must
        depend on `saved` alone.
        """


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

    def retires(self, saved: Sequence[SavedEpoch]) -> list[Position]:
        """What all policies retire."""
        retired = {row.at for row in saved}
        for policy in self.policies:
            retired &= {Position.of(at) for at in policy.retires(saved)}
        return sorted(retired)


@checked
@dataclass(frozen=True, slots=True)
class KeepAll(_JoinsRetention):
    """Keep every epoch.

    Parameters
    ----------
    partial : bool
        Whether to keep every checkpoint saved in the middle of an epoch, too.
    """

    partial: bool = False

    def retires(self, saved: Sequence[SavedEpoch]) -> list[Position]:
        """Checkpoints in the middle of an epoch, unless `partial`."""
        return _all_but(saved, _eligible(saved, self.partial))


@checked
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
    >>> KeepLast(2).retires([SavedEpoch(0), SavedEpoch(1), SavedEpoch(2), SavedEpoch(3)])
    [Position(0), Position(1)]
    """

    n: Count
    partial: bool = False

    def retires(self, saved: Sequence[SavedEpoch]) -> list[Position]:
        """All but the newest `n`."""
        return _all_but(saved, _eligible(saved, self.partial)[-self.n :])


@checked
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
    >>> saved = [SavedEpoch(n) for n in (0, 8, 9, 10, 11, 12, 13)]
    >>> (KeepEvery(10) | KeepLast(2)).retires(saved)
    [Position(8), Position(9), Position(11)]
    >>> saved = [SavedEpoch(5, time=0.0), SavedEpoch(6, time=1800.0), SavedEpoch(7, time=3600.0)]
    >>> KeepEvery(seconds=3600).retires(saved)
    [Position(6)]
    """

    n: Count | None = None
    partial: bool = False
    seconds: Interval | None = None

    def __post_init__(self) -> None:
        if self.n is None and self.seconds is None:
            raise DefinitionError(
                "KeepEvery needs an interval: KeepEvery(10) or KeepEvery(seconds=3600)."
            )

    def retires(self, saved: Sequence[SavedEpoch]) -> list[Position]:
        """What neither interval keeps."""
        kept: list[SavedEpoch] = []
        if self.n is not None:
            whole = _eligible(saved, partial=False)
            kept += [row for row in whole if row.epoch % self.n == 0]
        if self.seconds is not None:
            kept += _spaced(_eligible(saved, self.partial), self.seconds)
        return _all_but(saved, kept)


def _spaced(saved: Sequence[SavedEpoch], seconds: float) -> list[SavedEpoch]:
    """The first epoch, and each recorded at least that long after the last of these."""
    spaced = []
    last_time = -math.inf
    for row in saved:
        # Also kept if the clock was set back in between (the difference is negative), or the time
        # is unknown (every comparison with NaN is false): what cannot be placed is not deleted.
        if not 0 <= row.time - last_time < seconds:
            spaced.append(row)
            if not math.isnan(row.time):
                last_time = row.time
    return spaced


def _is_metric(value: Any) -> bool:
    return value != "" if isinstance(value, str) else callable(value)


_METRIC = Rule("the name of a metric, or a function of all metrics of an epoch", _is_metric)
_NUMBER = Rule("an int >= 1, or None", COUNT.fits, COUNT.read)
_THRESHOLD = number("a finite number", lambda value: abs(value) < math.inf)


@checked
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
    >>> losses = [{}, {"loss": 0.5}, {"loss": float("nan")}, {"loss": 0.7}]
    >>> saved = [SavedEpoch(epoch, metrics=reported) for epoch, reported in enumerate(losses)]
    >>> KeepBest("loss").retires(saved)
    [Position(0), Position(2), Position(3)]
    >>> KeepBest("loss", n=None, threshold=0.7).retires(saved)
    [Position(0), Position(2)]
    >>> KeepBest(lambda metrics: abs(metrics["loss"] - 0.7)).retires(saved)
    [Position(0), Position(1), Position(2)]
    """

    metric: Annotated[str | Callable[[Mapping[str, Any]], float], _METRIC]
    n: Annotated[int, _NUMBER] | None = 1
    mode: Literal["min", "max"] = "min"
    partial: bool = False
    threshold: Annotated[int | float, _THRESHOLD] | None = None  # any finite number

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str):
            check_call(self.metric, 1, (), "KeepBest: metric")
        if self.n is None and self.threshold is None:
            raise DefinitionError(
                f"{self} would keep all epochs. Give it a threshold, or a number of epochs, n."
            )

    def retires(self, saved: Sequence[SavedEpoch]) -> list[Position]:
        """All but the best."""
        ranked = [(self._badness(row.metrics), row) for row in _eligible(saved, self.partial)]
        ranked.reverse()  # the sort is stable, so of equal values the newer one comes first
        ranked.sort(key=lambda pair: pair[0])
        if self.threshold is not None:
            worst_kept = self._signed(self.threshold)
            ranked = [(badness, row) for badness, row in ranked if badness <= worst_kept]
        return _all_but(saved, [row for _, row in ranked[: self.n]])

    def choose(self, saved: Sequence[SavedEpoch]) -> Position | None:
        """The best of these epochs; None if none has a number for the metric."""
        ranked = [
            row for row in _eligible(saved, self.partial) if self._badness(row.metrics) != _WORST
        ]
        ranked.reverse()  # `min` takes the first of equal values: the newer one
        best = min(ranked, key=lambda row: self._badness(row.metrics), default=None)
        return None if best is None else best.at

    def value(self, metrics: Mapping[str, Any]) -> Any:
        """The value by which it ranks an epoch with these metrics; None if they lack it."""
        if isinstance(self.metric, str):
            return metrics.get(self.metric)
        try:
            return self.metric(metrics)
        except KeyError:
            return None

    def _badness(self, metrics: Mapping[str, Any]) -> _Badness:
        value = self.value(metrics)
        try:
            number = float(value)
        except OverflowError:  # an int too large for a float
            number = math.inf if value > 0 else -math.inf
        except (TypeError, ValueError):
            number = math.nan
        if math.isnan(number):
            return _WORST
        return self._signed(number)

    def _signed(self, number: float) -> _Badness:
        return (False, number if self.mode == "min" else -number)


_Badness = tuple[bool, float]
"""Whether there is no value, and the value, so that smaller is better."""

_WORST: _Badness = (True, 0.0)


def _eligible(saved: Sequence[SavedEpoch], partial: bool) -> Sequence[SavedEpoch]:
    """The epochs that a policy may keep: the whole ones, or all."""
    if partial:
        return saved
    return [row for row in saved if row.step == 0]


def _all_but(saved: Sequence[SavedEpoch], kept: Collection[SavedEpoch]) -> list[Position]:
    kept_positions = {row.at for row in kept}
    return [row.at for row in saved if row.at not in kept_positions]


def needs_rows(policy: RetentionPolicy) -> bool:
    """Whether the policy's answer can depend on more than positions; then records must be read."""
    if isinstance(policy, KeepAny):
        return any(needs_rows(part) for part in policy.policies)
    # Of no subclass: it may look at more.
    if type(policy) is KeepEvery:
        return policy.seconds is not None
    return type(policy) not in (KeepAll, KeepLast)


def best_policies(policy: RetentionPolicy) -> list[KeepBest]:
    """The policies that keep the best epochs, among those that are joined."""
    if isinstance(policy, KeepBest):
        return [policy]
    bests = []
    if isinstance(policy, KeepAny):
        for part in policy.policies:
            bests += best_policies(part)
    return bests


def find_unreported(policy: RetentionPolicy, saved: Sequence[SavedEpoch]) -> list[str]:
    """The metrics of a policy's `KeepBest` parts that no recorded epoch has reported."""
    unreported: list[str] = []
    for best in best_policies(policy):
        name = best.metric if isinstance(best.metric, str) else None
        if name is None:
            name = getattr(best.metric, "__name__", repr(best.metric))
        is_reported = any(best.value(row.metrics) is not None for row in saved)
        if not is_reported and name not in unreported:
            unreported.append(name)
    return unreported


def find_best(policy: RetentionPolicy) -> tuple[str, str] | None:
    """The metric by which a policy keeps the best epochs, and its mode; None if there is none."""
    for best in best_policies(policy):
        if isinstance(best.metric, str):
            return best.metric, best.mode
    return None


def name_reported(saved: Sequence[SavedEpoch]) -> str:
    """The names of all metrics that recorded epochs have reported, for a message."""
    names = set[str]()
    for row in saved:
        names.update(row.metrics)
    return printable(", ".join(sorted(names)), kept="") or "none"
