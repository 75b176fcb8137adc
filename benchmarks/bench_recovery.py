"""How long from SIGKILL of one of three workers to the next recorded epoch.

    python benchmarks/bench_recovery.py [--megabytes 100] [--rounds 5] [--json FILE]

The state is spread over three nodes, one a worker. The floor is what an undisturbed epoch and its
save take in the same run.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from distributed import Client, LocalCluster
from distributed.diagnostics.plugin import SchedulerPlugin
from harness import OURS, Report, Row, arguments, write

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


def build(numbers, at, flag):
    """A job of three nodes, of which one dies."""
    with Job("recovery") as job:
        for i in range(3):
            node = f"n{i}"
            with job.init_group:
                Task(lambda: np.zeros(numbers), outputs="x", node=node)
            kwargs = {"at": at if i == 1 else None, "flag": str(flag)}
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


def measure(megabytes):
    """Seconds: kill to record, an undisturbed epoch and save, kill to Dask, Dask to abort."""
    with tempfile.TemporaryDirectory() as directory:
        flag, watch = Path(directory, "flag"), Watch()
        job = build(megabytes * 2**20 // 24, 5, flag)
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
    """Add a row of the medians."""
    args = arguments(__doc__, megabytes=100, rounds=5)
    report = Report((__doc__ or "").splitlines()[0])
    values = [measure(args.megabytes) for _ in range(args.rounds)]
    total, calm, noticed, aborted = map(statistics.median, zip(*values, strict=True))
    figures = {OURS: total - calm, "an epoch and its save": calm}
    row = Row(f"recovery from SIGKILL of 1 of 3 workers, {args.megabytes} MB", "s", figures)
    row.note = f"noticed after {1000 * noticed:.0f} ms, aborted {1000 * aborted:.0f} ms later"
    report.add(row)
    write(report, args.json)


if __name__ == "__main__":
    main()
