"""Data with a length: one interface over arrays, tables, sequences, and structures of these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from jobrunner.data.order import Indices


class Part(NamedTuple):
    """Functions that read records by number. They never raise `StopIteration`, which ends loops."""

    get: Callable[[Any], Any]
    """The record of a number, or a batch of those in a slice."""
    take: Callable[[Indices], Any]
    """A batch of the records of these numbers, in their order."""
    array: NDArray[Any] | None = None
    """All records, if parts of this array are what `get` returns."""
    gather: Callable[[Indices, int], Any] | None = None
    """The same as `take`, with axis 0 as another argument: a call less."""


class Source(Protocol):
    """Records by number."""

    @property
    def lengths(self) -> Sequence[int]:
        """Records of each block that is read as a whole; one block if any records can be read."""

    @property
    def order(self) -> str:
        """How the blocks are ordered, if not by default."""

    def part(self, start: int, stop: int, /) -> Part:
        """What reads the records from `start` to before `stop`, by their numbers in the whole."""


class Rows:
    """Data in memory."""

    order = ""

    def __init__(self, data: Any) -> None:
        self.lengths: Sequence[int] = (len(data),)
        self._data = data
        self._part = rows_of(data)

    def part(self, start: int, stop: int) -> Part:
        """The same for all."""
        return self._part

    def __reduce__(self) -> tuple[Any, ...]:
        return (Rows, (self._data,))


class Structure(NamedTuple):
    """Sources of one length, in a dict or a tuple."""

    sources: Mapping[Any, Source]
    kind: type[dict[Any, Any] | tuple[Any, ...]]
    order: str = ""

    @property
    def lengths(self) -> Sequence[int]:
        """Those of the source of most blocks."""
        return max((source.lengths for source in self.sources.values()), key=len)

    def part(self, start: int, stop: int) -> Part:
        """What reads a record or batch of each."""
        parts = {name: source.part(start, stop) for name, source in self.sources.items()}
        if self.kind is tuple:
            return Part(
                lambda index: tuple(part.get(index) for part in parts.values()),
                lambda numbers: tuple(part.take(numbers) for part in parts.values()),
            )
        return Part(
            lambda index: {name: part.get(index) for name, part in parts.items()},
            lambda numbers: {name: part.take(numbers) for name, part in parts.items()},
        )


def rows_of(data: Any) -> Part:
    """What reads an array, a table or a sequence in memory."""
    if isinstance(data, np.ndarray):
        # What is read must not be changed, since it is not saved; batches in order are views.
        data = data.view()
        data.flags.writeable = False
        # `take` gathers rows in half the time, but copies all of other arrays first.
        is_plain = type(data) in (np.ndarray, np.memmap)
        array = data if type(data) is np.ndarray else None  # others run code of their own
        if is_plain and data.flags.c_contiguous and data.flags.aligned:
            gather = data.view(np.ndarray).take
            return Part(data.__getitem__, lambda numbers: gather(numbers, 0), array, gather)
        return Part(data.__getitem__, data.__getitem__, array)
    if is_of(data, "pandas") and hasattr(data, "iloc"):
        return Part(data.iloc.__getitem__, data.iloc.__getitem__)
    if is_of(data, "datasets") and hasattr(data, "column_names"):
        read = _Iterated(data) if hasattr(data, "iter") else data.__getitem__
        return Part(read, lambda numbers: data[numbers.tolist()])
    if is_of(data, "pyarrow") and hasattr(data, "num_columns"):
        return Part(partial(_of_table, data), data.take)
    if hasattr(data, "shape") and hasattr(data, "dtype"):
        is_tensor = is_of(data, "torch") and data.device.type == "cpu"
        return Part(data.__getitem__, partial(_of_tensor, data) if is_tensor else data.__getitem__)
    read = partial(_of_sequence, data)
    if type(data) is list:
        return Part(data.__getitem__, read)
    return Part(without_end(read), without_end(read))


_MOST_RESTS = 3  # of a data set, from where on it is read


class _Iterated:
    """Records and batches of a Hugging Face data set.

    Its `iter` prepares once what each slice prepares anew, so it reads while slices follow each other.
    """

    def __init__(self, data: Any) -> None:
        self._data, self._length = data, len(data)
        self._rests = {0: data}  # by their first record: where readers and their shards begin
        self._following: dict[int, tuple[int, Iterator[Any]]] = {}

    def __call__(self, index: int | slice) -> Any:
        if isinstance(index, int):
            return self._data[index]
        start, stop = index.start, index.stop
        # Only one thread finds what follows, and other readers of the set may want other sizes.
        size, batches = self._following.pop(start, None) or (stop - start, self._begin(index))
        is_last = stop == self._length and stop - start <= size
        if batches is not None and (stop - start == size or is_last):
            for item in batches:
                self._following = {stop: (size, batches)}
                return item
        return self._data[index]

    def _begin(self, index: slice) -> Iterator[Any] | None:
        start = index.start
        if start not in self._rests:
            # To select takes 2 ms, and is refused if there are indexes to search in.
            if len(self._rests) == _MOST_RESTS or self._data.list_indexes():
                return None
            self._rests[start] = self._data.select(range(start, self._length))
        batches: Iterator[Any] = self._rests[start].iter(index.stop - start)
        return batches


def _of_table(table: Any, index: int | slice) -> Any:
    if isinstance(index, slice):
        return table.slice(index.start, index.stop - index.start)
    return table.slice(index, 1).to_pylist()[0]


def _of_tensor(tensor: Any, numbers: Indices) -> Any:
    import torch

    return tensor.index_select(0, torch.from_numpy(numbers))


def _of_sequence(items: Any, index: int | slice | Indices) -> Any:
    if isinstance(index, int):
        return items[index]
    if isinstance(index, slice):
        index = np.arange(index.start, index.stop)
    numbers = index.tolist()
    if hasattr(items, "__getitems__"):  # a PyTorch data set that reads many at once
        return items.__getitems__(numbers)
    return [items[numbers[0]]] if len(numbers) == 1 else list(itemgetter(*numbers)(items))


def without_end(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same function, which raises another error in place of `StopIteration`."""

    def read_safely(index: Any) -> Any:
        try:
            return read(index)
        except StopIteration as error:
            raise RuntimeError(
                f"Reading {index!r:.200} raised StopIteration; expected a record, or an IndexError."
            ) from error

    return read_safely


def joined(pieces: list[Any]) -> Any:
    """One batch of several that follow each other."""
    first = pieces[0]
    if isinstance(first, dict):
        return {name: joined([piece[name] for piece in pieces]) for name in first}
    if isinstance(first, tuple):
        return tuple(joined(list(parts)) for parts in zip(*pieces, strict=True))
    if isinstance(first, list):
        return [item for piece in pieces for item in piece]
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
