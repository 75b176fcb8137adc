"""Data with a length: arrays, tables, sequences and structures of these, in memory or in blocks."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np

from jobrunner.data.order import Indices
from jobrunner.data.reader import DataReader
from jobrunner.data.record_reader import RecordReader, Records
from jobrunner.errors import DefinitionError

Index = int | slice | Indices
Read = Callable[[Any], Any]
"""Returns the record of a number, or a batch of those in a slice or an array of numbers."""

_MOST_HELD = 2
"""Blocks in memory: a batch ends one and begins the next."""

_BLOCK_BYTES = 8 << 20
"""Chunks of an array are read together up to this size."""


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
    return RecordReader(_records_of(data))


def _records_of(data: Any) -> Records:
    if type(data) is dict and data:
        return _Structure(data, dict)
    if type(data) is tuple and data:
        return _Structure(dict(enumerate(data)), tuple)
    if hasattr(type(data), "__dask_graph__"):
        raise DefinitionError(
            f"from_records: data must not be a Dask collection; got {type(data).__name__}. Use "
            f"from_dask, which reads it partition by partition."
        )
    has_records = hasattr(type(data), "__getitem__") and _has_length(data)
    if not has_records or isinstance(data, str | bytes | tuple | Mapping):
        raise DefinitionError(
            f"from_records: data must have a length and records by number: an array, a table, a "
            f"sequence, or a dict or tuple of these; got {data!r:.200}. For what can only be iterated "
            f"over, use from_iterable."
        )
    if hasattr(data, "chunks") and hasattr(data, "shape") and hasattr(data, "dtype"):
        return _chunks_of(data)
    return _Rows(data)


def _has_length(data: Any) -> bool:
    if hasattr(data, "shape"):  # Zarr's arrays have no `__len__`
        return len(data.shape) > 0
    return callable(getattr(data, "__len__", None))


class _Rows:
    """Data in memory."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self.lengths = (len(data),)
        self.read = rows_of(data)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Rows, (self._data,))


class _Structure:
    """Parts of one length, in a dict or a tuple."""

    def __init__(self, data: Mapping[Any, Any], kind: type[Any]) -> None:
        self._parts = {name: _records_of(part) for name, part in data.items()}
        self._kind = kind
        self.lengths = max((part.lengths for part in self._parts.values()), key=len)
        totals = {name: sum(part.lengths) for name, part in self._parts.items()}
        if len(set(totals.values())) > 1:
            raise DefinitionError(
                f"from_records: all parts must have as many records as the first; found {totals}."
            )

    def read(self, index: Index) -> Any:
        """A record or batch of each part."""
        records = {name: part.read(index) for name, part in self._parts.items()}
        if self._kind is tuple:
            return tuple(records.values())
        return records


# In blocks


class Blocks:
    """Records of which one block at a time is loaded; the last two stay in memory.

    Parameters
    ----------
    lengths : sequence of int
        Records of each block.
    load : callable
        Takes the number of a block; returns anything that `rows_of` accepts, with a length.
    describe : callable
        Says which block that is, for messages.
    """

    def __init__(
        self, lengths: Sequence[int], load: Callable[[int], Any], describe: Callable[[int], str]
    ) -> None:
        self.lengths = tuple(lengths) or (0,)
        self._load, self._describe = load, describe
        self._ends = list(accumulate(self.lengths))
        self._held: dict[int, Read] = {}
        self._lock = threading.Lock()

    def read(self, index: Index) -> Any:
        """A record or batch, also of several blocks."""
        if isinstance(index, int):
            number = self._number_of(index)
            return self._rows(number)(index - self._start(number))
        if isinstance(index, slice):
            return self._read_slice(index.start, index.stop)
        return self._gather(index)

    def _read_slice(self, start: int, stop: int) -> Any:
        pieces = []
        number = self._number_of(start)
        while start < stop:
            first, end = self._start(number), min(stop, self._ends[number])
            if start < end:
                pieces.append(self._rows(number)(slice(start - first, end - first)))
            start, number = end, number + 1
        return joined_batch(pieces)

    def _gather(self, numbers: Indices) -> Any:
        """Gather each block's records together, so that no block is loaded twice for a batch."""
        blocks = np.searchsorted(self._ends, numbers, side="right")
        by_block = np.argsort(blocks, kind="stable")
        pieces = []
        for places in np.split(by_block, np.flatnonzero(np.diff(blocks[by_block])) + 1):
            number = int(blocks[places[0]])
            pieces.append(self._rows(number)(numbers[places] - self._start(number)))
        batch = joined_batch(pieces)
        if (by_block[1:] > by_block[:-1]).all():
            return batch
        return rows_of(batch)(np.argsort(by_block))

    def _number_of(self, record: int) -> int:
        return bisect_right(self._ends, record)

    def _start(self, number: int) -> int:
        return self._ends[number] - self.lengths[number]

    def _rows(self, number: int) -> Read:
        with self._lock:  # threads that read ahead mostly need the same block
            rows = self._held.pop(number, None)
            if rows is None:
                rows = self._load_rows(number)
            self._held[number] = rows  # as the last one
            while len(self._held) > _MOST_HELD:
                del self._held[next(iter(self._held))]
            return rows

    def _load_rows(self, number: int) -> Read:
        try:
            data = self._load(number)
        except Exception as error:
            error.add_note(f"While reading {self._describe(number)}.")
            raise
        if len(data) != self.lengths[number]:
            raise ValueError(
                f"{self._describe(number)}: expected {self.lengths[number]} records, as counted or given "
                f"when the reader was made, found {len(data)}. The data must not change while it is read."
            )
        return rows_of(data)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Blocks, (self.lengths, self._load, self._describe))


