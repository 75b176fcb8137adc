"""SciPy's sparse arrays and matrices: csr, csc, bsr, coo and dia."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding.codecs import UnsuitableError

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
    form = parts["format"]
    kind = "matrix"
    if name.endswith("sparray"):
        kind = "array"
    cls = getattr(sys.modules["scipy.sparse"], f"{form}_{kind}")
    arrays = {attribute: parts[attribute] for attribute in _ARRAYS[form]}
    result = cls(tuple(arrays.values()), shape=tuple(parts["shape"]))  # checks coordinates
    if form in _COMPRESSED:
        # SciPy's compiled code follows indices and pointers unchecked, so those of a stranger could
        # lead it to any memory of this process. Its own check takes unsigned and falling pointers.
        result.check_format(full_check=True)
        indices, pointers = arrays["indices"], arrays["indptr"]
        are_ints = indices.dtype.kind == pointers.dtype.kind == "i"
        if not are_ints or np.any(np.diff(pointers) < 0):
            raise ValueError("its indices do not fit its shape")
    for attribute, array in arrays.items():
        # SciPy may have converted it to another integer or byte order.
        setattr(result, attribute, array)
    return result
