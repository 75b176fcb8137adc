"""NumPy dtypes as JSON and back, and the Zarr data type that stands for each. Pure: no I/O.

The JSON is NumPy's own description, the `descr` of a dtype, of which only plain texts, fields and
subarrays are read: NumPy itself would take addresses, Python code and lists without end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jobrunner.checkpoint.encoding.codecs import UnmakeableError, UnsuitableError

Array = np.ndarray[Any, Any]

Spec = str | list[Any]
"""JSON of a dtype: a text, or a list of fields: name (or title and name), dtype, perhaps a shape."""

Tree = Any
"""A JSON tree that stands for a value."""

Trail = tuple[str, ...]
"""Path within a blob: keys, escaped for file systems, and indices."""


@dataclass(slots=True)
class ArrayPart:
    """One array of a value."""

    data: Array  # axes in memory order, outermost first; not always contiguous
    order: tuple[int, ...] | None  # `data == array.transpose(order)`; None: in memory order already
    trail: Trail
    holds: str  # type of the encoded value: ndarray, bytes, str, ...


MOST_FIELDS = 1 << 14
"""Fields of a record; more would take NumPy long, each time that it makes the dtype."""

MOST_ITEM_BYTES = 1 << 30
"""Size of an item: a few fields of a forged record may claim more than any memory."""

NUMBERS = [
    "bool",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
"""Names of dtypes that NumPy, Zarr and PyTorch share."""

_ZARR_NAMES = {np.dtype(name).str[1:]: name for name in NUMBERS}

_ML_DTYPES = re.compile(r"b?complex32|bfloat16|float[468]_e\dm\d\w*|u?int[124]")
"""Names of dtypes of the package ml_dtypes, which JAX and others use."""

# NumPy would take much more for a dtype: lists of fields in a text, and "O", whose items are addresses.
_PLAIN = re.compile(r"[<>|][biufcSUV]\d{1,10}|[<>|][mM]8(\[\d{0,9}[a-zA-Z]+\])?")
"""What `dtype.str` is for all others without fields."""

STRING = np.dtypes.StringDType()
"""Strings of variable width."""

_CF_UNITS = {
    "D": "days",
    "h": "hours",
    "m": "minutes",
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
}
_NOT_A_TIME = -1 << 63
_FILLS: dict[str, Any] = {"b": False, "f": 0.0, "c": [0.0, 0.0]}

_X87_BITS, _X87_BYTES = 63, 10
"""Of the fraction of a long double on x86, and of all of it."""


class UnsupportedDtypeError(UnmakeableError):
    """A dtype that this platform lacks; the message says why."""


def dtype_to_spec(dtype: np.dtype[Any]) -> Spec:
    """Describe a dtype so that `dtype_from_spec` makes an equal one, byte order included."""
    if dtype == STRING:
        return "string"
    if isinstance(dtype, np.dtypes.StringDType):
        raise UnsuitableError(
            "its strings may be missing, or are not coerced; save array.astype(StringDType()), or "
            "an array of str objects and None"
        )
    if dtype.hasobject:
        raise UnsuitableError(f"the dtype {dtype!r} holds Python objects")
    if not dtype.itemsize:
        raise UnsuitableError(f"items of the dtype {dtype!r} have no bytes; save its shape instead")
    spec: Spec = dtype.str
    if dtype.isbuiltin == 1:
        return spec
    if _is_of_ml_dtypes(dtype):
        spec = dtype.name
    elif dtype.names is not None:
        # As it comes back from JSON, with lists in place of tuples.
        spec = msgspec.json.decode(msgspec.json.encode(np.lib.format.dtype_to_descr(dtype)))
    # A dtype that another package registered may look like one of NumPy's own.
    try:
        is_own = dtype_from_spec(spec) == dtype and dtype.type is not np.record
    except (UnsupportedDtypeError, ValueError):
        is_own = False
    if not is_own:
        raise UnsuitableError(f"the dtype {dtype!r} is not one of NumPy's own")
    return spec


def dtype_from_spec(spec: object) -> np.dtype[Any]:
    """Make the dtype that `dtype_to_spec` described.

    Raises `UnsupportedDtypeError` if this platform lacks it, ValueError if `spec` does not describe
    a dtype.
    """
    if isinstance(spec, str):
        return _plain(spec)
    try:
        if _count_fields(spec) > MOST_FIELDS:
            raise ValueError(f"a record has more than {MOST_FIELDS} fields")
        dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(_descr_of(spec))
    except RecursionError:
        raise ValueError("a dtype is nested too deep") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"it is not the dtype of an array that is saved: {error}") from error
    if dtype.itemsize > MOST_ITEM_BYTES:
        raise ValueError(f"an item of {dtype.itemsize} bytes is too large")
    return dtype


def _descr_of(spec: object) -> Any:
    """Turn JSON into what NumPy reads, and check what NumPy does not."""
    if isinstance(spec, str):
        dtype = _plain(spec)
        # The bytes of a file would be taken for addresses.
        if dtype.hasobject:
            raise ValueError("strings of variable width are part of another dtype")
        return dtype.str
    if not isinstance(spec, list):
        raise ValueError(f"expected a text or a list of fields, found {type(spec).__name__}")
    fields = []
    for name, inner, *shape in spec:
        key = tuple(name) if isinstance(name, list) else name  # a title and a name
        fields.append((key, _descr_of(inner), *map(tuple, shape)))
    return fields


def _count_fields(spec: Any) -> int:
    if not isinstance(spec, list):
        return 0
    return len(spec) + sum(_count_fields(field[1]) for field in spec)


@lru_cache(maxsize=256)
def _plain(spec: str) -> np.dtype[Any]:
    if spec == "string":
        return STRING
    if _ML_DTYPES.fullmatch(spec):
        return _ml_dtype(spec)
    if not _PLAIN.fullmatch(spec):
        raise ValueError(f"{spec!r:.80} is not the dtype of an array that is saved")
    try:
        return np.dtype(spec)
    except (TypeError, ValueError) as error:
        raise UnsupportedDtypeError(str(error)) from error


def _is_of_ml_dtypes(dtype: np.dtype[Any]) -> bool:
    """Whether it is one of the small floats and integers of the package ml_dtypes."""
    package = getattr(dtype.type, "__module__", "")
    return package == "ml_dtypes" and bool(_ML_DTYPES.fullmatch(dtype.name))


def _ml_dtype(name: str) -> np.dtype[Any]:
    try:
        import ml_dtypes

        dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    except (ImportError, AttributeError) as error:
        raise UnsupportedDtypeError(
            f"{name} needs the package ml_dtypes (pip install ml_dtypes): {error}"
        ) from None
    return dtype


class CoreType(NamedTuple):
    """The data type of Zarr's core that holds items of a dtype; their bytes stay as they are."""

    name: Any
    fill: Any
    codec: dict[str, Any]
    length: int
    """Of the axis, after all others, that an item takes; 0: an item is one number."""
    attributes: dict[str, Any]
    """What an array's attributes tell other readers: units, by the CF conventions."""


