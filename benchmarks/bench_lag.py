"""How late does a worker come to hear and to send while its tasks hold the interpreter?

Two worker processes of two threads. On one of them a task of pure Python computes all the time; on
its other thread and on the other worker runs a chain of short tasks, each of which waits for a value
from the other worker. Measured meanwhile: by how much that worker's event loop is late, the longest
pause between two of its heartbeats as the scheduler sees them, the time of a hop, and what the
task that computes gets done. Once with a neighbour that sleeps (the floor), once with one that computes,
once more with ``jobrunner.switch-seconds`` off, so at Python's own 5 ms.

    python benchmarks/bench_lag.py [--hops 20] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import threading
import time
from functools import partial
from typing import Any

import dask
from distributed import Client, LocalCluster
from harness import OURS, Report, Row, arguments, write

from jobrunner import Job, JobRunner, Node, Session, Task, current_task

TICK_SECONDS = 0.005
BUSY_SECONDS = 1.0


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def compute(seconds: float) -> None:
    end, loops = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        sum(range(1000))
        loops += 1
    current_task().report(loops_per_second=loops / seconds)


def leave_switching() -> None:
    dask.config.set({"jobrunner.switch-seconds": 0})


def begin() -> float:
    return time.monotonic()


def pass_on(started: float) -> float:
    return started


def end(started: float, hops: int) -> None:
    current_task().report(hop_ms=(time.monotonic() - started) / hops * 1e3)


async def watch_loop(seconds: float, dask_worker: Any = None) -> list[float]:
    """By how many ms each tick was late."""
    late = []
    until = time.monotonic() + seconds
    while (before := time.monotonic()) < until:
        await asyncio.sleep(TICK_SECONDS)
        late.append((time.monotonic() - before - TICK_SECONDS) * 1e3)
    return late


def neighbours(beside: Any, hops: int, here: str, there: str) -> Job:
    with Job("neighbours") as job:
        Task(beside, node=Node("beside", workers=[here]), kwargs={"seconds": BUSY_SECONDS})
        a, b = Node("a", workers=[here]), Node("b", workers=[there])
        value = Task(begin, node=a, name="begin").output()
        for i in range(hops):
            node = a if i % 2 else b
            value = Task(pass_on, inputs=value, node=node, name=f"hop {i}").output()
        Task(partial(end, hops=hops), inputs=value, node=a if hops % 2 == 0 else b, name="end")
    return job


def measure(cluster: LocalCluster, client: Client, beside: Any, args: Any) -> dict[str, float]:
    here, there = client.scheduler_info()["workers"]
    seconds = args.rounds * BUSY_SECONDS
    late: list[float] = []
    seen: list[float] = []
    is_over = threading.Event()

    def watch() -> None:
        late.extend(client.run(watch_loop, seconds, workers=[here])[here])

    def watch_heartbeats() -> None:
        while not is_over.wait(0.01):
            heard = cluster.scheduler.workers[here].last_seen
            if not seen or heard != seen[-1]:
                seen.append(heard)

    threads = [threading.Thread(target=work) for work in (watch, watch_heartbeats)]
    with Session(client) as session:
        for thread in threads:
            thread.start()
        job = neighbours(beside, args.hops, here, there)
        try:
            result = JobRunner(job, num_epochs=args.rounds).run(session)
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
    return {
        "loop": statistics.median(late),
        "worst": max(late),
        "heartbeat": max(b - a for a, b in itertools.pairwise(seen)),
        "hop": statistics.median(m["hop_ms"] for m in result.metrics),
        "loops": statistics.median(m.get("loops_per_second", 0.0) for m in result.metrics),
    }


def main() -> None:
    args = arguments(__doc__, hops=20, rounds=5)
    report = Report("How late does a worker hear and send while its tasks hold the interpreter?")
    found: dict[str, dict[str, float]] = {}
    with (
        LocalCluster(n_workers=2, threads_per_worker=2, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        measure(cluster, client, sleep, args)  # to warm up
        found["a neighbour that sleeps"] = measure(cluster, client, sleep, args)
        found[OURS] = measure(cluster, client, compute, args)
        client.run(leave_switching)
        found["switching every 5 ms"] = measure(cluster, client, compute, args)
    for key, case, unit in (
        ("loop", "event loop beside pure Python: late by", "ms"),
        ("worst", "the same, at worst", "ms"),
        ("heartbeat", "between two heartbeats, at worst", "s"),
        ("hop", "a hop beside pure Python", "ms"),
    ):
        report.add(Row(case, unit, {who: figures[key] for who, figures in found.items()}))
    loops = {who: figures["loops"] for who, figures in found.items() if figures["loops"]}
    report.add(Row("pure Python beside hops", "loops/s", loops, is_rate=True))
    write(report, args.json)


if __name__ == "__main__":
    main()
