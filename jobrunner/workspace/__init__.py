"""One node's values in memory. No Dask, no I/O."""

from jobrunner.workspace.array_pool import ArrayPool
from jobrunner.workspace.contents import MANY, Form, Known
from jobrunner.workspace.kept_states import KeptStates
from jobrunner.workspace.kinds import IMMUTABLE
from jobrunner.workspace.memory_limit import MEMORY_LIMIT, MemoryLimit, largest
from jobrunner.workspace.pickles import (
    NotPicklableError,
    Snapshot,
    crossing_frames,
    dumps_definitions,
    from_frames,
    open_frames,
    to_frames,
)
from jobrunner.workspace.values import (
    freeze,
    is_own,
    own,
    settle,
    sole_arrays,
    view,
    view_small,
)
from jobrunner.workspace.workspace import BlobUpdate, Workspace, WorkspaceView