@lru_cache(maxsize=1024)
def core_type(dtype: np.dtype[Any]) -> CoreType:
    """Return the core data type for a dtype whose items have at least one byte.

    Every reader of Zarr has these. Fixed-width strings are code points, dates a number of units
    since 1970; what is left (bytes, records, long doubles) is bytes, which NumPy can view as the
    dtype. Only variable-width strings have none.
    """
    name, length = _core_name(dtype)
    if name == "string":
        return CoreType(name, "", {"name": "vlen-utf8"}, 0, {})
    codec: dict[str, Any] = {"name": "bytes"}
    if name not in ("bool", "int8", "uint8"):
        endian = "little"
        if dtype.str[0] == ">":
            endian = "big"
        codec["configuration"] = {"endian": endian}
    fill = _FILLS.get(np.dtype(name).kind, 0)
    return CoreType(name, fill, codec, length, _cf_attributes(dtype))


def _core_name(dtype: np.dtype[Any]) -> tuple[str, int]:
    if isinstance(dtype, np.dtypes.StringDType):
        return "string", 0
    name = _ZARR_NAMES.get(dtype.str[1:])
    if name is not None:
        return name, 0
    if dtype.kind in "mM":
        return "int64", 0
    if _is_of_ml_dtypes(dtype):
        return f"uint{8 * dtype.itemsize}", 0
    if dtype.kind == "U":
        return "uint32", dtype.itemsize // 4
    return "uint8", dtype.itemsize


def _cf_attributes(dtype: np.dtype[Any]) -> dict[str, Any]:
    if dtype.kind not in "mM":
        return {}
    unit, count = np.datetime_data(dtype)
    if count != 1 or unit not in _CF_UNITS:
        return {}
    name = _CF_UNITS[unit]
    attributes: dict[str, Any] = {"units": name, "_FillValue": _NOT_A_TIME}
    if dtype.kind == "M":
        attributes |= {"units": f"{name} since 1970-01-01", "calendar": "proleptic_gregorian"}
    else:
        # By this attribute, xarray tells durations from other numbers of units; it knows no days.
        precision = unit if unit.endswith("s") else "s"
        attributes["dtype"] = f"timedelta64[{precision}]"
    return attributes


def without_padding(array: Array) -> Array:
    """Return the array with the padding of its items zeroed; a copy if its dtype has padding."""
    dtype = array.dtype
    if dtype.names is not None:
        records = np.zeros(array.shape, dtype)
        for name in dtype.names:
            records[name] = without_padding(array[name])
        return records
    if dtype.char in "gG" and np.finfo(dtype).nmant == _X87_BITS:
        numbers = np.array(array, order="C")
        # Of each number, which has sixteen bytes, or twelve, the first ten are in use.
        width = np.dtype(np.longdouble).itemsize
        numbers.reshape(-1).view(np.uint8).reshape(-1, width)[:, _X87_BYTES:] = 0
        return numbers
    return array


def memory_order(array: Array) -> tuple[int, ...] | None:
    """Return the memory order of the axes, outermost first; None if they are in it already."""
    if array.flags.c_contiguous or 0 in array.strides:
        return None
    axes = range(array.ndim)
    order = sorted(axes, key=lambda axis: -abs(array.strides[axis]))
    if order == list(axes):
        return None
    return tuple(order)
