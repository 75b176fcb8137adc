"""What does an epoch of trivial tasks cost, and does it stay so?

Floor, ours and the peers run in turn on the same cluster of two worker processes, several rounds
after a warm-up; the medians are printed. The floor is one empty message to each of the workers
through the scheduler. The peers are pinned Dask futures: one `Client.submit` a task and one
`Client.gather` an epoch, and one pinned graph an epoch with `Client.get`.

    python benchmarks/bench_epoch.py [--rounds 5] [--epochs 100] [--long 3000] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from distributed import Client, LocalCluster

from jobrunner import Job, JobRunner, Node, Session, Task

CASES = [(2, 1), (2, 50), (100, 10)]


def increment(n: int) -> int:
    return n + 1


def build(nodes: int, tasks: int) -> Job:
    with Job("bench") as job:
        for i in range(nodes):
            with Node(f"node:{i}"):
                for k in range(tasks):
                    with job.init_group:
                        Task(lambda: 0, outputs=f"n{k}")
                    Task(increment, inputs=f"n{k}", outputs=f"n{k}")
    return job


class Clock:
    """Takes the time between the ends of epochs."""

    def __init__(self) -> None:
        self.laps: list[float] = []
        self._last = 0.0

    def on_start(self, plan: object, total: object) -> None:
        self._last = time.perf_counter()

    def on_epoch(self, epoch: int, seconds: float, metrics: object) -> None:
        now = time.perf_counter()
        self.laps.append(now - self._last)
        self._last = now


def ours(client: Client, nodes: int, tasks: int, epochs: int) -> list[float]:
    clock = Clock()
    with Session(client) as session:
        JobRunner(build(nodes, tasks), num_epochs=epochs + 10, callbacks=[clock]).run(session)
    return clock.laps[10:]


def dask_futures(client: Client, nodes: int, tasks: int, epochs: int) -> list[float]:
    workers = list(client.scheduler_info()["workers"])
    laps = []
    for _ in range(epochs):
        started = time.perf_counter()
        futures = [
            client.submit(increment, k, workers=workers[i % len(workers)], pure=False)
            for i in range(nodes)
            for k in range(tasks)
        ]
        client.gather(futures)
        laps.append(time.perf_counter() - started)
    return laps


def dask_graph(client: Client, nodes: int, tasks: int, epochs: int) -> list[float]:
    import dask

    workers = list(client.scheduler_info()["workers"])
    laps = []
    for epoch in range(epochs):
        started = time.perf_counter()
        parts = []
        for i in range(nodes):
            with dask.annotate(workers=[workers[i % len(workers)]]):
                parts += [
                    dask.delayed(increment)(k, dask_key_name=f"inc-{epoch}-{i}-{k}")
                    for k in range(tasks)
                ]
        client.gather(client.compute(parts, optimize_graph=False))
        laps.append(time.perf_counter() - started)
    return laps


def floor(client: Client, nodes: int, tasks: int, epochs: int) -> list[float]:
    workers = list(client.scheduler_info()["workers"])[:nodes]

    async def laps() -> list[float]:
        found = []
        for _ in range(epochs):
            started = time.perf_counter()
            await client.scheduler.broadcast(msg={"op": "ping"}, workers=workers)
            found.append(time.perf_counter() - started)
        return found

    return client.sync(laps)


def compare(client: Client, rounds: int, epochs: int) -> list[dict[str, Any]]:
    contenders: dict[str, Callable[..., list[float]]] = {
        "floor": floor,
        "jobrunner": ours,
        "dask futures": dask_futures,
        "dask graph": dask_graph,
    }
    rows = []
    for nodes, tasks in CASES:
        laps: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(rounds + 1):
            for name, run in contenders.items():
                slow = name.startswith("dask")
                count = max(3, epochs // 20 // max(1, tasks // 10)) if slow else epochs
                found = run(client, nodes, tasks, count)
                if turn:  # the first round warms up
                    laps[name].append(statistics.median(found))
        medians = {name: statistics.median(found) * 1e3 for name, found in laps.items()}
        rows.append({"nodes": nodes, "tasks": tasks, "milliseconds": medians})
        print(
            f"{nodes:4} nodes x {tasks:3} tasks  "
            + "  ".join(f"{name} {value:8.2f} ms" for name, value in medians.items())
            + f"  futures/ours {medians['dask futures'] / medians['jobrunner']:6.1f}",
            flush=True,
        )
    return rows


def flatness(client: Client, epochs: int) -> dict[str, float]:
    laps = ours(client, 2, 1, epochs)
    width = epochs // 15
    early = statistics.median(laps[100 : 100 + width]) * 1e3
    late = statistics.median(laps[-width:]) * 1e3
    print(
        f"   2 nodes x   1 task   epochs 100-{100 + width}: {early:.2f} ms, "
        f"epochs {epochs - width}-{epochs}: {late:.2f} ms, ratio {late / early:.2f}"
    )
    return {"early_milliseconds": early, "late_milliseconds": late}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--long", type=int, default=3000, help="epochs of the flatness run")
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        found = {
            "epochs": compare(client, args.rounds, args.epochs),
            "flatness": flatness(client, args.long),
        }
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    main()
