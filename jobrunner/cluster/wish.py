"""Asks clusters that adapt to their load for workers, and notes which join."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import dask.config
from dask.utils import parse_timedelta
from distributed import Client

SETTLED_SECONDS = 1.0
"""If no worker has joined for so long, those that have joined get nodes."""
MOST_WAIT_SECONDS = 3.0
"""After this time they do in any case. Dask closes an idle worker about as soon."""

RESOURCE = "jobrunner-worker"
"""No worker has it, so a task that needs it waits, and counts as load."""


@dataclass(slots=True)
class Joins:
    """When workers joined the cluster, in seconds of one clock; infinite: none did."""

    first: float = math.inf
    last: float = math.inf

    def note(self, now: float) -> None:
        """Note that one has joined."""
        self.first = min(self.first, now)
        self.last = now

    def are_over(self, now: float) -> bool:
        """Whether some have joined, and no others are waited for."""
        return now - self.last >= SETTLED_SECONDS or now - self.first >= MOST_WAIT_SECONDS


class Wish:
    """Tasks that nobody can run.

    Dask's scheduler does not count leases as load, so a cluster that adapts has no reason to start a
    worker: with ``adapt(minimum=0)`` a run would wait for its first one for ever. It wants as many
    threads as finish the tasks that wait within its target duration, so we let that many wait.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._tasks: list[Any] = []  # futures of Dask

    def ask(self, workers: int, threads: int) -> None:
        """Ask for so many workers, with that many threads each."""
        target = parse_timedelta(dask.config.get("distributed.adaptive.target-duration"))
        task = parse_timedelta(dask.config.get("distributed.scheduler.unknown-task-duration"))
        count = workers * threads * max(1, math.ceil(target / task))
        if count != len(self._tasks):
            self.withdraw()
            self._tasks = self._client.map(
                int, range(count), key="wanted-worker", resources={RESOURCE: 1}, pure=False
            )

    def withdraw(self) -> None:
        """Ask for none."""
        for task in self._tasks:
            task.release()
        self._tasks = []
