"""xarray: variables, data arrays, datasets and trees. Their `encoding`, of files, is not saved."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding.codecs import UnsuitableError


def encode(name: str, value: Any) -> dict[str, Any]:
    """Return its variables, coordinates, indexes and attributes."""
    match name.rpartition(".")[2]:
        case "Variable":
            return _pack_variable(value)
        case "Dataset":
            return _pack_dataset(value)
        case "DataArray":
            coord = value.coords.get(value.name)
            is_coord = coord is not None and coord.variable is value.variable
            data = None if is_coord else value.variable
            return {"name": value.name, "data": data, "coords": _pack_coords(value)}
    if value.parent is not None:
        raise UnsuitableError("it is a part of a larger tree; save tree.copy()")
    nodes = {path: node.to_dataset(inherit=False) for path, node in value.subtree_with_keys}
    return {"name": value.name, "nodes": nodes}


def decode(name: str, parts: Any) -> Any:
    """Make it again."""
    xr = sys.modules["xarray"]
    match name.rpartition(".")[2]:
        case "Variable":
            return _make_variable(parts)
        case "Dataset":
            return _make_dataset(parts)
        case "DataArray":
            coords = _make_coords(parts["coords"])
            if parts["data"] is None:
                return coords[parts["name"]]
            return xr.DataArray(parts["data"], coords, name=parts["name"])
    nodes = {"/" if path == "." else path: dataset for path, dataset in parts["nodes"].items()}
    for dataset in nodes.values():
        if not isinstance(dataset, xr.Dataset):
            raise TypeError(f"expected a dataset, found {type(dataset).__name__}")
    return xr.DataTree.from_dict(nodes, name=parts["name"])


# --- variables


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

    if type(index) is indexes.PandasIndex:
        (name,) = variables
        dtypes = {name: index.coord_dtype}
    elif type(index) is indexes.PandasMultiIndex:
        dtypes = index.level_coords_dtype
    else:
        names = ", ".join(map(repr, variables))
        raise UnsuitableError(
            f"the index of {names} is of type {type(index).__name__}; save what "
            f".drop_indexes({names}) returns"
        )
    # None: its values are shown as pandas has them.
    shown = {}
    for name, dtype in dtypes.items():
        is_special = isinstance(dtype, np.dtype) and not dtype.hasobject
        shown[name] = dtype if is_special else None
    attrs = {name: dict(variable.attrs) for name, variable in variables.items()}
    return {"index": index.index, "dim": index.dim, "dtypes": shown, "attrs": attrs}


def _make_index(parts: Any) -> tuple[Any, dict[Hashable, Any]]:
    from xarray import indexes

    values, dtypes = parts["index"], parts["dtypes"]
    index: Any
    if isinstance(values, sys.modules["pandas"].MultiIndex):
        index = indexes.PandasMultiIndex(values, parts["dim"], dtypes)
    else:
        (dtype,) = dtypes.values()
        index = indexes.PandasIndex(values, parts["dim"], dtype)
    xr = sys.modules["xarray"]
    stubs = {name: xr.Variable((), 0, attrs) for name, attrs in parts["attrs"].items()}
    return index, index.create_variables(stubs)
