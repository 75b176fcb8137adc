"""NumPy dtypes as JSON and back, and the Zarr data type that stands for each. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from jobrunner.checkpoint.encoding.schema import Count, Document, Shape, described

Array = np.ndarray[Any, Any]

Spec = str | dict[str, Any]
"""JSON of a dtype: its string, or an object as one of the three below."""


Tree = Any
"""A JSON tree that stands for a value."""

Trail = tuple[str, ...]
"""Path within a blob: keys, escaped for file systems, and indices."""


@dataclass(frozen=True, slots=True)
class ArrayPart:
    """One array of a value."""

    data: Array  # axes in memory order, outermost first; not always contiguous
    order: tuple[int, ...] | None  # `data == array.transpose(order)`; None: in memory order already
    trail: Trail
    holds: str  # type of the encoded value: ndarray, bytes, str, ...


_MOST_FIELDS = 1 << 14
"""Fields of a record; more would take NumPy long, each time that it makes the dtype."""


class StringSpec(Document):
    """A variable-width string dtype; ``string`` is its missing value."""

    string: Literal["none", "nan"] | None
    coerce: bool


class SubarraySpec(Document):
    """A subarray dtype."""

    base: Spec
    shape: Shape


class StructSpec(Document):
    """A structured dtype; each field is its name, dtype, offset and title."""

    fields: Annotated[
        list[tuple[str, Spec, Count, str | None]], msgspec.Meta(max_length=_MOST_FIELDS)
    ]
    itemsize: Count
    aligned: bool


NUMBERS = [
    "bool",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
"""Names of dtypes that NumPy, Zarr and PyTorch share."""

_ZARR_NAMES = {np.dtype(name).str[1:]: name for name in NUMBERS}

_ML_DTYPES = re.compile(r"b?complex32|bfloat16|float[468]_e\dm\d\w*|u?int[124]")
"""Names of dtypes of the package ml_dtypes, which JAX and others use."""

_PLAIN = re.compile(r"[<>|][biufcSUV]\d+|[<>|][mM]8(\[\d*[a-zA-Z]+\])?")
"""What `dtype.str` is for all others without fields."""

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

_X87_MANTISSA_BITS, _X87_BYTES = 63, 10
"""A long double on x86; it takes 12 or 16 bytes in memory."""


class UnsupportedDtypeError(TypeError):
    """A dtype that cannot be saved, or that this platform lacks; the message says why."""


def dtype_to_spec(dtype: np.dtype[Any]) -> Spec:
    """Describe a dtype so that `dtype_from_spec` makes an equal one, byte order included."""
    spec = _describe(dtype)
    try:
        # A dtype that another package registered may look like a void of the same size.
        is_own = dtype_from_spec(spec) == dtype
    except (TypeError, ValueError):
        is_own = False
    if not is_own:
        raise UnsupportedDtypeError(f"the dtype {dtype!r} is not one of NumPy's own")
    return spec


def _describe(dtype: np.dtype[Any]) -> Spec:
    if dtype.metadata:
        raise UnsupportedDtypeError(f"the dtype {dtype!r} has metadata, which would be lost")
    if isinstance(dtype, np.dtypes.StringDType):
        return {"string": _missing_value(dtype), "coerce": dtype.coerce}
    if dtype.hasobject:
        raise UnsupportedDtypeError(f"the dtype {dtype!r} holds Python objects")
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": _describe(base), "shape": list(shape)}
    if dtype.names is None:
        return dtype.name if _is_of_ml_dtypes(dtype) else dtype.str
    if dtype.type is not np.void:
        raise UnsupportedDtypeError(
            f"records of type {dtype.type.__name__} cannot be saved as such"
        )
    fields: list[Any] = []
    if len(dtype.names) > _MOST_FIELDS:
        raise UnsupportedDtypeError(
            f"a record has {len(dtype.names)} fields, and at most {_MOST_FIELDS} can be saved"
        )
    for name in dtype.names:
        entry: tuple[Any, ...] = dtype.fields[name]  # type: ignore[index]
        title = entry[2] if len(entry) > 2 else None
        if not isinstance(title, str | None):
            raise UnsupportedDtypeError(f"the field {name!r} has a title that is not a str")
        fields.append([name, _describe(entry[0]), entry[1], title])
    return {"fields": fields, "itemsize": dtype.itemsize, "aligned": dtype.isalignedstruct}


def _is_of_ml_dtypes(dtype: np.dtype[Any]) -> bool:
    """Whether it is one of the small floats and integers of the package ml_dtypes."""
    of = getattr(dtype.type, "__module__", "")
    return of == "ml_dtypes" and bool(_ML_DTYPES.fullmatch(dtype.name))


def _missing_value(dtype: Any) -> str | None:
    if not hasattr(dtype, "na_object"):
        return None
    missing = dtype.na_object
    if missing is None:
        return "none"
    if type(missing) is float and missing != missing:
        return "nan"
    raise UnsupportedDtypeError(
        f"its missing strings are {missing!r}, and only None and NaN can be saved"
    )


def dtype_from_spec(spec: Spec) -> np.dtype[Any]:
    """Make the dtype that `dtype_to_spec` described.

    Raises `UnsupportedDtypeError` if this platform lacks it, `msgspec.ValidationError` if `spec`
    does not describe a dtype.
    """
    try:
        return _make(spec)
    except msgspec.ValidationError:
        raise
    except RecursionError:
        raise msgspec.ValidationError("it is nested too deep") from None
    except (TypeError, ValueError) as error:
        raise UnsupportedDtypeError(str(error)) from error


def _make(spec: Spec) -> np.dtype[Any]:
    if isinstance(spec, str):
        return _plain(spec)
    if "string" in spec:
        string = msgspec.convert(spec, described(StringSpec))
        options: dict[str, Any] = {"coerce": string.coerce}
        if string.string is not None:
            options["na_object"] = None if string.string == "none" else float("nan")
        return np.dtypes.StringDType(**options)
    if "base" in spec:
        subarray = msgspec.convert(spec, described(SubarraySpec))
        return np.dtype((_make_inner(subarray.base), subarray.shape))
    struct = msgspec.convert(spec, described(StructSpec))
    layout: dict[str, Any] = {
        "names": [name for name, *_ in struct.fields],
        "formats": [_make_inner(form) for _, form, *_ in struct.fields],
        "offsets": [offset for _, _, offset, _ in struct.fields],
        "itemsize": struct.itemsize,
    }
    if any(title is not None for *_, title in struct.fields):
        layout["titles"] = [title for *_, title in struct.fields]
    structured: np.dtype[Any] = np.dtype(layout, align=struct.aligned)  # type: ignore[call-overload]
    return structured


def _make_inner(spec: Spec) -> np.dtype[Any]:
    dtype = _make(spec)
    if dtype.hasobject:  # NumPy would take the bytes of a file for addresses
        raise msgspec.ValidationError("strings of variable width are part of another dtype")
    return dtype


@lru_cache(maxsize=256)
def _plain(spec: str) -> np.dtype[Any]:
    if _ML_DTYPES.fullmatch(spec):
        dtype: np.dtype[Any] = np.dtype(_type_of_ml_dtypes(spec))
        return dtype
    if not _PLAIN.fullmatch(spec):
        raise msgspec.ValidationError(f"{spec!r:.80} is not the dtype of an array that is saved")
    return np.dtype(spec)


def _type_of_ml_dtypes(name: str) -> Any:
    try:
        import ml_dtypes

        return getattr(ml_dtypes, name)
    except (ImportError, AttributeError) as error:
        why = f"{name} needs the package ml_dtypes (pip install ml_dtypes): {error}"
        raise TypeError(why) from None


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
        codec["configuration"] = {"endian": "big" if dtype.str[0] == ">" else "little"}
    fill: Any = {"b": False, "f": 0.0, "c": [0.0, 0.0]}.get(np.dtype(name).kind, 0)
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
    if dtype.kind == "M":
        units = {"units": f"{name} since 1970-01-01", "calendar": "proleptic_gregorian"}
    else:
        # By its own attribute, xarray tells durations from other numbers of units; it knows no days.
        units = {"units": name, "dtype": f"timedelta64[{unit if unit[-1] == 's' else 's'}]"}
    return {**units, "_FillValue": _NOT_A_TIME}


def without_padding(array: Array) -> Array:
    """Return the array with the padding of its items zeroed; a copy if its dtype has padding."""
    if array.dtype.names is None and array.dtype.char not in "gG":
        return array
    clean = np.zeros(array.shape, array.dtype)
    _fill(clean, array)
    return clean


def _fill(clean: Array, array: Array) -> None:
    if array.dtype.names is not None:
        for name in array.dtype.names:
            _fill(clean[name], array[name])
        return
    if array.dtype.char in "gG" and np.finfo(array.dtype).nmant == _X87_MANTISSA_BITS:
        array = np.array(array, order="C")
        width = np.dtype(np.longdouble).itemsize
        array.reshape(-1).view(np.uint8).reshape(-1, width)[:, _X87_BYTES:] = 0
    clean[...] = array
