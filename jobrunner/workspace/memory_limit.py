"""Ends a run before its worker runs out of memory. No Dask.

A nanny kills a worker that exceeds its limit, and a job that does not fit would restart forever. So
the run ends earlier, with an error that gives the figures: when the process has grown too large, or
before a copy that does not fit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from time import monotonic
from typing import Any

import numpy as np

from jobrunner.errors import ExecutionError

SLOWEST_LOOK_SECONDS = 0.1
"""The interval of Dask's nanny."""
FASTEST_LOOK_SECONDS = 0.005
"""How long a thread waits for the interpreter while another one is busy."""
KNOWN_BYTES = 32 << 20
"""Arrays of this size or more always take new memory from the system."""
TIGHT_SHARE = 0.7
"""Share of a worker's limit. At 0.8 Dask pauses the worker, and then it starts no lease task."""

WAITING_BYTES = 256 << 20
"""`MemoryLimit.waiting_bytes` of a worker without a limit."""


class MemoryLimit:
    """How much memory a worker's process uses, and how much it may use."""

    def __init__(
        self,
        address: str,  # the worker's, for messages
        *,
        used_bytes: Callable[[], int],  # by the process, now
        limit_bytes: int,  # 0 if unknown
        share: float,  # of the limit, beyond which a run ends; 0 for never
        sizes: Callable[[], Mapping[str, int]] = dict,  # of nodes' blobs, for messages
        relieve: Callable[[], object] = bool,  # drops kept states
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.is_over = False  # at the last `look`: the run must end
        self.is_tight = False  # at the last `look`: keep no states
        self._address = address
        self._used_bytes = used_bytes
        self._limit_bytes = limit_bytes
        self._share = share
        self._sizes = sizes
        self._relieve = relieve
        self._clock = clock
        self.is_limited = limit_bytes > 0 and share > 0
        # How much may wait to be sent, and how much more for later runs.
        self.waiting_bytes = limit_bytes // 16 if self.is_limited else WAITING_BYTES
        self._last = (clock(), used_bytes() if self.is_limited else 0)

    def look(self) -> float:
        """Check the memory in use; returns the seconds until the next look.

        That is half the time until memory runs out, if it grows as fast as since the last look.
        """
        before, then = self._last
        now, used = self._last = (self._clock(), self._used_bytes())
        left = self._share * self._limit_bytes - used
        self.is_tight = used > TIGHT_SHARE * self._limit_bytes
        if self.is_tight:
            self._relieve()
        self.is_over = left < 0 and self._used_bytes() > self._share * self._limit_bytes
        growth = (used - then) / max(now - before, 1e-6)
        if growth <= 0:
            return SLOWEST_LOOK_SECONDS
        return min(max(left / growth / 2, FASTEST_LOOK_SECONDS), SLOWEST_LOOK_SECONDS)

    def require(self, nbytes: int, what: str) -> None:
        """Raise an `ExecutionError` if that many bytes do not fit."""
        if self.is_limited and nbytes >= KNOWN_BYTES:
            used = self._used_bytes()
            if used + nbytes > self._share * self._limit_bytes:
                self._relieve()
                used = self._used_bytes()
            if used + nbytes > self._share * self._limit_bytes:
                raise ExecutionError(
                    f"{what} takes {as_text(nbytes)}, more than worker {self._address} has left: "
                    f"{self._account(used)}"
                )

    def error(self) -> ExecutionError:
        """The error that ends a run when `is_over`."""
        return ExecutionError(
            f"Worker {self._address} is about to exceed its memory limit: "
            f"{self._account(self._used_bytes())}"
        )

    def _account(self, used: int) -> str:
        sizes = self._sizes()
        return (
            f"it uses {as_text(used)} of its limit of {as_text(self._limit_bytes)}, and a run ends "
            f"at {self._share:.0%}. The blobs of its {len(sizes)} nodes take "
            f"{as_text(sum(sizes.values()))}: {largest(sizes)}. Values being sent, tasks and Python "
            f"itself take the rest. Use more workers or workers with more memory, place fewer nodes "
            f"on each, or make blobs smaller."
        )


MEMORY_LIMIT: ContextVar[MemoryLimit] = ContextVar("jobrunner_memory_limit")
"""The limit of the worker that this thread belongs to."""


def copied(array: np.ndarray, why: str) -> np.ndarray:
    """Copy an array in the same memory order; `ExecutionError` if the copy does not fit."""
    if array.nbytes >= KNOWN_BYTES and (limit := MEMORY_LIMIT.get(None)) is not None:
        limit.require(array.nbytes, f"A copy of an array {why}")
    return array.copy(order="K")


def size_of(values: Iterable[Any]) -> int:
    """Approximate size of values in bytes. Shared memory counts once."""
    return _size_of(list(values), set())


def _size_of(value: Any, seen: set[int]) -> int:
    while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
        value = value.base
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, dict):
        return sum(_size_of(item, seen) for item in list(value.values()))
    if isinstance(value, list | tuple | set):
        return sum(_size_of(item, seen) for item in list(value))
    nbytes = getattr(value, "nbytes", None)  # tensors, frames of other libraries
    return nbytes if isinstance(nbytes, int) else sys.getsizeof(value)


def largest(sizes: Mapping[str, int], count: int = 10) -> str:
    """List the largest nodes and their sizes, for a message."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name!r} {as_text(size)}" for name, size in ordered[:count])
    more = f" and {len(ordered) - count} more" if len(ordered) > count else ""
    return f"{shown or 'none'}{more}"


def as_text(nbytes: float) -> str:
    """Format a number of bytes."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
