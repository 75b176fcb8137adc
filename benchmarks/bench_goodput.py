"""What does it cost to record every epoch, beside a save by hand of the same state?

By hand is a file for each node and an index, each flushed before the index names them. The contenders
alternate on one disk, and nothing is deleted between rounds: a file system that has just deleted many
files makes new ones more slowly.

    python benchmarks/bench_goodput.py [--rounds 5] [--directory DIR]
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import OURS, Report, Row, alternate, arguments, two_workers, write

from jobrunner import Job, JobRunner, MultiNodeCheckpointManager, Node, Session, Task, epoch_limiter

CASES = [  # nodes, bytes of each, seconds of a task, epochs
    (2, 1 << 10, 0.0, 1000),
    (4, 128 << 10, 0.0025, 200),
    (100, 10 << 10, 0.0, 60),
]
HAND_EPOCHS = 50


def make(nbytes: int) -> np.ndarray[Any, Any]:
    return np.zeros(nbytes // 8)


def grow(x: np.ndarray[Any, Any], seconds: float) -> np.ndarray[Any, Any]:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    return x + 1


def build(nodes: int, nbytes: int, seconds: float, epochs: int) -> Job:
    with Job("growing") as job:
        for i in range(nodes):
            with Node(f"n{i}"):
                with job.init_group:
                    Task(make, outputs="x", kwargs={"nbytes": nbytes})
                Task(grow, inputs="x", outputs="x", kwargs={"seconds": seconds})
        epoch_limiter(job, epochs)
    return job


class Since0:
    """When epoch 0 was recorded, or the first epoch began."""

    at = 0.0

    def on_start(self, plan: object, total: object) -> None:
        self.at = time.perf_counter()

    def on_save(self, report: Any) -> None:
        if report.epoch == 0:
            self.at = time.perf_counter()


def ours(
    session: Session, parent: Path, case: tuple[int, int, float, int], **options: Any
) -> float:
    """Milliseconds an epoch, saved with options or, without any, not at all."""
    manager = None
    if options:
        manager = MultiNodeCheckpointManager(tempfile.mkdtemp(dir=parent) + "/k", **options)
    since = Since0()
    JobRunner(build(*case), manager, callbacks=[since]).run(session, progress=False)
    took = time.perf_counter() - since.at
    assert manager is None or len(manager.epochs()) == case[-1] + 1
    return 1000 * took / case[-1]


def by_hand(parent: Path, nodes: int, nbytes: int) -> float:
    path = Path(tempfile.mkdtemp(dir=parent))
    value = np.zeros(nbytes // 8)
    started = time.perf_counter()
    for epoch in range(HAND_EPOCHS):
        for node in range(nodes):
            with open(path / f"{node}.{epoch}.npy", "wb") as array:
                np.save(array, value + epoch)
                array.flush()
                os.fsync(array.fileno())
        with open(path / "index.tmp", "w") as index:
            json.dump({"last": epoch}, index)
            index.flush()
            os.fsync(index.fileno())
        os.replace(path / "index.tmp", path / "index.json")
        directory = os.open(path, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
    return 1000 * (time.perf_counter() - started) / HAND_EPOCHS


def main() -> None:
    args = arguments(__doc__, rounds=5, directory="")
    report = Report((__doc__ or "").splitlines()[0])
    parent = Path(tempfile.mkdtemp(dir=args.directory or None, prefix="jobrunner-bench-"))
    try:
        with two_workers() as client, Session(client) as session:
            for case in CASES:
                nodes, nbytes, seconds, epochs = case
                few = (*case[:3], max(20, epochs // 10))
                contenders = {
                    OURS: lambda case=case: ours(session, parent, case, asynchronous=True),
                    "asynchronous=False": lambda few=few: ours(
                        session, parent, few, asynchronous=False
                    ),
                    "not saved": lambda case=case: ours(session, parent, case),
                    "by hand": lambda case=case: by_hand(parent, *case[:2]),
                }
                figures = alternate(contenders, args.rounds)
                name = f"{nodes} × {nbytes >> 10} KiB, tasks of {1000 * seconds:g} ms"
                row = Row(f"an epoch of {name}, recorded", "ms", figures)
                goodput = figures["not saved"] / figures[OURS]
                row.note = f"goodput {goodput:.0%}"
                if seconds:
                    row.target, row.is_met = "goodput ≥ 85 %", goodput >= 0.85
                else:
                    share = 0.5 if nodes == 2 else 0.6
                    row.target = f"≤ {share} of by hand"
                    row.is_met = figures[OURS] <= share * figures["by hand"]
                report.add(row)
    finally:
        shutil.rmtree(parent)
    write(report, args.json)


if __name__ == "__main__":
    main()
