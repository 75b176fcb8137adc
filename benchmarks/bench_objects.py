"""How fast is a checkpoint saved to an object store, and loaded from it, that is far away?

The store speaks S3 and lies in the memory of a process on this machine; each of its answers waits
for the latency, and for its bytes at the rate of a connection (`latent_s3`). Ours and zarr reach it
through obstore. zarr once with its defaults, an array after the other, and once without a
compressor in chunks of 16 MiB, from as many threads as ours uses. Ours verifies what it loads.

    python benchmarks/bench_objects.py [--rounds 3] [--latency-ms 30] [--mb-per-second 20]
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from harness import OURS, Report, Row, Save, alternate, arguments, save_epoch, write

from jobrunner import KeepLast, MultiNodeCheckpointManager
from jobrunner.checkpoint.storage.object_files import ObjectFiles
from jobrunner.checkpoint.store.store_reader import StoreReader
from jobrunner.positions import Position
from jobrunner.workspace import Workspace, adopt

Blobs = dict[str, np.ndarray[Any, Any]]

CASES = {"8 x 16 MiB": (8, 16 << 20), "200 x 256 KiB": (200, 256 << 10)}
WORKERS = 4
NUMBERS = itertools.count()


@contextlib.contextmanager
def store(latency_ms: float, mb_per_second: float) -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [
            *(sys.executable, Path(__file__).with_name("latent_s3.py")),
            *(str(port), str(latency_ms), str(mb_per_second)),
        ],
        stdout=subprocess.PIPE,
    )
    os.environ.update(
        AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
        AWS_ALLOW_HTTP="true",
        AWS_REGION="us-east-1",
        AWS_ACCESS_KEY_ID="name",
        AWS_SECRET_ACCESS_KEY="secret",
    )
    try:
        assert server.stdout is not None
        server.stdout.readline()
        yield
    finally:
        server.terminate()
        server.wait()


def new_url() -> str:
    return f"s3://bucket/{next(NUMBERS)}"


def make_blobs(count: int, nbytes: int) -> Blobs:
    source = np.random.default_rng(0).random(nbytes // 8)
    return {f"blob{i:05}": source + i for i in range(count)}


class Ours:
    """A manager's own steps, without a cluster: begin, write, commit; then read and verify."""

    def __init__(self, blobs: Blobs) -> None:
        self.workspace = Workspace("node")
        for name, value in blobs.items():
            self.workspace.put(name, adopt(value))
        self.url = new_url()

    @contextlib.contextmanager
    def running(self) -> Iterator[MultiNodeCheckpointManager]:
        manager = MultiNodeCheckpointManager(self.url, keep=KeepLast(1))
        manager.run.start(["node"], {})
        try:
            yield manager
        finally:
            manager.run.end()

    def save(self, manager: MultiNodeCheckpointManager, epoch: int) -> float:
        started = time.perf_counter()
        save_epoch(manager, Position.of(epoch), {"node": self.workspace})
        return time.perf_counter() - started

    def load(self) -> Blobs:
        manager = MultiNodeCheckpointManager(self.url)
        epoch = manager.latest()
        assert epoch is not None
        about = manager.record(epoch).stores["node"]
        return StoreReader(manager.directory.files, manager.path, about.name, about.sha256).load()


class Zarr:
    def __init__(self, blobs: Blobs, threads: int, **options: Any) -> None:
        self.blobs, self.threads, self.options = blobs, threads, options

    def save(self) -> None:
        import zarr
        from obstore.store import from_url

        self.store = zarr.storage.ObjectStore(from_url(new_url()))
        group = zarr.create_group(self.store)

        def put(name: str) -> None:
            data = self.blobs[name]
            options = dict(self.options)
            if "chunks" in options:
                options["chunks"] = (min(options["chunks"], data.size),)
            group.create_array(name, data=data, **options)

        self.each(put)

    def load(self) -> None:
        import zarr

        group = zarr.open_group(self.store, mode="r")
        self.each(lambda name: group[name][:])

    def each(self, call: Callable[[str], object]) -> None:
        if self.threads == 1:
            for name in self.blobs:
                call(name)
            return
        with ThreadPoolExecutor(self.threads) as pool:
            list(pool.map(call, self.blobs))


