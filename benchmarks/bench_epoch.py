"""What does an epoch of trivial tasks cost on two worker processes?

The floor is one empty message to each of the workers through the scheduler. "asking" is ours with
the client asked after every epoch; ours itself runs epoch batches, several epochs for one message. Peers:
Ray actors (one call a node and epoch, looping over the node's tasks one call each), Ray tasks,
Dask actors, pinned Dask futures, one pinned Dask graph an epoch.

    python benchmarks/bench_epoch.py [--rounds 3] [--epochs 200] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import dask
from distributed import Client
from harness import (
    OURS,
    Laps,
    Report,
    Row,
    alternate,
    arguments,
    counters,
    increment,
    ray_or_reason,
    two_workers,
    write,
)

from jobrunner import Job, JobRunner, Session

CASES = [(2, 1), (2, 50), (100, 10), (1000, 10)]


def timed(epochs: int, run: Callable[[], Any]) -> float:
    laps = []
    for _ in range(epochs):
        started = time.perf_counter()
        run()
        laps.append(time.perf_counter() - started)
    return statistics.median(laps) * 1e3


def cpu_seconds() -> float:
    return time.process_time()


def ours(
    client: Client, job: Job, epochs: int, *, is_passive: bool, cpu: list[float] | None = None
) -> float:
    """Milliseconds an epoch; what each worker's processor spends on one is added to `cpu`."""
    laps = Laps(is_passive=is_passive)
    with Session(client) as session:
        JobRunner(job, num_epochs=10, callbacks=[]).run(session)
        before = sum(client.run(cpu_seconds).values())
        JobRunner(job, num_epochs=epochs + 10, callbacks=[laps]).run(session)
        spent = sum(client.run(cpu_seconds).values()) - before
    if cpu is not None:
        cpu.append(spent / 2 / (epochs + 10) * 1e3)
    return laps.median_seconds(10) * 1e3


def floor(client: Client, epochs: int) -> float:
    workers = list(client.scheduler_info()["workers"])

    async def laps() -> float:
        found = []
        for _ in range(epochs):
            started = time.perf_counter()
            await client.scheduler.broadcast(msg={"op": "ping"}, workers=workers)
            found.append(time.perf_counter() - started)
        return statistics.median(found) * 1e3

    return float(client.sync(laps))


class Counter:
    def __init__(self) -> None:
        self.n = 0

    def increment(self) -> int:
        self.n += 1
        return self.n


def dask_peers(client: Client, nodes: int, tasks: int) -> dict[str, Callable[[], float]]:
    workers = list(client.scheduler_info()["workers"])
    size = nodes * tasks
    epochs = max(3, 200 // size)
    count = [0]

    def futures() -> None:
        client.gather(
            [
                client.submit(increment, k, workers=workers[i % 2], pure=False)
                for i in range(nodes)
                for k in range(tasks)
            ]
        )

    def graph() -> None:
        parts = []
        count[0] += 1
        for i in range(nodes):
            with dask.annotate(workers=[workers[i % 2]]):
                parts += [
                    dask.delayed(increment)(k, dask_key_name=f"inc-{count[0]}-{i}-{k}")
                    for k in range(tasks)
                ]
        client.gather(client.compute(parts, optimize_graph=False))

    actors = [
        client.submit(Counter, actor=True, workers=workers[i % 2], pure=False).result()
        for i in range(min(nodes, 2))
    ]

    def actor_calls() -> None:
        for call in [actor.increment() for actor in actors for _ in range(size // len(actors))]:
            call.result()

    return {
        "Dask futures": lambda: timed(epochs, futures),
        "Dask graph": lambda: timed(epochs, graph),
        "Dask actors": lambda: timed(epochs, actor_calls),
    }


def ray_peers(nodes: int, tasks: int) -> dict[str, Callable[[], float]]:
    import ray

    if not ray.is_initialized():
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    actor_class = ray.remote(Counter)
    actors = [actor_class.remote() for _ in range(2)]
    task = ray.remote(increment)
    size = nodes * tasks
    epochs = max(3, 400 // size)
    return {
        "Ray actors": lambda: timed(
            epochs,
            lambda: ray.get([actors[i % 2].increment.remote() for i in range(size)]),
        ),
        "Ray tasks": lambda: timed(epochs, lambda: ray.get([task.remote(k) for k in range(size)])),
    }


def judge(nodes: int, tasks: int, figures: dict[str, float]) -> tuple[str, bool | None]:
    mine, asking = figures[OURS], figures["asking"]
    ray, futures = (figures.get(peer, float("inf")) for peer in ("Ray actors", "Dask futures"))
    if (nodes, tasks) == (2, 1):
        target = "≤ 0.2 ms; asking ≤ 1.0 ms; both ahead of Ray actors"
        return target, mine <= 0.2 and asking <= 1.0 and asking < ray
    if (nodes, tasks) == (2, 50):
        target = "≤ 1.2 ms; ≥ 12 × Ray actors, ≥ 200 × Dask futures"
        return target, mine <= 1.2 and ray >= 12 * mine and futures >= 200 * mine
    limit = {100: 2.0, 1000: 8.0}[nodes]
    return f"≤ {limit:g} ms", mine <= limit


def main() -> None:
    args = arguments(__doc__, rounds=3, epochs=200)
    report = Report("What does an epoch of trivial tasks cost on two worker processes?")
    with two_workers() as client:
        for nodes, tasks in CASES:
            job = counters(nodes, tasks)
            epochs = max(20, args.epochs * 20 // max(20, nodes))
            cpu: list[float] = []
            contenders: dict[str, Callable[[], float]] = {
                "floor": lambda epochs=epochs: floor(client, epochs),
                OURS: lambda job=job, epochs=epochs, cpu=cpu: ours(
                    client, job, 5 * epochs, is_passive=True, cpu=cpu
                ),
                "asking": lambda job=job, epochs=epochs: ours(
                    client, job, epochs, is_passive=False
                ),
            }
            if not args.no_peers and nodes * tasks <= 1000:
                contenders |= dask_peers(client, nodes, tasks)
                if not ray_or_reason():
                    contenders |= ray_peers(nodes, tasks)
            figures = alternate(contenders, args.rounds if nodes * tasks <= 100 else 2)
            target, is_met = judge(nodes, tasks, figures)
            note = f"processor time of a worker {statistics.median(cpu):.2g} ms"
            case = f"{nodes} nodes × {tasks} tasks"
            report.add(Row(case, "ms", figures, target, is_met, note))
    if not args.no_peers and ray_or_reason():
        report.skip("Ray", ray_or_reason())
    write(report, args.json)


if __name__ == "__main__":
    main()
