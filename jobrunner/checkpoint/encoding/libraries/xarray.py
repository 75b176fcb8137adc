"""xarray: variables, data arrays and datasets. Their `encoding`, of files, is not saved."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding.codecs import UnsuitableError
from jobrunner.checkpoint.encoding.dtypes import dtype_from_spec, dtype_to_spec


def encode(name: str, value: Any) -> dict[str, Any]:
    """Return its variables, coordinates and attributes."""
    match name.rpartition(".")[2]:
        case "Variable":
            return _pack_variable(value)
        case "DataArray":
            coord = value.coords.get(value.name)
            is_coord = coord is not None and coord.variable is value.variable
            data = None if is_coord else _pack_variable(value.variable)
            return {"name": value.name, "data": data, "coords": _pack_coords(value)}
    return {
        "variables": {
            name: _pack_variable(array.variable) for name, array in value.data_vars.items()
        },
        "coords": _pack_coords(value),
        "attrs": dict(value.attrs),
    }


def decode(name: str, parts: Any) -> Any:
    """Make it again."""
    xr = sys.modules["xarray"]
    match name.rpartition(".")[2]:
        case "Variable":
            return _make_variable(parts)
        case "DataArray":
            coords = _make_coords(parts["coords"])
            if parts["data"] is None:
                return coords[parts["name"]]
            return xr.DataArray(_make_variable(parts["data"]), coords, name=parts["name"])
    variables = {name: _make_variable(part) for name, part in parts["variables"].items()}
    return xr.Dataset(variables, _make_coords(parts["coords"]), parts["attrs"])


def _pack_coords(value: Any) -> dict[Any, Any]:
    from xarray import indexes

    packed = {}
    for name, coord in value.coords.items():
        index = value.xindexes.get(name)
        if index is None:
            packed[name] = _pack_variable(coord.variable)
            continue
        if type(index) is not indexes.PandasIndex:
            raise UnsuitableError(
                f"the index of {name!r} is of type {type(index).__name__}; save what "
                f".reset_index({name!r}) returns"
            )
        dtype = index.coord_dtype
        is_special = isinstance(dtype, np.dtype) and not dtype.hasobject
        own = {"index": index.index, "dtype": dtype_to_spec(dtype) if is_special else None}
        packed[name] = {"dims": index.dim, **own, "attrs": dict(coord.attrs)}
    return packed


def _make_coords(parts: Any) -> Any:
    xr = sys.modules["xarray"]
    variables, indexes = {}, {}
    for name, part in parts.items():
        if "index" not in part:
            variables[name] = _make_variable(part)
            continue
        dtype = None if part["dtype"] is None else dtype_from_spec(part["dtype"])
        indexes[name] = xr.indexes.PandasIndex(part["index"], part["dims"], dtype)
        variables |= indexes[name].create_variables({name: xr.Variable((), 0, part["attrs"])})
    return xr.Coordinates(variables, indexes)


def _pack_variable(value: Any) -> dict[str, Any]:
    if isinstance(value, sys.modules["xarray"].IndexVariable):
        raise UnsuitableError("it is an IndexVariable; save variable.to_base_variable()")
    if value.chunks is not None:
        raise UnsuitableError(
            "its data is a Dask array, not yet computed; save what .load() returns"
        )
    data = value.data
    if type(data).__name__ == "PandasExtensionArray":  # as some versions wrap them
        data = data.array
    return {"dims": list(value.dims), "data": data, "attrs": dict(value.attrs)}


def _make_variable(parts: Any) -> Any:
    data = parts["data"]
    if not hasattr(data, "shape") or not hasattr(data, "dtype"):  # a range may be of any length
        raise TypeError(f"expected an array, found {type(data).__name__}")
    return sys.modules["xarray"].Variable(parts["dims"], data, parts["attrs"])