def _chunks_of(array: Any) -> Blocks:
    """The rows of an array that is stored in chunks, of Zarr, HDF5 or alike."""
    stored = getattr(array, "shards", None) or array.chunks  # None: HDF5, stored as a whole
    chunk_rows = 1
    if stored:
        chunk_rows = max(1, int(stored[0]))
    width = int(np.prod(array.shape[1:], dtype=np.int64))
    chunk_bytes = max(1, chunk_rows * width * np.dtype(array.dtype).itemsize)
    rows = chunk_rows * max(1, _BLOCK_BYTES // chunk_bytes)
    starts = range(0, array.shape[0], rows)

    def load(number: int) -> Any:
        return np.asarray(array[starts[number] : starts[number] + rows])

    def describe(number: int) -> str:
        return f"rows {starts[number]} to {starts[number] + rows} of {array!r:.200}"

    return Blocks([min(rows, array.shape[0] - start) for start in starts], load, describe)


# In memory


def rows_of(data: Any) -> Read:
    """What reads an array, a table or a sequence in memory."""
    if isinstance(data, np.ndarray):
        # What is read must not be changed, since it is not saved; batches in order are views.
        data = data.view()
        data.flags.writeable = False
        return partial(_read_array, data)
    if is_of(data, "pandas") and hasattr(data, "iloc"):
        return partial(_read_item, data.iloc)
    is_data_set = is_of(data, "datasets") and hasattr(data, "column_names")
    if is_data_set or (hasattr(data, "shape") and hasattr(data, "dtype")):
        return partial(_read_item, data)
    if is_of(data, "pyarrow") and hasattr(data, "num_columns"):
        return partial(_read_table, data)
    return partial(_read_sequence, data)


def _read_item(data: Any, index: Index) -> Any:
    return data[index]


def _read_array(array: Any, index: Index) -> Any:
    # `take` gathers rows in half the time, but first copies all of an array that is laid out otherwise.
    if isinstance(index, np.ndarray) and array.flags.c_contiguous and array.flags.aligned:
        return array.take(index, 0)
    return array[index]


def _read_table(table: Any, index: Index) -> Any:
    if isinstance(index, slice):
        return table.slice(index.start, index.stop - index.start)
    if isinstance(index, int):
        return table.slice(index, 1).to_pylist()[0]
    return table.take(index)


def _read_sequence(items: Any, index: Index) -> Any:
    if isinstance(index, int):
        return items[index]
    if isinstance(index, slice):
        numbers = list(range(index.start, index.stop))
    else:
        numbers = index.tolist()
    if hasattr(items, "__getitems__"):  # a PyTorch data set that reads many at once
        return items.__getitems__(numbers)
    return [items[number] for number in numbers]


def joined_batch(pieces: Sequence[Any]) -> Any:
    """One batch of several that follow each other."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if isinstance(first, list):
        return list(chain.from_iterable(pieces))
    if is_of(first, "pyarrow"):
        import pyarrow

        return pyarrow.concat_tables(pieces)
    if is_of(first, "pandas"):
        import pandas

        return pandas.concat(pieces)
    return np.concatenate(pieces)


def is_of(value: object, package: str) -> bool:
    """Whether a value's class is of a library, which need not be imported to tell."""
    return type(value).__module__.partition(".")[0] == package
