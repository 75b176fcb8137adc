"""What readers read: each kind of data gives the same records in any order, shard and batch."""

from functools import partial

import cloudpickle
import dask.array
import dask.bag
import dask.dataframe
import numpy as np
import pandas
import pyarrow
import pytest
import zarr
from distributed import Client
from pyarrow import csv, dataset, feather, parquet

from jobrunner import DefinitionError
from jobrunner.data import from_arrow, from_dask, from_records

N = 40
TABLE = pyarrow.table({"n": range(N)})


def numbers(batch):
    """The records of a batch, of any kind, or the one of a record."""
    if isinstance(batch, pyarrow.RecordBatch | pyarrow.Table):
        return batch["n"].to_pylist()
    if isinstance(batch, dict | pandas.DataFrame | pandas.Series) and "n" in batch:
        batch = batch["n"]
    batch = np.asarray(batch)
    if batch.ndim and batch.shape[-1] > N:  # rows that are wider than a batch is long
        batch = batch[..., 0]
    return np.atleast_1d(batch).tolist()


def zarr_array(path):
    array = zarr.create_array(path / "a.zarr", shape=(N, 1 << 18), chunks=(3, 1 << 18), dtype="i4")
    array[:, 0] = np.arange(N)
    return from_records(array)


def files(path, format):
    """Two files, of which the first one has a column more."""
    write = {
        "parquet": lambda table, path: parquet.write_table(table, path, row_group_size=7),
        "feather": feather.write_feather,
        "csv": csv.write_csv,
    }[format]
    write(TABLE[25:], path / f"b.{format}")
    write(TABLE[:25].append_column("unused", [range(25)]), path / f"a.{format}")
    return from_arrow(dataset.dataset(path, format=format), columns=["n"])


