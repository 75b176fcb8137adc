"""Blobs of several nodes as one Dask array or data frame, in chunks of a sensible size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jobrunner.errors import BlobNotFoundError, DefinitionError

if TYPE_CHECKING:
    from dask.array import Array
    from dask.dataframe import DataFrame

CHUNK_BYTES = 64 << 20
"""Neighbours are joined up to this size; a larger blob is a chunk of its own."""


class ValueType(NamedTuple):
    """What the values of a blob must have in common."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """The size of a value."""
        nbytes = self.dtype.itemsize
        for length in self.shape:
            nbytes *= length
        return nbytes

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    def without(self, axis: int | None) -> ValueType:
        """What values must have in common that are joined along an axis; None: along a new one."""
        if axis is None:
            return self
        return ValueType((*self.shape[:axis], *self.shape[axis + 1 :]), self.dtype)


class FrameType(NamedTuple):
    """A data frame or series without its rows, and the size of the whole."""

    meta: Any
    nbytes: int

    def without(self, axis: int | None) -> str:
        """What frames must have in common that are joined."""
        return str(self)

    def __str__(self) -> str:
        if self.meta.ndim == 1:
            columns = [f"{self.meta.name} {self.meta.dtype}"]
        else:
            columns = [f"{name} {dtype}" for name, dtype in self.meta.dtypes.items()]
        return f"a {type(self.meta).__name__} of {', '.join(columns)}"


def type_of_array(value: Any) -> ValueType | None:
    """The type of an array or a number; None of anything else."""
    if type(value) is np.ndarray:
        return ValueType(value.shape, value.dtype)
    is_number = isinstance(value, bool | int | float | complex | np.generic)
    return ValueType((), np.asarray(value).dtype) if is_number else None


def type_of_frame(value: Any) -> FrameType | None:
    """The type of a data frame or series of pandas; None of anything else."""
    if type(value).__module__.partition(".")[0] != "pandas" or not hasattr(value, "iloc"):
        return None
    return FrameType(value.iloc[:0], int(np.sum(value.memory_usage(index=True))))


def cut(
    blob: str,
    types: Mapping[str, ValueType | None] | Mapping[str, FrameType | None],
    axis: int | None,
    place: str = "",
) -> list[list[str]]:
    """Cut nodes into neighbours that make up a chunk, given the types of their values of a blob.

    Raises `DefinitionError` if the values cannot be joined along `axis`; None: along a new one. It
    says where they are by `place`, such as " at epoch 3 of /runs".
    """
    if not types:
        raise BlobNotFoundError(
            f"No node has a blob {blob!r}{place}. Check the names of blob and nodes."
        )
    first = next(iter(types))
    chunks: list[list[str]] = []
    nbytes = 0
    for node, value in types.items():
        if value is None:
            raise DefinitionError(
                f"Blob {blob!r} of node {node!r}{place} is neither an array nor a number, nor, for "
                f"frame(), a data frame or series of pandas."
            )
        if axis is not None and isinstance(value, ValueType) and axis >= len(value.shape):
            raise DefinitionError(
                f"Blob {blob!r} of node {node!r}{place} has {len(value.shape)} axes; got axis={axis}."
            )
        if value.without(axis) != types[first].without(axis):  # type: ignore[union-attr]  # not None
            raise DefinitionError(
                f"Blob {blob!r}{place} is {types[first]} at node {first!r}, and {value} at node "
                f"{node!r}, so they cannot be joined. Name nodes that are alike: nodes=[...]."
            )
        if not chunks or nbytes + value.nbytes > CHUNK_BYTES:
            chunks.append([])
            nbytes = 0
        chunks[-1].append(node)
        nbytes += value.nbytes
    return chunks


def join_arrays(
    types: Mapping[str, Any],  # `ValueType` by node
    axis: int | None,
    pieces: Sequence[tuple[Sequence[str], Any]],  # nodes, and a `Delayed` or array of these joined
) -> Array:
    """Join arrays of nodes, each piece one chunk or more."""
    import dask.array  # slow to import

    arrays = []
    for nodes, piece in pieces:
        if not isinstance(piece, dask.array.Array):
            first: ValueType = types[nodes[0]]
            shape = (len(nodes), *first.shape)
            if axis is not None:
                length = sum(types[node].shape[axis] for node in nodes)
                shape = (*first.shape[:axis], length, *first.shape[axis + 1 :])
            piece = dask.array.from_delayed(piece, shape, first.dtype)
        arrays.append(piece)
    joined: Array = dask.array.concatenate(arrays, axis or 0)
    return joined


def join_frames(types: Mapping[str, Any], pieces: Sequence[Any]) -> DataFrame:
    """Join data frames of nodes: a `Delayed` for each chunk."""
    import dask.dataframe  # slow to import

    first: FrameType = next(iter(types.values()))
    frame: DataFrame = dask.dataframe.from_delayed(pieces, meta=first.meta, verify_meta=False)
    return frame


def join_values(values: Sequence[Any], axis: int | None) -> Any:
    """Join arrays along an axis; None: along a new one."""
    return np.stack(values) if axis is None else np.concatenate(values, axis)


def concatenate_frames(frames: Sequence[Any]) -> Any:
    """Join data frames, row by row."""
    import pandas as pd

    return frames[0] if len(frames) == 1 else pd.concat(frames)
