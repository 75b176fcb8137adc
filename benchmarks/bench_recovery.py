"""How long from SIGKILL of one of three workers to the next recorded epoch.

    python benchmarks/bench_recovery.py [--megabytes 100] [--rounds 5]

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


class Watch:
    """When each epoch was recorded."""

    def __init__(self):
        self.saved = {}

    def on_save(self, report):
        self.saved[report.epoch] = time.time()


def measure(megabytes):
    """Seconds from the kill to the next record, and of an undisturbed epoch with its save."""
    with tempfile.TemporaryDirectory() as directory:
        flag, watch = Path(directory, "flag"), Watch()
        job = build(megabytes * 2**20 // 24, 5, flag)
        with (
            LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=":0") as cluster,
            Client(cluster, set_as_default=False) as client,
            Session(client) as session,
        ):
            manager = MultiNodeCheckpointManager(Path(directory, "ckpt"))
            JobRunner(job, manager, callbacks=[watch]).run(session)
        calm = statistics.median(watch.saved[e] - watch.saved[e - 1] for e in (2, 3, 4, 7, 8))
        return watch.saved[5] - float(flag.read_text()), calm


def main():
    """Print medians, and JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    found = [measure(asked.megabytes) for _ in range(asked.rounds)]
    total, calm = (statistics.median(values) for values in zip(*found, strict=True))
    print(f"an undisturbed epoch and its save: {calm:.2f} s")
    print(
        f"SIGKILL to the next recorded epoch: {total:.2f} s, so recovery takes {total - calm:.2f} s"
    )
    print(json.dumps({"megabytes": asked.megabytes, "total_seconds": total, "epoch_seconds": calm}))


if __name__ == "__main__":
    main()
