"""One node's values in memory. No Dask, no I/O."""

from __future__ import annotations

from jobrunner.workspace.array_pool import Spares
from jobrunner.workspace.kept_states import Rollbacks
from jobrunner.workspace.memory_limit import ROOM, Room, as_text, largest
from jobrunner.workspace.values import (
    IMMUTABLE,
    NotPicklableError,
    Snapshot,
    WireSnapshot,
    freeze,
    from_frames,
    own,
    settle,
    sole_arrays,
    to_frames,
    view,
)
from jobrunner.workspace.workspace import BlobUpdate, Workspace, WorkspaceView

__all__ = [
    "IMMUTABLE",
    "ROOM",
    "BlobUpdate",
    "NotPicklableError",
    "Rollbacks",
    "Room",
    "Snapshot",
    "Spares",
    "WireSnapshot",
    "Workspace",
    "WorkspaceView",
    "as_text",
    "freeze",
    "from_frames",
    "largest",
    "own",
    "settle",
    "sole_arrays",
    "to_frames",
    "view",
]
