"""Retention policies: which recorded epochs a run keeps. They do no I/O."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from jobrunner.define import check_int
from jobrunner.errors import DefinitionError


def _check_count(value: object, what: str, advice: str) -> None:
    try:
        check_int(value, 1, what)
    except DefinitionError as error:
        raise DefinitionError(f"{error} {advice}") from None


Metrics = Mapping[int, Mapping[str, Any]]
"""Recorded epoch -> the metrics that its tasks reported; read from the log on first use."""


Unfinished = Callable[[Sequence[int]], Collection[int]]
"""Which of some epochs were saved within the epoch; their records are read on first use."""


def none_unfinished(epochs: Sequence[int]) -> Collection[int]:
    """All epochs have ended."""
    return ()


@runtime_checkable
class RetentionPolicy(Protocol):
    """Decides which epochs to retire after each commit.

    A run always keeps the newest recorded epoch, the one that it resumed from, and pinned ones.
    """

    def retires(self, epochs: Sequence[int], metrics: Metrics) -> Collection[int]:
        """Which of `epochs`, the recorded ones in ascending order, to retire.

        A third parameter, `unfinished`, would get a function: ``unfinished(epochs)`` are those
        among `epochs` that were saved within the epoch, and so have not ended.
        """


def retired_by(
    policy: RetentionPolicy, epochs: Sequence[int], metrics: Metrics, unfinished: Unfinished
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
        self, epochs: Sequence[int], metrics: Metrics, unfinished: Unfinished = none_unfinished
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


@dataclass(frozen=True, slots=True)
class KeepLast(_JoinsRetention):
    """Keep the newest `n` epochs.

    Parameters
    ----------
    n : int
        At least 1.
    partial : bool
        Whether checkpoints saved within an epoch count too. By default only whole epochs do.

    Examples
    --------
    >>> list(KeepLast(2).retires([0, 1, 2, 3], {}))
    [0, 1]
    """

    n: int
    partial: bool = False

    def __post_init__(self) -> None:
        _check_count(self.n, "KeepLast: n", "The newest epoch is kept in any case.")

    def retires(
        self, epochs: Sequence[int], metrics: Metrics, unfinished: Unfinished = none_unfinished
    ) -> Collection[int]:
        """See `RetentionPolicy`."""
        kept: set[int] = set()
        stop = len(epochs)
        while len(kept) < self.n and stop > 0:
            start = max(0, stop - self.n + len(kept))
            kept.update(_ranked(epochs[start:stop], self.partial, unfinished))
            stop = start
        return [epoch for epoch in epochs if epoch not in kept]


@dataclass(frozen=True, slots=True)
class KeepEvery(_JoinsRetention):
    """Keep the epochs whose number is a multiple of `n`.

    Parameters
    ----------
    n : int
        At least 1.
    partial : bool
        Whether checkpoints saved within an epoch count too. By default only whole epochs do.

    Examples
    --------
    >>> (KeepEvery(10) | KeepLast(2)).retires([0, 8, 9, 10, 11, 12, 13], {})
    [8, 9, 11]
    """

    n: int
    partial: bool = False

    def __post_init__(self) -> None:
        _check_count(self.n, "KeepEvery: n", "Without a policy, every epoch is kept.")

    def retires(
        self, epochs: Sequence[int], metrics: Metrics, unfinished: Unfinished = none_unfinished
    ) -> Collection[int]:
        """See `RetentionPolicy`."""
        multiples = [epoch for epoch in epochs if not epoch % self.n]
        kept = set(_ranked(multiples, self.partial, unfinished))
        return [epoch for epoch in epochs if epoch not in kept]


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
        Whether checkpoints saved within an epoch count too. By default only whole epochs do.

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

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise DefinitionError(
                f"KeepBest: metric must be the name of a metric; got {self.metric!r}."
            )
        _check_count(self.n, "KeepBest: n", "The newest epoch is kept in any case.")
        if self.mode not in ("min", "max"):
            raise DefinitionError(f"KeepBest: mode must be 'min' or 'max'; got {self.mode!r}.")

    def retires(
        self, epochs: Sequence[int], metrics: Metrics, unfinished: Unfinished = none_unfinished
    ) -> Collection[int]:
        """See `RetentionPolicy`."""
        ranked = sorted(
            _ranked(epochs, self.partial, unfinished),
            key=lambda epoch: (self._badness(metrics[epoch]), -epoch),
        )
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


def _ranked(epochs: Sequence[int], partial: bool, unfinished: Unfinished) -> Sequence[int]:
    left_out = () if partial else unfinished(epochs)
    return [epoch for epoch in epochs if epoch not in left_out] if left_out else epochs


def find_unreported(policy: RetentionPolicy, metrics: Metrics) -> list[str]:
    """The metrics of a policy's `KeepBest` parts that no recorded epoch has reported."""
    if isinstance(policy, KeepAny):
        found = [name for part in policy.policies for name in find_unreported(part, metrics)]
        return list(dict.fromkeys(found))
    if isinstance(policy, KeepBest):
        is_reported = any(policy.metric in reported for reported in metrics.values())
        return [] if is_reported else [policy.metric]
    return []


def name_reported(metrics: Metrics) -> str:
    """The names of all metrics that recorded epochs have reported, for a message."""
    names = sorted({name for reported in metrics.values() for name in reported})
    return ", ".join(names) or "none"
