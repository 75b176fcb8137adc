"""Arrays of a node that are alike, short and many: they are stored as one. Pure: no I/O.

An array by itself is a directory, a document and a chunk, whatever its length. So arrays of one
dtype and shape are stacked along a new first axis, as many as make a megabyte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

LEAST_ALIKE = 64
"""Fewer are stored each by itself, where other readers of Zarr find them by their names."""

MOST_BYTES = (64 << 10) - 1
"""Longest array that is stacked; a longer one is linked where it has not changed."""

_STACK_BYTES = 1 << 20
_KINDS = "biufcmMSU"


class Alike:
    """Stands for each of some blobs that are arrays of one dtype and shape, in C order.

    Parameters
    ----------
    arrays : dict of str to numpy.ndarray
        By blob; each has memory of its own.
    """

    __slots__ = ("arrays",)

    def __init__(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        self.arrays = arrays


def find_alike(blobs: Mapping[str, object], apart: Collection[str] = ()) -> dict[str, Alike]:
    """The blobs that are short arrays like many others.

    Parameters
    ----------
    blobs : mapping of str to object
    apart : collection of str
        Names of blobs that are left out.

    Returns
    -------
    dict of str to Alike
        By blob. What is in another order, or refers to the memory of others, is left out.
    """
    if len(blobs) < LEAST_ALIKE:
        return {}
    classes: dict[tuple[Any, ...], dict[str, np.ndarray[Any, Any]]] = {}
    for name, value in blobs.items():
        if type(value) is np.ndarray and 0 < value.nbytes <= MOST_BYTES and name not in apart:
            flags = value.flags
            if flags.c_contiguous and flags.owndata:
                classes.setdefault((value.dtype, value.shape), {})[name] = value
    found: dict[str, Alike] = {}
    for (dtype, _), arrays in classes.items():
        if are_worth_stacking(dtype, len(arrays)):
            found |= dict.fromkeys(arrays, Alike(arrays))
    return found


def are_worth_stacking(dtype: np.dtype[Any], count: int) -> bool:
    """Whether arrays that are alike are many, and of a dtype whose items lie in them as they are."""
    return count >= LEAST_ALIKE and dtype.kind in _KINDS and dtype.isbuiltin < 2


def cut_stacks(count: int, nbytes: int) -> Iterator[slice]:
    """Which of `count` arrays of `nbytes` each lie in one stack."""
    rows = max(1, _STACK_BYTES // nbytes)
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))


class Rows:
    """Arrays of one dtype and shape, contiguous in C order, that are to be one.

    Parameters
    ----------
    arrays : sequence of numpy.ndarray
    """

    __slots__ = ("_arrays", "dtype", "shape")

    def __init__(self, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        self._arrays = arrays
        self.dtype = arrays[0].dtype
        self.shape = (len(arrays), *arrays[0].shape)

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return len(self._arrays) * self._arrays[0].nbytes

    def gather(self) -> np.ndarray[Any, Any]:
        """A copy of them, one after another along a new first axis."""
        # Half the time of np.stack; typeshed does not know that arrays are buffers.
        joined = b"".join(self._arrays)  # type: ignore[arg-type]
        rows: np.ndarray[Any, Any] = np.frombuffer(joined, np.uint8).view(self.dtype)
        return rows.reshape(self.shape)
