"""What runs inside a worker process."""

from jobrunner.worker.applied import (
    GroupOutline,
    NewNode,
    add_groups,
    add_nodes,
    blob_names,
    call_keeper,
    call_on_workspaces,
    drop_groups,
    fetch,
    install_keeper,
)
from jobrunner.worker.dask_values import describe_blob, lend_blob, take_arrived
from jobrunner.worker.hosted_nodes import FETCH, BindingOptions
from jobrunner.worker.keeper import Keeper
from jobrunner.worker.messages import OPERATION, CaptureRhythm, EndedRun, Frames, Message, RunOrder
from jobrunner.worker.outbox import PING_SECONDS
from jobrunner.worker.outcome import Failure
from jobrunner.worker.plugin import (
    MOST_PINGS,
    PLUGIN_NAME,
    find_cut,
    host,
    lease_key,
    run_lease,
)
from jobrunner.worker.preload import MemoryOnly
from jobrunner.worker.task_context import (
    cancellation,
    current_task,
    renumber,
    seeded,
)
from jobrunner.worker.unix import SCHEME as UNIX
from jobrunner.worker.unix import make_socket_directory
