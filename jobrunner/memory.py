"""4 run: whether a worker still has room, and what to say where it has not. No Dask.

Workspaces stay in memory; a worker that goes over its limit is killed by its nanny, and a job that
does not fit would be begun again and again. So the run is ended before, with figures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jobrunner.errors import ExecutionError
from jobrunner.workspace import Workspace

CHECK_SECONDS = 0.1
"""As often as Dask's nanny looks."""


@dataclass(frozen=True, slots=True)
class MemoryMeter:
    """What a worker's process uses, and how much it may.

    Attributes
    ----------
    used_bytes : callable
        Gives what the process uses now.
    limit_bytes : int
        At which it is killed or the machine swaps; 0: nobody knows.
    share : float
        Of the limit, beyond which a run is ended; 0: never.
    """

    used_bytes: Callable[[], int]
    limit_bytes: int
    share: float

    @property
    def is_on(self) -> bool:
        """Whether there is anything to look after."""
        return self.limit_bytes > 0 and self.share > 0

    def is_over(self) -> bool:
        """Whether a run had better end now."""
        return self.used_bytes() > self.share * self.limit_bytes


def out_of_memory(
    address: str, meter: MemoryMeter, workspaces: Mapping[str, Workspace]
) -> ExecutionError:
    """The error that says what takes the room."""
    sizes = {node: workspace_bytes(space) for node, space in workspaces.items()}
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    shown = ", ".join(f"{node!r} {_text(size)}" for node, size in largest[:10])
    more = f" and {len(largest) - 10} more" if len(largest) > 10 else ""
    return ExecutionError(
        f"Worker {address} uses {_text(meter.used_bytes())} of its limit of "
        f"{_text(meter.limit_bytes)}, more than {meter.share:.0%}, and would soon be killed. The "
        f"blobs of its {len(sizes)} nodes take {_text(sum(sizes.values()))}: {shown or 'none'}"
        f"{more}; the rest are values on their way, what tasks hold, and Python itself. Use more "
        f"workers or ones with more memory, put fewer nodes on each, or let blobs be smaller."
    )


def workspace_bytes(workspace: Workspace) -> int:
    """About what a node's blobs take."""
    blobs = [*list(workspace.globals.values()), *list(workspace.private.values())]
    return sum(map(_size, blobs))


def _size(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return int(value.nbytes)
    if isinstance(value, dict):
        return sum(_size(item) for item in list(value.values()))
    if isinstance(value, list | tuple | set):
        return sum(_size(item) for item in list(value))
    nbytes = getattr(value, "nbytes", None)  # tensors, frames of other libraries
    return nbytes if isinstance(nbytes, int) else sys.getsizeof(value)


def _text(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
