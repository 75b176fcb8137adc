"""How fast is a checkpoint saved and loaded, and what does a save in the background cost?

Floor, ours and the peers take turns after a warm-up, another one first in each, and the medians
count. A peer whose turn takes longer than `SLOW_SECONDS` has one turn. The floor is `np.save` and
`np.load`, a file a blob; all sides are flushed by one `syncfs`. State lies in memory that was
touched before. After every turn its files are cut to nothing, so that all sides write over equally
fresh pages of the page cache; they are deleted at the end, for some file systems make new files
slowly beside ones that were just deleted. Loads are from the page cache; ours verifies every byte.

    python benchmarks/bench_checkpoint.py [--rounds 3] [--cases big,features] [--directory DIR]

A directory of its own just below the root of a file system keeps others' deletions out of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from harness import Report, Row, Save, arguments, caffe2_python, save_epoch, write

from jobrunner import MultiNodeCheckpointManager
from jobrunner.checkpoint.store.store_reader import StoreReader
from jobrunner.positions import Position
from jobrunner.workspace import Workspace, adopt

Blobs = dict[str, np.ndarray[Any, Any]]

CASES = {
    "big": (8, 128 << 20),
    "small": (1000, 1 << 20),
    "tiny": (10_000, 1 << 10),
}
SAVE_TARGETS = {"big": 1.0, "small": 0.85}  # of np.save
LOAD_TARGET = 1.3  # of np.load
ZARR_TARGET = 10.0
NODE_TARGETS = {2: 2.0, 100: 20.0, 1000: 150.0}  # milliseconds
SLOW_SECONDS = 15.0


def make_blobs(count: int, nbytes: int) -> Blobs:
    source = np.random.default_rng(0).random(nbytes // 4, np.float32)
    return {f"blob{i:05}": source + np.float32(i) for i in range(count)}


def flush(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        if ctypes.CDLL(None).syncfs(descriptor):
            raise OSError("syncfs failed")
    finally:
        os.close(descriptor)


class Floor:
    name = "np.save"

    def save(self, directory: Path, blobs: Blobs) -> None:
        for name, array in blobs.items():
            np.save(directory / f"{name}.npy", array)
        flush(directory)

    def load(self, directory: Path) -> Blobs:
        return {path.stem: np.load(path) for path in directory.iterdir()}


class Ours:
    """A manager's own steps, without a cluster: begin, write, commit; then read and verify."""

    name = "jobrunner"

    def save(self, directory: Path, blobs: Blobs) -> None:
        manager = MultiNodeCheckpointManager(directory / "k")
        workspace = Workspace("node")
        put_all(workspace, blobs)
        manager.run.start(["node"], {})
        try:
            started = time.perf_counter()
            save_epoch(manager, Position(0), {"node": workspace})
            self.seconds = time.perf_counter() - started
        finally:
            manager.run.end()

    def load(self, directory: Path) -> Blobs:
        manager = MultiNodeCheckpointManager(directory / "k")
        about = manager.record(0).stores["node"]
        reader = StoreReader(manager.directory.files, manager.path, about.name, about.sha256)
        return reader.load()


class Torch:
    name = "torch.save"

    def save(self, directory: Path, blobs: Blobs) -> None:
        import torch

        torch.save({k: torch.from_numpy(v) for k, v in blobs.items()}, directory / "all.pt")
        flush(directory)

    def load(self, directory: Path) -> Blobs:
        import torch

        return {k: v.numpy() for k, v in torch.load(directory / "all.pt").items()}


class TorchDistributed:
    name = "DCP"

    def save(self, directory: Path, blobs: Blobs) -> None:
        import torch
        from torch.distributed import checkpoint

        state = {k: torch.from_numpy(v) for k, v in blobs.items()}
        writer = checkpoint.FileSystemWriter(
            directory / "dcp", single_file_per_rank=True, sync_files=False, thread_count=2
        )
        checkpoint.save(state, storage_writer=writer, no_dist=True)
        flush(directory)

    def load(self, directory: Path) -> Blobs:
        import torch
        from torch.distributed import checkpoint

        metadata = checkpoint.FileSystemReader(directory / "dcp").read_metadata()
        state = {k: torch.empty(v.size) for k, v in metadata.state_dict_metadata.items()}
        checkpoint.load(state, checkpoint_id=str(directory / "dcp"), no_dist=True)
        return {k: v.numpy() for k, v in state.items()}


