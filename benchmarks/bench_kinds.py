"""What does each kind of plain value cost an epoch, beside `pickle.dumps` of the same?

One process, processor time, medians. As a task's input; returned by a task, updated in place, and
returned while something else refers to it; kept in memory for recovery and saved by an epoch that
has changed it, and loaded, beside `pickle.loads`. A star marks what takes more than twice as long.
The first lines say what a save and a load take whatever the value is, and what short arrays add;
`beyond` is what the save takes beyond one of a workspace without an array, made beside it.

    python benchmarks/bench_kinds.py [--rounds 5] [--items 100000] [--only NAME,NAME]
"""

from __future__ import annotations

import datetime as dt
import enum
import pickle
import shutil
import statistics
import tempfile
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from harness import arguments

from jobrunner.checkpoint import encode_blobs
from jobrunner.checkpoint.store.store_reader import StoreReader
from jobrunner.checkpoint.store.store_writer import StoreBatch
from jobrunner.testing import FaultyFiles
from jobrunner.workspace import Workspace, settle

STEPS = ("input", "returned", "updated", "settled", "saved", "beyond", "loaded")


class Point(NamedTuple):
    id: int
    x: float


@dataclass
class Sample:
    id: int
    x: float


class Phase(enum.Enum):
    COLD = 1
    HOT = 2


