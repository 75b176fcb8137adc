"""Retention policies: which recorded epochs a run keeps. They do no I/O."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, Protocol, runtime_checkable

from jobrunner.define import Count, Label, checked
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

    def __or__(self, policy: RetentionPolicy) -> KeepAny:
        if not isinstance(policy, RetentionPolicy):
            return NotImplemented
        return KeepAny((self, policy))  # type: ignore[arg-type]  # every subclass has `retires`

    def __ror__(self, policy: RetentionPolicy) -> KeepAny:
        """For a user's policy on the left, which may have no ``|`` of its own."""
        if not isinstance(policy, RetentionPolicy):
            return NotImplemented
        return KeepAny((policy, self))  # type: ignore[arg-type]


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
        return _all_but(saved, saved if self.partial else _whole_epochs(saved))


@checked
@dataclass(frozen=True, slots=True)
class KeepLast(_JoinsRetention):
    """Keep the newest `n` epochs.

    Parameters
    ----------
    n : int
        At least 1.

    Examples
    --------
    >>> KeepLast(2).retires([SavedEpoch(0), SavedEpoch(1), SavedEpoch(2), SavedEpoch(3)])
    [Position(0), Position(1)]
    """

    n: Count

    def retires(self, saved: Sequence[SavedEpoch]) -> list[Position]:
        """All but the newest `n`."""
        return _all_but(saved, _whole_epochs(saved)[-self.n :])


@checked
@dataclass(frozen=True, slots=True)
class KeepEvery(_JoinsRetention):
    """Keep the epochs whose number is a multiple of `n`; none in the middle of an epoch.

    Parameters
    ----------
    n : int
        At least 1.

    Examples
    --------
    >>> saved = [SavedEpoch(n) for n in (0, 8, 9, 10, 11, 12, 13)]
    >>> (KeepEvery(10) | KeepLast(2)).retires(saved)
    [Position(8), Position(9), Position(11)]
    """

    n: Count

    def retires(self, saved: Sequence[SavedEpoch]) -> list[Position]:
        """All that are no multiple."""
        return [row.at for row in saved if row.step or row.epoch % self.n]


@checked
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

    Notes
    -----
    An epoch without the metric, or with NaN, is not kept. Of equal values the newer epoch is
    better. A run that retires epochs warns, once, if no recorded epoch has the metric.

    Examples
    --------
    >>> losses = [{}, {"loss": 0.5}, {"loss": float("nan")}, {"loss": 0.7}]
    >>> saved = [SavedEpoch(epoch, metrics=reported) for epoch, reported in enumerate(losses)]
    >>> KeepBest("loss").retires(saved)
    [Position(0), Position(2), Position(3)]
    """

    metric: Label
    n: Count = 1
    mode: Literal["min", "max"] = "min"

    def retires(self, saved: Sequence[SavedEpoch]) -> list[Position]:
        """All but the best."""
        return _all_but(saved, rank(self.metric, self.mode, saved)[: self.n])


def rank(metric: str, mode: str, saved: Sequence[SavedEpoch]) -> list[SavedEpoch]:
    """The whole epochs that have a number for a metric, the best first."""
    newest_first = [row for row in reversed(saved) if _is_number(row.metrics.get(metric))]
    return sorted(  # stable: the newer of equal values first
        _whole_epochs(newest_first),
        key=lambda row: row.metrics[metric],
        reverse=mode == "max",
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and value == value  # NaN is not


def _whole_epochs(saved: Sequence[SavedEpoch]) -> list[SavedEpoch]:
    return [row for row in saved if row.step == 0]


def _all_but(saved: Sequence[SavedEpoch], kept: Collection[SavedEpoch]) -> list[Position]:
    kept_positions = {row.at for row in kept}
    return [row.at for row in saved if row.at not in kept_positions]


def reads_records(policy: RetentionPolicy) -> bool:
    """Whether the policy's answer can depend on more than positions; then records must be read."""
    if isinstance(policy, KeepAny):
        return any(map(reads_records, policy.policies))
    return type(policy) not in (KeepAll, KeepLast, KeepEvery)  # a subclass may look at more


def best_metrics(policy: RetentionPolicy) -> list[str]:
    """The metrics whose best epochs a policy keeps."""
    if isinstance(policy, KeepBest):
        return [policy.metric]
    metrics = []
    if isinstance(policy, KeepAny):
        for part in policy.policies:
            metrics += best_metrics(part)
    return metrics


def find_unreported(policy: RetentionPolicy, saved: Sequence[SavedEpoch]) -> list[str]:
    """Those of these metrics that no recorded epoch has reported."""
    reported = set[str]().union(*(row.metrics for row in saved))
    return [name for name in best_metrics(policy) if name not in reported]


def name_reported(saved: Sequence[SavedEpoch]) -> str:
    """The names of all metrics that recorded epochs have reported, for a message."""
    names = set[str]().union(*(row.metrics for row in saved))
    return printable(", ".join(sorted(names)), kept="") or "none"
