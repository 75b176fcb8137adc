"""One node's values in memory. No Dask, no I/O."""

from jobrunner.workspace.history_rows import Rows
from jobrunner.workspace.pickles import (
    NotPicklableError,
    Pickled,
    copied,
    dumps_definitions,
    from_frames,
    received,
    to_frames,
)
from jobrunner.workspace.values import (
    BEFORE_COPY,
    IMMUTABLE,
    adopt,
    capture,
    settle,
    unshared,
    view,
)
from jobrunner.workspace.workspace import (
    BlobUpdate,
    LoadedArrays,
    StoredAs,
    StoredBlob,
    Taken,
    Workspace,
    WorkspaceView,
    read,
    stored_in,
    take,
)
