"""Ends a run before its worker runs out of memory. No Dask.

A nanny kills a worker that exceeds its limit, and a job that does not fit would restart forever. So
the run ends earlier, with an error that gives the figures: when the process has grown too large, or
before a copy that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from jobrunner.config import largest
from jobrunner.errors import ExecutionError
from jobrunner.texts import format_bytes

LOOK_SECONDS = 0.01
"""Between two looks at the memory in use, each of which takes some microseconds."""
KNOWN_BYTES = 32 << 20
"""Arrays of this size or more always take new memory from the system."""


@dataclass
class MemoryLimit:
    """How much memory a worker's process uses, and how much it may use."""

    address: str  # the worker's, for messages
    used_bytes: Callable[[], int]  # by the process, now
    limit_bytes: int  # 0 if unknown
    share: float  # of the limit, beyond which a run ends; 0 for never
    sizes: Callable[[], Mapping[str, int]] = dict  # of nodes' blobs, for messages

    def __post_init__(self) -> None:
        self.is_over = False  # at the last `look`: the run must end
        self.is_limited = self.limit_bytes > 0 and self.share > 0
        self.most_bytes = self.share * self.limit_bytes
        # How much may wait to be sent, and how much more for later runs.
        self.waiting_bytes = 256 << 20
        if self.is_limited:
            self.waiting_bytes = self.limit_bytes // 16

    def look(self) -> None:
        """Check the memory in use."""
        self.is_over = self.used_bytes() > self.most_bytes

    def require(self, nbytes: int, description: str) -> None:
        """Raise an `ExecutionError` if that many bytes do not fit."""
        if self.is_limited and nbytes >= KNOWN_BYTES:
            used = self.used_bytes()
            if used + nbytes > self.most_bytes:
                raise ExecutionError(
                    f"{description} takes {format_bytes(nbytes)}, more than worker {self.address} has "
                    f"left: {self._account(used)}"
                )

    def error(self) -> ExecutionError:
        """The error that ends a run when `is_over`."""
        return ExecutionError(
            f"Worker {self.address} is about to exceed its memory limit: "
            f"{self._account(self.used_bytes())}"
        )

    def _account(self, used: int) -> str:
        sizes = self.sizes()
        return (
            f"it uses {format_bytes(used)} of its limit of {format_bytes(self.limit_bytes)}, and a "
            f"run ends at {self.share:.0%}. The blobs of its {len(sizes)} nodes take "
            f"{format_bytes(sum(sizes.values()))}: {largest(sizes)}. Values being sent, tasks and "
            f"Python itself take the rest. Use more workers or workers with more memory, place "
            f"fewer nodes on each, or make blobs smaller."
        )
