"""xarray objects come back as they were, without pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from jobrunner import CheckpointError, DefinitionError
from jobrunner.checkpoint import Decoder, encode_blobs
from jobrunner.testing import assert_identical
from tests.sampling import examples
from tests.stores import write_store, written_and_read

xr = pytest.importorskip("xarray", "2024.10")
pd = pytest.importorskip("pandas")


def assert_same_variable(expected: Any, found: Any) -> None:
    assert type(found) is type(expected)
    assert (found.dims, found.dtype) == (expected.dims, expected.dtype)
    xr.testing.assert_identical(expected, found)
    if type(expected.data) is np.ndarray and not isinstance(expected, xr.IndexVariable):
        assert_identical(expected.data, found.data)


def assert_same(expected: Any, found: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, xr.DataTree):
        one, other = dict(expected.subtree_with_keys), dict(found.subtree_with_keys)
        assert list(one) == list(other)
        assert expected.name == found.name
        for key, node in one.items():
            assert_same(node.to_dataset(inherit=False), other[key].to_dataset(inherit=False))
        return
    xr.testing.assert_identical(expected, found)
    assert list(found.coords) == list(expected.coords)
    if isinstance(expected, xr.Dataset):
        assert list(found.variables) == list(expected.variables)
        assert list(found.sizes) == list(expected.sizes)
        for name in expected.variables:
            assert_same_variable(expected.variables[name], found.variables[name])
    else:
        assert_same_variable(expected.variable, found.variable)
    assert list(found.xindexes) == list(expected.xindexes)
    for name, index in expected.xindexes.items():
        other = found.xindexes[name]
        assert type(other) is type(index)
        pd.testing.assert_index_equal(index.index, other.index, exact=True)
        assert getattr(index.index, "freq", None) == getattr(other.index, "freq", None)
        assert (index.dim, index.index.name) == (other.dim, other.index.name)


COORDS: list[Any] = [
    lambda n: np.arange(n), lambda n: np.linspace(0, 1, n).astype("f4"), lambda n: list("abcd"[:n]),
    lambda n: pd.date_range("2024-01-31", periods=n, freq="ME"), lambda n: pd.RangeIndex(n),
    lambda n: pd.CategoricalIndex(list("xyxy"[:n])), lambda n: pd.period_range("2024", periods=n, freq="M"),
    lambda n: np.array(list("wxyz"[:n]), object), lambda n: pd.interval_range(0, periods=n),
]  # fmt: skip
DATA: list[Any] = [
    lambda n: np.ones(n), lambda n: np.arange(n, dtype=">i2"), lambda n: np.array(["a", "é"] * n)[:n],
    lambda n: np.array(["a", None] * n, object)[:n], lambda n: np.array(["NaT"] * n, "M8[us]"),
    lambda n: pd.Categorical(list("abab"[:n])), lambda n: np.zeros((n, 2)).view("c16")[:, 0],
]  # fmt: skip
ATTRS = st.dictionaries(
    st.text(max_size=3), st.integers() | st.text(max_size=3) | st.just([1.5, "x"]), max_size=2
)


@st.composite
def datasets(draw: Any) -> Any:
    sizes = {"x": draw(st.integers(0, 4)), "y": draw(st.integers(1, 3))}
    dataset = xr.Dataset(attrs=draw(ATTRS))
    for name in draw(st.permutations(["x", "y", "t", "lat", "n", "s"])):
        if name in sizes:
            if draw(st.booleans()):
                dataset = dataset.assign_coords({name: draw(st.sampled_from(COORDS))(sizes[name])})
        elif name == "t":
            order = draw(st.sampled_from(["C", "F"]))
            dataset["t"] = (("x", "y"), np.ones((sizes["x"], sizes["y"]), order=order), draw(ATTRS))
        elif name == "lat":
            dataset = dataset.assign_coords(lat=("x", np.arange(sizes["x"]), draw(ATTRS)))
        elif name == "s":
            dataset = dataset.assign_coords(
                s=draw(st.sampled_from([5, "text", np.datetime64("NaT", "ns")]))
            )
        else:
            dataset["n"] = ("x", draw(st.sampled_from(DATA))(sizes["x"]))
    is_plain = all(isinstance(it.dtype, np.dtype) for it in dataset.variables.values())
    can_stack = is_plain and sizes["x"] and dataset.xindexes.keys() >= {"x", "y"}
    if can_stack and draw(st.booleans()):
        dataset = dataset.stack(z=("x", "y"))
    elif draw(st.booleans()) and "x" in dataset.xindexes:
        dataset = dataset.drop_indexes("x")
    for name in dataset.xindexes:
        dataset[name].attrs["long_name"] = "axis"
    return dataset


@given(datasets())
@settings(max_examples=examples(15))
def test_any_dataset_and_its_arrays_come_back_as_they_were(dataset: Any) -> None:
    assert_same(dataset, written_and_read(dataset))
    for array in dataset.variables:
        assert_same(dataset[array], written_and_read(dataset[array]))


def test_trees_and_variables_come_back_as_they_were() -> None:
    top = xr.Dataset({"t": ("x", [1.0, 2])}, {"x": [10, 20]}, {"a": 1})
    low = xr.Dataset({"u": (("x", "y"), np.ones((2, 2)))}, {"y": ["p", "q"]})
    tree = xr.DataTree.from_dict({"/": top, "/z/deep": low, "/a": low, "/empty": None}, name="root")
    assert_same(tree, written_and_read(tree))
    with pytest.raises(DefinitionError, match=r"part of a larger tree; save tree.copy\(\)"):
        encode_blobs("n", {"x": tree["z"]})
    variable = xr.Variable(("x", "y"), np.ones((2, 3), "f4", order="F"), {"u": "m"})
    assert_same_variable(variable, written_and_read(variable))


def test_other_readers_see_the_variables(tmp_path: Path) -> None:
    dataset = xr.Dataset({"t": ("x", [1.0, 2])}, {"x": [10, 20], "lat": ("x", [5, 6])})
    write_store(tmp_path, encode_blobs("n", {"ds": dataset}))
    group = zarr.open_group(tmp_path / "n.0", mode="r")
    assert group["ds/variables/t/data"][:].tolist() == [1, 2]
    assert group["ds/coords/variables/lat/data"][:].tolist() == [5, 6]
    assert group["ds/coords/indexes/0/index/values"][:].tolist() == [10, 20]


def test_derived_datasets_share_indexes_but_not_memory(tmp_path: Path) -> None:
    dataset = xr.Dataset({"t": (("x", "y"), np.ones((2, 2)))}, {"x": [1, 2]}, {"a": 1})
    blobs = {"a": dataset, "b": dataset.mean("y"), "c": dataset["t"] + 1}
    found = write_store(tmp_path, encode_blobs("n", blobs)).load()
    for name, value in blobs.items():
        assert_same(value, found[name])
    with pytest.raises(DefinitionError, match="share memory|contain the same Variable"):
        encode_blobs("n", {"a": dataset, "b": dataset["t"]})


class Zlib:
    pass


NOT_EXACT = [
    (lambda: xr.Dataset({"t": ("x", [1.0])}).chunk(), "a Dask array, not yet computed"),
    (lambda: xr.Dataset({"t": ("x", np.array([Zlib()]))}), "no codec for its type"),
    (lambda: xr.Dataset(attrs={"f": Zlib()}), "item attrs/f"),
    (lambda: xr.IndexVariable("x", [1]), r"save variable.to_base_variable\(\)"),
]


@pytest.mark.parametrize(("make", "why"), NOT_EXACT)
def test_what_is_not_exact_is_refused_by_name(make: Any, why: str) -> None:
    with pytest.raises(DefinitionError, match=why):
        encode_blobs("n", {"x": make()})


NONE: dict[str, Any] = {"attrs": {}}
NO_COORDS: dict[str, Any] = {"order": [], "variables": {}, "indexes": []}
FORGED = [
    ("Variable", {"dims": ["x", "y"], "data": np.ones(2), **NONE}),
    (
        "Dataset",
        {"variables": {}, "coords": {**NO_COORDS, "order": ["x"]}, "order": [], "dims": [], **NONE},
    ),
    ("Dataset", {"variables": {}, "coords": NO_COORDS, "order": ["x"], "dims": [], **NONE}),
    ("DataTree", {"name": None, "nodes": {"a/../..": 1}}),
    ("DataArray", {"name": "x", "data": None, "coords": NO_COORDS}),
]


@pytest.mark.parametrize(("name", "parts"), FORGED)
def test_forged_parts_are_refused(name: str, parts: dict[str, Any]) -> None:
    blob = encode_blobs("n", {"x": parts})["x"]
    node = {"$": f"xarray.{name}", "of": blob.tree}
    with pytest.raises(CheckpointError, match=f"xarray cannot make xarray.{name} of it"):
        Decoder(lambda i: blob.parts[i].data, where="Blob 'x'").decode(node)
