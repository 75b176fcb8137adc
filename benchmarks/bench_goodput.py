"""What does it cost to record every epoch, beside a save by hand, and what do the tasks notice of it?

By hand is a file for each node and an index, each flushed before the index names them. The contenders
alternate on one disk, and nothing is deleted between rounds: a file system that has just deleted many
files makes new ones more slowly.

    python benchmarks/bench_goodput.py [--rounds 3] [--directory DIR]
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import OURS, Report, Row, alternate, arguments, two_workers, write

from jobrunner import (
    Job,
    JobRunner,
    KeepLast,
    MultiNodeCheckpointManager,
    Node,
    SaveEvery,
    Session,
    Task,
    current_task,
    epoch_limiter,
)
from jobrunner.run.result import RunResult

CASES = [  # nodes, bytes of each, seconds of a task, epochs
    (2, 1 << 10, 0.0, 1000),
    (4, 128 << 10, 0.0025, 200),
    (100, 10 << 10, 0.0, 60),
    (1000, 1 << 10, 0.0, 10),
]
HAND_FILES = 100


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
    epochs = max(2, HAND_FILES // nodes)
    started = time.perf_counter()
    for epoch in range(epochs):
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
    return 1000 * (time.perf_counter() - started) / epochs


# ---- a task beside a save

NODES = ("a", "b")
ITEMS, ITEM_BYTES, BUDGET_BYTES = 8, 64 << 20, 128 << 20
EPOCHS_A_SAVE = 100
SLOWDOWN_TARGET = 1.15

Work = Callable[[np.ndarray[Any, Any]], None]


def make_item(i: int) -> np.ndarray[Any, Any]:
    return np.full(ITEM_BYTES // 8, float(i))


def change_once(item: np.ndarray[Any, Any]) -> None:
    if (current_task().epoch or 0) % EPOCHS_A_SAVE == 0:
        item += 1


def multiply(item: np.ndarray[Any, Any]) -> None:
    """NumPy in one thread, without the GIL but for moments."""
    a = np.ones((256, 256), np.float32)
    _tell(lambda: np.sort(np.einsum("ij,jk->ik", a, a), axis=None), 15)


def count_up(item: np.ndarray[Any, Any]) -> None:
    """Python that holds the GIL."""
    _tell(lambda: sum(i & 1 for i in range(70_000)), 10)


def _tell(part: Callable[[], object], times: int) -> None:
    started = time.perf_counter()
    for _ in range(times):
        part()
    ended = time.perf_counter()
    status = Path("/proc/self/status").read_text()
    peak = int(status.split("VmHWM:")[1].split()[0]) << 10
    values = {"started": started, "ended": ended, "peak": peak}
    current_task().report(**{f"{current_task().node} {key}": values[key] for key in values})


def build_large(work: Work, saves: int) -> Job:
    """A job that is saved once more than counts, for the first copies touch fresh memory."""
    with Job("background") as job:
        for name in NODES:
            with Node(name):
                with job.init_group:
                    for i in range(ITEMS):
                        Task(make_item, outputs=f"item{i}", kwargs={"i": i})
                for i in range(ITEMS):
                    Task(change_once, updates=f"item{i}", name=f"change{i}")
                Task(work, inputs=f"item{ITEMS - 1}", name="work")
        epoch_limiter(job, EPOCHS_A_SAVE * (saves + 2) - 1)
    return job


def run_large(parent: Path, work: Work, saves: int, **options: Any) -> RunResult:
    """Run the job, saved with `options` or, without any, not at all."""
    directory = Path(tempfile.mkdtemp(dir=parent))
    manager = None
    if options:
        save = SaveEvery(epochs=EPOCHS_A_SAVE)
        manager = MultiNodeCheckpointManager(
            directory / "k", save=save, keep=KeepLast(1), **options
        )
    with two_workers() as client, Session(client) as session:
        result = JobRunner(build_large(work, saves), manager).run(session)
    for folder, _, names in os.walk(directory):  # see bench_checkpoint: deleted at the end
        for name in names:
            os.truncate(os.path.join(folder, name), 0)
    return result


def compare(result: RunResult) -> tuple[list[float], list[float]]:
    """Seconds of the tasks beside a save, and of those beside none."""
    ends = {
        metrics["epoch"]: max(metrics[f"{node} ended"] for node in NODES)
        for metrics in result.metrics
    }
    spans = [
        (ends[save.epoch], ends[save.epoch] + save.seconds)
        for save in result.saves
        if save.epoch in ends
    ]
    beside, alone = [], []
    for metrics in result.metrics:
        for node in NODES:
            started, ended = metrics[f"{node} started"], metrics[f"{node} ended"]
            if any(a <= started and ended <= b for a, b in spans[1:]):
                beside.append(ended - started)
            elif all(ended < a or b < started for a, b in spans):
                alone.append(ended - started)
    return beside, alone


def slowdown(report: Report, parent: Path, saves: int) -> None:
    """A task beside a save of 1 GiB, against the same with none under way."""
    for what, work in (("NumPy", multiply), ("Python that holds the GIL", count_up)):
        result = run_large(parent, work, saves, budget_bytes=1 << 30)
        beside, alone = compare(result)
        ours, floor = (1000 * statistics.median(times) for times in (beside, alone))
        row = Row(f"a task of {what} beside a save of 1 GiB", "ms", {"jobrunner": ours})
        row.figures["no save"] = floor
        row.target = f"≤ {SLOWDOWN_TARGET} of no save"
        row.is_met = ours <= SLOWDOWN_TARGET * floor
        took = statistics.median(save.seconds for save in result.saves[1:])
        row.note = f"{len(beside)} tasks beside saves of {took:.2f} s"
        report.add(row)


def memory(report: Report, parent: Path) -> None:
    """The most that a worker takes more than without saves, with a budget for copies."""
    peaks = []
    for options in ({}, {"budget_bytes": BUDGET_BYTES}):
        metrics = run_large(parent, multiply, 1, **options).metrics[-1]
        peaks.append(max(metrics[f"{node} peak"] for node in NODES))
    ours = (peaks[1] - peaks[0]) / (1 << 20)
    allowed = (BUDGET_BYTES + ITEM_BYTES) >> 20
    row = Row(
        f"memory of a worker beyond that without saves, budget {BUDGET_BYTES >> 20} MiB",
        "MiB",
        {"jobrunner": ours},
        f"≤ {allowed}, an item more than the budget",
        ours <= allowed,
    )
    report.add(row)


def main() -> None:
    args = arguments(__doc__, rounds=3, directory="")
    report = Report((__doc__ or "").splitlines()[0])
    parent = Path(tempfile.mkdtemp(dir=args.directory or None, prefix="jobrunner-bench-"))
    try:
        with two_workers() as client, Session(client) as session:
            for case in CASES:
                nodes, nbytes, seconds, epochs = case
                few = (*case[:3], max(10, epochs // 10))
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
        slowdown(report, parent, args.rounds)
        memory(report, parent)
        write(report, args.json)
    finally:
        shutil.rmtree(parent)


if __name__ == "__main__":
    main()