def records(n: int) -> Any:
    return [
        {
            "id": i,
            "kind": ("train", "test")[i % 2],
            "loss": i + 0.5 if i % 5 else None,
            "tags": ["a", "b"][: i % 3],
        }
        for i in range(n // 2)
    ]


KINDS: dict[str, Callable[[int], Any]] = {
    "integers": lambda n: list(range(0, 3 * n, 3)),
    "long integers": lambda n: [i << 40 for i in range(n)],
    "floats": lambda n: [i + 0.5 for i in range(n)],
    "bools": lambda n: [i % 3 == 0 for i in range(n)],
    "strings": lambda n: [f"name {i}" for i in range(n)],
    "few strings": lambda n: [("train", "test")[i % 2] for i in range(n)],
    "bytes": lambda n: [b"%d" % i for i in range(n)],
    "bytearrays": lambda n: [bytearray(b"%d" % i) for i in range(n)],
    "complex": lambda n: [complex(i, 1) for i in range(n)],
    "floats or None": lambda n: [None if i % 3 else i + 0.5 for i in range(n)],
    "strings or None": lambda n: [None if i % 3 else f"n{i}" for i in range(n)],
    "integers and floats": lambda n: [i + 0.5 if i % 3 else i for i in range(n)],
    "set of integers": lambda n: {i * 7 for i in range(n)},
    "set of floats": lambda n: {i * 7.5 for i in range(n)},
    "set of strings": lambda n: {f"name {i}" for i in range(n)},
    "set of tuples": lambda n: {(i, i + 1) for i in range(n)},
    "sets": lambda n: [{i, i + 1} for i in range(n // 2)],
    "dict of floats": lambda n: {f"k{i}": i + 0.5 for i in range(n)},
    "integer keys": lambda n: {i: i + 0.5 for i in range(n)},
    "tuple keys": lambda n: {(i, i % 7): i * 0.5 for i in range(n)},
    "dict of lists": lambda n: {i: [i, i + 1, i + 2] for i in range(n)},
    "OrderedDict": lambda n: OrderedDict((f"k{i}", i + 0.5) for i in range(n)),
    "OrderedDict of lists": lambda n: OrderedDict((f"k{i}", [i]) for i in range(n)),
    "Counter": lambda n: Counter({f"k{i}": i for i in range(n)}),
    "defaultdict": lambda n: defaultdict(int, {i: i for i in range(n)}),
    "defaultdict of lists": lambda n: defaultdict(list, {i: [i, i + 1] for i in range(n)}),
    "deque of tuples": lambda n: deque((i, i + 0.5) for i in range(n)),
    "tuples": lambda n: [(i, i + 0.5) for i in range(n)],
    "ragged tuples": lambda n: [tuple(range(i % 7)) for i in range(n)],
    "ragged lists": lambda n: [[float(j) for j in range(i % 19)] for i in range(n // 10)],
    "small dicts": lambda n: [{"id": i, "loss": i + 0.5} for i in range(n)],
    "nested dicts": lambda n: [{"id": i, "at": [i, i + 0.5]} for i in range(n // 2)],
    "records": records,
    "named tuples": lambda n: [Point(i, i + 0.5) for i in range(n)],
    "dataclasses": lambda n: [Sample(i, i + 0.5) for i in range(n)],
    "enumerations": lambda n: [Phase(1 + i % 2) for i in range(n)],
    "one list again and again": lambda n: [[1, 2]] * n,
    "pairs with one dict": lambda n: [*zip(range(n), [{"lr": 0.5}] * n, strict=True)],
    "dates": lambda n: [dt.date.fromordinal(1 + i) for i in range(n)],
    "datetimes": lambda n: [dt.datetime(2000, 1, 1) + dt.timedelta(hours=i) for i in range(n)],
    "decimals": lambda n: [Decimal(i) / 8 for i in range(n)],
}


class Clock:
    """The processor time of steps, in seconds by name."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def take(self, step: str, call: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = call()
        self.note(step, time.process_time() - started)
        return result

    def note(self, step: str, seconds: float) -> None:
        self.found.setdefault(step, []).append(seconds)

    def last(self, step: str) -> float:
        return self.found[step][-1]

    def milliseconds(self, step: str) -> float:
        return statistics.median(self.found.get(step, [0])) * 1e3


def save(value: Any, directory: str) -> StoreReader:
    files = FaultyFiles(sync=False)
    files.bind(directory)  # as managers do
    blobs = encode_blobs("n", {"x": value})
    batch = StoreBatch(files, directory, {"n.0": ({"node": "n", "epoch": 0, "run": "r"}, blobs)})
    batch.write()
    (receipt,) = batch.finish()
    return StoreReader(files, directory, "n.0", receipt.sha256)


def measure(make: Callable[[], Any], clock: Clock) -> None:
    value = make()
    pickled = clock.take("dumps", lambda: pickle.dumps(value, 5))
    clock.take("loads", lambda: pickle.loads(pickled))
    workspace = Workspace("n")
    workspace.put("x", clock.take("returned", lambda: settle([value])))
    assert clock.take("input", lambda: workspace.lookup("x")) == value
    clock.take("updated", lambda: workspace.take("x"))
    clock.take("settled", lambda: workspace.put("x", settle(workspace.globals["x"].box)))
    assert save_and_load(workspace.value("x"), clock) == value
    empty = Clock()
    save_and_load([], empty)
    clock.note("beyond", clock.last("saved") - empty.last("saved"))


def save_and_load(value: Any, clock: Clock) -> Any:
    directory = tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    reader = clock.take("saved", lambda: save(value, directory))
    loaded = clock.take("loaded", reader.load)["x"]
    shutil.rmtree(directory)
    return loaded


def main() -> None:
    args = arguments(__doc__, rounds=5, items=100_000, only="")
    for num_arrays in range(3):
        clock = Clock()
        for _ in range(20):
            save_and_load([np.ones(1) for _ in range(num_arrays)], clock)
        saved, loaded = clock.milliseconds("saved"), clock.milliseconds("loaded")
        print(f"{num_arrays} short arrays are saved in {saved:.2f} ms, loaded in {loaded:.2f} ms")
    print(f"{'':26}{'dumps':>9}{'loads':>9}" + "".join(f"{step:>10}" for step in STEPS))
    for name, make in KINDS.items():
        if args.only and name not in args.only.split(","):
            continue
        clock = Clock()
        for _ in range(args.rounds):
            measure(lambda make=make: make(args.items), clock)  # type: ignore[misc]  # its default
        dumps, loads = clock.milliseconds("dumps"), clock.milliseconds("loads")
        line = f"{name:26}{dumps:6.1f} ms{loads:6.1f} ms"
        for step in STEPS:
            ratio = clock.milliseconds(step) / (loads if step == "loaded" else dumps)
            line += f"{ratio:8.1f} {'*' if ratio > 2 else '×'}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
