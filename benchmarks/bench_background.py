"""What a save in the background costs the tasks beside it, and how much memory it takes.

Two workers of one thread have half of 1 GiB each, which changes once before each save. The tasks
of every epoch take about 50 ms: either NumPy, which lets the GIL go, or Python, which holds it.
Epochs that lie wholly within a save are compared with those that lie wholly outside of one. Memory
is the largest resident size of a worker, against the same run without a save.

    python benchmarks/bench_background.py [--rounds 3] [--directory DIR]

A round is a save; one more comes first and does not count.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import Report, Row, arguments, two_workers, write

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


def change_twice(item: np.ndarray[Any, Any]) -> None:
    if (current_task().epoch or 0) % EPOCHS_A_SAVE in (1, EPOCHS_A_SAVE - 1):
        item += 1


def begin(item: np.ndarray[Any, Any]) -> None:
    current_task().report(**{f"{current_task().node} begun": time.perf_counter()})


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


def build(work: Work, saves: int, change: Work) -> Job:
    """A job that is saved once more than counts, for the first copies touch fresh memory."""
    with Job("background") as job:
        for name in NODES:
            with Node(name):
                with job.init_group:
                    for i in range(ITEMS):
                        Task(make_item, outputs=f"item{i}", kwargs={"i": i})
                Task(begin, inputs="item0", name="begin")
                for i in range(ITEMS):
                    Task(change, updates=f"item{i}", name=f"change{i}")
                Task(work, inputs=f"item{ITEMS - 1}", name="work")
        epoch_limiter(job, EPOCHS_A_SAVE * (saves + 2) - 1)
    return job


def run(
    parent: Path, work: Work, saves: int, change: Work = change_once, **options: Any
) -> RunResult:
    """Run the job, saved with `options` or, without any, not at all."""
    directory = Path(tempfile.mkdtemp(dir=parent))
    manager = None
    if options:
        save = SaveEvery(epochs=EPOCHS_A_SAVE)
        manager = MultiNodeCheckpointManager(
            directory / "k", save=save, keep=KeepLast(1), **options
        )
    with two_workers() as client, Session(client) as session:
        result = JobRunner(build(work, saves, change), manager).run(session)
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
        result = run(parent, work, saves, budget_bytes=1 << 30)
        beside, alone = compare(result)
        ours, floor = (1000 * statistics.median(times) for times in (beside, alone))
        row = Row(f"a task of {what} beside a save of 1 GiB", "ms", {"jobrunner": ours})
        row.figures["no save"] = floor
        row.target = f"≤ {SLOWDOWN_TARGET} of no save"
        row.is_met = ours <= SLOWDOWN_TARGET * floor
        took = statistics.median(save.seconds for save in result.saves[1:])
        row.note = f"{len(beside)} tasks beside saves of {took:.2f} s"
        report.add(row)


def next_epoch(report: Report, parent: Path, saves: int) -> None:
    """An epoch that updates all 1 GiB in place: right after a save began, and long after."""
    result = run(parent, multiply, saves, budget_bytes=1 << 30, change=change_twice)
    took: dict[int, list[float]] = {1: [], EPOCHS_A_SAVE - 1: []}
    for metrics in result.metrics[EPOCHS_A_SAVE:]:  # before, memory is fresh
        place = metrics["epoch"] % EPOCHS_A_SAVE
        if place in took:
            spans = [metrics[f"{node} started"] - metrics[f"{node} begun"] for node in NODES]
            took[place].append(1000 * max(spans))
    after, alone = map(statistics.median, took.values())
    row = Row("an epoch that updates 1 GiB in place, as a save begins", "ms", {"jobrunner": after})
    row.figures["no save"] = alone
    stall = 1000 * statistics.median(save.stall_seconds for save in result.saves[1:-1])
    row.note = f"{len(took[1])} saves, which the epochs waited {stall:.1f} ms for"
    report.add(row)


def memory(report: Report, parent: Path) -> None:
    """The most that a worker takes more than without saves, with a budget for copies."""
    peaks = []
    for options in ({}, {"budget_bytes": BUDGET_BYTES}):
        metrics = run(parent, multiply, 1, **options).metrics[-1]
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
        slowdown(report, parent, args.rounds)
        next_epoch(report, parent, args.rounds)
        memory(report, parent)
    finally:
        shutil.rmtree(parent)
    write(report, args.json)


if __name__ == "__main__":
    main()
