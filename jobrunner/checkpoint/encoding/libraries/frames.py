"""pandas: data frames, series, indexes, extension arrays and scalars.

A frame is stored as pandas holds it, in blocks of columns of one dtype, since sums depend on it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding.dtypes import Array
from jobrunner.checkpoint.encoding.libraries.columns import (
    pack,
    pack_freq,
    pack_zone,
    unpack,
    unpack_freq,
    unpack_zone,
    whole,
)


def encode(name: str, value: Any) -> Any:
    """Return the arrays and plain values that it is made of."""
    match name.rpartition(".")[2]:
        case "DataFrame":
            blocks = [
                {"columns": block.mgr_locs.as_array.tolist(), "values": pack(block.values)}
                for block in value._mgr.blocks
            ]
            axes = {"index": value.index, "columns": value.columns}
            return {"blocks": blocks, **axes, **_pack_about(value)}
        case "Series":
            about = {"index": value.index, "name": value.name, **_pack_about(value)}
            return {"values": pack(_plain(value.array)), **about}
        case "Index":
            return _pack_index(value)
        case "ExtensionArray":
            return pack(value)
        case "Timestamp":
            return {"value": value.asm8, "zone": pack_zone(value.tz)}
        case "Timedelta":
            return {"value": value.asm8}
        case "Period":
            return {"value": value.ordinal, "freq": pack_freq(value.freq)}
        case "Interval":
            return {"left": value.left, "right": value.right, "closed": value.closed}
    return None  # NA and NaT are what they are


def decode(name: str, parts: Any) -> Any:
    """Make it again."""
    pd = sys.modules["pandas"]
    match name.rpartition(".")[2]:
        case "DataFrame":
            return _unpack_about(_make_frame(parts), parts)
        case "Series":
            values, index = unpack(parts["values"]), parts["index"]
            _check_index(index)
            made = pd.Series(values, index, values.dtype, parts["name"], copy=False)
            return _unpack_about(made, parts)
        case "Index":
            return _make_index(parts)
        case "ExtensionArray":
            return unpack(parts)
        case "Timestamp":
            made = pd.Timestamp(parts["value"])
            zone = unpack_zone(parts["zone"])
            return made if zone is None else made.tz_localize("UTC").tz_convert(zone)
        case "Timedelta":
            return pd.Timedelta(parts["value"])
        case "Period":
            return pd.Period(ordinal=parts["value"], freq=unpack_freq(parts["freq"]))
        case "Interval":
            return pd.Interval(parts["left"], parts["right"], parts["closed"])
        case "NAType":
            return pd.NA
    return pd.NaT


def _plain(array: Any) -> Any:
    wrapper = sys.modules["pandas"].arrays.NumpyExtensionArray
    return array.to_numpy() if type(array) is wrapper else array


def _pack_about(value: Any) -> dict[str, Any]:
    return {"attrs": dict(value.attrs), "duplicates": value.flags.allows_duplicate_labels}


def _unpack_about(made: Any, parts: Any) -> Any:
    if parts["attrs"]:
        made.attrs = parts["attrs"]
    if not parts["duplicates"]:
        made.flags.allows_duplicate_labels = False
    return made


# --- frames


def _make_frame(parts: Any) -> Any:
    index, columns = parts["index"], parts["columns"]
    _check_index(index)
    _check_index(columns)
    blocks = [
        (unpack(block["values"]), np.array(block["columns"], np.intp)) for block in parts["blocks"]
    ]
    for values, at in blocks:
        rows = (len(at), len(index)) if values.ndim == 2 else (len(index),)
        if values.shape != rows or (values.ndim == 1 and len(at) != 1):
            raise ValueError(f"a block has the shape {values.shape}, expected {rows}")
    found = np.concatenate([np.zeros(0, np.intp), *(at for _, at in blocks)])
    if not np.array_equal(np.sort(found), np.arange(len(columns))):
        raise ValueError("its blocks do not have each column once")
    try:
        from pandas.api.internals import create_dataframe_from_blocks
    except ImportError:  # before pandas 3
        return _make_frame_of_pandas_2(blocks, index, columns)
    return create_dataframe_from_blocks(blocks, index, columns)


def _make_frame_of_pandas_2(blocks: list[tuple[Any, Array]], index: Any, columns: Any) -> Any:
    from pandas._libs.internals import BlockPlacement
    from pandas.core.internals.blocks import ensure_block_shape, get_block_type
    from pandas.core.internals.managers import BlockManager

    made = []
    for values, at in blocks:
        cls = get_block_type(values.dtype)
        is_wide = values.ndim == 2 or not cls.is_extension or hasattr(values, "_ndarray")
        shaped = ensure_block_shape(values, ndim=2) if is_wide and cls._validate_ndim else values
        made.append(cls(shaped, placement=BlockPlacement(at), ndim=2))
    manager = BlockManager(tuple(made), [columns, index])
    return sys.modules["pandas"].DataFrame._from_mgr(manager, manager.axes)


# --- indexes


def _check_index(index: Any) -> None:
    if not isinstance(index, sys.modules["pandas"].Index):
        raise TypeError(f"expected an index, found {type(index).__name__}")


def _pack_index(index: Any) -> dict[str, Any]:
    pd = sys.modules["pandas"]
    if isinstance(index, pd.RangeIndex):
        return {"range": [index.start, index.stop, index.step], "name": index.name}
    if isinstance(index, pd.MultiIndex):
        return {
            "levels": list(index.levels),
            "codes": [np.asarray(codes) for codes in index.codes],
            "names": list(index.names),
            "sortorder": index.sortorder,
        }
    parts = {"values": pack(_plain(index.array)), "name": index.name}
    if isinstance(index, pd.DatetimeIndex | pd.TimedeltaIndex):
        parts["freq"] = pack_freq(index.freq)
    return parts


def _make_index(parts: dict[str, Any]) -> Any:
    pd = sys.modules["pandas"]
    if "range" in parts:
        return pd.RangeIndex(*parts["range"], name=parts["name"])
    if "levels" in parts:
        for level in parts["levels"]:
            whole(level)
        about = {"sortorder": parts["sortorder"], "names": parts["names"]}
        return pd.MultiIndex(parts["levels"], parts["codes"], **about)
    values = unpack(parts["values"])
    if parts.get("freq") is None:
        return pd.Index(values, dtype=values.dtype, name=parts["name"], copy=False)
    cls = pd.DatetimeIndex if values.dtype.kind == "M" else pd.TimedeltaIndex
    return cls(values, freq=parts["freq"], name=parts["name"])
