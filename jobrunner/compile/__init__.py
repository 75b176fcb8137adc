"""Job -> Plan: slices, edges, blob lifetimes, fingerprint. Pure: no I/O, no Dask."""

from jobrunner.compile.fingerprint import changes, describe
from jobrunner.compile.job import compile_group, compile_job, compile_resume, planned_nodes
from jobrunner.compile.plan import (
    Argument,
    BlobArgument,
    Capture,
    Condition,
    Crossing,
    CrossingArgument,
    GroupPlan,
    Plan,
    PlannedNode,
    PlannedTask,
    Report,
    ResultArgument,
    Slice,
    UpdateArgument,
    is_due,
)
