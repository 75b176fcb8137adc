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
        index, flipped = self._normal(key)
        along = index[self.axis]
        if isinstance(along, int):
            for part, start in zip(self.parts, self._starts, strict=True):
                if start <= along < start + part.shape[self.axis]:
                    index[self.axis] = along - start
                    return np.flip(part[tuple(index)], tuple(flipped))
        pieces = []
        for part, start in zip(self.parts, self._starts, strict=True):
            stop = min(along.stop, start + part.shape[self.axis])
            skipped = max(0, -(-(start - along.start) // along.step))
            first = along.start + skipped * along.step
            if first < stop:
                index[self.axis] = slice(first - start, stop - start, along.step)
                pieces.append(np.asarray(part[tuple(index)]))
        if not pieces:
            index[self.axis] = slice(0, 0)
            pieces = [np.asarray(self.parts[0][tuple(index)])]
        at = sum(isinstance(item, slice) for item in index[: self.axis])
        return np.flip(np.concatenate(pieces, at), tuple(flipped))

    def _normal(self, key: Any) -> tuple[list[Any], list[int]]:
        """Return an index with nonnegative ints and forward slices, and the axes to flip."""
        index: list[Any] = []
        flipped: list[int] = []
        axes = 0
        for item, length in zip(self._full(key), self.shape, strict=True):
            if isinstance(item, slice):
                places = range(*item.indices(length))
                if places.step < 0:
                    places = places[::-1]
                    flipped.append(axes)
                # An empty range may start anywhere.
                ends = (places.start, places.stop) if places else (0, 0)
                index.append(slice(*ends, places.step))
                axes += 1
            else:
                place = operator.index(item)
                if not -length <= place < length:
                    raise IndexError(
                        f"index {place} is out of range for an axis of {self.name!r} of length {length}"
                    )
                index.append(place % length)
        return index, flipped

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
        items = list(key) if isinstance(key, tuple) else [key]
        for item in items:
            if item is not Ellipsis and not isinstance(item, slice):
                operator.index(item)
        if Ellipsis not in items:
            items.append(Ellipsis)
        at = items.index(Ellipsis)
        missing = self.ndim - len(items) + 1
        if missing < 0:
            raise IndexError(f"{len(items) - 1} indices for {self.ndim} axes of {self.name!r}")
        return [*items[:at], *[slice(None)] * missing, *items[at + 1 :]]

    def __repr__(self) -> str:
        return f"<PartitionedArray {self.name!r} {self.dtype}{list(self.shape)}, {len(self.parts)} parts>"


def _describe_but(part: Any, axis: int) -> tuple[Any, ...] | None:
    """Return dtype and shape without an axis; None if there is no such axis."""
    shape = getattr(part, "shape", ())
    return (part.dtype, *shape[:axis], *shape[axis + 1 :]) if axis < len(shape) else None


def _describe(part: Any) -> str:
    is_array = hasattr(part, "shape") and hasattr(part, "dtype")
    return f"{part.dtype}{list(part.shape)}" if is_array else f"a {type(part).__name__}"
