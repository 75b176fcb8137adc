"""NumPy dtypes as JSON and back, and the Zarr data type that stands for each. Pure."""

from __future__ import annotations

import base64
from functools import lru_cache
from typing import Any, Literal

import msgspec
import numpy as np

from jobrunner.checkpoint.encoding.schema import Count, Document, Shape

Array = np.ndarray[Any, Any]

Spec = str | dict[str, Any]
"""JSON of a dtype: its string, or an object as one of the three below."""


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

    fields: list[tuple[str, Spec, Count, str | None]]
    itemsize: Count
    aligned: bool


NUMBERS = [
    "bool",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "complex64", "complex128"),
]
"""Names of dtypes that NumPy, Zarr and PyTorch share."""

_ZARR_NAMES = {np.dtype(name).str[1:]: name for name in NUMBERS}

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
    if isinstance(dtype, np.dtypes.StringDType):
        return {"string": _missing_value(dtype), "coerce": dtype.coerce}
    if dtype.hasobject:
        raise UnsupportedDtypeError(f"the dtype {dtype!r} holds Python objects")
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": _describe(base), "shape": list(shape)}
    if dtype.names is None:
        return dtype.str
    if dtype.type is not np.void:
        raise UnsupportedDtypeError(
            f"records of type {dtype.type.__name__} cannot be saved as such"
        )
    fields: list[Any] = []
    for name in dtype.names:
        entry: tuple[Any, ...] = dtype.fields[name]  # type: ignore[index]
        title = entry[2] if len(entry) > 2 else None
        if not isinstance(title, str | None):
            raise UnsupportedDtypeError(f"the field {name!r} has a title that is not a str")
        fields.append([name, _describe(entry[0]), entry[1], title])
    return {"fields": fields, "itemsize": dtype.itemsize, "aligned": dtype.isalignedstruct}


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
        string = msgspec.convert(spec, StringSpec)
        options: dict[str, Any] = {"coerce": string.coerce}
        if string.string is not None:
            options["na_object"] = None if string.string == "none" else float("nan")
        return np.dtypes.StringDType(**options)
    if "base" in spec:
        subarray = msgspec.convert(spec, SubarraySpec)
        return np.dtype((_make(subarray.base), subarray.shape))
    struct = msgspec.convert(spec, StructSpec)
    layout: dict[str, Any] = {
        "names": [name for name, *_ in struct.fields],
        "formats": [_make(form) for _, form, *_ in struct.fields],
        "offsets": [offset for _, _, offset, _ in struct.fields],
        "itemsize": struct.itemsize,
    }
    if any(title is not None for *_, title in struct.fields):
        layout["titles"] = [title for *_, title in struct.fields]
    structured: np.dtype[Any] = np.dtype(layout, align=struct.aligned)  # type: ignore[call-overload]
    return structured


@lru_cache(maxsize=256)
def _plain(spec: str) -> np.dtype[Any]:
    dtype = np.dtype(spec)
    if dtype.hasobject:
        raise TypeError(f"{spec!r} holds Python objects")
    return dtype


def zarr_data_type(dtype: np.dtype[Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return the Zarr v3 data type that holds items of `dtype` unchanged, its fill value and codec.

    Items must have at least one byte. Long doubles and big-endian, nested or padded structures have
    no Zarr type: they are stored as raw bytes, which any reader can view as the dtype.
    """
    if isinstance(dtype, np.dtypes.StringDType):
        return "string", "", {"name": "vlen-utf8"}
    raw = {"name": "bytes"}
    endian = {"<": "little", ">": "big"}.get(dtype.str[0])
    codec = {**raw, "configuration": {"endian": endian}} if endian else raw
    base = _ZARR_NAMES.get(dtype.str[1:])
    if base is not None:
        fill = [0.0, 0.0] if dtype.kind == "c" else 0.0 if dtype.kind == "f" else 0
        return base, False if dtype.kind == "b" else fill, codec
    size = {"length_bytes": dtype.itemsize}
    if dtype.kind == "U":
        return {"name": "fixed_length_utf32", "configuration": size}, "", codec
    if dtype.kind == "S":
        return {"name": "null_terminated_bytes", "configuration": size}, "", raw
    if dtype.kind in "mM":
        unit, count = np.datetime_data(dtype)
        name = "numpy.datetime64" if dtype.kind == "M" else "numpy.timedelta64"
        configuration = {"unit": unit, "scale_factor": count}
        return {"name": name, "configuration": configuration}, "NaT", codec
    zeros = base64.b64encode(bytes(dtype.itemsize)).decode()
    if dtype.names:
        fields = [[name, _simple_field(dtype, name)] for name in dtype.names]
        packed = np.dtype([(name, dtype.fields[name][0]) for name in dtype.names])  # type: ignore[index]
        if all(kind for _, kind in fields) and dtype == packed:
            data_type = {"name": "structured", "configuration": {"fields": fields}}
            return data_type, zeros, raw
    return {"name": "raw_bytes", "configuration": size}, zeros, raw


def _simple_field(dtype: np.dtype[Any], name: str) -> Any:
    entry: tuple[Any, ...] = dtype.fields[name]  # type: ignore[index]
    field = entry[0]
    if field.subdtype or field.names or field.itemsize == 0 or len(entry) > 2:
        return None
    data_type, _, _ = zarr_data_type(field)
    is_raw = isinstance(data_type, dict) and data_type["name"] == "raw_bytes"
    return None if field.str[0] == ">" or (is_raw and field.kind != "V") else data_type


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
