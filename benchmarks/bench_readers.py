"""How fast do readers hand out batches, beside a plain loop and the loaders of others?

Batches of records of float32 are only iterated over: what a reader costs is what a task waits for.
An array in memory, in order and shuffled, at several sizes of records and of batches; then, in
batches of 256, small sets, a Hugging Face data set, chunks of a Zarr array, rows of a Parquet file
and items of a Dask bag. The plain loops take slices, or gather the rows of a permutation with `take`,
block after block where there are blocks. They make the generator of each pass from its number, so
that a pass can be read again. Small sets are also shuffled by a loop that keeps one generator, whose
passes cannot. PyTorch's DataLoader gets batches by index (`BatchSampler`) in its own
process; Dask computes a chunk at a time, in this process; Ray yields batches of its own.

Each figure is of as many passes as take 50 ms: the first of them warms up what others have used.
Figures are of processor time, which other processes disturb less; Ray's are of the clock, since it
works in other processes. So it is shown beside the clock's figures of this package.

    python benchmarks/bench_readers.py [--rounds 5] [--mebibytes 64] [--no-peers] [--json FILE]
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from harness import OURS, Report, Row, alternate, arguments, ray_or_reason, write

from jobrunner.data import from_arrow, from_dask, from_records

BATCH, WIDTH, CHUNK = 256, 64, 8192
PLAIN = "plain loop"
Batches = Callable[[], Iterable[Any]]


def timed(batches: Batches, clock: Callable[[], float]) -> Callable[[], float]:
    """Measures microseconds a batch, over some passes."""

    def measure() -> float:
        begun = time.perf_counter()
        started, count = clock(), 0
        while not count or time.perf_counter() - begun < 0.05:
            for _ in batches():
                count += 1
        return (clock() - started) / count * 1e6

    return measure


def add(
    report: Report,
    case: str,
    rounds: int,
    contenders: dict[str, Batches],
    clock: Callable[[], float] = time.process_time,
    *,
    blocks: int = 1,
) -> None:
    measured = {name: timed(batches, clock) for name, batches in contenders.items()}
    figures = alternate(measured, rounds)
    best = min(value for name, value in figures.items() if name != OURS)
    count = sum(1 for _ in contenders[OURS]())
    most = max(2 * best, best + 30 + 400 * blocks / count)
    target = "≤ 2 of the fastest, or 30 µs a batch and 400 µs a pass and block more"
    report.add(Row(case, "µs", figures, target, figures[OURS] <= most))


def slices(data: Any, batch: int) -> Iterable[Any]:
    for start in range(0, len(data), batch):
        yield data[start : start + batch]


PASSES = count()
KEPT = np.random.default_rng(1)


def gathered(
    data: np.ndarray, batch: int, generator: np.random.Generator | None = None
) -> Iterable[Any]:
    """In an order that the number of the pass restores: another one in each, as readers have."""
    order = (generator or np.random.default_rng((1, next(PASSES)))).permutation(len(data))
    for start in range(0, len(data), batch):
        yield data.take(order[start : start + batch], axis=0)


def of_torch(data: np.ndarray, batch: int, *, shuffled: bool) -> Iterable[Any]:
    import torch
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

    class Rows(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.rows = torch.from_numpy(data)

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: Any) -> Any:
            return self.rows[index]

    rows = Rows()
    order = RandomSampler(rows) if shuffled else SequentialSampler(rows)
    return DataLoader(rows, sampler=BatchSampler(order, batch, False), batch_size=None)


def of_dask(array: Any, batch: int) -> Iterable[Any]:
    for i in range(array.numblocks[0]):
        yield from slices(array.blocks[i].compute(scheduler="synchronous"), batch)


def of_ray(data: np.ndarray, batch: int, *, shuffled: bool) -> Iterable[Any]:
    import ray.data

    buffer = max(CHUNK, 2 * batch) if shuffled else None
    return ray.data.from_numpy(data).iter_batches(
        batch_size=batch, local_shuffle_buffer_size=buffer
    )


def arrays(report: Report, args: Any, peers: set[str]) -> None:
    for width in (1, 64, 1024):
        n = min(400_000, (args.mebibytes << 20) // (4 * width))
        data = np.random.default_rng(0).random((n, width), np.float32)
        for batch in (32, 256, 4096):
            for is_shuffled in (False, True):
                reader = from_records(data).batched(batch)
                reader = reader.shuffled(1) if is_shuffled else reader
                plain = gathered if is_shuffled else slices
                contenders: dict[str, Batches] = {
                    OURS: lambda reader=reader: reader,
                    PLAIN: lambda plain=plain, data=data, b=batch: plain(data, b),
                }
                if "torch" in peers:
                    contenders["DataLoader"] = lambda d=data, b=batch, s=is_shuffled: of_torch(
                        d, b, shuffled=s
                    )
                order = "shuffled" if is_shuffled else "in order"
                case = f"{4 * width} B × {batch} {order}"
                add(report, case, args.rounds, contenders)
                if "ray" in peers:
                    by_clock: dict[str, Batches] = {
                        OURS: contenders[OURS],
                        "ray.data": lambda d=data, b=batch, s=is_shuffled: of_ray(d, b, shuffled=s),
                    }
                    add(report, f"{case}, clock", args.rounds, by_clock, time.perf_counter)


def small(report: Report, args: Any) -> None:
    """Shuffled sets whose order takes as long as to gather them, and of a little more than 2^k."""
    for n in (1_000, 4_097, 5_000, 8_193, 12_000, 20_000, 66_000, 131_073):
        data = np.random.default_rng(0).random((n, WIDTH), np.float32)
        reader = from_records(data).shuffled(1).batched(BATCH)

        contenders: dict[str, Batches] = {
            OURS: lambda reader=reader: reader,
            PLAIN: lambda data=data: gathered(data, BATCH),
            "one generator": lambda data=data: gathered(data, BATCH, KEPT),
        }
        add(report, f"{n:,} records shuffled", args.rounds, contenders)


def hugging_face(report: Report, args: Any) -> None:
    import datasets

    columns = {f"c{k}": np.random.default_rng(k).random(50_000) for k in range(2)}
    for form in (None, "numpy", "arrow"):
        data = datasets.Dataset.from_dict(columns).with_format(form)
        reader = from_records(data).batched(BATCH)
        contenders: dict[str, Batches] = {
            OURS: lambda reader=reader: reader,
            "iter": lambda data=data: data.iter(BATCH),
        }
        add(report, f"Hugging Face, format {form}", args.rounds, contenders)


def stored(report: Report, path: Path, args: Any) -> None:
    """Data in blocks."""
    import dask.array
    import dask.bag
    import zarr

    n = min(200_000, (args.mebibytes << 20) // (4 * WIDTH))
    data = np.random.default_rng(0).random((n, WIDTH), np.float32)
    array = zarr.create_array(str(path / "a.zarr"), data=data, chunks=(CHUNK, WIDTH))

    def chunks(read: Callable[..., Iterable[Any]]) -> Iterable[Any]:
        for start in range(0, n, CHUNK):
            yield from read(array[start : start + CHUNK], BATCH)

    lazy = dask.array.from_array(data, chunks=(CHUNK, WIDTH))
    items = [f"record {i}" for i in range(n)]
    bag = dask.bag.from_sequence(items, npartitions=16)

    def of_bag() -> Iterable[Any]:
        for part in bag.to_delayed():
            yield from slices(part.compute(scheduler="synchronous"), BATCH)

    zarr_reader = from_records(array).batched(BATCH)
    array_reader = from_dask(lazy).batched(BATCH)
    bag_reader = from_dask(bag).batched(BATCH)
    of_zarr = "a Zarr array"
    add(report, of_zarr, args.rounds, {OURS: lambda: zarr_reader, PLAIN: lambda: chunks(slices)})
    add(
        report,
        f"{of_zarr} shuffled",
        args.rounds,
        {OURS: lambda: zarr_reader.shuffled(1), PLAIN: lambda: chunks(gathered)},
    )
    add(
        report,
        "a Dask array",
        args.rounds,
        {OURS: lambda: array_reader, PLAIN: lambda: of_dask(lazy, BATCH)},
    )
    add(report, "a Dask bag", args.rounds, {OURS: lambda: bag_reader, PLAIN: of_bag})
    if importlib.util.find_spec("pyarrow") is None:
        report.skip("Parquet", "pyarrow is not installed: pip install 'dask-jobrunner[arrow]'")
    else:
        parquet_rows(report, path, args)


def parquet_rows(report: Report, path: Path, args: Any) -> None:
    import pyarrow
    from pyarrow import dataset, parquet

    n = 1_000_000
    table = pyarrow.table({f"c{k}": np.random.default_rng(k).random(n) for k in range(4)})
    for rows in (1 << 13, 1 << 15, 1 << 20):
        file = path / f"{rows}.parquet"
        parquet.write_table(table, file, row_group_size=rows)
        for batch in (BATCH, 4096):
            reader = from_arrow(dataset.dataset(file)).batched(batch)
            contenders: dict[str, Batches] = {
                OURS: lambda reader=reader: reader,
                "iter_batches": lambda file=file, batch=batch: parquet.ParquetFile(
                    file
                ).iter_batches(batch, use_threads=False),
            }
            case = f"Parquet, {rows:,} rows a group × {batch}"
            add(report, case, args.rounds, contenders, blocks=-(-n // rows))


def main() -> None:
    args = arguments(__doc__, rounds=5, mebibytes=64)
    report = Report("How fast do readers hand out batches?")
    peers = set()
    if args.no_peers or importlib.util.find_spec("torch") is None:
        report.skip("PyTorch", "torch is not installed, or --no-peers")
    else:
        import torch

        torch.set_num_threads(1)  # as many as the plain loop has
        peers.add("torch")
    if why := "--no-peers" if args.no_peers else ray_or_reason():
        report.skip("Ray", why)
    else:
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        ray.data.DataContext.get_current().enable_progress_bars = False
        peers.add("ray")
    arrays(report, args, peers)
    small(report, args)
    if importlib.util.find_spec("datasets") is None:
        report.skip("Hugging Face", "datasets is not installed")
    else:
        hugging_face(report, args)
    with tempfile.TemporaryDirectory() as directory:
        stored(report, Path(directory), args)
    write(report, args.json)


if __name__ == "__main__":
    main()
