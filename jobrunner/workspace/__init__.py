"""One node's values in memory. No Dask, no I/O."""

from __future__ import annotations

from jobrunner.workspace.array_pool import ArrayPool
from jobrunner.workspace.kept_states import KeptStates
from jobrunner.workspace.memory_limit import MEMORY_LIMIT, MemoryLimit, as_text, largest
from jobrunner.workspace.values import (
    IMMUTABLE,
    NotPicklableError,
    Snapshot,
    WireSnapshot,
    adopt,
    freeze,
    from_frames,
    own,
    sole_arrays,
    to_frames,
    view,
)
from jobrunner.workspace.workspace import BlobUpdate, Workspace, WorkspaceView

__all__ = [
    "IMMUTABLE",
    "MEMORY_LIMIT",
    "ArrayPool",
    "BlobUpdate",
    "KeptStates",
    "MemoryLimit",
    "NotPicklableError",
    "Snapshot",
    "WireSnapshot",
    "Workspace",
    "WorkspaceView",
    "adopt",
    "as_text",
    "freeze",
    "from_frames",
    "largest",
    "own",
    "sole_arrays",
    "to_frames",
    "view",
]
