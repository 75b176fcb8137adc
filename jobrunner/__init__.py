"""Stateful, iterative work on Dask that survives.

The way of the data, one module a stage; a module imports only from those above it::

    errors          the error tree
    names           what things may be called; the only formatter and parser of ``node.epoch``
    arguments, storage, node, task, job
                    1 define    Node, Blob; Task, TaskGroup; Job
    drawing                     a job as a picture
    plan            2 compile   what a compiled job is: slices and crossings
    fingerprint                 its digest, and what differs from another's
    group_compiler, job_blobs, compiler
                                Job -> Plan
    placement       3 place     nodes x workers
    memory          4 run       whether a worker still has room
    values                      the rules that make blobs values
    rollback                    states kept in memory, to go back to
    spares                      memory for copies of what is kept and updated, used again
    workspace                   one node's blobs, global and private
    current                     what a task can ask about itself
    clearance                   tasks that wait until the client knows of them
    program, calls, crew, outcome
                                slices made ready, one call, the threads, what a run came to
    slice                       runs slices in threads, without Dask
    stint                       several epochs for one message
    outbox, peers, running      values on their way to other workers, and a binding's runs on one
    operation, hosting, worker  the Dask plugin that hosts bindings and their workspaces
    local_cluster               workers on this machine that leave signals to their client
    cluster, direct             the driver's messages, through the scheduler and past it
    membership, candidates      a binding's workers, and those that it may place nodes on
    request, conversation       what it asks of them, and how
    leases                      what holds workers and their resources
    shipping, binding           a plan's nodes on workers
    connection                  how a session comes by its client
    session_binding, session    the driver's side of Dask
    checkpoint/     5 save      codecs, stores, the log, policies, managers
    result, resume, restoring, decisions, survival, recorder, upload
                    6 loop      its parts: where to begin, what comes next, what is written
    callbacks, options          what a run tells, and what it is told
    loop, runner                init or resume, then epochs, then download and exit
    comparison, exactness, tracing, replay
                    a recorded epoch run again, what differs, and which task it comes from
    progress, script, listing, upkeep
                    what commands tell and do
    answers, cluster_options, checkpoint_commands, cli
                    7 show
    collector                   the garbage collector held off
    config, preload, signals    Dask's configuration; what local worker processes load; Ctrl-C
    testing/                    fault injection and contract suites for users' own tests

Names are imported when first used, so that ``import jobrunner`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jobrunner._version import __version__

if TYPE_CHECKING:
    from jobrunner.checkpoint import (
        Auto,
        Checkpoint,
        CheckpointManager,
        Codec,
        FileMetadataHandler,
        KeepAll,
        KeepBest,
        KeepEvery,
        KeepLast,
        MetadataHandler,
        Moment,
        MultiNodeCheckpointManager,
        RetentionPolicy,
        SaveEvery,
        SavePolicy,
        register_codec,
    )
    from jobrunner.current import current_task
    from jobrunner.errors import (
        BlobNotFoundError,
        CheckpointCorruptError,
        CheckpointError,
        CheckpointNotFoundError,
        CheckpointWriteError,
        CommitConflictError,
        DefinitionError,
        ExecutionError,
        JobRunnerError,
        NodeLostError,
        PlacementError,
        PlanMismatchError,
        RunStoppedError,
        SchedulerLostError,
        TaskFailedError,
    )
    from jobrunner.job import Job, epoch_limiter
    from jobrunner.node import Blob, Node, WorkspaceType
    from jobrunner.plan import Plan
    from jobrunner.replay import BlobDifference, ReplayReport
    from jobrunner.result import ResumePlan, RunResult, SaveReport
    from jobrunner.runner import JobRunner
    from jobrunner.session import Session
    from jobrunner.task import Task, TaskGroup, TaskOutput
    from jobrunner.upload import CopyTo, UploadTaskGroupBuilder

_MODULE_OF = {
    name: module
    for module, names in {
        "checkpoint": (
            "Auto Checkpoint CheckpointManager Codec FileMetadataHandler KeepAll KeepBest "
            "KeepEvery KeepLast MetadataHandler Moment MultiNodeCheckpointManager "
            "RetentionPolicy SaveEvery SavePolicy register_codec"
        ),
        "current": "current_task",
        "errors": (
            "BlobNotFoundError CheckpointCorruptError CheckpointError CheckpointNotFoundError "
            "CheckpointWriteError CommitConflictError DefinitionError ExecutionError "
            "JobRunnerError NodeLostError PlacementError PlanMismatchError RunStoppedError "
            "SchedulerLostError TaskFailedError"
        ),
        "job": "Job epoch_limiter",
        "node": "Blob Node WorkspaceType",
        "plan": "Plan",
        "replay": "BlobDifference ReplayReport",
        "result": "ResumePlan RunResult SaveReport",
        "runner": "JobRunner",
        "session": "Session",
        "task": "Task TaskGroup TaskOutput",
        "upload": "CopyTo UploadTaskGroupBuilder",
    }.items()
    for name in names.split()
}

__all__ = [
    "Auto",
    "Blob",
    "BlobDifference",
    "BlobNotFoundError",
    "Checkpoint",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointNotFoundError",
    "CheckpointWriteError",
    "Codec",
    "CommitConflictError",
    "CopyTo",
    "DefinitionError",
    "ExecutionError",
    "FileMetadataHandler",
    "Job",
    "JobRunner",
    "JobRunnerError",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "MetadataHandler",
    "Moment",
    "MultiNodeCheckpointManager",
    "Node",
    "NodeLostError",
    "PlacementError",
    "Plan",
    "PlanMismatchError",
    "ReplayReport",
    "ResumePlan",
    "RetentionPolicy",
    "RunResult",
    "RunStoppedError",
    "SaveEvery",
    "SavePolicy",
    "SaveReport",
    "SchedulerLostError",
    "Session",
    "Task",
    "TaskFailedError",
    "TaskGroup",
    "TaskOutput",
    "UploadTaskGroupBuilder",
    "WorkspaceType",
    "__version__",
    "current_task",
    "epoch_limiter",
    "register_codec",
]


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'jobrunner' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"jobrunner.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
