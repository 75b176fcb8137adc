"""xarray: data arrays and datasets. Their `encoding`, of files, is not saved."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding.codecs import UnsuitableError
from jobrunner.checkpoint.encoding.dtypes import dtype_from_spec, dtype_to_spec


def encode(name: str, value: Any) -> dict[str, Any]:
    """Return its variables, coordinates and attributes."""
    coords = _pack_coords(value)
    if name == "xarray.DataArray":
        return {"name": value.name, "data": _pack_variable(value), "coords": coords}
    variables = {name: _pack_variable(array) for name, array in value.data_vars.items()}
    return {"variables": variables, "coords": coords, "attrs": dict(value.attrs)}


def decode(name: str, parts: Any) -> Any:
    """Make it again."""
    xr, coords = sys.modules["xarray"], _make_coords(parts["coords"])
    if name == "xarray.DataArray":
        return xr.DataArray(_make_variable(parts["data"]), coords, name=parts["name"])
    variables = {name: _make_variable(part) for name, part in parts["variables"].items()}
    return xr.Dataset(variables, coords, parts["attrs"])


def _pack_coords(value: Any) -> dict[Any, Any]:
    from xarray import indexes

    packed = {}
    for name, coord in value.coords.items():
        index = value.xindexes.get(name)
        if index is None:
            packed[name] = _pack_variable(coord)
            continue
        if type(index) is not indexes.PandasIndex:
            raise UnsuitableError(
                f"the index of {name!r} is of type {type(index).__name__}; save what "
                f".reset_index({name!r}) returns"
            )
        spec = None
        dtype = index.coord_dtype
        if isinstance(dtype, np.dtype) and not dtype.hasobject:
            spec = dtype_to_spec(dtype)
        own = {"index": index.index, "dtype": spec}
        packed[name] = {"dims": index.dim, **own, "attrs": dict(coord.attrs)}
    return packed


def _make_coords(parts: Any) -> Any:
    xr = sys.modules["xarray"]
    variables, indexes = {}, {}
    for name, part in parts.items():
        if "index" not in part:
            variables[name] = _make_variable(part)
            continue
        dtype = part["dtype"]
        if dtype is not None:
            dtype = dtype_from_spec(dtype)
        indexes[name] = xr.indexes.PandasIndex(part["index"], part["dims"], dtype)
        variables |= indexes[name].create_variables({name: xr.Variable((), 0, part["attrs"])})
    return xr.Coordinates(variables, indexes)


def _pack_variable(array: Any) -> dict[str, Any]:
    if array.chunks is not None:
        raise UnsuitableError(
            "its data is a Dask array, not yet computed; save what .load() returns"
        )
    return {"dims": list(array.dims), "data": array.data, "attrs": dict(array.attrs)}


def _make_variable(parts: Any) -> Any:
    data = parts["data"]
    if not hasattr(data, "shape") or not hasattr(data, "dtype"):  # a range may be of any length
        raise TypeError(f"expected an array, found {type(data).__name__}")
    return sys.modules["xarray"].Variable(parts["dims"], data, parts["attrs"])
