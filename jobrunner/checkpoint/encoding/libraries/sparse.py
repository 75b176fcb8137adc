"""SciPy's sparse arrays and matrices. The formats `dok` and `lil` are saved by way of `coo`."""

from __future__ import annotations

import math
import sys
from typing import Any

from jobrunner.checkpoint.encoding.codecs import UnsuitableError
from jobrunner.checkpoint.encoding.dtypes import Array

_COMPRESSED = ("csr", "csc", "bsr")
_BY_WAY_OF_COO = ("dok", "lil")
_ARRAYS = {
    **dict.fromkeys(_COMPRESSED, ("data", "indices", "indptr")),
    "dia": ("data", "offsets"),
    **dict.fromkeys(("coo", *_BY_WAY_OF_COO), ("data", "coords")),
}
"""What a value of each format is made of; `coords` are a tuple of arrays."""

_OWN_ATTRIBUTES = {
    *("data", "indices", "indptr", "coords", "row", "col", "offsets", "rows", "dtype", "maxprint"),
    "has_canonical_format",
}
_MOST_ROWS = 1 << 24
"""Of a `lil`, which has two lists for each row: a forged shape may claim any number of rows."""


def encode(name: str, value: Any) -> dict[str, Any]:
    """Return the arrays that the format is made of."""
    for attribute in vars(value):
        if not attribute.startswith("_") and attribute not in _OWN_ATTRIBUTES:
            raise UnsuitableError(f"its attribute {attribute!r} would be lost; save it separately")
    form = value.format
    if form not in _ARRAYS:
        raise UnsuitableError(f"its format {form!r} is unknown; save value.tocsr()")
    parts: dict[str, Any] = {"format": form, "shape": [int(length) for length in value.shape]}
    if form in _BY_WAY_OF_COO:
        value = value.tocoo()
    for attribute in _ARRAYS[form]:
        parts[attribute] = getattr(value, attribute)
    if value.format == "coo":
        parts["canonical"] = bool(value.has_canonical_format)
    return parts


def decode(name: str, parts: dict[str, Any]) -> Any:
    """Make it again, on the memory of the arrays, which are not trusted."""
    form, shape = parts["format"], tuple(parts["shape"])
    arrays = {attribute: parts[attribute] for attribute in _ARRAYS[form]}
    if form in _COMPRESSED:
        _check_compressed(form, shape, **arrays)
    kind = "array" if name.endswith("sparray") else "matrix"
    stored = "coo" if form in _BY_WAY_OF_COO else form
    cls = getattr(sys.modules["scipy.sparse"], f"{stored}_{kind}")
    result = cls(tuple(arrays.values()), shape=shape)  # checks coordinates
    for attribute, array in arrays.items():
        # SciPy may have converted it to another integer or byte order.
        setattr(result, attribute, array)
    if stored == "coo":
        result.has_canonical_format = bool(parts["canonical"])
    if form == "lil" and shape[0] > _MOST_ROWS:
        raise ValueError(f"a lil of {shape[0]} rows is too large")
    return result.asformat(form)


def _check_compressed(
    form: str, shape: tuple[int, ...], data: Array, indices: Array, indptr: Array
) -> None:
    """Refuse indices that SciPy's compiled code would follow out of its memory."""
    major, minor = shape if len(shape) == 2 else (1, math.prod(shape))
    if form == "csc":
        major, minor = minor, major
    if form == "bsr":
        rows, columns = data.shape[1:]
        if major % rows or minor % columns:
            raise ValueError("its blocks do not fit its shape")
        major, minor = major // rows, minor // columns
    is_fit = (
        indptr.dtype.kind == indices.dtype.kind == "i"
        and indptr.shape == (major + 1,)
        and indices.shape == data.shape[:1]
        and indptr[0] == 0
        and bool((indptr[1:] >= indptr[:-1]).all())
        and indptr[-1] <= len(indices)
        and bool(((indices >= 0) & (indices < minor))[: indptr[-1]].all())
    )
    if not is_fit:
        raise ValueError("its indices do not fit its shape")
