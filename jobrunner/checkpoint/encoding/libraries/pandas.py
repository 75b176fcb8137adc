"""pandas: data frames, series, indexes, extension arrays and scalars.

A frame is stored as pandas holds it, in blocks of columns of one dtype, since sums depend on it.
"""

from __future__ import annotations

import datetime as dt
import sys
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np

from jobrunner.checkpoint.encoding.codecs import UnsuitableError
from jobrunner.checkpoint.encoding.dtypes import Array

_MOST_OF_RANGE = 1 << 24


def encode(name: str, value: Any) -> Any:
    """Return the arrays and plain values that it is made of."""
    match name.rpartition(".")[2]:
        case "DataFrame":
            return _pack_frame(value)
        case "Series":
            values = pack(_without_wrapper(value.array))
            return {
                "values": values,
                "index": value.index,
                "name": value.name,
                **_pack_flags(value),
            }
        case "Index":
            return _pack_index(value)
        case "ExtensionArray":
            return pack(value)
        case "Timestamp":
            return {"value": value.asm8, "zone": _check_zone(value.tz)}
        case "Timedelta":
            return {"value": value.asm8}
        case "Period":
            return {"value": value.ordinal, "freq": _pack_freq(value.freq)}
        case "Interval":
            return {"left": value.left, "right": value.right, "closed": value.closed}
    return None  # NA and NaT are what they are


def decode(name: str, parts: Any) -> Any:
    """Make it again."""
    pd = sys.modules["pandas"]
    match name.rpartition(".")[2]:
        case "DataFrame":
            return _unpack_flags(_make_frame(parts), parts)
        case "Series":
            values, index = unpack(parts["values"]), _expect_index(parts["index"])
            result = pd.Series(values, index, values.dtype, parts["name"], copy=False)
            return _unpack_flags(result, parts)
        case "Index":
            return _make_index(parts)
        case "ExtensionArray":
            return unpack(parts)
        case "Timestamp":
            result = pd.Timestamp(parts["value"])
            zone = _expect_zone(parts["zone"])
            return result if zone is None else result.tz_localize("UTC").tz_convert(zone)
        case "Timedelta":
            return pd.Timedelta(parts["value"])
        case "Period":
            return pd.Period(ordinal=parts["value"], freq=_unpack_freq(parts["freq"]))
        case "Interval":
            return pd.Interval(parts["left"], parts["right"], parts["closed"])
        case "NAType":
            return pd.NA
    return pd.NaT


# --- frames


def _pack_frame(frame: Any) -> dict[str, Any]:
    blocks = [
        {"columns": block.mgr_locs.as_array.tolist(), "values": pack(block.values)}
        for block in frame._mgr.blocks
    ]
    axes = {"index": frame.index, "columns": frame.columns}
    return {"blocks": blocks, **axes, **_pack_flags(frame)}


def _make_frame(parts: Any) -> Any:
    index, columns = _expect_index(parts["index"]), _expect_index(parts["columns"])
    blocks = [
        (unpack(block["values"]), np.array(block["columns"], np.intp)) for block in parts["blocks"]
    ]
    for values, places in blocks:
        rows = (len(places), len(index)) if values.ndim == 2 else (len(index),)
        if values.shape != rows or (values.ndim == 1 and len(places) != 1):
            raise ValueError(f"a block has the shape {values.shape}, expected {rows}")
    all_places = np.concatenate([np.zeros(0, np.intp), *(places for _, places in blocks)])
    if not np.array_equal(np.sort(all_places), np.arange(len(columns))):
        raise ValueError("its blocks do not have each column once")
    try:
        from pandas.api.internals import create_dataframe_from_blocks
    except ImportError:  # before pandas 3
        return _make_frame_by_columns(blocks, index, columns)
    return create_dataframe_from_blocks(blocks, index, columns)


def _make_frame_by_columns(blocks: list[tuple[Any, Array]], index: Any, columns: Any) -> Any:
    by_place: dict[int, Any] = {}
    for values, places in blocks:
        for row, place in enumerate(places.tolist()):
            by_place[place] = values[row] if values.ndim == 2 else values
    ordered = {place: by_place[place] for place in range(len(columns))}
    result = sys.modules["pandas"].DataFrame(ordered, index=index, copy=False)
    result.columns = columns
    return result


