"""How fast is a checkpoint saved and loaded?

Floor, ours and the peers take turns, several rounds after a warm-up, another one first in each, and the medians are printed.
The floor is `np.save` and `np.load`, a file a blob, flushed by one `syncfs` as ours is. State lies in
memory that was touched before; what is written is deleted after every turn, so that all sides write
over equally fresh pages of the page cache. Loads are from the page cache; ours verifies every byte.
Peers that are not installed are left out, and that is said: `pip install 'jobrunner[bench]'`.

    python benchmarks/bench_checkpoint.py [--rounds 5] [--case big] [--directory DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jobrunner import MultiNodeCheckpointManager
from jobrunner.checkpoint.reader import StoreReader
from jobrunner.workspace import Workspace

Blobs = dict[str, np.ndarray[Any, Any]]

CASES = {
    "big": (8, 128 << 20),
    "small": (1000, 1 << 20),
    "tiny": (10_000, 1 << 10),
}
SLOW_PEERS = {"tiny": ("orbax", "torch.distributed.checkpoint")}
TINY_NODES = (2, 100, 1000)


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
        workspace.globals.update(blobs)
        manager.start_run(["node"], {})
        try:
            started = time.perf_counter()
            order = manager.begin(0)
            manager.commit(order, order({"node": workspace}), {})
            self.seconds = time.perf_counter() - started
        finally:
            manager.end_run()

    def load(self, directory: Path) -> Blobs:
        manager = MultiNodeCheckpointManager(directory / "k")
        about = manager.record(0)["stores"]["node"]
        reader = StoreReader(manager._files, manager.path, about["store"], about["manifest"])
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
    name = "torch.distributed.checkpoint"

    def save(self, directory: Path, blobs: Blobs) -> None:
        import torch
        from torch.distributed import checkpoint

        state = {k: torch.from_numpy(v) for k, v in blobs.items()}
        checkpoint.save(state, checkpoint_id=str(directory / "dcp"), no_dist=True)
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
            group.create_array(name, data=array)
        flush(directory)

    def load(self, directory: Path) -> Blobs:
        import zarr

        group = zarr.open_group(str(directory / "z"), mode="r")
        return {name: array[:] for name, array in group.arrays()}  # type: ignore[misc]


PEERS = [
    (Zarr, "zarr"),
    (Torch, "torch"),
    (TorchDistributed, "torch"),
    (Orbax, "orbax"),
]


@contextlib.contextmanager
def fresh(parent: Path) -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(dir=parent))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)
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
    return getattr(side, "seconds", saving), loading


def compare(case: str, sides: list[Any], parent: Path, rounds: int) -> dict[str, Any]:
    count, nbytes = CASES[case]
    blobs = make_blobs(count, nbytes)
    taken: dict[str, list[tuple[float, float]]] = {side.name: [] for side in sides}
    for side in sides:
        turn(side, parent, blobs)
    for lap in range(rounds):
        for side in sides[lap % len(sides) :] + sides[: lap % len(sides)]:  # nobody is always first
            taken[side.name].append(turn(side, parent, blobs))
    total = count * nbytes
    floor = [statistics.median(times) for times in zip(*taken["np.save"], strict=True)]
    result: dict[str, Any] = {}
    print(f"\n{case}: {count} x {nbytes >> 10} KiB{'':12}save, durable      load")
    for name, turns in taken.items():
        save, load = (statistics.median(times) for times in zip(*turns, strict=True))
        result[name] = {
            "save_gb_per_s": total / save / 1e9,
            "save_ratio": floor[0] / save,
            "load_gb_per_s": total / load / 1e9,
            "load_ratio": floor[1] / load,
        }
        print(
            f"  {name:30}{total / save / 1e9:6.2f} GB/s {floor[0] / save:5.2f}x"
            f"{total / load / 1e9:8.2f} GB/s {floor[1] / load:5.2f}x"
        )
    return result


def change_one_percent(parent: Path, rounds: int) -> dict[str, float]:
    """A save of 1 GiB of which one blob in a hundred has changed, against one of all of it."""
    blobs = make_blobs(100, (1 << 30) // 100 & ~7)
    workspace = Workspace("node")
    workspace.globals.update(blobs)
    whole, part = [], []
    for _ in range(rounds):
        with fresh(parent) as directory:
            manager = MultiNodeCheckpointManager(directory / "k")
            manager.start_run(["node"], {})
            for epoch, times in ((0, whole), (1, part)):
                started = time.perf_counter()
                order = manager.begin(epoch)
                manager.commit(order, order({"node": workspace}), {})
                times.append(time.perf_counter() - started)
                workspace.globals["blob00050"] = workspace.globals["blob00050"] + np.float32(1)
            manager.end_run()
    ratio = statistics.median(whole) / statistics.median(part)
    print(f"\n1 GiB, 1 % changed: {ratio:.1f} times faster than a whole save")
    return {"ratio": ratio}


def stall(parent: Path, rounds: int) -> dict[str, float]:
    """What the epochs wait for: the copy of 1 GiB, against a durable save of it."""
    workspace = Workspace("node")
    blobs = make_blobs(8, 128 << 20)
    whole, copies = [], []
    with fresh(parent) as directory:
        manager = MultiNodeCheckpointManager(directory / "k", asynchronous=True)
        manager.start_run(["node"], {})
        for epoch in range(2 * rounds + 2):
            # Others than the last time, or nothing would be written.
            names = list(blobs)[epoch % 8 :] + list(blobs)[: epoch % 8]
            workspace.globals.update(zip(blobs, (blobs[name] for name in names), strict=True))
            started = time.perf_counter()
            order = manager.begin(epoch)
            if epoch % 2:
                receipts = order({"node": workspace})
                times = whole
            else:
                order.copy(None)({"node": workspace})
                copies.append(time.perf_counter() - started)
                receipts = order.write_copies()({"node": workspace})
                times = []
            manager.commit(order, receipts, {})
            times.append(time.perf_counter() - started)
            manager.rewind(epoch - 1 if epoch else None, "room for the next")
            shutil.rmtree(receipts["node"].store and manager.path + "/" + receipts["node"].store)
        manager.end_run()
    ratio = statistics.median(whole[1:]) / statistics.median(copies[1:])
    print(f"1 GiB: the copy takes 1/{ratio:.1f} of a durable save")
    return {"ratio": ratio}


def tiny_nodes(parent: Path, rounds: int) -> dict[str, float]:
    """Milliseconds to record an epoch of many nodes that hold next to nothing."""
    found = {}
    for count in TINY_NODES:
        names = [f"node:{i}" for i in range(count)]
        workspaces = {name: Workspace(name) for name in names}
        for workspace in workspaces.values():
            workspace.globals.update(w=np.arange(4.0), n=1)
        times = []
        with fresh(parent) as directory:
            manager = MultiNodeCheckpointManager(directory / "k")
            manager.start_run(names, {})
            for epoch in range(rounds + 1):
                started = time.perf_counter()
                order = manager.begin(epoch)
                manager.commit(order, order(workspaces), {})
                times.append(time.perf_counter() - started)
            manager.end_run()
        found[str(count)] = 1000 * statistics.median(times[1:])
        print(f"{count} tiny nodes: {found[str(count)]:.1f} ms")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", choices=[*CASES, "features"], action="append")
    parser.add_argument("--directory", type=Path, default=Path())
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    missing = [peer.name for peer, module in PEERS if importlib.util.find_spec(module) is None]
    if missing:
        print(f"left out, for they are not installed: {', '.join(missing)}")
    results: dict[str, Any] = {}
    with fresh(arguments.directory) as parent:
        for case in arguments.case or [*CASES, "features"]:
            if case == "features":
                results["one_percent"] = change_one_percent(parent, arguments.rounds)
                results["stall"] = stall(parent, arguments.rounds)
                results["tiny_nodes_ms"] = tiny_nodes(parent, arguments.rounds)
                continue
            peers = [
                peer()
                for peer, module in PEERS
                if peer.name not in missing and peer.name not in SLOW_PEERS.get(case, ())
            ]
            sides = [Floor(), Ours(), *peers]
            results[case] = compare(case, sides, parent, arguments.rounds)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
