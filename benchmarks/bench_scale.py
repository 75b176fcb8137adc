"""How long does a start take, and how do time and memory grow with nodes, epochs and workers?

A job of two nodes on a live cluster, from `JobRunner.run` to the end of its first epoch; `import
jobrunner` with all names that a job's script uses, against `import distributed`; `jobrunner --help`.

Compiling and shipping up to 10,000 nodes of 10 tasks each, half of them in the init group; a run of many epochs, whose time and
memory early and late are compared by a fitted slope; the driver's own CPU time a worker and epoch
(the scheduler runs in a process of its own).

    python benchmarks/bench_scale.py [--rounds 5] [--nodes 10000] [--epochs 100000] [--workers 64] [--json FILE]
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import tracemalloc
from typing import Any

import dask
import numpy as np
import psutil
from distributed import Client, LocalCluster
from harness import OURS, Laps, Report, Row, alternate, arguments, counters, two_workers, write

from jobrunner import JobRunner, Session
from jobrunner.cluster.shipping import Parcel
from jobrunner.compile.fingerprint import describe

DRIVER = """
import json, sys, time
sys.path[:0] = json.loads(sys.argv[3])
from distributed import Client
from harness import counters
from jobrunner import JobRunner, Session

class Asks:
    def on_epoch(self, epoch, seconds, metrics):
        if epoch in (10, 110):
            marks.append(time.process_time())

marks = []
with Client(sys.argv[1], set_as_default=False) as client, Session(client) as session:
    JobRunner(counters(int(sys.argv[2]), 1), num_epochs=110, callbacks=[Asks()]).run(session)