def _pack_flags(value: Any) -> dict[str, Any]:
    return {"attrs": dict(value.attrs), "duplicates": value.flags.allows_duplicate_labels}


def _unpack_flags(result: Any, parts: Any) -> Any:
    if parts["attrs"]:
        result.attrs = parts["attrs"]
    if not parts["duplicates"]:
        result.flags.allows_duplicate_labels = False
    return result


# --- indexes


def _pack_index(index: Any) -> dict[str, Any]:
    pd = sys.modules["pandas"]
    if isinstance(index, pd.RangeIndex):
        return {"range": [index.start, index.stop, index.step], "name": index.name}
    if isinstance(index, pd.MultiIndex):
        return {
            "levels": list(index.levels),
            "codes": list(map(np.asarray, index.codes)),
            "names": list(index.names),
            "sortorder": index.sortorder,
        }
    parts = {"values": pack(_without_wrapper(index.array)), "name": index.name}
    if isinstance(index, pd.DatetimeIndex | pd.TimedeltaIndex):
        parts["freq"] = _pack_freq(index.freq)
    return parts


def _make_index(parts: Any) -> Any:
    pd = sys.modules["pandas"]
    if "range" in parts:
        return pd.RangeIndex(*parts["range"], name=parts["name"])
    if "levels" in parts:
        levels = list(map(_expect_finite, parts["levels"]))
        names, order = parts["names"], parts["sortorder"]
        return pd.MultiIndex(levels, parts["codes"], sortorder=order, names=names)
    values = unpack(parts["values"])
    if parts.get("freq") is None:
        return pd.Index(values, dtype=values.dtype, name=parts["name"], copy=False)
    cls = pd.DatetimeIndex if values.dtype.kind == "M" else pd.TimedeltaIndex
    return cls(values, freq=parts["freq"], name=parts["name"])


def _expect_index(index: Any) -> Any:
    if not isinstance(index, sys.modules["pandas"].Index):
        raise TypeError(f"expected an index, found {type(index).__name__}")
    return index


def _expect_finite(index: Any) -> Any:
    """Return an index that is no range without end: pandas will write it out."""
    pd = sys.modules["pandas"]
    if isinstance(_expect_index(index), pd.RangeIndex) and len(index) > _MOST_OF_RANGE:
        raise ValueError(f"a range of {len(index)} numbers is too long to be written out")
    return index


# --- columns


def pack(values: Any) -> Any:
    """Convert a NumPy array or an extension array to arrays and plain values."""
    pd = sys.modules["pandas"]
    arrays = pd.arrays
    if type(values) is np.ndarray:
        return values
    if type(values) is arrays.NumpyExtensionArray:  # not its subclasses for strings
        return {"kind": "numpy", "values": values.to_numpy()}
    if isinstance(values, arrays.DatetimeArray):
        moments = values.asi8.view(f"M8[{values.unit}]")
        return {"kind": "datetime", "values": moments, "zone": _check_zone(values.tz)}
    if isinstance(values, arrays.TimedeltaArray):
        return {"kind": "timedelta", "values": values.asi8.view(f"m8[{values.unit}]")}
    if isinstance(values, arrays.PeriodArray):
        return {"kind": "period", "values": values.asi8, "freq": _pack_freq(values.dtype.freq)}
    if isinstance(values, arrays.IntervalArray):
        sides = {"left": values.left, "right": values.right}
        return {"kind": "interval", **sides, "closed": values.closed}
    if isinstance(values, pd.Categorical):
        dtype = {"categories": values.categories, "ordered": bool(values.ordered)}
        return {"kind": "categorical", "values": np.asarray(values.codes), **dtype}
    dtype = values.dtype
    if isinstance(dtype, pd.StringDtype):
        missing = np.asarray(values.isna())
        return {
            "kind": "string",
            "values": values.to_numpy(dtype=object, na_value=""),
            "missing": missing if missing.any() else None,
            "storage": "python" if dtype.storage == "python" else "pyarrow",
            "is_nan": dtype.na_value is not pd.NA,
        }
    if isinstance(dtype, pd.ArrowDtype):
        return {"kind": "arrow", "values": values.__arrow_array__()}
    if isinstance(values, arrays.IntegerArray | arrays.FloatingArray | arrays.BooleanArray):
        data, missing = values._data, values._mask
        if missing.any():  # what is below is of no value, and may differ from time to time
            data = np.where(missing, np.zeros((), data.dtype), data)
        return {"kind": "masked", "values": data, "missing": missing}
    raise UnsuitableError(
        f"there is no codec for its dtype {dtype}; convert it to another one, or to a NumPy array"
    )


