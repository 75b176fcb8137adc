"""xarray: variables, data arrays, datasets and trees."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding.libraries.columns import pack, unpack
from jobrunner.checkpoint.encoding.libraries.table import NotExactError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic, np.dtype, np.ndarray)


def encode(name: str, value: Any) -> dict[str, Any]:
    """Return its variables, coordinates, indexes and attributes; raises `NotExactError`."""
    match name:
        case "xarray.Variable":
            return _pack_variable(value)
        case "xarray.Dataset":
            return _pack_dataset(value)
        case "xarray.DataArray":
            index = value.xindexes.get(value.name)
            is_own = index is not None and value.coords[value.name].variable is value.variable
            data = None if is_own else value.variable
            return {"name": value.name, "data": data, "coords": _pack_coords(value)}
    if value.parent is not None:
        raise NotExactError("it is a part of a larger tree; save tree.copy()")
    nodes = {path: node.to_dataset(inherit=False) for path, node in value.subtree_with_keys}
    return {"name": value.name, "nodes": nodes}


def decode(name: str, parts: Any) -> Any:
    """Make it again."""
    xr = sys.modules["xarray"]
    match name:
        case "xarray.Variable":
            return _make_variable(parts)
        case "xarray.Dataset":
            return _make_dataset(parts)
        case "xarray.DataArray":
            coords, key = _make_coords(parts["coords"]), parts["name"]
            if parts["data"] is None:
                return xr.Dataset(coords=coords)[key]
            key = "_"
            while key in coords:
                key += "_"
            made = xr.Dataset({key: parts["data"]}, coords=coords)[key]
            made.name = parts["name"]
            return made
    nodes = {"/" if path == "." else path: dataset for path, dataset in parts["nodes"].items()}
    for dataset in nodes.values():
        if not isinstance(dataset, xr.Dataset):
            raise TypeError(f"expected a dataset, found {type(dataset).__name__}")
    return xr.DataTree.from_dict(nodes, name=parts["name"])


# --- variables


def _pack_variable(value: Any) -> dict[str, Any]:
    xr, pd = sys.modules["xarray"], sys.modules["pandas"]
    if isinstance(value, xr.IndexVariable):
        raise NotExactError("it is an IndexVariable; save variable.to_base_variable()")
    if value.chunks is not None:
        raise NotExactError("its data is a Dask array, not yet computed; save what .load() returns")
    data = value.data
    if type(data).__name__ == "PandasExtensionArray":  # as some versions wrap them
        data = data.array
    is_packed = type(data) is np.ndarray or isinstance(data, pd.api.extensions.ExtensionArray)
    data = pack(data) if is_packed else {"kind": "value", "value": data}
    return {"dims": list(value.dims), "data": data, **_pack_about(value)}


def _make_variable(parts: Any) -> Any:
    data = parts["data"]
    is_value = isinstance(data, dict) and data["kind"] == "value"
    data = data["value"] if is_value else unpack(data)
    if not hasattr(data, "shape") or not hasattr(data, "dtype"):  # a range may be of any length
        raise TypeError(f"expected an array, found {type(data).__name__}")
    return sys.modules["xarray"].Variable(parts["dims"], data, parts["attrs"], parts["encoding"])


def _pack_about(value: Any) -> dict[str, Any]:
    """Return copies of its attributes, and its encoding, if that holds only plain values."""
    for key, item in value.encoding.items():
        if not _is_plain(item):
            raise NotExactError(
                f"its encoding {key!r} holds {type(item).__qualname__}; save what "
                f".drop_encoding() returns"
            )
    return {"attrs": dict(value.attrs), "encoding": dict(value.encoding)}


def _is_plain(item: Any) -> bool:
    if isinstance(item, list | tuple | set):
        return all(map(_is_plain, item))
    if isinstance(item, dict):
        return all(map(_is_plain, item.values()))
    return isinstance(item, _PLAIN)


# --- datasets and their coordinates


def _pack_dataset(value: Any) -> dict[str, Any]:
    variables = {name: value.variables[name] for name in value.data_vars}
    about = {"order": list(value.variables), "dims": list(value.sizes), **_pack_about(value)}
    return {"variables": variables, "coords": _pack_coords(value), **about}


def _make_dataset(parts: Any) -> Any:
    coords = _make_coords(parts["coords"])
    made = sys.modules["xarray"].Dataset(parts["variables"], coords, parts["attrs"])
    made.encoding = parts["encoding"]
    if [*made.variables, *made.sizes] != [*parts["order"], *parts["dims"]]:
        made._variables = _reorder(made.variables, parts["order"])
        made._dims = _reorder(made.sizes, parts["dims"])
    return made


def _pack_coords(value: Any) -> dict[str, Any]:
    indexes = [_pack_index(*group) for group in value.xindexes.group_by_index()]
    plain = {name: it.variable for name, it in value.coords.items() if name not in value.xindexes}
    return {"order": list(value.coords), "variables": plain, "indexes": indexes}


def _make_coords(parts: Any) -> Any:
    variables, indexes = dict(parts["variables"]), {}
    for group in parts["indexes"]:
        index, made = _make_index(group)
        variables.update(made)
        indexes.update(dict.fromkeys(made, index))
    return sys.modules["xarray"].Coordinates(_reorder(variables, parts["order"]), indexes)


def _reorder(found: Mapping[Hashable, Any], order: list[Hashable]) -> dict[Hashable, Any]:
    if len(order) != len(found):
        raise ValueError(f"expected {list(found)} in another order, found {order}")
    return {name: found[name] for name in order}


def _pack_index(index: Any, variables: Mapping[Hashable, Any]) -> dict[str, Any]:
    from xarray import indexes

    about = {name: _pack_about(variable) for name, variable in variables.items()}
    parts = {"index": getattr(index, "index", None), "about": about}
    if type(index) is indexes.PandasIndex:
        return {**parts, "dim": index.dim, "dtype": _pack_dtype(index.coord_dtype)}
    if type(index) is indexes.PandasMultiIndex:
        dtypes = {name: _pack_dtype(dtype) for name, dtype in index.level_coords_dtype.items()}
        return {**parts, "dim": index.dim, "dtypes": dtypes}
    names = ", ".join(map(repr, variables))
    raise NotExactError(
        f"the index of {names} is of type {type(index).__name__}; save what .drop_indexes({names}) returns"
    )


def _make_index(parts: Any) -> tuple[Any, dict[Hashable, Any]]:
    from xarray import indexes

    xr = sys.modules["xarray"]
    stubs = {
        name: xr.Variable((), 0, it["attrs"], it["encoding"]) for name, it in parts["about"].items()
    }
    about = (parts["index"], parts["dim"])
    index: Any
    if "dtypes" in parts:
        dtypes = {name: _unpack_dtype(dtype) for name, dtype in parts["dtypes"].items()}
        index = indexes.PandasMultiIndex(*about, dtypes)
    else:
        index = indexes.PandasIndex(*about, _unpack_dtype(parts["dtype"]))
    return index, index.create_variables(stubs)


def _pack_dtype(dtype: Any) -> Any:
    """Describe what other values of an index are shown as; None: as pandas has them."""
    if not isinstance(dtype, np.dtype):
        return None
    if np.dtype(dtype.str) != dtype:
        raise NotExactError(f"the dtype {dtype!r} of a coordinate would be lost")
    return dtype.str


def _unpack_dtype(text: Any) -> Any:
    return None if text is None else np.dtype(text)
