"""What the benchmarks share: turns, medians, tables.

Machines are noisy: contenders run in turn, several rounds after a warm-up, and only figures of one
run are to be compared. A figure is the median of the rounds' medians.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from distributed import Client, LocalCluster

from jobrunner import Job, MultiNodeCheckpointManager, Node, Position, Task
from jobrunner.checkpoint import Receipt, SaveQueue, Written
from jobrunner.workspace import Workspace

OURS = "jobrunner"


@dataclass
class Row:
    """One case: a figure for each contender, in `unit`; less is better unless `is_rate`."""

    case: str
    unit: str
    figures: dict[str, float]
    target: str = ""
    is_met: bool | None = None
    note: str = ""
    is_rate: bool = False

    def ratios(self) -> dict[str, float]:
        """How many times better ours is than each other."""
        ours = self.figures[OURS]
        return {
            name: (ours / value if self.is_rate else value / ours)
            for name, value in self.figures.items()
            if name != OURS and value and ours
        }


@dataclass
class Report:
    """What one benchmark found."""

    question: str
    rows: list[Row] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Take a row and print it."""
        self.rows.append(row)
        figures = "  ".join(f"{name} {value:.4g}" for name, value in row.figures.items())
        ratios = "  ".join(f"{name}/ours {value:.3g}" for name, value in row.ratios().items())
        met = {None: "", True: "met", False: "NOT MET"}[row.is_met]
        print(
            f"{row.case}: {figures} {row.unit}  ({ratios}) {row.target} {met} {row.note}",
            flush=True,
        )

    def skip(self, peer: str, reason: str) -> None:
        """Say why a peer does not take part."""
        self.skipped[peer] = reason
        print(f"without {peer}: {reason}", flush=True)


def arguments(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """Read the command line: what `defaults` names, and ``--json FILE``."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    for name, value in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--no-peers", action="store_true", help="run ours and the floor only")
    return parser.parse_args()


def write(report: Report, path: str | None) -> None:
    """Write a report as JSON."""
    if path:
        with open(path, "w") as file:
            json.dump({**asdict(report), "machine": machine()}, file, indent=2)


PACKAGES = [
    "dask",
    "distributed",
    "zarr",
    "numpy",
    "obstore",
    "ray",
    "torch",
    "orbax-checkpoint",
    "pyarrow",
]


def versions() -> dict[str, str]:
    """The versions of Dask, of peers and of what they use, as far as they are installed."""
    installed = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[package] = importlib.metadata.version(package)
    return installed


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    return {
        "versions": versions(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def alternate(
    contenders: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1
) -> dict[str, float]:
    """Run contenders in turn; the median of each one's figures."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + warm_up):
        for name, measure in contenders.items():
            figure = measure()
            if turn >= warm_up:
                found[name].append(figure)
    return {name: statistics.median(figures) for name, figures in found.items()}


@contextlib.contextmanager
def two_workers(*, processes: bool = True, workers: int = 2) -> Iterator[Client]:
    """A client of a local cluster of worker processes of one thread each."""
    with (
        LocalCluster(
            n_workers=workers,
            threads_per_worker=1,
            processes=processes,
            dashboard_address=None,
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


class Laps:
    """A callback that takes the time between the ends of epochs.

    A passive one lets workers run several epochs for one message, which are told together.
    """

    def __init__(self, *, is_passive: bool) -> None:
        self.is_passive = is_passive
        self.ends: list[float] = []
        self.init_at = 0.0

    def on_start(self, plan: object, total: object) -> None:
        self.init_at = time.perf_counter()

    def on_epoch(self, epoch: int, seconds: float, metrics: object) -> None:
        self.ends.append(time.perf_counter())

    def median_seconds(self, skip: int) -> float:
        """The median lap after the first `skip` epochs; of epoch batches the mean lap.

        The first epoch runs alone: the client has yet to learn how long one takes.
        """
        if self.is_passive:
            return (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1)
        ends = self.ends[skip:]
        return statistics.median(b - a for a, b in itertools.pairwise(ends))


def increment(n: int) -> int:
    return n + 1


def zero() -> int:
    return 0


def counters(nodes: int, tasks: int) -> Job:
    """A job of trivial tasks, each adding one to a blob of its own."""
    with Job("counters") as job:
        for i in range(nodes):
            with Node(f"node:{i}"):
                for k in range(tasks):
                    with job.init_group:
                        Task(zero, outputs=f"n{k}")
                    Task(increment, inputs=f"n{k}", outputs=f"n{k}")
    return job


def ray_or_reason() -> str:
    """Why Ray does not take part; the empty string where it does."""
    return "" if importlib.util.find_spec("ray") else "ray is not installed: pip install '.[bench]'"


def caffe2_python() -> tuple[str, str]:
    """A Python that has Caffe2, or why there is none."""
    candidates: Sequence[str | None] = (
        os.environ.get("CAFFE2_PYTHON"),
        shutil.which("python3.9"),
    )
    for candidate in candidates:
        if candidate:
            asked = subprocess.run(
                [candidate, "-c", "import caffe2.python.checkpoint"], capture_output=True
            )
            if asked.returncode == 0:
                return candidate, ""
    return "", (
        "no Python with Caffe2: in a Python 3.9, pip install torch==1.10.2 'numpy<1.24' "
        "'protobuf<3.21' future six, and name it in CAFFE2_PYTHON"
    )


class Save:
    """A save of one epoch that has begun, without a job and its workers."""

    def __init__(self, manager: MultiNodeCheckpointManager, epoch: Any) -> None:
        self.at, self.run = Position.of(epoch), manager.run
        encoding = manager.run.encoding()
        self.order = manager.run.order({self.at: {}}, encoding)
        self.queue = SaveQueue(encoding)

    def write(self, workspaces: Mapping[str, Workspace]) -> Mapping[str, Receipt]:
        return self.queue.save(workspaces, order=self.order).receipts[0]

    def capture(self, workspaces: Mapping[str, Workspace]) -> None:
        self.queue.capture(workspaces, at=self.at)

    def write_captured(self, workspaces: Mapping[str, Workspace]) -> Mapping[str, Receipt]:
        return self.queue.write(workspaces, order=self.order).receipts[0]

    def commit(self, receipts: Mapping[str, Receipt]) -> None:
        self.run.commit(self.order, Written([dict(receipts)]))


def save_epoch(
    manager: MultiNodeCheckpointManager, epoch: Any, workspaces: Mapping[str, Workspace]
) -> None:
    """Save an epoch."""
    save = Save(manager, epoch)
    save.commit(save.write(workspaces))
