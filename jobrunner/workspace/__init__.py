"""One node's values in memory. No Dask, no I/O."""

from jobrunner.workspace.array_pool import ArrayPool
from jobrunner.workspace.kept_states import KeptStates
from jobrunner.workspace.memory_limit import MEMORY_LIMIT, MemoryLimit, largest
from jobrunner.workspace.values import (
    IMMUTABLE,
    NotPicklableError,
    Snapshot,
    adopt,
    freeze,
    from_frames,
    open_frames,
    own,
    sole_arrays,
    to_frames,
    view,
)
from jobrunner.workspace.workspace import BlobUpdate, Workspace, WorkspaceView