class Orbax:
    name = "orbax"

    def save(self, directory: Path, blobs: Blobs) -> None:
        from orbax import checkpoint

        with checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(directory.absolute() / "orbax", dict(blobs))
        flush(directory)

    def load(self, directory: Path) -> Blobs:
        from orbax import checkpoint

        with checkpoint.PyTreeCheckpointer() as checkpointer:
            loaded: Blobs = checkpointer.restore(directory.absolute() / "orbax")
        return loaded


class Zarr:
    name = "zarr"

    def save(self, directory: Path, blobs: Blobs) -> None:
        import zarr

        group = zarr.open_group(str(directory / "z"), mode="w")
        for name, array in blobs.items():
            group.create_array(name, data=array, **self.options(array))
        flush(directory)

    def options(self, array: np.ndarray[Any, Any]) -> dict[str, Any]:
        return {}

    def load(self, directory: Path) -> Blobs:
        import zarr

        group = zarr.open_group(str(directory / "z"), mode="r")
        return {name: array[:] for name, array in group.arrays()}  # type: ignore[misc]


class ZarrTuned(Zarr):
    name = "zarr uncompressed"

    def options(self, array: np.ndarray[Any, Any]) -> dict[str, Any]:
        return {"compressors": None, "chunks": (min(len(array), (16 << 20) // array.itemsize),)}


MINIDB = """
import ctypes, os, sys, time
import numpy as np
from caffe2.python import core, workspace

count, nbytes = int(sys.argv[1]), int(sys.argv[2])
source = np.random.default_rng(0).random(nbytes // 4, np.float32)
names = ["blob%05d" % i for i in range(count)]
for i, name in enumerate(names):
    workspace.FeedBlob(name, source + np.float32(i))
print("ready", flush=True)
for line in sys.stdin:
    what, path = line.split()
    about = {"absolute_path": 1, "db": path + "/minidb", "db_type": "minidb"}
    started = time.perf_counter()
    if what == "save":
        workspace.RunOperatorOnce(core.CreateOperator("Save", names, [], **about))
        descriptor = os.open(path, os.O_RDONLY)
        ctypes.CDLL(None).syncfs(descriptor)
        os.close(descriptor)
    else:
        workspace.SwitchWorkspace("loaded", True)
        workspace.RunOperatorOnce(core.CreateOperator("Load", [], names, **about))
    print(time.perf_counter() - started, flush=True)
    if what == "load":
        workspace.ResetWorkspace()
        workspace.SwitchWorkspace("default")
"""


class Minidb:
    """Caffe2's, in a process of a Python that has it; tells its own seconds."""

    name = "Caffe2 minidb"

    def __init__(self, python: str, case: str) -> None:
        self._process = subprocess.Popen(
            [python, "-c", MINIDB, *map(str, CASES[case])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def save(self, directory: Path, blobs: Blobs) -> None:
        self.seconds = self._ask(f"save {directory.absolute()}")

    def load(self, directory: Path) -> None:
        self.load_seconds = self._ask(f"load {directory.absolute()}")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, request: str) -> float:
        print(request, file=self._process.stdin, flush=True)
        return float(self._answer())

    def _answer(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"Caffe2 ended with {self._process.wait()}")
        return line


PEERS = [
    (Zarr, "zarr"),
    (ZarrTuned, "zarr"),
    (Torch, "torch"),
    (TorchDistributed, "torch"),
    (Orbax, "orbax"),
]


@contextlib.contextmanager
def fresh(parent: Path) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(dir=parent))
    yield directory
    for folder, _, names in os.walk(directory):
        for name in names:
            os.truncate(os.path.join(folder, name), 0)
    flush(parent)


def timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def warm(nbytes: int) -> None:
    """Touch free memory, so that nobody pays for the first touch but for this."""
    np.ones(nbytes, np.uint8)


def turn(side: Any, parent: Path, blobs: Blobs) -> tuple[float, float]:
    nbytes = sum(array.nbytes for array in blobs.values())
    with fresh(parent) as directory:
        warm(2 * nbytes)
        saving = timed(lambda: side.save(directory, blobs))
        warm(2 * nbytes)
        loading = timed(lambda: side.load(directory))
    return getattr(side, "seconds", saving), getattr(side, "load_seconds", loading)


def compare(report: Report, case: str, sides: list[Any], parent: Path, rounds: int) -> None:
    count, nbytes = CASES[case]
    blobs = make_blobs(count, nbytes)
    taken: dict[str, list[tuple[float, float]]] = {}
    for side in sides:
        first = turn(side, parent, blobs)
        taken[side.name] = [first] if sum(first) > SLOW_SECONDS else []
    slow = [name for name, turns in taken.items() if turns]
    for lap in range(rounds):
        for side in sides[lap % len(sides) :] + sides[: lap % len(sides)]:  # nobody is always first
            if side.name not in slow:
                taken[side.name].append(turn(side, parent, blobs))
    size = f"{nbytes >> 20} MiB" if nbytes >> 20 else f"{nbytes >> 10} KiB"
    note = f"one turn only: {', '.join(slow)}" if slow else ""
    for at, what in enumerate(("durable save", "verified load")):
        unit, scale = ("GB/s", 1e9) if nbytes >> 20 else ("MB/s", 1e6)
        speed = {
            name: count * nbytes / statistics.median(times[at] for times in turns) / scale
            for name, turns in taken.items()
        }
        ours, floor = speed["jobrunner"], speed["np.save"]
        peers = [value for name, value in speed.items() if name not in ("jobrunner", "np.save")]
        target, is_met = "", None
        if at == 0 and case in SAVE_TARGETS:
            target = f"≥ {SAVE_TARGETS[case]} of np.save, ahead of peers"
            is_met = ours >= SAVE_TARGETS[case] * floor and ours > max(peers, default=0)
        elif at == 0:
            target = f"≥ {ZARR_TARGET:.0f} of zarr, ahead of peers"
            if "zarr" in speed:
                is_met = ours >= ZARR_TARGET * speed["zarr"] and ours > max(peers)
        elif case in SAVE_TARGETS:
            target, is_met = f"≥ {LOAD_TARGET} of np.load", ours >= LOAD_TARGET * floor
        if at:
            speed["np.load"] = speed.pop("np.save")
        report.add(
            Row(f"{count} x {size}, {what}", unit, speed, target, is_met, note, is_rate=True)
        )


def change_one_percent(report: Report, parent: Path, rounds: int) -> None:
    """A save of 1 GiB of which one blob in a hundred has changed, against one of all of it."""
    workspace = Workspace("node")
    # As in a run, nothing else refers to the arrays.
    put_all(workspace, make_blobs(100, (1 << 30) // 100 & ~7))
    whole, part = [], []
    for _ in range(rounds):
        with fresh(parent) as directory:
            manager = MultiNodeCheckpointManager(directory / "k")
            manager.run.start(["node"], {})
            for epoch, times in ((0, whole), (1, part)):
                warm(2 << 30)
                started = time.perf_counter()
                save_epoch(manager, Position.of(epoch), {"node": workspace})
                times.append(time.perf_counter() - started)
                workspace.put("blob00050", adopt(workspace.value("blob00050") + np.float32(1)))
            manager.run.end()
    figures = {"jobrunner": statistics.median(part), "a whole save": statistics.median(whole)}
    row = Row("1 GiB, 1 % changed, durable save", "s", figures, "≥ 10 times faster than whole")
    row.is_met = row.ratios()["a whole save"] >= 10
    report.add(row)


class Stateful:
    """An object that is saved by its state, one array."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def state_dict(self) -> dict[str, Any]:
        return {"array": self.array}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.array = state["array"]


def stall(report: Report, parent: Path, rounds: int) -> None:
    """What the epochs wait for at an asynchronous save of 1 GiB, against a durable save of it."""
    for what, is_shared in (
        ("of arrays that only blobs hold", False),
        ("of objects, which must be copied", True),
    ):
        workspace = Workspace("node")
        arrays = make_blobs(8, 128 << 20)
        if is_shared:  # objects, which any task may change
            arrays = {name: Stateful(array) for name, array in arrays.items()}
        put_all(workspace, arrays)
        whole, waits = [], []
        with fresh(parent) as directory:
            manager = MultiNodeCheckpointManager(directory / "k", asynchronous=True)
            manager.run.start(["node"], {})
            for epoch in range(2 * rounds + 2):
                rotate(workspace)  # or nothing would be written
                started = time.perf_counter()
                save = Save(manager, Position.of(epoch))
                if epoch % 2:
                    receipts = save.write({"node": workspace})
                    times = whole
                else:
                    save.capture({"node": workspace})
                    waits.append(time.perf_counter() - started)
                    receipts = save.write_captured({"node": workspace})
                    times = []
                save.commit(receipts)
                times.append(time.perf_counter() - started)
                store = Path(manager.path, receipts["node"].store)
                manager.run.rewind(Position.of(epoch - 1) if epoch else None, "room for the next")
                for chunk in store.glob("*/c*"):
                    os.truncate(chunk, 0)
            manager.run.end()
        figures = {
            "jobrunner": statistics.median(waits[1:]),
            "synchronous": statistics.median(whole[1:]),
        }
        if is_shared:
            copied = {name: value.array for name, value in arrays.items()}
            figures["a copy by two threads"] = copy_seconds(copied, rounds)
        case = f"1 GiB {what}, wait of an asynchronous save"
        row = Row(case, "s", figures, "≤ 1/10 of the synchronous")
        row.is_met = row.ratios()["synchronous"] >= 10
        report.add(row)


def copy_seconds(blobs: Blobs, rounds: int) -> float:
    """What it takes to copy all of it to memory that was touched before, by two threads."""
    copies = [np.ones_like(array) for array in blobs.values()]
    pairs = list(zip(copies, blobs.values(), strict=True))

    def copy_half(start: int) -> None:
        for target, source in pairs[start::2]:
            np.copyto(target, source)

    def copy() -> None:
        other = threading.Thread(target=copy_half, args=(1,))
        other.start()
        copy_half(0)
        other.join()

    return statistics.median(timed(copy) for _ in range(2 * rounds))


def put_all(workspace: Workspace, blobs: Mapping[str, Any]) -> None:
    for name, value in blobs.items():
        workspace.put(name, adopt(value))


def rotate(workspace: Workspace) -> None:
    """Give every blob the array of the one before."""
    values = [workspace.value(name) for name in workspace.globals]
    for name, before in zip(workspace.globals, [values[-1], *values[:-1]], strict=True):
        workspace.put(name, before)


def tiny_nodes(report: Report, parent: Path, rounds: int) -> None:
    """Milliseconds to record an epoch of many nodes that hold next to nothing."""
    for count, target in NODE_TARGETS.items():
        names = [f"node:{i}" for i in range(count)]
        workspaces = {name: Workspace(name) for name in names}
        for workspace in workspaces.values():
            put_all(workspace, {"w": np.arange(4.0), "n": 1})
        times = []
        with fresh(parent) as directory:
            manager = MultiNodeCheckpointManager(directory / "k")
            manager.run.start(names, {})
            for epoch in range(rounds + 1):
                started = time.perf_counter()
                save_epoch(manager, Position.of(epoch), workspaces)
                times.append(time.perf_counter() - started)
            manager.run.end()
        taken = 1000 * statistics.median(times[1:])
        report.add(
            Row(
                f"checkpoint of {count} tiny nodes, durable",
                "ms",
                {"jobrunner": taken},
                f"≤ {target:.0f} ms",
                taken <= target,
            )
        )


def main() -> None:
    args = arguments(__doc__, rounds=3, cases=",".join([*CASES, "features"]), directory="")
    report = Report((__doc__ or "").splitlines()[0])
    peers = []
    python, reason = caffe2_python()
    if not args.no_peers:
        for peer, module in PEERS:
            if importlib.util.find_spec(module) is None:
                report.skip(peer.name, f"{module} is not installed: pip install '.[bench]'")
            else:
                peers.append(peer)
        if reason:
            report.skip(Minidb.name, reason)
    parent = Path(tempfile.mkdtemp(dir=args.directory or None, prefix="jobrunner-bench-"))
    try:
        for case in args.cases.split(","):
            if case == "features":
                change_one_percent(report, parent, args.rounds)
                stall(report, parent, args.rounds)
                tiny_nodes(report, parent, args.rounds)
                continue
            sides = [Floor(), Ours(), *(peer() for peer in peers)]
            with contextlib.ExitStack() as stack:
                if python and not args.no_peers:
                    sides.append(stack.enter_context(contextlib.closing(Minidb(python, case))))
                compare(report, case, sides, parent, args.rounds)
        write(report, args.json)
    finally:
        shutil.rmtree(parent)


if __name__ == "__main__":
    main()
