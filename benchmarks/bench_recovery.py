"""How long from SIGKILL of one of three workers to the next recorded epoch.

    python benchmarks/bench_recovery.py [--megabytes 100] [--rounds 5] [--in-place]

The state is spread over three nodes, one a worker. The floor is what an undisturbed epoch and its
save take in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from distributed import Client, LocalCluster
from distributed.diagnostics.plugin import SchedulerPlugin

from jobrunner import (
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Session,
    Task,
    current_task,
    epoch_limiter,
)


def step(x, *, at, flag):
    """Add one; in epoch `at` die, after a note of when."""
    if current_task().epoch == at and not Path(flag).exists():
        Path(flag).write_text(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    return x + 1


def step_in_place(x, **kwargs):
    """The same on the array itself."""
    if kwargs["at"] is not None:
        step(0, **kwargs)
    x += 1


def build(numbers, at, flag, in_place):
    """A job of three nodes, of which one dies."""
    with Job("recovery") as job:
        for i in range(3):
            node = f"n{i}"
            with job.init_group:
                Task(lambda: np.zeros(numbers), outputs="x", node=node)
            kwargs = {"at": at if i == 1 else None, "flag": str(flag)}
            if in_place:
                Task(step_in_place, updates="x", node=node, kwargs=kwargs)
            else:
                Task(step, inputs="x", outputs="x", node=node, kwargs=kwargs)
    epoch_limiter(job, 8)
    return job


class Watch(SchedulerPlugin):
    """When Dask noticed, when the run had aborted its attempt, and when each epoch was recorded."""

    def __init__(self):
        self.saved = {}
        self.noticed = self.aborted = None

    def remove_worker(self, scheduler, worker, **kwargs):
        """Dask's scheduler lets go of a worker."""
        self.noticed = self.noticed or time.time()

    def on_warning(self, message):
        """The run has aborted the attempt, and begins again."""
        self.aborted = self.aborted or time.time()

    def on_save(self, report):
        """An epoch is recorded."""
        self.saved[report.epoch] = time.time()


def measure(megabytes, in_place):
    """Seconds: kill to record, an undisturbed epoch and save, kill to Dask, Dask to abort."""
    with tempfile.TemporaryDirectory() as directory:
        flag, watch = Path(directory, "flag"), Watch()
        job = build(megabytes * 2**20 // 24, 5, flag, in_place)
        with (
            LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=":0") as cluster,
            Client(cluster, set_as_default=False) as client,
            Session(client) as session,
        ):
            cluster.scheduler.add_plugin(watch, name="watch")
            manager = MultiNodeCheckpointManager(Path(directory, "ckpt"))
            result = JobRunner(job, manager, callbacks=[watch]).run(session)
            assert (result.restarts, result.epoch) == (1, 8)
            killed, aborted, noticed = float(flag.read_text()), watch.aborted, watch.noticed
        calm = statistics.median(watch.saved[e] - watch.saved[e - 1] for e in (2, 3, 4, 7, 8))
        return watch.saved[5] - killed, calm, noticed - killed, aborted - noticed


def main():
    """Print medians, and JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in-place", action="store_true", help="tasks update their array")
    asked = parser.parse_args()
    values = [measure(asked.megabytes, asked.in_place) for _ in range(asked.rounds)]
    total, calm, noticed, aborted = map(statistics.median, zip(*values, strict=True))
    print(
        f"SIGKILL to the next recorded epoch {total:.2f} s, of which an undisturbed epoch and its "
        f"save take {calm:.2f} s, so recovery takes {total - calm:.2f} s. Dask noticed after "
        f"{1000 * noticed:.0f} ms, the attempt was aborted {1000 * aborted:.0f} ms later (at most "
        f"{1000 * max(row[3] for row in values):.0f})."
    )
    row = {
        "total_seconds": total,
        "epoch_seconds": calm,
        "noticed_seconds": noticed,
        "aborted_seconds": aborted,
    }
    print(json.dumps({"megabytes": asked.megabytes, "in_place": asked.in_place, **row}))


if __name__ == "__main__":
    main()
