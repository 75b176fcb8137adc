"""The values of a pandas column or index as arrays and plain values, and back."""

from __future__ import annotations

import datetime as dt
import struct
import sys
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np

from jobrunner.checkpoint.encoding.dtypes import Array
from jobrunner.checkpoint.encoding.libraries.table import NotExactError

_MOST_OF_RANGE = 1 << 24
_NAN = struct.pack("d", float("nan"))
_STR, _NONE, _FLOAT_NAN, _NA, _NAT = range(5)


def pack(values: Any) -> Any:
    """Convert a NumPy array or an extension array; raises `NotExactError`."""
    pd = sys.modules["pandas"]
    arrays = pd.arrays
    if type(values) is np.ndarray:
        return values if values.dtype != object else _pack_objects(values)
    if type(values) is arrays.NumpyExtensionArray:  # not its subclasses for strings
        return {"kind": "numpy", "values": pack(values.to_numpy())}
    if isinstance(values, arrays.DatetimeArray):
        moments = values.asi8.view(f"M8[{values.unit}]")
        return {"kind": "datetime", "values": moments, "zone": pack_zone(values.tz)}
    if isinstance(values, arrays.TimedeltaArray):
        return {"kind": "timedelta", "values": values.asi8.view(f"m8[{values.unit}]")}
    if isinstance(values, arrays.PeriodArray):
        return {"kind": "period", "values": values.asi8, "freq": pack_freq(values.dtype.freq)}
    if isinstance(values, arrays.IntervalArray):
        sides = {"left": values.left, "right": values.right}
        return {"kind": "interval", **sides, "closed": values.closed}
    if isinstance(values, pd.Categorical):
        about = {"categories": values.categories, "ordered": bool(values.ordered)}
        return {"kind": "categorical", "values": np.asarray(values.codes), **about}
    if isinstance(values, arrays.SparseArray):
        return _pack_sparse(values)
    dtype = values.dtype
    if isinstance(dtype, pd.StringDtype):
        missing = np.asarray(values.isna())
        texts = values.to_numpy(dtype=object, na_value="")
        return {
            "kind": "string",
            "values": texts,
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
    raise NotExactError(
        f"there is no codec for its dtype {dtype}, which pandas does not define; convert it to one "
        f"that pandas defines"
    )


def unpack(parts: Any) -> Any:
    """Make the array again that `pack` converted."""
    if type(parts) is np.ndarray:
        return parts
    pd = sys.modules["pandas"]
    kind, values = parts["kind"], parts.get("values")
    match kind:
        case "objects" | "texts":
            return _unpack_objects(parts)
        case "numpy":
            return pd.arrays.NumpyExtensionArray(unpack(values))
        case "datetime":
            index = pd.DatetimeIndex(_expect(values, "M").ravel())
            if parts["zone"] is not None:
                index = index.tz_localize("UTC").tz_convert(unpack_zone(parts["zone"]))
            return index.array.reshape(values.shape)
        case "timedelta":
            return pd.TimedeltaIndex(_expect(values, "m").ravel()).array.reshape(values.shape)
        case "period":
            dtype = pd.PeriodDtype(unpack_freq(parts["freq"]))
            return pd.arrays.PeriodArray(_expect(values, "i"), dtype=dtype)
        case "interval":
            sides = tuple(whole(parts[side]) for side in ("left", "right"))
            return pd.arrays.IntervalArray.from_arrays(*sides, closed=parts["closed"])
        case "categorical":
            dtype = pd.CategoricalDtype(whole(parts["categories"]), bool(parts["ordered"]))
            return pd.Categorical.from_codes(_expect(values, "i"), dtype=dtype)
        case "sparse":
            return _unpack_sparse(parts)
        case "string":
            missing = pd.NA if not parts["is_nan"] else float("nan")
            texts = _expect(values, "O").copy()
            if parts["missing"] is not None:
                texts[_expect(parts["missing"], "b")] = missing
            is_default = missing is pd.NA
            options = {} if is_default else {"na_value": missing}
            return pd.array(texts, dtype=pd.StringDtype(parts["storage"], **options))
        case "arrow":
            return pd.arrays.ArrowExtensionArray(values)
        case "masked":
            cls = {
                "b": pd.arrays.BooleanArray,
                "f": pd.arrays.FloatingArray,
            }.get(values.dtype.kind, pd.arrays.IntegerArray)
            return cls(values, _expect(parts["missing"], "b"))
    raise ValueError(f"the kind {kind!r} of a column is unknown")


def whole(index: Any) -> Any:
    """Check that it is an index, and not a range without end: pandas will write it out."""
    pd = sys.modules["pandas"]
    if not isinstance(index, pd.Index):
        raise TypeError(f"expected an index, found {type(index).__name__}")
    if isinstance(index, pd.RangeIndex) and len(index) > _MOST_OF_RANGE:
        raise ValueError(f"a range of {len(index)} numbers is too long to be written out")
    return index


def _expect(values: Any, kind: str) -> Array:
    if type(values) is not np.ndarray or values.dtype.kind != kind:
        raise TypeError(f"expected an array of kind {kind!r}, found {type(values).__name__}")
    return values


# --- Python objects


def _pack_objects(values: Array) -> dict[str, Any]:
    """Convert objects: strings and missing values are an array, others a list."""
    pd = sys.modules["pandas"]
    items = values.ravel().tolist()
    kinds = set(map(type, items))
    shape = list(values.shape)
    if kinds <= {str}:
        return {"kind": "texts", "values": values, "gaps": None}
    if str in kinds and kinds <= {str, type(None), float, type(pd.NA), type(pd.NaT)}:
        constants = {id(None): _NONE, id(pd.NA): _NA, id(pd.NaT): _NAT}
        gaps = np.zeros(len(items), np.uint8)
        for i, item in enumerate(items):
            if type(item) is not str:
                is_nan = type(item) is float and struct.pack("d", item) == _NAN
                gaps[i] = _FLOAT_NAN if is_nan else constants.get(id(item), 255)
        if 255 not in gaps:
            gaps = gaps.reshape(shape)
            texts = values.copy()
            texts[gaps != _STR] = ""
            return {"kind": "texts", "values": texts, "gaps": gaps}
    return {"kind": "objects", "items": items, "shape": shape}


def _unpack_objects(parts: dict[str, Any]) -> Array:
    pd = sys.modules["pandas"]
    if parts["kind"] == "texts":
        texts, gaps = _expect(parts["values"], "O"), parts["gaps"]
        if gaps is not None:
            constants = {_NONE: None, _FLOAT_NAN: float("nan"), _NA: pd.NA, _NAT: pd.NaT}
            for number, constant in constants.items():
                texts[gaps == number] = constant
        return texts
    items = parts["items"]
    objects = np.empty(len(items), object)
    for i, item in enumerate(items):
        objects[i] = item
    return objects.reshape(parts["shape"])


# --- sparse columns


def _pack_sparse(values: Any) -> dict[str, Any]:
    index = values.sp_index
    return {
        "kind": "sparse",
        "values": values.sp_values,
        "fill": values.fill_value,
        "length": index.length,
        "indices": index.indices,
        "index": "integer" if type(index).__name__ == "IntIndex" else "block",
    }


def _unpack_sparse(parts: dict[str, Any]) -> Any:
    cls = sys.modules["pandas"].arrays.SparseArray
    values, indices, length = parts["values"], parts["indices"], parts["length"]
    if indices.dtype != np.int32 or values.shape != indices.shape:
        raise ValueError("its values do not fit its indices")
    if hasattr(cls, "from_indices"):
        return cls.from_indices(values, indices, length, parts["fill"], parts["index"])
    index = type(cls([0], kind="integer").sp_index)(length, indices)  # before pandas 3.1
    if parts["index"] == "block":
        index = index.to_block_index()
    return cls(values, sparse_index=index, fill_value=parts["fill"])


# --- time zones and frequencies


def pack_zone(zone: Any) -> Any:
    """Return a time zone, or its name; raises `NotExactError`."""
    if zone is None or type(zone) is dt.timezone or (type(zone) is ZoneInfo and zone.key):
        return zone
    pytz = sys.modules.get("pytz")
    if pytz is not None and isinstance(zone, pytz.tzinfo.BaseTzInfo) and zone.zone:
        return {"pytz": zone.zone}
    raise NotExactError(f"its time zone {zone!r} would be lost; convert it to a zoneinfo.ZoneInfo")


def unpack_zone(parts: Any) -> Any:
    """Make the time zone again."""
    if isinstance(parts, dict):
        import pytz

        return pytz.timezone(parts["pytz"])
    if not isinstance(parts, dt.tzinfo | None):
        raise TypeError(f"expected a time zone, found {type(parts).__name__}")
    return parts


def pack_freq(freq: Any) -> str | None:
    """Return the name of a frequency; raises `NotExactError` if that does not say all of it."""
    if freq is None:
        return None
    name: str = freq.freqstr
    try:
        is_same = unpack_freq(name) == freq
    except ValueError:
        is_same = False
    if not is_same:
        raise NotExactError(f"its frequency {freq!r} would be lost; set index.freq = None")
    return name


def unpack_freq(name: str) -> Any:
    """Make the frequency again."""
    from pandas.tseries.frequencies import to_offset

    return to_offset(name)
