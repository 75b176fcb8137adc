"""pandas: data frames, series, indexes, their arrays, and scalars.

A frame is stored as pandas holds it, in blocks of columns of one dtype, since sums depend on it. What
a value is made of may be values of pandas again, such as an index or the array of a column.
"""

from __future__ import annotations

import datetime as dt
import sys
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np

from jobrunner.checkpoint.encoding.codecs import UnsuitableError
from jobrunner.checkpoint.encoding.everyday import expect

_MOST_OF_RANGE = 1 << 24
_MASKED = ("IntegerArray", "FloatingArray", "BooleanArray")


def encode(name: str, value: Any) -> Any:
    """Return the arrays and plain values that it is made of."""
    match name.rpartition(".")[2]:
        case "DataFrame":
            blocks = []
            for block in value._mgr.blocks:
                columns = block.mgr_locs.as_array.tolist()
                blocks.append({"columns": columns, "values": block.values})
            axes = {"index": value.index, "columns": value.columns}
            return {"blocks": blocks, **axes, **_pack_flags(value)}
        case "Series":
            own = {"values": value._values, "index": value.index, "name": value.name}
            return {**own, **_pack_flags(value)}
        case "Index":
            return _pack_index(value)
        case "ExtensionArray":
            return _pack_array(value)
        case "Timestamp":
            return {"value": value.asm8, "zone": _check_zone(value.tz)}
        case "Timedelta":
            return {"value": value.asm8}
    return None  # NA and NaT are what they are


def decode(name: str, parts: Any) -> Any:
    """Make it again."""
    pd = sys.modules["pandas"]
    match name.rpartition(".")[2]:
        case "DataFrame":
            return _add_flags(_make_frame(parts), parts)
        case "Series":
            values = parts["values"]
            series = pd.Series(values, parts["index"], values.dtype, parts["name"], copy=False)
            return _add_flags(series, parts)
        case "Index":
            return _make_index(parts)
        case "ExtensionArray":
            return _make_array(parts)
        case "Timestamp":
            return _in_zone(pd.Timestamp(parts["value"]), parts["zone"])
        case "Timedelta":
            return pd.Timedelta(parts["value"])
        case "NAType":
            return pd.NA
    return pd.NaT


def _pack_flags(value: Any) -> dict[str, Any]:
    return {"attrs": value.attrs, "duplicates": value.flags.allows_duplicate_labels}


def _add_flags(result: Any, parts: Any) -> Any:
    result.attrs = parts["attrs"]
    result.flags.allows_duplicate_labels = parts["duplicates"]
    return result


# --- frames


def _make_frame(parts: Any) -> Any:
    """Make a frame of blocks, of which pandas believes that they fit."""
    index, columns = _expect_index(parts["index"]), _expect_index(parts["columns"])
    blocks = []
    all_places: list[int] = []
    for block in parts["blocks"]:
        values, places = block["values"], block["columns"]
        shape = (len(places), len(index))
        is_one_column = len(places) == 1 and values.shape == shape[1:]
        if values.shape != shape and not is_one_column:
            raise ValueError(f"a block has the shape {values.shape}, expected {shape}")
        blocks.append((values, np.array(places, np.intp)))
        all_places += places
    if sorted(all_places) != list(range(len(columns))):
        raise ValueError("its blocks do not have each column once")
    # A sum over a frame of three columns in one block may differ in its last bits from one over three
    # blocks of one column, so the blocks are made as they were, where pandas lets us.
    try:
        from pandas.api.internals import create_dataframe_from_blocks
    except ImportError:  # before pandas 3
        return _make_frame_by_columns(blocks, index, columns)
    return create_dataframe_from_blocks(blocks, index, columns)


def _make_frame_by_columns(blocks: list[tuple[Any, Any]], index: Any, columns: Any) -> Any:
    by_place: dict[int, Any] = {}
    for values, places in blocks:
        if values.ndim == 1:  # an array of pandas is one column
            values = [values]
        by_place.update(zip(places.tolist(), values, strict=True))
    frame = sys.modules["pandas"].DataFrame(dict(sorted(by_place.items())), index, copy=False)
    frame.columns = columns
    return frame


# --- indexes


def _pack_index(index: Any) -> dict[str, Any]:
    pd = sys.modules["pandas"]
    if isinstance(index, pd.RangeIndex):
        return {"range": [index.start, index.stop, index.step], "name": index.name}
    if isinstance(index, pd.MultiIndex):
        levels, codes = list(index.levels), list(index.codes)
        return {"levels": levels, "codes": codes, "names": list(index.names)}
    freq = None
    if isinstance(index, pd.DatetimeIndex | pd.TimedeltaIndex):
        freq = _pack_freq(index.freq)
    return {"values": index._values, "name": index.name, "freq": freq}


