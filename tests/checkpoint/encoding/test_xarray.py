"""xarray objects come back as they were, without pickle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobrunner import CheckpointError, DefinitionError
from jobrunner.checkpoint import encode_blobs
from jobrunner.testing import assert_identical
from tests.sampling import examples
from tests.stores import decode_forged, written_and_read

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
    xr.testing.assert_identical(expected, found)
    assert list(found.coords) == list(expected.coords)
    if isinstance(expected, xr.Dataset):
        assert list(found.data_vars) == list(expected.data_vars)
        for name in expected.variables:
            assert_same_variable(expected.variables[name], found.variables[name])
    else:
        one, other = (array.variable.to_base_variable() for array in (expected, found))
        assert_same_variable(one, other)
    assert set(found.xindexes) == set(expected.xindexes)
    for name, index in expected.xindexes.items():
        other = found.xindexes[name]
        assert type(other) is type(index)
        assert index.index.identical(other.index)
        assert getattr(index.index, "freq", None) == getattr(other.index, "freq", None)
        assert (index.dim, index.index.name) == (other.dim, other.index.name)


COORDS: list[Any] = [
    lambda n: np.arange(n), lambda n: np.linspace(0, 1, n).astype("f4"), lambda n: list("abcd"[:n]),
    lambda n: pd.date_range("2024-01-31", periods=n, freq="ME"), lambda n: pd.RangeIndex(n),
    lambda n: pd.CategoricalIndex(list("xyxy"[:n])),
    lambda n: np.array(list("wxyz"[:n]), object),
]  # fmt: skip
DATA: list[Any] = [
    lambda n: np.ones(n), lambda n: np.arange(n, dtype=">i2"), lambda n: np.array(["a", "é"] * n)[:n],
    lambda n: np.array(["a", None] * n, object)[:n], lambda n: np.array(["NaT"] * n, "M8[us]"),
    lambda n: np.zeros((n, 2)).view("c16")[:, 0],
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
    if draw(st.booleans()) and "x" in dataset.xindexes:
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


class Zlib:
    pass


SQUARE = xr.Dataset({"t": (("x", "y"), np.ones((2, 2)))}, {"x": [1, 2], "y": [3, 4]})
NOT_EXACT = [
    (lambda: xr.Dataset({"t": ("x", [1.0])}).chunk(), "a Dask array, not yet computed"),
    (lambda: xr.Dataset({"t": ("x", np.array([Zlib()]))}), "no codec for its type"),
    (lambda: xr.Dataset(attrs={"f": Zlib()}), "item attrs/f"),
    (lambda: SQUARE.stack(z=("x", "y")), r"index of 'z' .*reset_index\('z'\)"),
]


@pytest.mark.parametrize(("make", "why"), NOT_EXACT)
def test_what_is_not_exact_is_refused_by_name(make: Any, why: str) -> None:
    with pytest.raises(DefinitionError, match=why):
        encode_blobs("n", {"x": make()})


NONE: dict[str, Any] = {"attrs": {}}
FORGED = [
    ("DataArray", {"name": "x", "data": {"dims": ["x"], "data": 1}, "coords": {}}),
    ("Dataset", {"variables": {}, "coords": {"order": ["x"]}, **NONE}),
    ("DataArray", {"name": "x", "data": None, "coords": {}}),
]


@pytest.mark.parametrize(("name", "parts"), FORGED)
def test_forged_parts_are_refused(name: str, parts: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=f"xarray cannot make xarray.{name} of it"):
        decode_forged(f"xarray.{name}", parts)
