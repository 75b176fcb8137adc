"""What readers read: each kind of data gives the same records in any order, shard and batch."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from distributed import Client

from jobrunner import DefinitionError, PlanMismatchError
from jobrunner.data import (
    DataReader,
    from_arrow,
    from_csv,
    from_dask,
    from_lines,
    from_parquet,
    from_records,
)

N = 40


def arrow_of(batch: Any) -> list[int]:
    return [batch["n"]] if isinstance(batch, dict) else batch["n"].to_pylist()


def numbers(batch: Any) -> list[int]:
    return [int(each) for each in np.atleast_1d(batch)]


def zarr_array(path: Path) -> DataReader:
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(path / "a.zarr", shape=(N, 1 << 18), chunks=(3, 1 << 18), dtype="i4")
    array[:, 0] = np.arange(N)
    return from_records(array)


def lines(path: Path) -> DataReader:
    (path / "a.txt").write_text("".join(f"{i}\n" for i in range(25)))
    (path / "b.txt").write_bytes(b"\r\n".join(b"%d" % i for i in range(25, N)))
    (path / "empty.txt").write_text("")
    return from_lines([path / "a.txt", path / "empty.txt", path / "b.txt"])


def csv(path: Path) -> DataReader:
    pytest.importorskip("pyarrow")
    (path / "a.csv").write_text("n,t\n" + "".join(f'{i},"a,{i}"\n' for i in range(25)))
    (path / "b.csv").write_text("n,t\n\n" + "\r\n\n".join(f"{i},b" for i in range(25, N)))
    return from_csv([path / "a.csv", path / "b.csv"], types={"n": "int16"})


def parquet(path: Path) -> DataReader:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for name, part in (("b", range(25, N)), ("a", range(25))):
        table = arrow.table({"n": list(part), "unused": list(part)})
        parquet.write_table(table, path / f"{name}.parquet", row_group_size=7)
    return from_parquet(path, columns=["n"])


def feather(path: Path) -> DataReader:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import dataset, feather

    feather.write_feather(arrow.table({"n": list(range(N))}), path / "a.arrow")
    return from_arrow(dataset.dataset(path / "a.arrow", format="feather"))


def table(path: Path) -> DataReader:
    arrow = pytest.importorskip("pyarrow")
    return from_records(arrow.table({"n": list(range(N))}))


def frame(path: Path) -> DataReader:
    pandas = pytest.importorskip("pandas")
    return from_records(pandas.DataFrame({"n": range(N), "t": "a"}))


def dask_array(path: Path) -> DataReader:
    array = pytest.importorskip("dask.array")
    whole = np.arange(N * 4).reshape(N, 4) // 4
    return from_dask(array.from_array(whole, chunks=(7, 2)), scheduler="synchronous")


def dask_frame(path: Path) -> DataReader:
    frames = pytest.importorskip("dask.dataframe")
    import pandas

    whole = frames.from_pandas(pandas.DataFrame({"n": range(N)}), npartitions=4)
    return from_dask(whole, scheduler="synchronous")


def dask_bag(path: Path) -> DataReader:
    bag = pytest.importorskip("dask.bag")
    whole = bag.from_sequence(range(N), npartitions=4).map(abs)
    return from_dask(whole, scheduler="synchronous")


def structure(path: Path) -> DataReader:
    return from_records({"n": np.arange(N), "chunks": (list(range(N)), np.zeros(N))})


class Squares:
    """A map-style PyTorch data set."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> int:
        return i


class Many(Squares):
    """One that reads several at once."""

    def __getitems__(self, listed: list[int]) -> list[int]:
        return listed


