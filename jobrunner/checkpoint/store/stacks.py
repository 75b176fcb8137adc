"""Stack many short arrays of one dtype and shape, to store them as one. Pure: no I/O.

An array by itself takes a directory, a document and a chunk. Alike arrays are therefore stacked
along a new first axis, up to a megabyte at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding import Array

LEAST_ALIKE = 64
"""Fewer are stored one by one, where other readers of Zarr find them by their names."""

MOST_BYTES = (64 << 10) - 1
"""The longest array that is stacked; longer ones are linked if they have not changed."""

_STACK_BYTES = 1 << 20
_KINDS = "biufcmMSU"


@dataclass(slots=True)
class Alike:
    """Stands for several blobs: arrays of one dtype and shape, in C order, that own their memory."""

    arrays: dict[str, Array]  # by blob


def find_alike(blobs: Mapping[str, object], apart: Collection[str] = ()) -> dict[str, Alike]:
    """Find the blobs, but those `apart`, that are short arrays like many others; return their groups.

    Skips arrays that are not in C order or do not own their memory.
    """
    arrays = (
        (name, value, None)
        for name, value in blobs.items()
        if type(value) is np.ndarray
        and value.flags.owndata
        and name not in apart
        and not value.dtype.metadata
    )
    found: dict[str, Alike] = {}
    for alike, _ in group_alike(arrays):
        found |= dict.fromkeys(alike, Alike(alike))
    return found


def group_alike(arrays: Iterable[tuple[Any, Array, Any]]) -> Iterator[tuple[dict[Any, Array], Any]]:
    """Group short arrays in C order that are alike; `arrays` are given with a key and their order.

    They can be stacked: their dtype is one of NumPy's own, of items without gaps.
    """
    groups: dict[tuple[Any, ...], dict[Any, Array]] = {}
    for key, array, order in arrays:
        if 0 < array.nbytes <= MOST_BYTES and array.flags.c_contiguous:
            groups.setdefault((array.dtype, array.shape, order), {})[key] = array
    for (dtype, _, order), alike in groups.items():
        if len(alike) >= LEAST_ALIKE and dtype.kind in _KINDS and dtype.isbuiltin < 2:
            yield alike, order


def cut_stacks(count: int, nbytes: int) -> Iterator[slice]:
    """Divide `count` arrays of `nbytes` each into stacks."""
    rows = max(1, _STACK_BYTES // nbytes)
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))


class Rows:
    """Arrays of one dtype and shape, contiguous in C order, to be stored as one."""

    __slots__ = ("_arrays", "dtype", "shape")

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = arrays
        self.dtype = arrays[0].dtype
        self.shape = (len(arrays), *arrays[0].shape)

    @property
    def nbytes(self) -> int:
        """The size of all of them."""
        return len(self._arrays) * self._arrays[0].nbytes

    def gather(self) -> Array:
        """Copy them into one array, along a new first axis."""
        # Twice as fast as np.stack; typeshed does not know that arrays are buffers.
        joined = b"".join(self._arrays)  # type: ignore[arg-type]
        rows: Array = np.frombuffer(joined, np.uint8).view(self.dtype)
        return rows.reshape(self.shape)
