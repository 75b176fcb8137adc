"""One lazy array whose parts are blobs of several nodes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding import Array
from jobrunner.errors import CheckpointError


class PartitionedArray:
    """The parts of an array that nodes saved, concatenated along an axis.

    Indexing it with ints, slices and ``...`` reads only the items requested, unverified.

    Parameters
    ----------
    name : str
    axis : int
    parts : sequence of array
        Lazy arrays, in order, that differ only in their length along `axis`.
    """

    def __init__(self, name: str, axis: int, parts: Sequence[Any]) -> None:
        fit = {_describe_but(part, axis) for part in parts}
        if len(fit) != 1 or None in fit:
            found = ", ".join(map(_describe, parts))
            raise CheckpointError(
                f"The parts of {name!r} do not fit together along axis {axis}: {found}. Parts must "
                f"be arrays with that axis, and differ only in their length along it."
            )
        self.name = name
        self.axis = axis
        self.parts = tuple(parts)
        self.dtype: np.dtype[Any] = parts[0].dtype
        ends = np.cumsum([part.shape[axis] for part in parts]).tolist()
        self._starts = [0, *ends[:-1]]
        first = list(parts[0].shape)
        first[axis] = ends[-1]
        self.shape: tuple[int, ...] = tuple(first)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        index: list[range] = []  # of each axis, forward
        finish: list[int | slice] = []  # drops axes given by an int, and flips others
        for item, length in zip(self._full(key), self.shape, strict=True):
            try:
                places = range(length)[item]
            except IndexError:
                raise IndexError(
                    f"index {item} is out of range for an axis of {self.name!r} of length {length}"
                ) from None
            if isinstance(places, int):
                places = range(places, places + 1)
                finish.append(0)
            else:
                finish.append(slice(None, None, -1 if places.step < 0 else 1))
            index.append(places if places.step > 0 else places[::-1])
        along = index[self.axis]
        pieces = []
        for part, start in zip(self.parts, self._starts, strict=True):
            stop = start + part.shape[self.axis]
            low, high = (max(0, -(-(end - along.start) // along.step)) for end in (start, stop))
            if inside := along[low:high]:
                index[self.axis] = range(inside.start - start, inside.stop - start, inside.step)
                pieces.append(_read(part, index))
        if not pieces:
            index[self.axis] = range(0)
            pieces = [_read(self.parts[0], index)]
        return np.concatenate(pieces, self.axis)[tuple(finish)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self[...], dtype)

    def to_dask(self) -> Any:
        """Return it as a `dask.array.Array`, a block for each file on disk."""
        import dask.array

        return dask.array.concatenate(
            [dask.array.from_array(part, part.shards or part.chunks) for part in self.parts],
            self.axis,
        )

    def _full(self, key: Any) -> list[Any]:
        """Return an index of every axis."""
        items = list(key) if isinstance(key, tuple) else [key]
        for item in items:
            if item is not Ellipsis and not isinstance(item, slice):
                operator.index(item)
        if Ellipsis not in items:
            items.append(Ellipsis)
        if len(items) - 1 > self.ndim:
            raise IndexError(f"{len(items) - 1} indices for {self.ndim} axes of {self.name!r}")
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (self.ndim - len(items) + 1)
        return items

    def __repr__(self) -> str:
        return f"<PartitionedArray {self.name!r} {self.dtype}{list(self.shape)}, {len(self.parts)} parts>"


def _read(part: Any, index: Sequence[range]) -> Array:
    # An empty range may start anywhere.
    ends = ((it.start, it.stop, it.step) if it else (0, 0) for it in index)
    return np.asarray(part[tuple(slice(*end) for end in ends)])


def _describe_but(part: Any, axis: int) -> tuple[Any, ...] | None:
    """Return dtype and shape without an axis; None if there is no such axis."""
    shape = getattr(part, "shape", ())
    return (part.dtype, *shape[:axis], *shape[axis + 1 :]) if axis < len(shape) else None


def _describe(part: Any) -> str:
    is_array = hasattr(part, "shape") and hasattr(part, "dtype")
    return f"{part.dtype}{list(part.shape)}" if is_array else f"a {type(part).__name__}"
