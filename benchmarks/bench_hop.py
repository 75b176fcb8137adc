"""What does a hop between workers cost, and how fast do large values cross?

A chain of tasks that alternates between two workers, of a small value and of 8 MiB, against pinned
Dask futures; and two nodes that each send the other 50 MB an epoch, against Dask's own comm between
the same two workers: an echo of 50 MB each way, frames as they are.

    python benchmarks/bench_hop.py [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
from distributed import Client, get_worker
from distributed.protocol.serialize import to_serialize
from harness import OURS, Laps, Report, Row, alternate, arguments, two_workers, write

from jobrunner import Job, JobRunner, Node, Session, Task

HOPS = 20


def pass_on(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value + 1


def chain(size: int) -> Job:
    with Job("chain") as job:
        nodes = [Node("a"), Node("b")]
        with job.init_group:
            Task(lambda: np.zeros(size) if size else 0, outputs="x", node=nodes[0])
        last: Any = nodes[0]["x"]
        for hop in range(HOPS):
            last = Task(pass_on, inputs=[last], node=nodes[(hop + 1) % 2]).output()
    return job


def our_hop(client: Client, size: int, epochs: int) -> float:
    laps = Laps(is_passive=False)
    with Session(client) as session:
        JobRunner(chain(size), num_epochs=epochs + 3, callbacks=[laps]).run(session)
    return laps.median_seconds(3) * 1e3 / HOPS


def dask_hop(client: Client, size: int, epochs: int) -> float:
    workers = list(client.scheduler_info()["workers"])
    laps = []
    for _ in range(epochs):
        value = client.submit(lambda: np.zeros(size) if size else 0, workers=workers[0], pure=False)
        value.result() if not size else client.submit(len, value).result()
        started = time.perf_counter()
        for hop in range(HOPS):
            value = client.submit(pass_on, value, workers=workers[(hop + 1) % 2], pure=False)
        client.submit(type, value).result()
        laps.append((time.perf_counter() - started) / HOPS)
    return statistics.median(laps) * 1e3


def touch(x: np.ndarray) -> None:
    x += 1


def exchange(n: int) -> Job:
    with Job("halo") as job:
        nodes = [Node("a"), Node("b")]
        for node in nodes:
            with job.init_group:
                Task(lambda: np.random.default_rng(0).random(n), outputs="x", node=node)
            Task(touch, updates="x", node=node)
        for i, node in enumerate(nodes):
            Task(lambda got: float(got[0]), inputs=nodes[1 - i]["x"], outputs="seen", node=node)
    return job


def our_exchange(client: Client, n: int, epochs: int) -> float:
    laps = Laps(is_passive=False)
    with Session(client) as session:
        JobRunner(exchange(n), num_epochs=epochs + 2, callbacks=[laps]).run(session)
    return 2 * 8 * n / laps.median_seconds(2) / 1e9


def install_echo(dask_worker: Any = None) -> None:
    async def take(data: Any = None) -> str:
        return "OK"

    dask_worker.handlers["bench_take"] = take


async def send_many(other: str, n: int, times: int) -> float:
    worker = get_worker()
    data = np.random.default_rng(0).random(n)
    found = []
    for _ in range(times):
        started = time.perf_counter()
        touch(data)  # as the job's task does, within the time of its epoch
        await worker.rpc(other).bench_take(data=to_serialize(data))
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def comm_exchange(client: Client, n: int, times: int) -> float:
    """Both workers change their half and send it to the other, at once."""
    a, b = client.scheduler_info()["workers"]
    client.run(install_echo)
    futures = [
        client.submit(send_many, other, n, times, workers=[one], pure=False)
        for one, other in ((a, b), (b, a))
    ]
    return 2 * 8 * n / max(client.gather(futures)) / 1e9


def main() -> None:
    args = arguments(__doc__, rounds=3)
    report = Report("What does a hop between workers cost, and how fast do large values cross?")
    with two_workers() as client:
        for case, size, limit, epochs in (("a number", 0, 0.7, 20), ("8 MiB", 1 << 20, 9.0, 4)):
            figures = alternate(
                {
                    OURS: lambda size=size, epochs=epochs: our_hop(client, size, epochs),
                    "Dask futures": lambda size=size: dask_hop(client, size, 3),
                },
                args.rounds,
            )
            target = f"≤ {limit:g} ms"
            report.add(Row(f"a hop of {case}", "ms", figures, target, figures[OURS] <= limit))
        n = 50_000_000 // 8
        figures = alternate(
            {
                OURS: lambda: our_exchange(client, n, 5),
                "Dask's comm": lambda: comm_exchange(client, n, 5),
            },
            args.rounds,
        )
        is_met = figures[OURS] >= 0.9 * figures["Dask's comm"]
        report.add(Row("100 MB across", "GB/s", figures, "≥ 0.9 of the comm", is_met, is_rate=True))
    write(report, args.json)


if __name__ == "__main__":
    main()
