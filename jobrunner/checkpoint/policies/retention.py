"""Which recorded epochs are kept. Pure: decides, deletes nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from jobrunner.errors import DefinitionError

Metrics = Mapping[int, Mapping[str, Any]]
"""Recorded epoch -> what its tasks reported; read from the log as it is asked for."""


@runtime_checkable
class RetentionPolicy(Protocol):
    """Says which epochs to give up after a commit.

    The newest recorded epoch, the one that was resumed from and those that are pinned are kept
    whatever it says.
    """

    def retires(self, epochs: Sequence[int], metrics: Metrics) -> Collection[int]:
        """Those of `epochs`, all that are recorded in ascending order, to be given up."""


class _Composable:
    """Lets retention policies be joined: the whole keeps what any part keeps."""

    __slots__ = ()

    def __or__(self, other: RetentionPolicy) -> KeepAny:
        if not isinstance(other, RetentionPolicy):
            return NotImplemented
        return KeepAny((self, other))  # type: ignore[arg-type]  # every subclass has `retires`


@dataclass(frozen=True, slots=True)
class KeepAny(_Composable):
    """Keep what any of `policies` keeps; ``a | b`` makes one."""

    policies: tuple[RetentionPolicy, ...]

    def retires(self, epochs: Sequence[int], metrics: Metrics) -> Collection[int]:
        """See `RetentionPolicy`."""
        first, *others = self.policies
        retired = set(first.retires(epochs, metrics))
        for policy in others:
            retired &= set(policy.retires(epochs, metrics))
        return sorted(retired)


@dataclass(frozen=True, slots=True)
class KeepAll(_Composable):
    """Keep every epoch."""

    def retires(self, epochs: Sequence[int], metrics: Metrics) -> Collection[int]:
        """See `RetentionPolicy`."""
        return ()


@dataclass(frozen=True, slots=True)
class KeepLast(_Composable):
    """Keep the newest epochs.

    Parameters
    ----------
    n : int
        How many, from 1 on.

    Examples
    --------
    >>> list(KeepLast(2).retires([0, 1, 2, 3], {}))
    [0, 1]
    """

    n: int

    def __post_init__(self) -> None:
        _check_count("KeepLast", self.n)

    def retires(self, epochs: Sequence[int], metrics: Metrics) -> Collection[int]:
        """See `RetentionPolicy`."""
        return epochs[: max(0, len(epochs) - self.n)]


@dataclass(frozen=True, slots=True)
class KeepEvery(_Composable):
    """Keep the epochs whose number is a multiple of `n`.

    Parameters
    ----------
    n : int
        From 1 on.

    Examples
    --------
    >>> (KeepEvery(10) | KeepLast(2)).retires([0, 8, 9, 10, 11, 12, 13], {})
    [8, 9, 11]
    """

    n: int

    def __post_init__(self) -> None:
        _check_count("KeepEvery", self.n)

    def retires(self, epochs: Sequence[int], metrics: Metrics) -> Collection[int]:
        """See `RetentionPolicy`."""
        return [epoch for epoch in epochs if epoch % self.n]


@dataclass(frozen=True, slots=True)
class KeepBest(_Composable):
    """Keep the epochs with the best values of a metric.

    Parameters
    ----------
    metric : str
        As a task reported it, ``current_task().report(loss=...)``.
    n : int
        How many epochs, from 1 on.
    mode : "min" or "max"
        Whether less is better, or more.

    Notes
    -----
    NaN ranks worst, and so does an epoch without the metric. Of equals the newer is better. A run
    that gives epochs up warns, once, where no recorded epoch has the metric.

    Examples
    --------
    >>> losses = {0: {}, 1: {"loss": 0.5}, 2: {"loss": float("nan")}, 3: {"loss": 0.7}}
    >>> KeepBest("loss").retires(list(losses), losses)
    [0, 2, 3]
    """

    metric: str
    n: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise DefinitionError(f"KeepBest: metric is a metric's name; got {self.metric!r}.")
        _check_count("KeepBest", self.n)
        if self.mode not in ("min", "max"):
            raise DefinitionError(f"KeepBest: mode is 'min' or 'max'; got {self.mode!r}.")

    def retires(self, epochs: Sequence[int], metrics: Metrics) -> Collection[int]:
        """See `RetentionPolicy`."""
        ranked = sorted(epochs, key=lambda epoch: (self._badness(metrics[epoch]), -epoch))
        return sorted(ranked[self.n :])

    def _badness(self, metrics: Mapping[str, Any]) -> tuple[bool, float]:
        try:
            value = float(metrics[self.metric])
        except OverflowError:  # an int beyond what a double holds
            value = math.inf if metrics[self.metric] > 0 else -math.inf
        except (KeyError, TypeError, ValueError):
            value = math.nan
        if math.isnan(value):
            return True, 0.0
        return False, value if self.mode == "min" else -value


def find_unreported(policy: RetentionPolicy, metrics: Metrics) -> list[str]:
    """The metrics that a policy goes by, and that no recorded epoch has: mistyped, most likely.

    Parameters
    ----------
    policy : RetentionPolicy
        Only `KeepBest`, alone or joined with others, says what it goes by.
    metrics : mapping of int to mapping of str to object
        Recorded epoch -> what its tasks reported.
    """
    if isinstance(policy, KeepAny):
        found = [name for part in policy.policies for name in find_unreported(part, metrics)]
        return list(dict.fromkeys(found))
    if isinstance(policy, KeepBest):
        is_reported = any(policy.metric in reported for reported in metrics.values())
        return [] if is_reported else [policy.metric]
    return []


def name_reported(metrics: Metrics) -> str:
    """The names of all metrics that recorded epochs have, in words."""
    names = sorted({name for reported in metrics.values() for name in reported})
    return ", ".join(names) or "none"


def _check_count(what: str, n: object) -> None:
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise DefinitionError(f"{what}: n is an int from 1 on; got {n!r}.")