def unpack(parts: Any) -> Any:
    """Make the array again that `pack` converted."""
    if type(parts) is np.ndarray:
        return parts
    pd = sys.modules["pandas"]
    kind, values = parts["kind"], parts.get("values")
    match kind:
        case "numpy":
            return pd.arrays.NumpyExtensionArray(values)
        case "datetime":
            index = pd.DatetimeIndex(_expect(values, "M").ravel())
            zone = _expect_zone(parts["zone"])
            if zone is not None:
                index = index.tz_localize("UTC").tz_convert(zone)
            return index.array.reshape(values.shape)
        case "timedelta":
            return pd.TimedeltaIndex(_expect(values, "m").ravel()).array.reshape(values.shape)
        case "period":
            dtype = pd.PeriodDtype(_unpack_freq(parts["freq"]))
            return pd.arrays.PeriodArray(_expect(values, "i"), dtype=dtype)
        case "interval":
            left, right = _expect_finite(parts["left"]), _expect_finite(parts["right"])
            return pd.arrays.IntervalArray.from_arrays(left, right, closed=parts["closed"])
        case "categorical":
            categories = _expect_finite(parts["categories"])
            dtype = pd.CategoricalDtype(categories, bool(parts["ordered"]))
            return pd.Categorical.from_codes(_expect(values, "i"), dtype=dtype)
        case "string":
            return _unpack_strings(parts)
        case "arrow":
            return pd.arrays.ArrowExtensionArray(values)
        case "masked":
            classes = {"b": pd.arrays.BooleanArray, "f": pd.arrays.FloatingArray}
            cls = classes.get(values.dtype.kind, pd.arrays.IntegerArray)
            return cls(values, _expect(parts["missing"], "b"))
    raise ValueError(f"the kind {kind!r} of a column is unknown")


def _unpack_strings(parts: Any) -> Any:
    pd = sys.modules["pandas"]
    missing = float("nan") if parts["is_nan"] else pd.NA
    texts = _expect(parts["values"], "O").copy()
    if parts["missing"] is not None:
        texts[_expect(parts["missing"], "b")] = missing
    if missing is pd.NA:
        return pd.array(texts, dtype=pd.StringDtype(parts["storage"]))
    return pd.array(texts, dtype=pd.StringDtype(parts["storage"], na_value=missing))


def _without_wrapper(array: Any) -> Any:
    wrapper = sys.modules["pandas"].arrays.NumpyExtensionArray
    return array.to_numpy() if type(array) is wrapper else array


def _expect(values: Any, kind: str) -> Array:
    if type(values) is not np.ndarray or values.dtype.kind != kind:
        raise TypeError(f"expected an array of kind {kind!r}, found {type(values).__name__}")
    return values


# --- time zones and frequencies


def _check_zone(zone: Any) -> Any:
    if zone is None or type(zone) is dt.timezone or (type(zone) is ZoneInfo and zone.key):
        return zone
    raise UnsuitableError(
        f"its time zone {zone!r} would be lost; convert it to a zoneinfo.ZoneInfo"
    )


def _expect_zone(zone: Any) -> Any:
    if not isinstance(zone, dt.tzinfo | None):
        raise TypeError(f"expected a time zone, found {type(zone).__name__}")
    return zone


def _pack_freq(freq: Any) -> str | None:
    """Return the name of a frequency, if that says all of it."""
    if freq is None:
        return None
    name: str = freq.freqstr
    try:
        is_same = _unpack_freq(name) == freq
    except ValueError:
        is_same = False
    if not is_same:
        raise UnsuitableError(f"its frequency {freq!r} would be lost; set index.freq = None")
    return name


def _unpack_freq(name: str) -> Any:
    from pandas.tseries.frequencies import to_offset

    return to_offset(name)
