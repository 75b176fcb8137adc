"""Do real jobs run at least as fast as the same written by hand for Dask?

K-means over 40,000 points, heat on a 1024 × 1024 plate, and SGD on a linear model; four nodes on
two worker processes. By hand: state in pinned futures, one `submit` a task, the driver reading the
value that tells when to stop. Both run the same functions and come to the same values.

    python benchmarks/bench_real.py [--rounds 3] [--epochs 30] [--json FILE]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from distributed import Client, wait
from harness import OURS, Report, Row, alternate, arguments, two_workers, write

from jobrunner import Job, JobRunner, Node, Session, Task

NODES = 4
Made = tuple[Job, Callable[[Client, int], Any], Callable[[Session], Any]]


def points(i: int) -> np.ndarray:
    return np.random.default_rng(i).normal(size=(10_000, 8))


def first_centroids() -> np.ndarray:
    return np.random.default_rng(9).normal(size=(10, 8))


def assign(data: np.ndarray, centroids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    distances = (centroids**2).sum(axis=1) - 2 * data @ centroids.T
    nearest = distances.argmin(axis=1)
    one_hot = np.eye(len(centroids))[nearest]
    return one_hot.T @ data, one_hot.sum(axis=0)


def recompute(centroids: np.ndarray, *parts: Any) -> np.ndarray:
    sums, counts = (np.sum([part[i] for part in parts], axis=0) for i in (0, 1))
    return np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centroids)


def rows(i: int) -> np.ndarray:
    return np.random.default_rng(i).random((1024 // NODES, 1024))


def edges(field: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return field[0].copy(), field[-1].copy()


def flow(above: Any, below: Any, field: np.ndarray) -> np.ndarray:
    padded = np.vstack([above[1], field, below[0]])
    around = padded[:-2] + padded[2:] + np.roll(field, 1, axis=1) + np.roll(field, -1, axis=1)
    return field + 0.2 * (around - 4 * field)


def samples(i: int) -> np.ndarray:
    return np.random.default_rng(i).normal(size=(4_000, 101))


def gradient(data: np.ndarray, w: np.ndarray) -> np.ndarray:
    x, y = data[:, :-1], data[:, -1]
    return x.T @ (x @ w - y) / len(y)


def descend(w: np.ndarray, *gradients: np.ndarray) -> np.ndarray:
    return w - 0.01 * np.mean(gradients, axis=0)


def gathered(
    load: Callable[[int], Any],
    first: Callable[[], Any],
    part: Callable[..., Any],
    combine: Callable[..., Any],
) -> Made:
    """Workers compute parts of shared state, a server combines them: k-means, SGD."""
    server, nodes = Node("server"), [Node(f"n{i}") for i in range(NODES)]
    with Job("gathered") as job:
        with job.init_group:
            Task(first, outputs="state", node=server)
            for i, node in enumerate(nodes):
                Task(load, outputs="data", node=node, inputs=(), kwargs={"i": i})
        parts = [Task(part, inputs=["data", server["state"]], node=node).output() for node in nodes]
        Task(combine, inputs=["state", *parts], outputs="state", node=server)

    def by_hand(client: Client, epochs: int) -> tuple[float, Any]:
        workers = list(client.scheduler_info()["workers"])
        where = [workers[i % 2] for i in range(NODES)]
        data = [client.submit(load, i, workers=where[i], pure=False) for i in range(NODES)]
        state = client.submit(first, workers=where[0], pure=False)
        wait([*data, state])
        started = time.perf_counter()
        for _ in range(epochs):
            parts = [
                client.submit(part, data[i], state, workers=where[i], pure=False)
                for i in range(NODES)
            ]
            state = client.submit(combine, state, *parts, workers=where[0], pure=False)
            wait(state)
        return time.perf_counter() - started, state.result()

    return job, by_hand, lambda session: session.fetch(server["state"])


def heat() -> Made:
    nodes = [Node(f"n{i}") for i in range(NODES)]
    with Job("heat") as job:
        for i, node in enumerate(nodes):
            with job.init_group:
                Task(rows, outputs="field", node=node, kwargs={"i": i})
            Task(edges, inputs="field", outputs="edges", node=node, name="edges")
        for i, node in enumerate(nodes):
            around = [nodes[i - 1]["edges"], nodes[(i + 1) % NODES]["edges"]]
            Task(flow, inputs=[*around, "field"], outputs="field", node=node)

    def by_hand(client: Client, epochs: int) -> tuple[float, Any]:
        workers = list(client.scheduler_info()["workers"])
        where = [workers[i % 2] for i in range(NODES)]
        fields = [client.submit(rows, i, workers=where[i], pure=False) for i in range(NODES)]
        wait(fields)
        started = time.perf_counter()
        for _ in range(epochs):
            out = [
                client.submit(edges, fields[i], workers=where[i], pure=False) for i in range(NODES)
            ]
            fields = [
                client.submit(
                    flow,
                    out[i - 1],
                    out[(i + 1) % NODES],
                    fields[i],
                    workers=where[i],
                    pure=False,
                )
                for i in range(NODES)
            ]
            wait(fields)
        return time.perf_counter() - started, fields[0].result()

    return job, by_hand, lambda session: session.fetch(nodes[0]["field"])


class Ends:
    """Takes when the first and the last epoch ended."""

    is_passive = True

    def __init__(self) -> None:
        self.first = self.last = 0.0

    def on_epoch(self, epoch: int, seconds: float, metrics: object) -> None:
        self.last = time.perf_counter()
        self.first = self.first or self.last


def main() -> None:
    args = arguments(__doc__, rounds=3, epochs=30)
    report = Report("Do real jobs run at least as fast as the same written by hand for Dask?")
    cases = {
        "k-means, 40,000 × 8": gathered(points, first_centroids, assign, recompute),
        "heat, 1024 × 1024": heat(),
        "SGD, 16,000 × 100": gathered(samples, lambda: np.zeros(100), gradient, descend),
    }
    with two_workers() as client:
        for case, (job, by_hand, fetch) in cases.items():
            values: dict[str, Any] = {}

            def ours(job: Job = job, fetch: Any = fetch, values: Any = values) -> float:
                ends = Ends()
                with Session(client) as session:
                    JobRunner(job, num_epochs=args.epochs + 1, callbacks=[ends]).run(session)
                    values[OURS] = fetch(session)
                return (ends.last - ends.first) / args.epochs * 1e3

            def dask(by_hand: Any = by_hand, values: Any = values) -> float:
                seconds, values["Dask"] = by_hand(client, args.epochs + 1)
                return seconds / (args.epochs + 1) * 1e3

            figures = alternate({OURS: ours, "Dask by hand": dask}, args.rounds)
            np.testing.assert_array_equal(values[OURS], values["Dask"])
            is_met = figures[OURS] <= figures["Dask by hand"]
            report.add(Row(case, "ms an epoch", figures, "not slower", is_met, "same bits"))
    write(report, args.json)


if __name__ == "__main__":
    main()
