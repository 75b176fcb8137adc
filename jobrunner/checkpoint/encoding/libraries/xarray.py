"""xarray: variables, data arrays, datasets and trees. Their `encoding`, of files, is not saved."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding.codecs import UnsuitableError
from jobrunner.checkpoint.encoding.libraries.pandas import pack, unpack


def encode(name: str, value: Any) -> dict[str, Any]:
    """Return its variables, coordinates, indexes and attributes."""
    match name.rpartition(".")[2]:
        case "Variable":
            return _pack_variable(value)
        case "Dataset":
            return _pack_dataset(value)
        case "DataArray":
            index = value.xindexes.get(value.name)
            is_own = index is not None and value.coords[value.name].variable is value.variable
            data = None if is_own else value.variable
            return {"name": value.name, "data": data, "coords": _pack_coords(value)}
    if value.parent is not None:
        raise UnsuitableError("it is a part of a larger tree; save tree.copy()")
    nodes = {path: node.to_dataset(inherit=False) for path, node in value.subtree_with_keys}
    return {"name": value.name, "nodes": nodes}


def decode(name: str, parts: Any) -> Any:
    """Make it again."""
    match name.rpartition(".")[2]:
        case "Variable":
            return _make_variable(parts)
        case "Dataset":
            return _make_dataset(parts)
        case "DataArray":
            return _make_data_array(parts)
    xr = sys.modules["xarray"]
    nodes = {"/" if path == "." else path: dataset for path, dataset in parts["nodes"].items()}
    for dataset in nodes.values():
        if not isinstance(dataset, xr.Dataset):
            raise TypeError(f"expected a dataset, found {type(dataset).__name__}")
    return xr.DataTree.from_dict(nodes, name=parts["name"])


# --- variables and data arrays


def _pack_variable(value: Any) -> dict[str, Any]:
    xr, pd = sys.modules["xarray"], sys.modules["pandas"]
    if isinstance(value, xr.IndexVariable):
        raise UnsuitableError("it is an IndexVariable; save variable.to_base_variable()")
    if value.chunks is not None:
        raise UnsuitableError(
            "its data is a Dask array, not yet computed; save what .load() returns"
        )
    data = value.data
    if type(data).__name__ == "PandasExtensionArray":  # as some versions wrap them
        data = data.array
    is_packed = type(data) is np.ndarray or isinstance(data, pd.api.extensions.ExtensionArray)
    data = pack(data) if is_packed else {"kind": "value", "value": data}
    return {"dims": list(value.dims), "data": data, "attrs": dict(value.attrs)}


def _make_variable(parts: Any) -> Any:
    data = parts["data"]
    is_value = isinstance(data, dict) and data["kind"] == "value"
    data = data["value"] if is_value else unpack(data)
    if not hasattr(data, "shape") or not hasattr(data, "dtype"):  # a range may be of any length
        raise TypeError(f"expected an array, found {type(data).__name__}")
    return sys.modules["xarray"].Variable(parts["dims"], data, parts["attrs"])


def _make_data_array(parts: Any) -> Any:
    xr = sys.modules["xarray"]
    coords, key = _make_coords(parts["coords"]), parts["name"]
    if parts["data"] is None:
        return xr.Dataset(coords=coords)[key]
    key = "_"
    while key in coords:
        key += "_"
    result = xr.Dataset({key: parts["data"]}, coords=coords)[key]
    result.name = parts["name"]
    return result


# --- datasets and their coordinates


def _pack_dataset(value: Any) -> dict[str, Any]:
    return {
        "variables": {name: value.variables[name] for name in value.data_vars},
        "coords": _pack_coords(value),
        "order": list(value.variables),
        "dims": list(value.sizes),
        "attrs": dict(value.attrs),
    }


def _make_dataset(parts: Any) -> Any:
    coords = _make_coords(parts["coords"])
    result = sys.modules["xarray"].Dataset(parts["variables"], coords, parts["attrs"])
    if [*result.variables, *result.sizes] != [*parts["order"], *parts["dims"]]:
        result._variables = _reorder(result.variables, parts["order"])
        result._dims = _reorder(result.sizes, parts["dims"])
    return result


def _pack_coords(value: Any) -> dict[str, Any]:
    indexes = [_pack_index(*group) for group in value.xindexes.group_by_index()]
    plain = {}
    for name, coord in value.coords.items():
        if name not in value.xindexes:
            plain[name] = coord.variable
    return {"order": list(value.coords), "variables": plain, "indexes": indexes}


def _make_coords(parts: Any) -> Any:
    variables, indexes = dict(parts["variables"]), {}
    for group in parts["indexes"]:
        index, result = _make_index(group)
        variables.update(result)
        indexes.update(dict.fromkeys(result, index))
    return sys.modules["xarray"].Coordinates(_reorder(variables, parts["order"]), indexes)


def _reorder(items: Mapping[Hashable, Any], order: list[Hashable]) -> dict[Hashable, Any]:
    if len(order) != len(items):
        raise ValueError(f"expected {list(items)} in another order, found {order}")
    return {name: items[name] for name in order}


def _pack_index(index: Any, variables: Mapping[Hashable, Any]) -> dict[str, Any]:
    from xarray import indexes

    attrs = {name: dict(variable.attrs) for name, variable in variables.items()}
    parts = {"index": getattr(index, "index", None), "attrs": attrs}
    if type(index) is indexes.PandasIndex:
        return {**parts, "dim": index.dim, "dtype": _pack_dtype(index.coord_dtype)}
    if type(index) is indexes.PandasMultiIndex:
        dtypes = {name: _pack_dtype(dtype) for name, dtype in index.level_coords_dtype.items()}
        return {**parts, "dim": index.dim, "dtypes": dtypes}
    names = ", ".join(map(repr, variables))
    raise UnsuitableError(
        f"the index of {names} is of type {type(index).__name__}; save what "
        f".drop_indexes({names}) returns"
    )


def _make_index(parts: Any) -> tuple[Any, dict[Hashable, Any]]:
    from xarray import indexes

    xr = sys.modules["xarray"]
    stubs = {name: xr.Variable((), 0, attrs) for name, attrs in parts["attrs"].items()}
    index: Any
    if "dtypes" in parts:
        dtypes = {name: _unpack_dtype(dtype) for name, dtype in parts["dtypes"].items()}
        index = indexes.PandasMultiIndex(parts["index"], parts["dim"], dtypes)
    else:
        dtype = _unpack_dtype(parts["dtype"])
        index = indexes.PandasIndex(parts["index"], parts["dim"], dtype)
    return index, index.create_variables(stubs)


def _pack_dtype(dtype: Any) -> Any:
    """Describe what other values of an index are shown as; None: as pandas has them."""
    if not isinstance(dtype, np.dtype):
        return None
    if np.dtype(dtype.str) != dtype:
        raise UnsuitableError(f"the dtype {dtype!r} of a coordinate would be lost")
    return dtype.str


def _unpack_dtype(text: Any) -> Any:
    return None if text is None else np.dtype(text)
