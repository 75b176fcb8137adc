"""What the scheduler knows of the runs of its clients."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from jobrunner.view import IS_SHOWN, RUNS


def running(scheduler: Scheduler) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the name and the last state of each run, in the order in which they began."""
    for runs in scheduler.get_metadata([RUNS], default={}).values():
        for name, known in runs.items():
            if known is not None:
                yield name, known


def seconds_since(known: Mapping[str, Any]) -> float:
    """How long ago a state was told."""
    return max(0.0, time.time() - float(known["time"]))


class Forgets(SchedulerPlugin):
    """Forgets the runs of clients that are gone."""

    name = "jobrunner-dashboard"

    def __init__(self, scheduler: Scheduler) -> None:
        scheduler.set_metadata([IS_SHOWN], value=True)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Forget those of one client."""
        scheduler.get_metadata([RUNS], default={}).pop(client, None)