def _make_index(parts: Any) -> Any:
    pd = sys.modules["pandas"]
    if "range" in parts:
        return pd.RangeIndex(*parts["range"], name=parts["name"])
    if "levels" in parts:
        levels = list(map(_expect_finite, parts["levels"]))
        return pd.MultiIndex(levels, parts["codes"], names=parts["names"])
    values = parts["values"]
    index = pd.Index(values, dtype=values.dtype, name=parts["name"], copy=False)
    if parts["freq"] is not None:
        index.freq = _make_freq(parts["freq"])
    return index


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


# --- arrays that are not NumPy's


def _pack_array(values: Any) -> Any:
    pd = sys.modules["pandas"]
    arrays, dtype, kind = pd.arrays, values.dtype, type(values).__name__
    if isinstance(dtype, pd.StringDtype):
        return {
            "kind": "string",
            "values": values.to_numpy(dtype=object, na_value=""),
            "missing": values.isna(),
            "storage": dtype.storage.partition("_")[0],  # without "_numpy"
            "is_nan": dtype.na_value is not pd.NA,
        }
    if isinstance(values, arrays.DatetimeArray):
        moments = values.asi8.view(f"M8[{values.unit}]")
        return {"kind": "time", "values": moments, "zone": _check_zone(values.tz)}
    if isinstance(values, arrays.TimedeltaArray):
        return {"kind": "time", "values": values.asi8.view(f"m8[{values.unit}]"), "zone": None}
    if isinstance(values, pd.Categorical):
        own = {"categories": values.categories, "ordered": bool(values.ordered)}
        return {"kind": "categorical", "values": values.codes, **own}
    if kind in _MASKED:
        missing = values._mask
        # What is below is of no value, and may differ from time to time.
        data = np.where(missing, np.zeros((), values._data.dtype), values._data)
        return {"kind": kind, "values": data, "missing": missing}
    raise UnsuitableError(
        f"there is no codec for its dtype {dtype}; convert it to another one, or to a NumPy array"
    )


def _make_array(parts: Any) -> Any:
    pd, kind = sys.modules["pandas"], parts["kind"]
    values = expect(np.ndarray, parts["values"])
    if kind == "time":
        if values.dtype.kind not in "mM":
            raise TypeError(f"expected times, found {values.dtype}")
        return _in_zone(pd.Index(values.ravel()), parts["zone"]).array.reshape(values.shape)
    if kind == "categorical":
        categories = _expect_finite(parts["categories"])
        dtype = pd.CategoricalDtype(categories, bool(parts["ordered"]))
        return pd.Categorical.from_codes(values, dtype=dtype)
    missing = expect(np.ndarray, parts["missing"])
    if kind in _MASKED:
        return getattr(pd.arrays, kind)(values, missing)
    if kind != "string":
        raise ValueError(f"the kind {kind!r} of an array is unknown")
    options = {}
    if parts["is_nan"]:
        options["na_value"] = float("nan")  # of pandas 2.3 and later
    dtype = pd.StringDtype(parts["storage"], **options)
    texts = values.copy()
    texts[missing] = dtype.na_value
    return pd.array(texts, dtype=dtype)


# --- time zones and frequencies


def _check_zone(zone: Any) -> Any:
    if zone is None or type(zone) is dt.timezone or (type(zone) is ZoneInfo and zone.key):
        return zone
    raise UnsuitableError(
        f"its time zone {zone!r} would be lost; convert it to a zoneinfo.ZoneInfo"
    )


def _in_zone(moments: Any, zone: Any) -> Any:
    if zone is None:
        return moments
    if not isinstance(zone, dt.tzinfo):  # the name of a zone is that of a file
        raise TypeError(f"expected a time zone, found {type(zone).__name__}")
    return moments.tz_localize("UTC").tz_convert(zone)


def _pack_freq(freq: Any) -> str | None:
    """Return the name of a frequency, if that says all of it."""
    if freq is None:
        return None
    name: str = freq.freqstr
    try:
        is_same = _make_freq(name) == freq
    except ValueError:
        is_same = False
    if not is_same:
        raise UnsuitableError(f"its frequency {freq!r} would be lost; set index.freq = None")
    return name


def _make_freq(name: str) -> Any:
    from pandas.tseries.frequencies import to_offset

    return to_offset(name)
