"""SciPy's sparse arrays and matrices, in all formats."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding.dtypes import Array
from jobrunner.checkpoint.encoding.libraries.table import NotExactError

_COMPRESSED = ("csr", "csc", "bsr")
_FORMATS = (*_COMPRESSED, "coo", "dia", "dok", "lil")
_OWN_ATTRIBUTES = {
    *("data", "indices", "indptr", "coords", "row", "col", "offsets", "rows", "dtype", "maxprint"),
    "has_canonical_format",
}


def encode(name: str, value: Any) -> dict[str, Any]:
    """Return the arrays that the format is made of."""
    for attribute in vars(value):
        if not attribute.startswith("_") and attribute not in _OWN_ATTRIBUTES:
            raise NotExactError(f"its attribute {attribute!r} would be lost; save it separately")
    form = value.format
    parts = {"format": form, "shape": [int(length) for length in value.shape]}
    if form in _COMPRESSED:
        return {**parts, "data": value.data, "indices": value.indices, "indptr": value.indptr}
    if form == "coo":
        canonical = bool(value.has_canonical_format)
        return {**parts, "data": value.data, "coords": list(value.coords), "canonical": canonical}
    if form == "dia":
        return {**parts, "data": value.data, "offsets": value.offsets}
    if form == "lil":
        indptr = np.cumsum([0, *map(len, value.rows)], dtype=np.int64)
        indices = np.fromiter((i for row in value.rows for i in row), np.int64, indptr[-1])
        data = np.array([item for row in value.data for item in row], value.dtype)
        return {**parts, "data": data, "indices": indices, "indptr": indptr}
    if form == "dok":
        keys = [key if isinstance(key, tuple) else (key,) for key in value.keys()]  # noqa: SIM118
        coords = np.array(keys, np.int64).reshape(len(keys), value.ndim)
        data = np.array(list(value.values()), value.dtype)
        return {**parts, "data": data, "coords": coords}
    raise NotExactError(f"its format {form!r} is unknown; save value.tocsr()")


def decode(name: str, parts: dict[str, Any]) -> Any:
    """Make it again, on the memory of the arrays, which are not trusted."""
    form, shape, data = parts["format"], tuple(parts["shape"]), parts["data"]
    if form not in _FORMATS:
        raise ValueError(f"the format {form!r} is unknown")
    kind = "array" if name.endswith("sparray") else "matrix"
    cls = getattr(sys.modules["scipy.sparse"], f"{form}_{kind}")
    if form in _COMPRESSED:
        indices, indptr = parts["indices"], parts["indptr"]
        _check_compressed(form, shape, data, indices, indptr)
        made = cls((data, indices, indptr), shape=shape)
        # SciPy may have converted them to another integer or byte order.
        made.data, made.indices, made.indptr = data, indices, indptr
    elif form == "coo":
        coords = tuple(parts["coords"])
        made = cls((data, coords), shape=shape)  # checks that they are within the shape
        made.data, made.coords = data, coords
        made.has_canonical_format = bool(parts["canonical"])
    elif form == "dia":
        made = cls((data, parts["offsets"]), shape=shape)
        made.data, made.offsets = data, parts["offsets"]
    elif form == "lil":
        indices, indptr = parts["indices"], parts["indptr"]
        _check_compressed("csr", shape, data, indices, indptr)
        made = cls(shape, dtype=data.dtype)
        numbers, items = indices.tolist(), data.tolist()
        for i in range(shape[0]):
            made.rows[i] = numbers[indptr[i] : indptr[i + 1]]
            made.data[i] = items[indptr[i] : indptr[i + 1]]
    else:
        coords = parts["coords"]
        if coords.shape != (len(data), len(shape)) or not _is_within(coords, shape):
            raise ValueError("its indices do not fit its shape")
        made = cls(shape, dtype=data.dtype)
        keys = coords[:, 0].tolist() if len(shape) == 1 else map(tuple, coords.tolist())
        made._dict.update(zip(keys, data, strict=True))
    return made


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
        and _is_within(indices[: indptr[-1], np.newaxis], (minor,))
    )
    if not is_fit:
        raise ValueError("its indices do not fit its shape")


def _is_within(coords: Array, shape: tuple[int, ...]) -> bool:
    return bool(((coords >= 0) & (coords < np.array(shape))).all())
