"""Stateful, epoch-by-epoch jobs on Dask that checkpoint to Zarr and resume.

``docs/design/README.md`` lists the packages in layers. Each imports only those above it there, and
only through their ``__init__.py``, which says what the package does and lists what others may use.

Names are imported on first use, so ``import jobrunner`` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jobrunner._version import __version__

if TYPE_CHECKING:
    from jobrunner.checkpoint import (
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
        SaveBefore,
        SavedEpoch,
        SaveEvery,
        SavePolicy,
        register_codec,
    )
    from jobrunner.cluster import Session
    from jobrunner.compile import Plan
    from jobrunner.define import (
        Blob,
        GlobalRNG,
        Image,
        Job,
        Max,
        Mean,
        Min,
        Node,
        Sum,
        Task,
        TaskGroup,
        TaskOutput,
        WorkspaceType,
        epoch_limiter,
        job,
    )
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
    from jobrunner.pipes import pipe
    from jobrunner.positions import EpochLike, Position
    from jobrunner.report import (
        EpochStory,
        Ledger,
        LossStory,
        RunStory,
        SaveStory,
        Span,
        Story,
        read_story,
        write_report,
        write_trace,
    )
    from jobrunner.run import (
        BlobDifference,
        Callback,
        CopyTo,
        JobRunner,
        ReplayReport,
        ResumePlan,
        RunResult,
        SaveReport,
        UploadTaskGroupBuilder,
    )
    from jobrunner.worker import current_task, seeded

_PACKAGES = (
    "errors",
    "positions",
    "define",
    "compile",
    "workspace",
    "worker",
    "cluster",
    "checkpoint",
    "report",
    "run",
    "pipes",
)
"""Each imports those before it, but `pipes`: looking a name up in all of them loads little else."""

__all__ = [
    "Blob",
    "BlobDifference",
    "BlobNotFoundError",
    "Callback",
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
    "EpochLike",
    "EpochStory",
    "ExecutionError",
    "FileMetadataHandler",
    "GlobalRNG",
    "Image",
    "Job",
    "JobRunner",
    "JobRunnerError",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "Ledger",
    "LossStory",
    "Max",
    "Mean",
    "MetadataHandler",
    "Min",
    "Moment",
    "MultiNodeCheckpointManager",
    "Node",
    "NodeLostError",
    "PlacementError",
    "Plan",
    "PlanMismatchError",
    "Position",
    "ReplayReport",
    "ResumePlan",
    "RetentionPolicy",
    "RunResult",
    "RunStoppedError",
    "RunStory",
    "SaveBefore",
    "SaveEvery",
    "SavePolicy",
    "SaveReport",
    "SaveStory",
    "SavedEpoch",
    "SchedulerLostError",
    "Session",
    "Span",
    "Story",
    "Sum",
    "Task",
    "TaskFailedError",
    "TaskGroup",
    "TaskOutput",
    "UploadTaskGroupBuilder",
    "WorkspaceType",
    "__version__",
    "current_task",
    "epoch_limiter",
    "job",
    "pipe",
    "read_story",
    "register_codec",
    "seeded",
    "write_report",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        for package in _PACKAGES:
            module = importlib.import_module(f"jobrunner.{package}")
            if hasattr(module, name):
                globals()[name] = value = getattr(module, name)
                return value
    raise AttributeError(f"module 'jobrunner' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
