"""A store is read by others as docs/readers.md says, and as plain numbers with attributes."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import xarray

from jobrunner import MultiNodeCheckpointManager
from jobrunner.testing import assert_identical
from tests.readers.kinds import ARRAYS, save
from tests.readers.readers import READERS, MissingReaderError, cell, compare

TABLE = Path(__file__).parents[2] / "docs" / "readers.md"
EVERYDAY = ("Zarr-Python", "xarray", "TensorStore")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("readers") / "kinds")


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, str]]:
    """Kind of array -> reader -> what the documentation says; those that all read have no row."""
    text = TABLE.read_text()
    first, _, *others = text.partition("| kind of array")[2].split("\n\n")[0].splitlines()
    lines = [f"| kind of array{first}", *others]
    head, *rows = ([part.strip() for part in line.strip("|").split("|")] for line in lines)
    found = {kind: dict(zip(head[1:], cells, strict=True)) for kind, *cells in rows}
    all_read = text.partition("All of them read ")[2].partition(".")[0].replace("\n", " ")
    for kind in all_read.split("; "):
        found[kind] = dict.fromkeys(head[1:], "yes")
    return found


@pytest.mark.parametrize(
    "reader",
    [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.nightly) for name in READERS],
)
def test_a_reader_reads_what_the_table_says(
    store: Path, table: dict[str, dict[str, str]], reader: str
) -> None:
    try:
        wrong = compare(reader, store)
    except MissingReaderError as error:
        pytest.skip(f"{reader} is missing: {error}")
    assert {kind: cell(kind, wrong) for kind in ARRAYS} == {
        kind: table[kind][reader] for kind in ARRAYS
    }
    listed = {name for arrays in ARRAYS.values() for name in arrays}
    assert wrong.keys() <= listed  # containers and rows are read by all


def test_xarray_shows_dates_as_dates_and_all_groups(store: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tree = xarray.open_datatree(store, engine="zarr", chunks=None)
    dates = [tree[f"date{i}"].dtype.kind for i in range(10)]
    assert dates == ["M", "M", "M", "M", "M", "M", "M", "i", "i", "M"]
    spans = [tree[f"span{i}"].dtype.kind for i in range(10)]
    assert spans == ["m", "m", "m", "m", "m", "m", "m", "i", "i", "m"]
    assert tree["span4"].values[0] == np.timedelta64(7, "D")
    groups = {"/", "/_stacks", "/params", "/params/layers"}
    assert {group.path for group in tree.subtree} == groups
    assert tree["counts"].shape == (300,)
    assert tree.attrs["step"] == 7


def test_we_open_lazily_what_was_saved(store: Path) -> None:
    checkpoint = MultiNodeCheckpointManager(store.parent).open(1)["n"]
    for name, array in ((name, it) for arrays in ARRAYS.values() for name, it in arrays.items()):
        assert_identical(array, checkpoint.load(name))
        lazy = checkpoint[name]
        assert lazy.shape == array.shape, name
        found = np.asarray(lazy[...])
        if array.dtype.isbuiltin == 2 or found.dtype.kind == "V":
            found = np.frombuffer(found.tobytes(), array.dtype).reshape(array.shape)
        assert found.dtype.kind == array.dtype.kind, name
        assert str(found.tolist()) == str(array.tolist()), name  # NaT is not equal to itself
    for name in ("row3", "day3", "word3"):
        assert_identical(checkpoint.load(name), checkpoint[name][...])
