"""What do lists, dicts and tuples of plain Python values cost, beside `pickle.dumps` of the same?

As a task's input, returned by a task, read by a node on another worker, and saved by every epoch,
which changes nothing of it or one item. pickle.dumps runs in a worker process too. Peers pass the same object to a
task: Dask on the worker that has it (a reference, not a copy) and on the other one; Ray, which has
it in its store. The save is compared with one of an array of the same numbers, untouched.

    python benchmarks/bench_values.py [--rounds 3] [--epochs 12] [--json FILE]
"""

from __future__ import annotations

import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from distributed import Client
from harness import (
    OURS,
    Laps,
    Report,
    Row,
    alternate,
    arguments,
    ray_or_reason,
    two_workers,
    write,
)

from jobrunner import Job, JobRunner, MultiNodeCheckpointManager, Node, Session, Task

SIZE = 100_000
SAVED_SIZE = 10_000


def pairs(size: int = SIZE) -> Any:
    return [(i, i + 0.5) for i in range(size)]


def records(size: int = SIZE) -> Any:
    return [{"id": i, "at": [i, i + 0.5]} for i in range(size // 2)]


def numbers(size: int = SIZE) -> Any:
    return np.arange(2.0 * size)


def look(value: Any) -> int:
    return len(value)


class Stock:
    """Makes values before they are measured, and gives one at each call."""

    def __init__(self, make: Callable[[], Any], count: int) -> None:
        self.make, self.count = make, count
        self.values: list[Any] = []

    def fill(self) -> None:
        self.values = [self.make() for _ in range(self.count)]

    def give(self) -> Any:
        return self.values.pop()


def laps_of(client: Client, job: Job, epochs: int, *manager: Any) -> float:
    laps = Laps(is_passive=False)
    with Session(client) as session:
        JobRunner(job, *manager, num_epochs=epochs + 3, callbacks=[laps]).run(session)
    return laps.median_seconds(3) * 1e3


def as_input(client: Client, make: Callable[[], Any], epochs: int, *, crosses: bool) -> float:
    with Job("input") as job:
        a, b = Node("a"), Node("b")
        with job.init_group:
            Task(make, outputs="value", node=a)
            Task(int, outputs="other", node=b)
        Task(look, inputs=a["value"], outputs="seen", node=b if crosses else a)
    return laps_of(client, job, epochs)


def returned(client: Client, make: Callable[[], Any], epochs: int) -> float:
    stock = Stock(make, epochs + 4)
    with Job("returned") as job, Node("a"):
        with job.init_group:
            Task(stock.give, outputs="value", name="first", after=[Task(stock.fill)])
        Task(stock.give, outputs="value")
    return laps_of(client, job, epochs)


def saved(
    client: Client,
    make: Callable[[int], Any],
    epochs: int,
    *,
    size: int = SAVED_SIZE,
    changes: bool = False,
) -> float:
    with Job("saved") as job, Node("a"):
        with job.init_group:
            Task(lambda: make(size), outputs="value", name="make")
            Task(int, outputs="n")
        Task(lambda n: n + 1, inputs="n", outputs="n")
        if changes:
            Task(list.reverse, updates="value")
    with tempfile.TemporaryDirectory() as directory:
        return laps_of(client, job, epochs, MultiNodeCheckpointManager(directory))


def dumps_milliseconds(make: Callable[[], Any], times: int) -> float:
    value, found = make(), []
    for _ in range(times):
        started = time.perf_counter()
        pickle.dumps(value, protocol=5)
        found.append(time.perf_counter() - started)
    return statistics.median(found) * 1e3


def by_dask(client: Client, make: Callable[[], Any], times: int, *, crosses: bool) -> float:
    workers = list(client.scheduler_info()["workers"])
    found = []
    for _ in range(times):
        value = client.submit(make, workers=workers[0], pure=False)
        client.submit(look, value, workers=workers[0], pure=False).result()
        started = time.perf_counter()
        client.submit(look, value, workers=workers[crosses], pure=False).result()
        found.append(time.perf_counter() - started)
    return statistics.median(found) * 1e3


def by_ray(make: Callable[[], Any], times: int) -> float:
    import ray

    if not ray.is_initialized():
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    task, value, found = ray.remote(look), ray.put(make()), []
    for _ in range(times + 2):
        started = time.perf_counter()
        ray.get(task.remote(value))
        found.append(time.perf_counter() - started)
    return statistics.median(found[2:]) * 1e3


def main() -> None:
    args = arguments(__doc__, rounds=3, epochs=12)
    report = Report("What do plain Python values cost, beside pickle.dumps?")
    with two_workers() as client:
        workers = list(client.scheduler_info()["workers"])

        def dumps(make: Callable[[], Any]) -> float:
            future = client.submit(dumps_milliseconds, make, 5, workers=workers[0], pure=False)
            return float(future.result())

        for what, make in (("100,000 pairs", pairs), ("50,000 nested dicts", records)):
            cases: dict[str, dict[str, Callable[[], float]]] = {
                f"{what}, as an input": {
                    OURS: lambda make=make: as_input(client, make, args.epochs, crosses=False)
                },
                f"{what}, returned": {OURS: lambda make=make: returned(client, make, args.epochs)},
                f"{what}, to another worker": {
                    OURS: lambda make=make: as_input(client, make, args.epochs, crosses=True)
                },
            }
            for case, contenders in cases.items():
                contenders["pickle.dumps"] = lambda make=make: dumps(make)
                if not args.no_peers and "returned" not in case:
                    contenders["Dask"] = lambda make=make, case=case: by_dask(
                        client, make, 3, crosses="another" in case
                    )
                if not args.no_peers and "an input" in case and not ray_or_reason():
                    contenders["Ray"] = lambda make=make: by_ray(make, 5)
                figures = alternate(contenders, args.rounds)
                limit = 4 if "another" in case else 3
                is_met = figures[OURS] <= limit * figures["pickle.dumps"]
                report.add(Row(case, "ms", figures, f"≤ {limit} × pickle.dumps", is_met))
        for count, what, make in ((10, "pairs", pairs), (5, "nested dicts", records)):
            figures = alternate(
                {
                    OURS: lambda make=make: saved(client, make, args.epochs),
                    "an array": lambda: saved(client, numbers, args.epochs),
                    "pickle.dumps": lambda make=make: dumps(lambda: make(SAVED_SIZE)),
                },
                args.rounds,
            )
            is_met = figures[OURS] <= 1.5 * figures["an array"]
            report.add(
                Row(
                    f"{count},000 {what}, saved untouched",
                    "ms",
                    figures,
                    "≤ 1.5 × an array",
                    is_met,
                )
            )
            figures = alternate(
                {
                    OURS: lambda make=make: saved(
                        client, make, args.epochs, size=SIZE, changes=True
                    ),
                    "an array": lambda: saved(client, numbers, args.epochs, size=SIZE),
                    "pickle.dumps": lambda make=make: dumps(make),
                },
                args.rounds,
            )
            limit = figures["an array"] + 4 * figures["pickle.dumps"]
            case = f"{count}0,000 {what}, saved changed"
            is_met = figures[OURS] <= limit
            report.add(Row(case, "ms", figures, "≤ an array + 4 × pickle.dumps", is_met))
    if not args.no_peers and ray_or_reason():
        report.skip("Ray", ray_or_reason())
    write(report, args.json)


if __name__ == "__main__":
    main()
