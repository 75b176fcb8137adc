"""SciPy's sparse arrays and matrices: csr, csc, bsr, coo and dia."""

from __future__ import annotations

import math
import sys
from typing import Any

from jobrunner.checkpoint.encoding.codecs import UnsuitableError
from jobrunner.checkpoint.encoding.dtypes import Array

_COMPRESSED = ("csr", "csc", "bsr")
_ARRAYS = {
    **dict.fromkeys(_COMPRESSED, ("data", "indices", "indptr")),
    "dia": ("data", "offsets"),
    "coo": ("data", "coords"),
}
"""What a value of each format is made of; `coords` are a tuple of arrays."""


def encode(name: str, value: Any) -> dict[str, Any]:
    """Return the arrays that the format is made of."""
    form = value.format
    if form not in _ARRAYS:
        raise UnsuitableError(f"its format is {form!r}; save value.tocsr()")
    arrays = {attribute: getattr(value, attribute) for attribute in _ARRAYS[form]}
    return {"format": form, "shape": [int(length) for length in value.shape], **arrays}


def decode(name: str, parts: dict[str, Any]) -> Any:
    """Make it again, on the memory of the arrays, which are not trusted."""
    form, shape = parts["format"], tuple(parts["shape"])
    arrays = {attribute: parts[attribute] for attribute in _ARRAYS[form]}
    if form in _COMPRESSED:
        _check_compressed(form, shape, **arrays)
    kind = "array" if name.endswith("sparray") else "matrix"
    cls = getattr(sys.modules["scipy.sparse"], f"{form}_{kind}")
    result = cls(tuple(arrays.values()), shape=shape)  # checks coordinates
    for attribute, array in arrays.items():
        # SciPy may have converted it to another integer or byte order.
        setattr(result, attribute, array)
    return result


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
