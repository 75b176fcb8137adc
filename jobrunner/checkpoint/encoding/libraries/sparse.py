"""SciPy's sparse arrays and matrices. The formats `dok` and `lil` are saved by way of `coo`."""

from __future__ import annotations

import math
import sys
from typing import Any

from jobrunner.checkpoint.encoding.codecs import UnsuitableError
from jobrunner.checkpoint.encoding.dtypes import Array

_COMPRESSED = ("csr", "csc", "bsr")
_BY_WAY_OF_COO = ("dok", "lil")
_FORMATS = (*_COMPRESSED, *_BY_WAY_OF_COO, "coo", "dia")
_OWN_ATTRIBUTES = {
    *("data", "indices", "indptr", "coords", "row", "col", "offsets", "rows", "dtype", "maxprint"),
    "has_canonical_format",
}


def encode(name: str, value: Any) -> dict[str, Any]:
    """Return the arrays that the format is made of."""
    for attribute in vars(value):
        if not attribute.startswith("_") and attribute not in _OWN_ATTRIBUTES:
            raise UnsuitableError(f"its attribute {attribute!r} would be lost; save it separately")
    form = value.format
    if form not in _FORMATS:
        raise UnsuitableError(f"its format {form!r} is unknown; save value.tocsr()")
    parts: dict[str, Any] = {"format": form, "shape": [int(length) for length in value.shape]}
    if form in _BY_WAY_OF_COO:
        value = value.tocoo()
    parts["data"] = value.data
    if form in _COMPRESSED:
        parts |= {"indices": value.indices, "indptr": value.indptr}
    elif form == "dia":
        parts["offsets"] = value.offsets
    else:
        parts |= {"coords": list(value.coords), "canonical": bool(value.has_canonical_format)}
    return parts


def decode(name: str, parts: dict[str, Any]) -> Any:
    """Make it again, on the memory of the arrays, which are not trusted."""
    form, shape, data = parts["format"], tuple(parts["shape"]), parts["data"]
    if form not in _FORMATS:
        raise ValueError(f"the format {form!r} is unknown")
    kind = "array" if name.endswith("sparray") else "matrix"
    scipy = sys.modules["scipy.sparse"]
    stored = "coo" if form in _BY_WAY_OF_COO else form
    cls = getattr(scipy, f"{stored}_{kind}")
    if form in _COMPRESSED:
        indices, indptr = parts["indices"], parts["indptr"]
        _check_compressed(form, shape, data, indices, indptr)
        result = cls((data, indices, indptr), shape=shape)
        # SciPy may have converted them to another integer or byte order.
        result.data, result.indices, result.indptr = data, indices, indptr
        return result
    if form == "dia":
        result = cls((data, parts["offsets"]), shape=shape)
        result.data, result.offsets = data, parts["offsets"]
        return result
    coords = tuple(parts["coords"])
    result = cls((data, coords), shape=shape)  # checks that they are within the shape
    result.data, result.coords = data, coords
    result.has_canonical_format = bool(parts["canonical"])
    if form in _BY_WAY_OF_COO:
        _check_rows(form, shape)
        return result.asformat(form)
    return result


_MOST_ROWS = 1 << 24
"""Of a `lil`, which has two lists for each row: a forged shape may claim any number of rows."""


def _check_rows(form: str, shape: tuple[int, ...]) -> None:
    if form == "lil" and shape[0] > _MOST_ROWS:
        raise ValueError(f"a lil of {shape[0]} rows is too large")


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
