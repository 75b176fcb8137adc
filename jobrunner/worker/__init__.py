"""What runs inside a worker process."""

from __future__ import annotations

from jobrunner.worker.epoch_batch import GroupResult, UnderWay, merge_runs
from jobrunner.worker.outbox import Message
from jobrunner.worker.outcome import Failure
from jobrunner.worker.plugin import (
    MOST_PINGS,
    OPERATION,
    PLUGIN_NAME,
    WorkspaceHost,
    hold_lease,
    lease_key,
)
from jobrunner.worker.preload import MemoryOnly
from jobrunner.worker.task_context import Metric, current_task

__all__ = [
    "MOST_PINGS",
    "OPERATION",
    "PLUGIN_NAME",
    "Failure",
    "GroupResult",
    "MemoryOnly",
    "Message",
    "Metric",
    "UnderWay",
    "WorkspaceHost",
    "current_task",
    "hold_lease",
    "lease_key",
    "merge_runs",
]