def seconds(call: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    return measure


def peers(blobs: Blobs) -> dict[str, Zarr]:
    return {
        "zarr": Zarr(blobs, 1),
        f"zarr uncompressed, {ObjectFiles.threads} threads": Zarr(
            blobs, ObjectFiles.threads, compressors=None, chunks=2 << 20
        ),
    }


def measure_case(report: Report, case: str, args: Any) -> None:
    blobs = make_blobs(*CASES[case])
    others = {} if args.no_peers else peers(blobs)

    def save() -> float:
        nonlocal ours
        ours = Ours(blobs)
        with ours.running() as manager:
            return ours.save(manager, 0)

    ours = Ours(blobs)
    saves: Mapping[str, Callable[[], float]] = {
        OURS: save,
        **{name: seconds(peer.save) for name, peer in others.items()},
    }
    report.add(Row(f"{case}, save", "s", alternate(saves, args.rounds)))
    loads = {
        OURS: seconds(ours.load),
        **{name: seconds(peer.load) for name, peer in others.items()},
    }
    report.add(Row(f"{case}, verified load", "s", alternate(loads, args.rounds)))
    with ours.running() as manager:
        epochs = itertools.count(1)
        names = list(blobs)[: max(1, len(blobs) // 100)]

        def change_and_save() -> float:
            for name in names:
                ours.workspace.put(name, adopt(ours.workspace.value(name) + 1))
            return ours.save(manager, next(epochs))

        share = len(names) / len(blobs)
        found = alternate({OURS: change_and_save}, args.rounds)
        report.add(Row(f"{case}, save of which {share:.0%} changed", "s", found))


def measure_nodes(report: Report, count: int, args: Any) -> None:
    """A job of many nodes of 256 KiB on four workers, as the client and the workers see it."""
    nodes = [f"n:{i}" for i in range(count)]
    workspaces = {node: Workspace(node) for node in nodes}
    for i, node in enumerate(nodes):
        workspaces[node].globals.update(w=np.arange(32768.0) + i, k=i)
    manager = MultiNodeCheckpointManager(new_url(), keep=KeepLast(1))
    manager.run.start(nodes, {})
    epochs = itertools.count()
    settled: list[float] = []

    def save() -> float:
        started = time.perf_counter()
        begun = Save(manager, next(epochs))
        receipts = {}
        with ThreadPoolExecutor(WORKERS) as pool:
            parts = [{n: workspaces[n] for n in nodes[i::WORKERS]} for i in range(WORKERS)]
            for found in pool.map(begun.write, parts):
                receipts |= found
        begun.commit(receipts)
        ended = time.perf_counter()
        manager.retention.sweeper.drain()
        settled.append(time.perf_counter() - ended)
        return ended - started

    figures = alternate({OURS: save}, args.rounds)
    row = Row(f"{count} nodes of 256 KiB, {WORKERS} workers, save", "s", figures, "≤ 1.0 s")
    row.is_met = figures[OURS] <= 1.0
    report.add(row)
    figures = {OURS: sorted(settled[1:])[len(settled[1:]) // 2]}
    report.add(Row(f"{count} nodes of 256 KiB, deleting the epoch before", "s", figures))
    manager.run.end()


def main() -> None:
    args = arguments(__doc__, rounds=3, latency_ms=30.0, mb_per_second=20.0)
    where = f"{args.latency_ms:g} ms a request, {args.mb_per_second:g} MB/s a connection"
    report = Report(f"How fast are checkpoints in an object store: {where}?")
    with store(args.latency_ms, args.mb_per_second):
        for case in CASES:
            measure_case(report, case, args)
        measure_nodes(report, 200, args)
    write(report, args.json)


if __name__ == "__main__":
    main()