Read = Callable[[Any], list[int]]
SOURCES: dict[str, tuple[Callable[[Path], DataReader], Read]] = {
    "array": (lambda _: from_records(np.arange(N)), numbers),
    "list": (lambda _: from_records(list(range(N))), numbers),
    "data set": (lambda _: from_records(Squares()), numbers),
    "data set, many at once": (lambda _: from_records(Many()), numbers),
    "structure": (structure, lambda it: numbers(it["n"])),
    "zarr": (zarr_array, lambda it: numbers(it[..., 0])),
    "lines": (lines, numbers),
    "csv": (csv, arrow_of),
    "parquet": (parquet, arrow_of),
    "feather": (feather, arrow_of),
    "table": (table, arrow_of),
    "frame": (frame, lambda it: numbers(it["n"])),
    "dask array": (dask_array, lambda it: numbers(it[..., 0])),
    "dask frame": (dask_frame, lambda it: numbers(it["n"])),
    "dask bag": (dask_bag, numbers),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_each_kind_of_data_is_read_in_any_way(kind: str, tmp_path: Path) -> None:
    make, read = SOURCES[kind]
    reader = make(tmp_path)
    assert len(reader) == N
    assert [read(one) for one in reader] == [[i] for i in range(N)]

    def flat(reader: DataReader) -> list[int]:
        return [number for batch in reader for number in read(batch)]

    assert flat(reader.batched(8)) == list(range(N))
    assert flat(reader.batched(N)) == list(range(N))
    # Mixing all records loads a block again and again.
    orders = [True] if kind in ("zarr", "csv") or "dask" in kind else [True, False]
    for shuffled in (reader.shuffled(3, by_block=by_block) for by_block in orders):
        once = flat(shuffled.batched(8))
        assert once != list(range(N))
        assert sorted(once) == list(range(N))
        assert flat(shuffled.batched(3)) == once
        assert flat(shuffled.batched(3).prefetched(3, threads=2)) == once
        assert [number for i in range(3) for number in flat(shuffled.sharded(i, 3))] == once
    half = reader.shuffled(3).batched(8)
    list(half.limited(batches=2))
    assert flat(pickle.loads(cloudpickle.dumps(half))) == flat(half)


def test_blocks_are_shuffled_and_the_records_of_each_so_each_is_loaded_once(
    tmp_path: Path,
) -> None:
    loaded = []
    reader = parquet(tmp_path)
    source = reader._cursor.setup.source
    load = source._load
    source._load = lambda i: loaded.append(i) or load(i)
    list(reader.shuffled(1).batched(4))
    assert sorted(loaded) == list(range(7))
    assert loaded != list(range(7))


@pytest.mark.parametrize(
    "lengths", [[7, 7, 7, 7], [7, 7, 3], [4, 2, 2, 4, 4], [3, 7, 7], [5, 4, 5, 4], [6]]
)
def test_row_groups_that_are_read_in_a_run_are_whole(lengths: list[int], tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    n = sum(lengths)
    for name, first in (("a", 0), ("b", n)):
        table = arrow.table({"m": [0] * n, "n": list(range(first, first + n))})
        with parquet.ParquetWriter(tmp_path / f"{name}.parquet", table.schema) as writer:
            start = 0
            for length in lengths:
                writer.write_table(table.slice(start, length))
                start += length
    for columns in (["n", "m"], ["n"]):
        for size in (1, 4, n):
            reader = from_parquet(tmp_path, columns=columns).batched(size)
            batches = list(reader)
            assert [it for batch in batches for it in arrow_of(batch)] == list(range(2 * n))
            assert {tuple(batch.column_names) for batch in batches} == {tuple(columns)}
            assert [arrow_of(it) for it in reader.prefetched(4, threads=2)] == [
                arrow_of(it) for it in batches
            ]
    middle = from_parquet(tmp_path).sharded(1, 3)
    assert [record["n"] for record in middle] == list(range(2 * n // 3, 4 * n // 3))


def test_one_reader_goes_through_the_row_groups_of_a_file(tmp_path: Path) -> None:
    reader = parquet(tmp_path)  # groups of 7, 7, 7, 4; 7, 7, 1
    load = reader._cursor.setup.source._load
    runs = [load._following for _ in reader]
    assert [sum(1 for each in runs if each is it) for it in dict.fromkeys(runs)] == [7, 18, 15]


def test_a_pass_in_other_blocks_is_another_order(tmp_path: Path) -> None:
    state = parquet(tmp_path).shuffled(1).state_dict()
    message = "field 'order': expected 'shuffled, seed 1', found 'shuffled, seed 1, in 7 blocks"
    with pytest.raises(PlanMismatchError, match=message):
        from_records(np.arange(N)).shuffled(1).load_state_dict(state)


def test_lines_come_without_their_ends_and_files_in_the_order_of_their_names(
    tmp_path: Path,
) -> None:
    parquet(tmp_path)
    assert from_parquet(tmp_path, columns=["n"]).read() == {"n": 0}
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\r\n\nb \n\rc")
    assert list(from_lines(path)) == ["a", "", "b ", "\rc"]


def test_files_of_a_list_are_read_in_its_order(tmp_path: Path) -> None:
    parquet(tmp_path)
    b, a = listed = [tmp_path / "b.parquet", tmp_path / "a.parquet"]
    assert from_parquet(listed).read() == {"n": 25, "unused": 25}
    for shuffled in (lambda it: it, lambda it: it.shuffled(1)):
        state = {**shuffled(from_parquet([a, b])).state_dict(), "rest": [[10, N, 1]]}
        assert "listed" not in state["order"]
        with pytest.raises(PlanMismatchError, match="field 'order'.*files as listed"):
            shuffled(from_parquet(listed)).load_state_dict(state)
        for same in (
            from_parquet([a, b]),
            from_parquet(tmp_path),
            pickle.loads(pickle.dumps(from_parquet([a, b]))),
        ):
            shuffled(same).load_state_dict(state)
        as_listed = shuffled(pickle.loads(pickle.dumps(from_parquet(listed))))
        as_listed.load_state_dict(shuffled(from_parquet(listed)).state_dict())
    for name in "ba":
        (tmp_path / name).write_text(f"n\n{ord(name)}\n")
    for read in (from_lines, from_csv):
        last = list(read([tmp_path / "b", tmp_path / "a"]))[-1]
        assert last in ("97", {"n": 97})


@pytest.mark.parametrize("columns", [None, ["x", "y"]])
def test_parquet_files_of_other_columns_are_refused_and_lose_no_data(
    columns: list[str] | None, tmp_path: Path
) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import dataset, parquet

    def write(name: str, **columns: Any) -> Path:
        path = tmp_path / f"{name}.parquet"
        parquet.write_table(arrow.table(columns), path)
        return path

    first = write("0", x=[1, 2], y=[1, 2])
    for name, table in (("1", {"x": [3], "z": [3]}), ("2", {"x": [3]}), ("3", {"z": [3]})):
        other = write(name, **table)
        with pytest.raises(
            DefinitionError, match=rf"\['x', 'y'\] as in .*0.parquet, found .*{name}.pa"
        ):
            from_parquet([first, other], columns=columns)
    assert len(from_parquet([first, tmp_path / "1.parquet"], columns=["x"])) == 3
    assert len(from_parquet([first, tmp_path / "1.parquet"], columns=["x", "x"])) == 3
    more = write("4", y=[3], x=[3], z=[3])
    if columns:
        assert from_parquet([first, more], columns=columns).batched(3).read().num_rows == 3
    else:
        with pytest.raises(DefinitionError, match=r"found \['x', 'y', 'z'\]"):
            from_parquet([first, more])
    schema = dataset.dataset(tmp_path / "1.parquet").schema
    with_nulls = from_arrow(dataset.dataset([first, tmp_path / "1.parquet"], schema=schema))
    assert with_nulls.read() == {"x": 1, "z": None}


def test_types_of_parquet_files_are_promoted_as_arrow_does(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    kinds = {
        "0": [None, None],
        "1": arrow.array([1, 2], "int8"),
        "2": [3, 1 << 40],
        "3": ["a", "b"],
    }
    files = {name: tmp_path / name for name in kinds}
    for name, values in kinds.items():
        parquet.write_table(arrow.table({"x": values}), files[name])
    reader = from_parquet([files["0"], files["1"], files["2"]])
    assert [row["x"] for row in reader] == [None, None, 1, 2, 3, 1 << 40]
    for batch in reader.batched(2):
        assert batch.schema.field("x").type == arrow.int64()
    with pytest.raises(
        DefinitionError, match="'x' must.* expected int64 as .*, found string in .*3"
    ):
        from_parquet([files["2"], files["3"]])


@pytest.mark.parametrize("kind", ["gzip", "bz2", "lzma", "zipfile"])
def test_compressed_files_are_refused(kind: str, tmp_path: Path) -> None:
    module, path = importlib.import_module(kind), tmp_path / "a.csv"
    if kind == "zipfile":
        with module.ZipFile(path, "w") as file:
            file.writestr("a", "n\n1\n")
    else:
        with module.open(path, "wt") as file:
            file.write("n\n1\n")
    for read in (from_lines, from_csv):
        with pytest.raises(
            DefinitionError, match=rf"{read.__name__}: .* not be compressed.*a\.csv"
        ):
            read(path)


def test_long_files_are_read_block_by_block(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "long.txt"
    path.write_text("".join(f"{i:01000d}\n" for i in range(3000)))
    reader = from_lines(path)
    assert [int(line) for batch in reader.batched(700) for line in batch] == list(range(3000))
    once = [int(line) for batch in reader.shuffled(1).batched(700) for line in batch]
    assert sorted(once) == list(range(3000))
    csv_path = tmp_path / "long.csv"
    csv_path.write_text("n\n" + path.read_text())
    table = from_csv(csv_path, types={"n": "string"}).batched(3000).read()
    assert [int(each) for each in table["n"].to_pylist()] == list(range(3000))


def test_data_that_changes_under_a_reader_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("1\n2\n")
    reader = from_lines(path)
    path.write_text("123\n")
    with pytest.raises(ValueError, match=r"a\.txt, bytes 0 to 4: expected 2 records.*found 1"):
        reader.read()


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "a.csv"
    for read, what in (
        (from_lines, path),
        (from_csv, [path]),
        (from_parquet, path),
        (from_lines, tmp_path),
    ):
        message = f"{read.__name__}: paths must be files that the worker can open; .* no file: '"
        with pytest.raises(FileNotFoundError, match=message) as missing:
            read(what)
        assert str(missing.value.filename) == str(path if read is from_csv else what)
    path.write_bytes(b"\xff\n")
    with pytest.raises(UnicodeDecodeError) as caught:
        from_lines(path).read()
    assert str(path) in caught.value.__notes__[0]
    for wrong in ("utf-16", "none", 1):
        with pytest.raises(DefinitionError, match="encoding must be"):
            from_lines(path, encoding=wrong)  # type: ignore[arg-type]
    for paths in ([], 3, [3]):
        with pytest.raises(DefinitionError, match="paths must be a path"):
            from_lines(paths)  # type: ignore[arg-type]


def test_csv_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    a, b = tmp_path / "a.csv", tmp_path / "b.csv"
    a.write_text("n,m\n1,2\n")
    b.write_text("n\n1\n")
    with pytest.raises(DefinitionError, match=r"expected \['n', 'm'\].*found \['n'\] in .*b.csv"):
        from_csv([a, b])
    with pytest.raises(DefinitionError, match=r"found \['x'\], expected some of \['n', 'm'\]"):
        from_csv(a, types={"x": "int8"})
    with pytest.raises(DefinitionError, match="types must be types of Arrow.*'nothing' for 'n'"):
        from_csv(a, types={"n": "nothing"})
    b.write_text("n\n" + "1\n" * 600_000 + "1.5\n")
    assert from_csv(b, types={"n": arrow.float32()}).batched(2).read()["n"].type == "float"
    reader = from_csv(b).batched(300_000)
    with pytest.raises(arrow.ArrowInvalid) as caught:
        list(reader)
    assert "Name the type" in caught.value.__notes__[0]
    assert f"{b}, bytes " in caught.value.__notes__[1]
    b.write_text('n\n"1\n2"\n')
    with pytest.raises(
        ValueError, match=r"a\.csv|b\.csv, bytes 2 to 8: expected 2 records.*found 1"
    ):
        from_csv(b).read()
    b.write_text("n,m\n1,2\n3\n")
    with pytest.raises(arrow.ArrowInvalid) as caught:
        from_csv(b)
    assert caught.value.__notes__ == [f"While reading {b}, bytes 4 to 10."]
    b.write_text("n,m,n\n1,2,3\n")
    with pytest.raises(
        DefinitionError, match=r"must be distinct; found \['n', 'm', 'n'\] in .*b.csv"
    ):
        from_csv(b)
    b.write_text("")
    with pytest.raises(DefinitionError, match="no names of columns"):
        from_csv(b)


def test_other_things_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    bag = pytest.importorskip("dask.bag").from_sequence([1, 2], npartitions=2)
    array = pytest.importorskip("dask.array").ones(4)
    with pytest.raises(DefinitionError, match="Use from_dask"):
        from_records(bag)
    with pytest.raises(DefinitionError, match="collection must be a Dask array"):
        from_dask([1])
    with pytest.raises(DefinitionError, match="one item for each of the 2 partitions"):
        from_dask(bag, lengths=[2])
    with pytest.raises(DefinitionError, match="lengths must be a list"):
        from_dask(bag, lengths=[-1, 2])
    with pytest.raises(DefinitionError, match="is not for arrays"):
        from_dask(array, lengths=[4])
    with pytest.raises(DefinitionError, match="delimiter must be one character"):
        from_csv("x", delimiter=1)  # type: ignore[arg-type]
    with pytest.raises(DefinitionError, match="paths must be a path"):
        from_parquet(3)  # type: ignore[arg-type]
    with pytest.raises(DefinitionError, match="compute_chunk_sizes"):
        from_dask(array[array > 0])
    with pytest.raises(DefinitionError, match=r"must be a pyarrow\.dataset\.Dataset"):
        from_arrow(3)
    parquet(tmp_path)
    with pytest.raises(DefinitionError, match=r"found \['x'\], expected some of \['n', 'unused'\]"):
        from_parquet(tmp_path, columns=["x"])


@pytest.mark.filterwarnings("ignore:Running on a single-machine scheduler")  # of Dask before 2025
def test_what_is_persisted_on_a_cluster_is_refused_at_once() -> None:
    """Only its futures would be there, which a local scheduler cannot compute."""
    array = pytest.importorskip("dask.array").arange(20, chunks=7)
    bag = pytest.importorskip("dask.bag").from_sequence(range(20), npartitions=3)
    pandas = pytest.importorskip("pandas")
    frame = pytest.importorskip("dask.dataframe").from_pandas(
        pandas.DataFrame({"n": range(20)}), npartitions=3
    )
    here = [each.persist(scheduler="synchronous") for each in (array, bag, frame)]
    with Client(
        processes=False, n_workers=1, dashboard_address=None, set_as_default=False
    ) as client:
        there = [client.persist(each) for each in (array, bag, frame)]
        for collection in (*there, there[0] + 1, there[1].map(str), there[2].n + 1):
            with pytest.raises(
                DefinitionError, match="persisted on a cluster.*scheduler='threads'"
            ):
                from_dask(collection, lengths=None)
        client.cancel(there)
    for collection in here:
        assert len(from_dask(collection, scheduler="synchronous").batched(20).read()) == 20


def test_lengths_save_counting() -> None:
    bag = pytest.importorskip("dask.bag")
    computed = []

    def see(partition: Any) -> Any:
        computed.append(1)
        return partition

    whole = bag.from_sequence(range(4), npartitions=2).map_partitions(see)
    reader = from_dask(whole, lengths=[2, 2], scheduler="synchronous")
    assert not computed
    assert list(reader) == [0, 1, 2, 3]
    assert len(computed) == 2


def test_a_package_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DefinitionError, match=r"needs pyarrow.*dask-jobrunner\[arrow\]"):
        from_parquet(tmp_path / "absent")


@pytest.mark.parametrize("columns", [None, ["a"], ["a.b", "a"], ["nested"], ["kind", "time"]])
def test_columns_of_any_name_and_type_come_as_pyarrow_reads_them(
    columns: list[str] | None, tmp_path: Path
) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import dataset, parquet

    table = arrow.table(
        {
            "a": range(9),
            "a.b": [f"x{i}" for i in range(9)],
            "nested": [{"a": i, "l": [i] * (i % 3)} for i in range(9)],
            "kind": arrow.array(["u", "v", None] * 3).dictionary_encode(),
            "time": arrow.array(range(9), arrow.timestamp("us", "UTC")),
        }
    )
    parquet.write_table(table, tmp_path / "0.parquet", row_group_size=4)
    parquet.write_table(table.drop(["nested"]), tmp_path / "1.parquet")
    expected = dataset.dataset(tmp_path, format="parquet").to_table(columns)
    whole = dataset.dataset(tmp_path, format="parquet")
    assert from_arrow(whole, columns=columns).batched(100).read() == expected


def test_data_that_raises_stop_iteration_loses_no_record() -> None:
    class Stopping:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> int:
            if i == 2:
                raise StopIteration
            return i

    for reader in (from_records(Stopping()), from_records(Stopping()).batched(2)):
        with pytest.raises(RuntimeError, match="Reading .*2.* raised StopIteration"):
            list(reader)


def test_a_bag_is_optimized_once_and_not_for_each_partition() -> None:
    bag = pytest.importorskip("dask.bag").from_sequence(range(20), npartitions=10)
    optimized = []
    optimize = type(bag).__dask_optimize__

    class Counted(type(bag)):  # type: ignore[misc]
        @staticmethod
        def __dask_optimize__(*args: Any, **kwargs: Any) -> Any:
            optimized.append(1)
            return optimize(*args, **kwargs)

    bag.__class__ = Counted
    assert list(from_dask(bag, lengths=[2] * 10, scheduler="synchronous")) == list(range(20))
    assert len(optimized) == 1
