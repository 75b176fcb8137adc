"""NumPy dtypes as JSON and back, and the Zarr data type that stands for each. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np

Spec = Any
"""JSON: a dtype string, or a dict for structured, subarray and variable-width string dtypes."""

_ZARR_NAMES = {
    "b1": "bool",
    **{f"{kind}{size}": f"{name}{8 * size}" for kind, name, sizes in (
        ("i", "int", (1, 2, 4, 8)),
        ("u", "uint", (1, 2, 4, 8)),
        ("f", "float", (2, 4, 8)),
        ("c", "complex", (8, 16)),
    ) for size in sizes},
}  # fmt: skip

_X87_MANTISSA_BITS, _X87_BYTES = 63, 10
"""Of a long double on x86, which takes 12 or 16 bytes in memory."""


class UnsupportedDtypeError(TypeError):
    """No bytes on disk can stand for this dtype; the message says why."""


def dtype_to_spec(dtype: np.dtype[Any]) -> Spec:
    """Describe a dtype so that `dtype_from_spec` gives an equal one, byte order included.

    Raises
    ------
    UnsupportedDtypeError
        For objects, and for dtypes that come from other packages.
    """
    spec = _describe(dtype)
    try:
        # What another package registered may look like a void of the same size.
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
        raise UnsupportedDtypeError(f"records of type {dtype.type.__name__} are not kept as such")
    fields = []
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
        f"missing strings are marked by {missing!r}, and only None and NaN can be kept"
    )


def dtype_from_spec(spec: Spec) -> np.dtype[Any]:
    """Make the dtype that `dtype_to_spec` described.

    Raises
    ------
    TypeError, ValueError, KeyError
        `spec` describes none, or none that this platform has.
    """
    if isinstance(spec, str):
        dtype = np.dtype(spec)
        if dtype.hasobject:
            raise TypeError(f"{spec!r} holds Python objects")
        return dtype
    if "string" in spec:
        options: dict[str, Any] = {"coerce": spec["coerce"]}
        if spec["string"] is not None:
            options["na_object"] = {"none": None, "nan": float("nan")}[spec["string"]]
        return np.dtypes.StringDType(**options)
    if "base" in spec:
        return np.dtype((dtype_from_spec(spec["base"]), tuple(spec["shape"])))
    fields = spec["fields"]
    layout: dict[str, Any] = {
        "names": [name for name, *_ in fields],
        "formats": [dtype_from_spec(form) for _, form, *_ in fields],
        "offsets": [offset for _, _, offset, _ in fields],
        "itemsize": spec["itemsize"],
    }
    if any(title is not None for *_, title in fields):
        layout["titles"] = [title for *_, title in fields]
    structured: np.dtype[Any] = np.dtype(layout, align=bool(spec["aligned"]))  # type: ignore[call-overload]
    return structured


def zarr_data_type(dtype: np.dtype[Any]) -> tuple[Any, Any, str | None]:
    """Which Zarr v3 data type holds items of `dtype` unchanged.

    Parameters
    ----------
    dtype : numpy.dtype
        Of at least one byte an item, and not a StringDType.

    Returns
    -------
    data_type, fill_value : JSON
    endian : {"little", "big", None}
        What the ``bytes`` codec must be told; None where items have no byte order.

    Notes
    -----
    What Zarr has no type for (long doubles; big-endian, nested or padded structures) is held as
    raw bytes of the item's size, which any reader can view as the dtype.
    """
    base = _ZARR_NAMES.get(dtype.str[1:])
    if base is not None:
        fill = [0.0, 0.0] if dtype.kind == "c" else 0.0 if dtype.kind == "f" else 0
        return base, False if dtype.kind == "b" else fill, _endian(dtype)
    size = {"length_bytes": dtype.itemsize}
    if dtype.kind == "U":
        return {"name": "fixed_length_utf32", "configuration": size}, "", _endian(dtype)
    if dtype.kind == "S":
        return {"name": "null_terminated_bytes", "configuration": size}, "", None
    if dtype.kind in "mM":
        unit, count = np.datetime_data(dtype)
        name = "numpy.datetime64" if dtype.kind == "M" else "numpy.timedelta64"
        configuration = {"unit": unit, "scale_factor": count}
        return (
            {"name": name, "configuration": configuration},
            "NaT",
            _endian(dtype),
        )
    if dtype.names:
        fields = [[name, _simple_field(dtype, name)] for name in dtype.names]
        if all(kind for _, kind in fields) and dtype == _packed(dtype):
            data_type = {"name": "structured", "configuration": {"fields": fields}}
            return data_type, _zeros_base64(dtype.itemsize), None
    return (
        {"name": "raw_bytes", "configuration": size},
        _zeros_base64(dtype.itemsize),
        None,
    )


def _endian(dtype: np.dtype[Any]) -> str | None:
    return {"<": "little", ">": "big"}.get(dtype.str[0])


def _simple_field(dtype: np.dtype[Any], name: str) -> Any:
    entry: tuple[Any, ...] = dtype.fields[name]  # type: ignore[index]
    field = entry[0]
    if field.subdtype or field.names or field.itemsize == 0 or len(entry) > 2:
        return None
    data_type, _, endian = zarr_data_type(field)
    is_raw = isinstance(data_type, dict) and data_type["name"] == "raw_bytes"
    return None if endian == "big" or (is_raw and field.kind != "V") else data_type


def _packed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype([(name, dtype.fields[name][0]) for name in dtype.names or ()])  # type: ignore[index]


def _zeros_base64(count: int) -> str:
    """Base64 of `count` zero bytes."""
    full, rest = divmod(count, 3)
    return "AAAA" * full + ("", "AA==", "AAA=")[rest]


def without_padding(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array with zeros for what pads its items, which is no value: a copy where any is padded."""
    if array.dtype.names is None and array.dtype.char not in "gG":
        return array
    clean = np.zeros(array.shape, array.dtype)
    _fill(clean, array)
    return clean


def _fill(clean: np.ndarray[Any, Any], array: np.ndarray[Any, Any]) -> None:
    if array.dtype.names is not None:
        for name in array.dtype.names:
            _fill(clean[name], array[name])
        return
    clean[...] = array
    if array.dtype.char in "gG" and np.finfo(array.dtype).nmant == _X87_MANTISSA_BITS:
        width = np.dtype(np.longdouble).itemsize
        offsets = range(_X87_BYTES, array.itemsize, width)
        padding = np.dtype(
            {
                "names": [str(offset) for offset in offsets],
                "formats": [f"V{width - _X87_BYTES}"] * len(offsets),
                "offsets": list(offsets),
                "itemsize": array.itemsize,
            }
        )
        clean.view(padding)[...] = np.zeros((), padding)