class Squares:
    """A map-style PyTorch data set."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return i


class Many(Squares):
    """One that reads several at once."""

    def __getitems__(self, listed):
        return listed


class Records:
    """As a data set of Hugging Face."""

    __module__ = "datasets.arrow_dataset"
    column_names = ("n",)

    def __len__(self):
        return N

    def __getitem__(self, index):
        return {"n": np.arange(N)[index].tolist()}


FRAME = pandas.DataFrame({"n": range(N), "t": "a"})
WIDE = np.arange(N * 50).reshape(N, 50) // 50
SOURCES = {
    "array": lambda _: from_records(np.arange(N)),
    "list": lambda _: from_records(list(range(N))),
    "data set": lambda _: from_records(Squares()),
    "data set, many at once": lambda _: from_records(Many()),
    "Hugging Face": lambda _: from_records(Records()),
    "structure": lambda _: from_records({"n": np.arange(N), "more": (list(range(N)), WIDE)}),
    "zarr": zarr_array,
    "parquet": lambda path: files(path, "parquet"),
    "feather": lambda path: files(path, "feather"),
    "csv": lambda path: files(path, "csv"),
    "table": lambda _: from_records(TABLE),
    "frame": lambda _: from_records(FRAME),
    "series": lambda _: from_records(pandas.Series(range(N), index=range(N, 0, -1))),
    "dask array": lambda _: from_dask(dask.array.from_array(WIDE, chunks=(7, 25))),
    "dask frame": lambda _: from_dask(dask.dataframe.from_pandas(FRAME, npartitions=4)),
    "dask bag": lambda _: from_dask(dask.bag.from_sequence(range(N), npartitions=4).map(abs)),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_each_kind_of_data_is_read_in_any_way(kind, tmp_path):
    reader = SOURCES[kind](tmp_path)
    assert len(reader) == N
    assert [numbers(one) for one in reader] == [[i] for i in range(N)]

    def flat(reader):
        return [number for batch in reader for number in numbers(batch)]

    assert flat(reader.batched(8)) == list(range(N))
    assert flat(reader.batched(N)) == list(range(N))
    for by_block in (True, False):
        shuffled = reader.shuffled(3, by_block=by_block)
        once = flat(shuffled.batched(8))
        assert once != list(range(N))
        assert sorted(once) == list(range(N))
        assert flat(shuffled.batched(3)) == once
        assert flat(shuffled.batched(3).prefetched(3, threads=2)) == once
        assert [number for i in range(3) for number in flat(shuffled.sharded(i, 3))] == once
    half = reader.shuffled(3).batched(8)
    list(half.limited(batches=2))
    assert flat(cloudpickle.loads(cloudpickle.dumps(half))) == flat(half)


def test_parts_of_dicts_and_tuples_stay_together():
    data = {"x": np.arange(10), "y": (np.arange(10) * 2, list("abcdefghij"))}
    for batch in from_records(data).shuffled(3).batched(4):
        assert (batch["x"] * 2 == batch["y"][0]).all()
        assert batch["y"][1] == ["abcdefghij"[i] for i in batch["x"]]


ARRAYS = {
    "numbers": np.arange(10),
    "rows": np.arange(60).reshape(10, 2, 3),
    "columns": np.asfortranarray(np.arange(20).reshape(10, 2)),
    "backwards": np.arange(30)[::-3],
    "without width": np.zeros((10, 0)),
    "objects": np.array([[i] for i in range(10)] + [None], dtype=object)[:10],
    "structured": np.zeros(10, [("a", "i4"), ("b", "U3")]),
    "a subclass": np.rec.array(np.arange(10)),
}


@pytest.mark.parametrize("size", [None, 1, 3, 5, 10, 11])
@pytest.mark.parametrize("kind", ARRAYS)
def test_batches_of_an_array_are_its_slices(kind, size):
    data = ARRAYS[kind]
    reader = from_records(data) if size is None else from_records(data).batched(size)
    expected = [data[i] if size is None else data[i : i + size] for i in range(0, 10, size or 1)]
    passes = [list(reader)]
    iter(reader)
    passes.append([reader.read() for _ in expected])
    for found in passes:
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert type(one) is type(other)
            np.testing.assert_array_equal(one, other)
            if isinstance(one, np.ndarray) and one.size and kind != "objects":
                assert np.shares_memory(one, data)
                assert not one.flags.writeable


# In blocks


class Chunked:
    """As an array of `n` rows in chunks, of which blocks have four."""

    dtype, chunks = np.dtype("V2000000"), (2,)

    def __init__(self, n):
        self.shape, self.read = (n,), []

    def __getitem__(self, index):
        self.read.append(index.start // 4)
        return np.arange(self.shape[0])[index]


def test_a_shuffled_pass_loads_each_block_once():
    data = Chunked(30)
    records = np.concatenate(list(from_records(data).shuffled(1).batched(5)))
    assert sorted(records) == list(range(30))
    assert sorted(data.read) == list(range(8))
    assert data.read != list(range(8))


def test_a_batch_of_mixed_records_loads_each_of_its_blocks_once():
    data = Chunked(30)
    batch = from_records(data).shuffled(1, by_block=False).batched(30).read()
    assert batch.tolist() == from_records(range(30)).shuffled(1).batched(30).read()
    assert data.read == list(range(8))


def test_data_that_changes_under_a_reader_is_noticed():
    data = Chunked(8)
    reader = from_records(data)
    data.shape = (3,)
    with pytest.raises(ValueError, match=r"rows 0 to 4 of .*: expected 4 records.*found 3"):
        reader.read()


def test_an_error_names_the_block(tmp_path):
    reader = files(tmp_path, "parquet").batched(20)
    reader.read()
    (tmp_path / "b.parquet").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        reader.read()
    assert caught.value.__notes__ == [f"While reading {tmp_path}/b.parquet."]


# Refused


BAG = dask.bag.from_sequence([1, 2], npartitions=2)
ONES = dask.array.ones(4)
NO_DATA = (3, "text", iter([1]), np.array(1), (), {}, None)
REFUSED = [
    *((partial(from_records, data), r"must have a length.*from_iterable") for data in NO_DATA),
    (lambda: from_records({"x": [1, 2], "y": [1, 2, 3]}), r"\{'x': 2, 'y': 3\}"),
    (lambda: from_records(BAG), "Use from_dask"),
    (lambda: from_dask([1]), "collection must be a Dask array"),
    (lambda: from_dask(BAG, lengths=[2]), "one item for each of the 2 partitions"),
    (lambda: from_dask(BAG, lengths=[-1, 2]), "lengths must be a list"),
    (lambda: from_dask(ONES, lengths=[4]), "is not for arrays"),
    (lambda: from_dask(ONES[ONES > 0]), "compute_chunk_sizes"),
    (lambda: from_arrow("a.parquet"), r"must be a pyarrow\.dataset\.Dataset"),
    (lambda: from_arrow(TABLE), "for a table use from_records"),
]


@pytest.mark.parametrize(("make", "says"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_no_such_data_is_refused(make, says):
    with pytest.raises(DefinitionError, match=says):
        make()


def test_what_is_persisted_on_a_cluster_is_refused_at_once():
    """Only its futures would be there, which a local scheduler cannot compute."""
    array = dask.array.arange(20, chunks=7)
    bag = dask.bag.from_sequence(range(20), npartitions=3)
    frame = dask.dataframe.from_pandas(FRAME[:20], npartitions=3)
    here = [each.persist(scheduler="synchronous") for each in (array, bag, frame)]
    with Client(
        processes=False, n_workers=1, dashboard_address=None, set_as_default=False
    ) as client:
        there = [client.persist(each) for each in (array, bag, frame)]
        for collection in (*there, there[0] + 1, there[1].map(str), there[2].n + 1):
            refused = "persisted on a cluster.*scheduler='threads'"
            with pytest.raises(DefinitionError, match=refused):
                from_dask(collection, lengths=None)
        client.cancel(there)
    for collection in here:
        assert len(from_dask(collection).batched(20).read()) == 20


def test_lengths_save_counting():
    computed = []

    def see(partition):
        computed.append(1)
        return partition

    whole = dask.bag.from_sequence(range(4), npartitions=2).map_partitions(see)
    reader = from_dask(whole, lengths=[2, 2])
    assert not computed
    assert list(reader) == [0, 1, 2, 3]
    assert len(computed) == 2


@pytest.mark.parametrize("columns", [None, ["a"], ["a.b", "a"], ["nested"], ["kind", "time"]])
def test_columns_of_any_name_and_type_come_as_pyarrow_reads_them(columns, tmp_path):
    table = pyarrow.table(
        {
            "a": range(9),
            "a.b": [f"x{i}" for i in range(9)],
            "nested": [{"a": i, "l": [i] * (i % 3)} for i in range(9)],
            "kind": pyarrow.array(["u", "v", None] * 3).dictionary_encode(),
            "time": pyarrow.array(range(9), pyarrow.timestamp("us", "UTC")),
        }
    )
    parquet.write_table(table, tmp_path / "0.parquet", row_group_size=4)
    parquet.write_table(table.drop(["nested"]), tmp_path / "1.parquet")
    expected = dataset.dataset(tmp_path, format="parquet").to_table(columns)
    whole = dataset.dataset(tmp_path, format="parquet")
    assert from_arrow(whole, columns=columns).batched(100).read() == expected


def test_data_that_raises_stop_iteration_loses_no_record():
    class Stopping:
        def __len__(self):
            return 4

        def __getitem__(self, i):
            if i == 2:
                raise StopIteration
            return i

    for reader in (from_records(Stopping()), from_records(Stopping()).batched(2)):
        with pytest.raises(RuntimeError, match="Reading .*2.* raised StopIteration"):
            list(reader)
