"""How fast do readers hand out batches, beside a plain loop and the loaders of others?

Batches of 256 records of 64 float32, whose mean each contender takes, as the least that a task does:
in the order of an array in memory, and shuffled; rows of a Parquet file in batches of tables; lines
of a file. The plain loop takes slices, or one fancy index a batch from a permutation. PyTorch's
DataLoader gets batches by index (`BatchSampler`) in its own process, and also one record after
another, as it does by default; Dask computes a chunk of 8,192 records at a time, in this process.

    python benchmarks/bench_readers.py [--rounds 5] [--records 400000] [--no-peers] [--json FILE]
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from harness import OURS, Report, Row, alternate, arguments, ray_or_reason, write

from jobrunner.data import from_lines, from_parquet, from_records

BATCH, WIDTH, CHUNK = 256, 64, 8192
PLAIN = "plain loop"


def rate(records: int, batches: Callable[[], Iterable[Any]], use: Callable[[Any], Any]) -> float:
    """Million records a second."""
    started = time.perf_counter()
    seen = 0
    for batch in batches():
        use(batch)
        seen += len(batch)
    assert seen == records, (seen, records)
    return records / (time.perf_counter() - started) / 1e6


def slices(data: np.ndarray) -> Iterable[Any]:
    for start in range(0, len(data), BATCH):
        yield data[start : start + BATCH]


def permuted(data: np.ndarray) -> Iterable[Any]:
    order = np.random.default_rng(1).permutation(len(data))
    for start in range(0, len(data), BATCH):
        yield data[order[start : start + BATCH]]


def of_torch(data: np.ndarray, *, shuffled: bool, by_record: bool) -> Iterable[Any]:
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
    if by_record:
        return DataLoader(rows, batch_size=BATCH, shuffle=shuffled)
    order = RandomSampler(rows) if shuffled else SequentialSampler(rows)
    return DataLoader(rows, sampler=BatchSampler(order, BATCH, False), batch_size=None)


def of_dask(data: np.ndarray) -> Iterable[Any]:
    import dask.array

    array = dask.array.from_array(data, chunks=(CHUNK, WIDTH))
    for i in range(array.numblocks[0]):
        yield from slices(array.blocks[i].compute(scheduler="synchronous"))


def of_ray(data: np.ndarray, *, shuffled: bool) -> Iterable[Any]:
    import ray.data

    found = ray.data.from_numpy(data).iter_batches(
        batch_size=BATCH, local_shuffle_buffer_size=CHUNK if shuffled else None
    )
    return (batch["data"] for batch in found)


def add(report: Report, case: str, rounds: int, contenders: dict[str, Callable[[], float]]) -> None:
    figures = alternate(contenders, rounds)
    best = max(value for name, value in figures.items() if name != OURS)
    target = "≥ 0.9 of the fastest"
    report.add(Row(case, "M/s", figures, target, figures[OURS] >= 0.9 * best, is_rate=True))


def main() -> None:
    args = arguments(__doc__, rounds=5, records=400_000)
    report = Report("How fast do readers hand out batches?")
    n = args.records
    data = np.random.default_rng(0).random((n, WIDTH), np.float32)
    has_torch = not args.no_peers and importlib.util.find_spec("torch") is not None
    if has_torch:
        import torch

        torch.set_num_threads(1)  # for a mean of so few numbers
    else:
        report.skip("PyTorch", "torch is not installed, or --no-peers")
    why_no_ray = "--no-peers" if args.no_peers else ray_or_reason()
    if why_no_ray:
        report.skip("Ray", why_no_ray)
    else:
        import ray

        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")

    def mean(batch: Any) -> Any:
        return batch.mean(axis=0)

    for case, is_shuffled in (("in order", False), ("shuffled", True)):
        reader = from_records(data).batched(BATCH)
        reader = reader.shuffled(1) if is_shuffled else reader
        plain = permuted if is_shuffled else slices
        contenders = {
            OURS: lambda reader=reader: rate(n, lambda: reader, mean),
            PLAIN: lambda plain=plain: rate(n, lambda: plain(data), mean),
        }
        if not args.no_peers and not is_shuffled:
            contenders["Dask"] = lambda: rate(n, lambda: of_dask(data), mean)
        if has_torch:
            for name, by_record in (("DataLoader", True), ("DataLoader by batch", False)):
                contenders[name] = lambda by_record=by_record, is_shuffled=is_shuffled: rate(
                    n,
                    lambda: of_torch(data, shuffled=is_shuffled, by_record=by_record),
                    lambda batch: batch.mean(0),
                )
        if not why_no_ray:
            contenders["ray.data"] = lambda is_shuffled=is_shuffled: rate(
                n, lambda: of_ray(data, shuffled=is_shuffled), mean
            )
        add(report, f"an array {case}", args.rounds, contenders)

    with tempfile.TemporaryDirectory() as directory:
        files(report, Path(directory), n, args.rounds)
    write(report, args.json)


def files(report: Report, path: Path, n: int, rounds: int) -> None:
    """Parquet and lines, beside the libraries that read them."""
    if importlib.util.find_spec("pyarrow") is None:
        report.skip("Parquet", "pyarrow is not installed: pip install 'dask-jobrunner[arrow]'")
    else:
        parquet_rows(report, path, n, rounds)
    text = path / "lines.txt"
    text.write_text("".join(f"record {i} of some words\n" for i in range(n)))

    def of_file() -> Iterable[Any]:
        with text.open() as file:
            batch: list[str] = []
            for line in file:
                batch.append(line.rstrip("\n"))
                if len(batch) == BATCH:
                    yield batch
                    batch = []
            if batch:
                yield batch

    add(
        report,
        "lines of a file",
        rounds,
        {
            OURS: lambda: rate(n, lambda: from_lines(text).batched(BATCH), len),
            PLAIN: lambda: rate(n, of_file, len),
        },
    )


def parquet_rows(report: Report, path: Path, n: int, rounds: int) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({f"c{k}": np.random.default_rng(k).random(n) for k in range(4)})
    parquet.write_table(table, path / "t.parquet", row_group_size=CHUNK * 4)

    def of_arrow() -> Iterable[Any]:
        return parquet.ParquetFile(path / "t.parquet").iter_batches(BATCH, use_threads=False)

    add(
        report,
        "a Parquet file",
        rounds,
        {
            OURS: lambda: rate(n, lambda: from_parquet(path / "t.parquet").batched(BATCH), len),
            "iter_batches": lambda: rate(n, of_arrow, len),
        },
    )


if __name__ == "__main__":
    main()
