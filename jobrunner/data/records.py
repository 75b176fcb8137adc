"""Which source reads which kind of data that has a length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jobrunner.data.blocks import Blocks
from jobrunner.data.indexed import Indexed
from jobrunner.data.reader import DataReader, reader_of
from jobrunner.data.sources import Rows, Source, Structure
from jobrunner.errors import DefinitionError


def from_records(data: Any) -> DataReader:
    """A reader of data that has a length and records by number.

    Parameters
    ----------
    data : array, table, data set, sequence, or a dict or tuple of these
        NumPy, Zarr and HDF5 arrays and PyTorch tensors; pandas frames and Arrow tables; Hugging Face
        and map-style PyTorch data sets; sequences. Records of a dict or a tuple are dicts or tuples
        of the records of its parts, which must have the same length.

    Raises
    ------
    DefinitionError
        If the data has no length or no records by number, or its parts have other lengths.

    Examples
    --------
    >>> reader = from_records(np.arange(10)).shuffled(seed=7).batched(4)
    >>> [len(batch) for batch in reader]
    [4, 4, 2]
    """
    return reader_of(Indexed, source_of(data))


def source_of(data: Any) -> Source:
    """A source of any supported kind. Raises `DefinitionError` if there is none."""
    if type(data) is dict and data:
        return _structure(data, dict)
    if type(data) is tuple and data:
        return _structure(dict(enumerate(data)), tuple)
    if hasattr(type(data), "__dask_graph__"):
        raise DefinitionError(
            f"from_records: data must not be a Dask collection; got {type(data).__name__}. Use "
            f"from_dask, which reads it partition by partition."
        )
    has_rows = hasattr(type(data), "__getitem__") and _has_length(data)
    if not has_rows or isinstance(data, str | bytes | tuple | Mapping):
        raise DefinitionError(
            f"from_records: data must have a length and records by number: an array, a table, a "
            f"sequence, or a dict or tuple of these; got {data!r:.200}. For what can only be iterated "
            f"over, use from_iterable."
        )
    if hasattr(data, "chunks") and hasattr(data, "shape") and hasattr(data, "dtype"):
        return _chunks_of(data)
    return Rows(data)


def _structure(data: Mapping[Any, Any], kind: type[Any]) -> Structure:
    parts = {name: source_of(part) for name, part in data.items()}
    lengths = {name: sum(part.lengths) for name, part in parts.items()}
    if len(set(lengths.values())) > 1:
        raise DefinitionError(
            f"from_records: all parts must have as many records as the first; found {lengths}."
        )
    return Structure(parts, kind)


def _has_length(data: Any) -> bool:
    if hasattr(data, "shape"):  # Zarr's arrays have no `__len__`
        return len(data.shape) > 0
    return callable(getattr(data, "__len__", None))


_LEAST_BYTES = 1 << 23
"""Chunks are read together up to this size."""


class _Chunks(NamedTuple):
    array: Any
    rows: int

    def __call__(self, block: int) -> Any:
        return np.asarray(self.array[block * self.rows : (block + 1) * self.rows])

    def where(self, block: int) -> str:
        return f"rows {block * self.rows} to {(block + 1) * self.rows} of {self.array!r:.200}"


def _chunks_of(array: Any) -> Blocks:
    """A source of an array that is stored in chunks, of Zarr, HDF5 or alike."""
    stored = getattr(array, "shards", None) or array.chunks  # None: HDF5, stored as a whole
    total = array.shape[0]
    least = max(1, int(stored[0]) if stored else 1)
    row_bytes = max(
        1, np.dtype(array.dtype).itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
    )
    rows = least * max(1, _LEAST_BYTES // (least * row_bytes))
    lengths = [min(rows, total - start) for start in range(0, total, rows)]
    return Blocks(lengths, _Chunks(array, rows))