print((marks[1] - marks[0]) / 100 / int(sys.argv[2]) * 1e6)
"""


def compile_and_ship(client: Client, nodes: int) -> dict[str, float]:
    job = counters(nodes, 5)  # and as many in the init group
    started = time.perf_counter()
    plan = job.compile()
    compiled = time.perf_counter()
    describe(plan)
    described = time.perf_counter()
    parcel = Parcel(plan.groups, {node.name: "here" for node in plan.nodes})
    size = sum(map(len, parcel.by_worker["here"].values()))
    packed = time.perf_counter()
    with Session(client) as session:
        bound = time.perf_counter()
        session.bind(plan)
        shipped = time.perf_counter()
    return {
        "compile": compiled - started,
        "fingerprint": described - compiled,
        "pack": packed - described,
        "bind and ship": shipped - bound,
        "megabytes": size / 1e6,
    }


def compile_memory(nodes: int) -> float:
    tracemalloc.start()
    job = counters(nodes, 5)
    plan = job.compile()
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    del plan
    return size / 1e6


def memory(dask_worker: Any = None) -> float:
    return psutil.Process().memory_info().rss / 1e6


class Watch(Laps):
    """Takes memory too, every so many epochs."""

    def __init__(self, client: Client, every: int) -> None:
        super().__init__(is_passive=True)
        self.client, self.every = client, every
        self.memory: list[tuple[int, float, float, float]] = []

    def on_epoch(self, epoch: int, seconds: float, metrics: object) -> None:
        super().on_epoch(epoch, seconds, metrics)
        if epoch == 100 or epoch % self.every == 0:
            workers = sum(self.client.run(memory).values())
            scheduler = float(self.client.run_on_scheduler(memory))
            self.memory.append((epoch, memory(), workers, scheduler))


def slope(xs: Any, ys: Any) -> tuple[float, float]:
    """The slope of a fitted line, and half its 95 % confidence interval."""
    xs, ys = np.asarray(xs, float), np.asarray(ys, float)
    (fitted, offset), residuals = np.polyfit(xs, ys, 1), None
    residuals = ys - (fitted * xs + offset)
    spread = math.sqrt((residuals**2).sum() / (len(xs) - 2) / ((xs - xs.mean()) ** 2).sum())
    return float(fitted), 2 * spread


def many_epochs(report: Report, client: Client, epochs: int) -> None:
    watch = Watch(client, max(1, epochs // 20))
    with Session(client) as session:
        JobRunner(counters(2, 1), num_epochs=epochs, callbacks=[watch]).run(session)
    ends = np.array(watch.ends)
    width = max(100, epochs // 100)
    starts = np.arange(100, epochs - width, width)
    # The median of blocks, so that the pauses in which memory is measured don't count.
    laps = (ends[starts + width - 1] - ends[starts - 1]) / width * 1e3
    time_slope, time_error = slope(starts, laps)
    growth = {}
    for i, who in ((1, "driver"), (2, "workers"), (3, "scheduler")):
        fitted, error = slope([m[0] for m in watch.memory], [m[i] for m in watch.memory])
        growth[who] = (fitted * 1e5, error * 1e5)
    tenth = max(1, len(laps) // 10)
    early, late = (float(np.median(part)) for part in (laps[:tenth], laps[-tenth:]))
    report.add(
        Row(
            f"an epoch after {epochs:,} against one after 100",
            "ms",
            {OURS: late, "early": early},
            "same time",
            late <= 1.2 * early,
            f"slope {time_slope * 1e5:+.3g} ± {time_error * 1e5:.2g} ms per 100,000 epochs; memory "
            + ", ".join(f"{who} {a:+.3g} ± {b:.2g} MB" for who, (a, b) in growth.items())
            + " per 100,000 epochs",
        )
    )


# What workers of Dask's do by themselves, many times a second, would fill two cores from some 30 on.
IDLE = {
    "distributed.admin.tick.interval": "2s",
    "distributed.admin.tick.limit": "30s",
    "distributed.admin.system-monitor.interval": "30s",
    "distributed.worker.memory.monitor-interval": "30s",
    "distributed.worker.profile.enabled": False,
}


def driver_cpu(workers: int) -> float:
    paths = json.dumps([os.path.dirname(os.path.abspath(__file__)), *sys.path])
    with (
        dask.config.set(IDLE),
        LocalCluster(
            n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None
        ) as cluster,
    ):
        ran = subprocess.run(
            [sys.executable, "-c", DRIVER, cluster.scheduler_address, str(workers), paths],
            capture_output=True,
            text=True,
        )
    if ran.returncode:
        sys.exit(ran.stderr)
    return float(ran.stdout.split()[-1])


EVERY_NAME = "from jobrunner import *"


def first_epoch(client: Client) -> float:
    laps = Laps(is_passive=False)
    with Session(client) as session:
        started = time.perf_counter()
        JobRunner(counters(2, 1), num_epochs=1, callbacks=[laps]).run(session)
    return (laps.ends[0] - started) * 1e3


def process(*command: str) -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - started) * 1e3


def start(report: Report, rounds: int) -> None:
    with two_workers() as client:
        figures = alternate({OURS: lambda: first_epoch(client)}, rounds)
    report.add(Row("run to the first epoch", "ms", figures, "≤ 200 ms", figures[OURS] <= 200))
    figures = alternate(
        {
            "python": lambda: process("-c", "pass"),
            OURS: lambda: process("-c", "import jobrunner"),
            "every name": lambda: process("-c", EVERY_NAME),
            "distributed": lambda: process("-c", "import distributed"),
        },
        rounds,
    )
    is_met = figures[OURS] <= 1.1 * figures["distributed"]
    report.add(Row("import", "ms", figures, "≤ 1.1 × distributed", is_met))
    figures = alternate(
        {OURS: lambda: process("-m", "jobrunner", "--help")},
        rounds,
    )
    report.add(Row("jobrunner --help", "ms", figures, "≤ 300 ms", figures[OURS] <= 300))


def main() -> None:
    args = arguments(__doc__, rounds=5, nodes=10_000, epochs=100_000, workers=64)
    report = Report((__doc__ or "").splitlines()[0])
    start(report, args.rounds)
    with two_workers() as client:
        for nodes in (args.nodes // 10, args.nodes):
            parts = compile_and_ship(client, nodes)
            seconds = parts["compile"] + parts["bind and ship"]
            note = ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
            note += f"; plan {compile_memory(nodes):.0f} MB"
            report.add(
                Row(
                    f"compile and ship {nodes:,} nodes × 10 tasks",
                    "s",
                    {OURS: seconds},
                    "≤ 8 s; fingerprint ≤ 1 s",
                    seconds <= 8 and parts["fingerprint"] <= 1,
                    note,
                )
            )
        many_epochs(report, client, args.epochs)
    for count in sorted({4, args.workers // 4, args.workers // 2, args.workers}):
        cpu = driver_cpu(count)
        case = f"driver's CPU a worker and epoch, {count} workers"
        report.add(Row(case, "µs", {OURS: cpu}, "≤ 100 µs", cpu <= 100))
    write(report, args.json)


if __name__ == "__main__":
    main()
