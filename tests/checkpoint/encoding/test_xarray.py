"""xarray objects come back as they were, without pickle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jobrunner import CheckpointError, DefinitionError
from jobrunner.checkpoint import encode_blobs
from jobrunner.testing import assert_identical
from tests.stores import decode_forged, written_and_read

xr = pytest.importorskip("xarray", "2024.10")
pd = pytest.importorskip("pandas")


def assert_same(expected: Any, found: Any) -> None:
    assert type(found) is type(expected)
    xr.testing.assert_identical(expected, found)
    if isinstance(expected, xr.DataArray):
        expected, found = expected.to_dataset(name="data"), found.to_dataset(name="data")
    assert list(found.coords) == list(expected.coords)
    assert list(found.data_vars) == list(expected.data_vars)
    for name, variable in expected.variables.items():
        other = found.variables[name]
        assert (other.dims, other.dtype) == (variable.dims, variable.dtype)
        if type(variable.data) is np.ndarray and not isinstance(variable, xr.IndexVariable):
            assert_identical(variable.data, other.data)
    assert set(found.xindexes) == set(expected.xindexes)
    for name, index in expected.xindexes.items():
        other = found.xindexes[name]
        assert (type(other), other.dim) == (type(index), index.dim)
        assert index.index.identical(other.index)
        assert getattr(index.index, "freq", None) == getattr(other.index, "freq", None)


COORDS = [
    np.arange(3),
    np.linspace(0, 1, 3).astype("f4"),
    list("abc"),
    pd.date_range("2024-01-31", periods=3, freq="ME"),
    pd.RangeIndex(3),
    pd.CategoricalIndex(list("xyx")),
    np.array(["w", "x", "y"], object),
]
DATA = [
    np.arange(3, dtype=">i2"),
    np.array(["a", "é", ""]),
    np.array(["a", None, "b"], object),
    np.array(["NaT"] * 3, "M8[us]"),
    np.zeros((3, 2)).view("c16")[:, 0],
    np.asfortranarray(np.ones((3, 2))),
]


def datasets() -> list[Any]:
    """With coordinates and data of all kinds."""
    by_coord = []
    for coord in COORDS:
        dataset = xr.Dataset({"b": ("x", np.ones(3))}, {"x": coord}, {"title": "é"})
        dataset["x"].attrs["long_name"] = "axis"
        by_coord.append(dataset)
    data = {f"d{i}": (("x", "y")[: it.ndim], it, {"unit": 1.5}) for i, it in enumerate(DATA)}
    others = {"t": np.datetime64("NaT", "ns"), "lat": ("x", np.arange(3)), "s": "text"}
    without_index = by_coord[1].drop_indexes("x")
    return [*by_coord, xr.Dataset(data, others), without_index, by_coord[0][{"x": slice(0)}]]


def test_datasets_and_their_arrays_come_back_as_they_were() -> None:
    for dataset in datasets():
        saved = [dataset, *(dataset[name] for name in dataset.variables)]
        for expected, found in zip(saved, written_and_read(saved), strict=True):
            assert_same(expected, found)


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
