"""4 run: whether a worker still has room, and what to say where it has not. No Dask.

Workspaces stay in memory; a worker that goes over its limit is killed by its nanny, and a job that
does not fit would be begun again and again. So the run is ended before, with figures: when the
process has grown too large, and before an allocation that is known to be too large for it.
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
"""As often as Dask's nanny looks."""
FASTEST_LOOK_SECONDS = 0.005
"""As long as a thread waits for the interpreter beside one that does not let go of it."""
KNOWN_BYTES = 32 << 20
"""From here on, memory comes fresh from the system whatever the process has freed before."""
TIGHT_SHARE = 0.7
"""Of a worker's limit. At 0.8 Dask pauses it, and then it starts no lease task."""

WAITING_BYTES = 256 << 20
"""What may wait on a worker without a limit."""


class MemoryLimit:
    """What a worker's process uses, and how much it may.

    Parameters
    ----------
    address : str
        The worker's, for messages.
    used_bytes : callable
        Gives what the process uses now.
    limit_bytes : int
        At which it is killed or the machine swaps; 0: nobody knows.
    share : float
        Of the limit, beyond which a run is ended; 0: never.
    sizes : callable
        Gives node -> about what its blobs take, for messages.
    relieve : callable
        Frees what the worker can do without.
    clock : callable, optional
        Gives seconds.

    Attributes
    ----------
    is_over : bool
        Whether a run had better end now, as of the last `look`.
    is_tight : bool
        Whether there is no room for what the worker can do without.
    """

    def __init__(
        self,
        address: str,
        *,
        used_bytes: Callable[[], int],
        limit_bytes: int,
        share: float,
        sizes: Callable[[], Mapping[str, int]] = dict,
        relieve: Callable[[], object] = bool,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.is_over = False
        self.is_tight = False
        self._address = address
        self._used_bytes = used_bytes
        self._limit_bytes = limit_bytes
        self._share = share
        self._sizes = sizes
        self._relieve = relieve
        self._clock = clock
        self._last = (clock(), used_bytes() if self.is_limited else 0)

    @property
    def waiting_bytes(self) -> int:
        """What may wait here to be sent, and again what came for later runs."""
        return self._limit_bytes // 16 if self.is_limited else WAITING_BYTES

    @property
    def is_limited(self) -> bool:
        """Whether there is anything to look after."""
        return self._limit_bytes > 0 and self._share > 0

    def look(self) -> float:
        """Take what the process uses; gives the seconds until the next look.

        That is half of what is left at the pace since the last look.
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
        """Refuse to allocate so many bytes where they don't fit.

        Raises
        ------
        ExecutionError
            They don't.
        """
        if self.is_limited and nbytes >= KNOWN_BYTES:
            used = self._used_bytes()
            if used + nbytes > self._share * self._limit_bytes:
                self._relieve()
                used = self._used_bytes()
            if used + nbytes > self._share * self._limit_bytes:
                raise ExecutionError(
                    f"{what} takes {as_text(nbytes)}, which worker {self._address} has no room "
                    f"for: {self._account(used)}"
                )

    def error(self) -> ExecutionError:
        """What to end a run with, where the worker is over."""
        return ExecutionError(
            f"Worker {self._address} would soon be killed: {self._account(self._used_bytes())}"
        )

    def _account(self, used: int) -> str:
        sizes = self._sizes()
        return (
            f"it uses {as_text(used)} of its limit of {as_text(self._limit_bytes)}, and a run ends "
            f"at {self._share:.0%}. The blobs of its {len(sizes)} nodes take "
            f"{as_text(sum(sizes.values()))}: {largest(sizes)}; the rest are values on their way, "
            f"what tasks hold, and Python itself. Use more workers or ones with more memory, put "
            f"fewer nodes on each, or let blobs be smaller."
        )


MEMORY_LIMIT: ContextVar[MemoryLimit] = ContextVar("jobrunner_memory_limit")
"""Of the worker that this thread works for."""


def copied(array: np.ndarray, why: str) -> np.ndarray:
    """A copy in the same order in memory, if there is room for it.

    Raises
    ------
    ExecutionError
        There is none.
    """
    if array.nbytes >= KNOWN_BYTES and (limit := MEMORY_LIMIT.get(None)) is not None:
        limit.require(array.nbytes, f"A copy of an array {why}")
    return array.copy(order="K")


def size_of(values: Iterable[Any]) -> int:
    """About what values take, in bytes; memory that several share counts once."""
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
    """The largest of some nodes and their sizes, for a message."""
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{name!r} {as_text(size)}" for name, size in ordered[:count])
    more = f" and {len(ordered) - count} more" if len(ordered) > count else ""
    return f"{shown or 'none'}{more}"


def as_text(nbytes: float) -> str:
    """A size as people read it."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
