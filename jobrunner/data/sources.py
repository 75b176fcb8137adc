"""Data with a length: one interface over arrays, tables, sequences, and structures of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np

from jobrunner.data.order import Indices


class Part(Protocol):
    """Reads records by number; it never raises `StopIteration`."""

    def get(self, index: Any, /) -> Any:
        """The record of a number, or a batch of those in a slice."""

    def take(self, numbers: Indices, /) -> Any:
        """A batch of the records of these numbers, in their order."""


class Source(Protocol):
    """Records by number."""

    @property
    def lengths(self) -> Sequence[int]:
        """Records of each block that is read as a whole; one block if any records can be read."""

    def get(self, index: Any, /) -> Any:
        """As a `Part`."""

    def take(self, numbers: Indices, /) -> Any:
        """As a `Part`."""

    def part(self, start: int, stop: int, /) -> Part:
        """Itself, or what reads faster as long as only these records are asked for."""


class Rows:
    """Rows that are indexed as those of an array are.

    Batches of a slice of a NumPy array are views. What is read must not be changed, since it is not
    saved: so these views cannot be.
    """

    def __init__(self, rows: Any, through: str = "") -> None:
        self.lengths: Sequence[int] = (len(rows),)
        self._rows, self._through = rows, through
        if isinstance(rows, np.ndarray):
            rows = rows.view()
            rows.flags.writeable = False
        by = getattr(rows, through) if through else rows
        self.get: Callable[[Any], Any] = by.__getitem__
        self.take: Callable[[Indices], Any] = by.__getitem__
        # What gathers rows in half the time, or less:
        if type(rows) in (np.ndarray, np.memmap) and rows.flags.c_contiguous and rows.flags.aligned:
            self.take = partial(rows.view(np.ndarray).take, axis=0)
        elif is_of(rows, "torch") and rows.device.type == "cpu":
            self.take = partial(_selected, rows)

    def part(self, start: int, stop: int) -> Part:
        """Itself."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (Rows, (self._rows, self._through))


def _selected(rows: Any, numbers: Indices) -> Any:
    import torch

    return rows.index_select(0, torch.from_numpy(numbers))


class Listed:
    """A sequence of records, whose batches are lists."""

    def __init__(self, items: Any) -> None:
        self.lengths: Sequence[int] = (len(items),)
        self._items = items
        self.get: Callable[[Any], Any] = items.__getitem__ if type(items) is list else self._get

    def take(self, numbers: Indices) -> list[Any]:
        """A list of records."""
        return self._listed(numbers.tolist())

    def part(self, start: int, stop: int) -> Part:
        """Itself."""
        return self

    def _get(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self._listed(range(index.start, index.stop))
        try:
            return self._items[index]
        except StopIteration as error:
            raise not_an_end(f"record {index}") from error

    def _listed(self, numbers: Sequence[int]) -> list[Any]:
        try:
            if hasattr(self._items, "__getitems__"):  # a PyTorch data set that reads many at once
                found: list[Any] = self._items.__getitems__(list(numbers))
                return found
            if len(numbers) == 1:
                return [self._items[numbers[0]]]
            return list(itemgetter(*numbers)(self._items))
        except StopIteration as error:
            raise not_an_end(f"records {numbers!r:.200}") from error

    def __reduce__(self) -> tuple[Any, ...]:
        return (Listed, (self._items,))


class Columns:
    """An Arrow table, whose batches are tables, or a Hugging Face data set, whose are dicts."""

    def __init__(self, table: Any) -> None:
        self.lengths: Sequence[int] = (len(table),)
        self._table = table
        self._is_arrow = is_of(table, "pyarrow")
        self.get: Callable[[Any], Any] = self._slice if self._is_arrow else table.__getitem__

    def take(self, numbers: Indices) -> Any:
        """A batch."""
        return self._table.take(numbers) if self._is_arrow else self._table[numbers.tolist()]

    def part(self, start: int, stop: int) -> Part:
        """Itself."""
        return self

    def _slice(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return self._table.slice(index.start, index.stop - index.start)
        return self._table.slice(index, 1).to_pylist()[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return (Columns, (self._table,))


class Structure(NamedTuple):
    """Sources of one length, in a dict or a tuple."""

    parts: Mapping[Any, Any]
    kind: type[dict[Any, Any] | tuple[Any, ...]]

    @property
    def lengths(self) -> Sequence[int]:
        """Those of the part of most blocks."""
        found: Sequence[int] = max((part.lengths for part in self.parts.values()), key=len)
        return found

    def get(self, index: Any) -> Any:
        """One record or batch of each part."""
        return self._of_each({name: part.get(index) for name, part in self.parts.items()})

    def take(self, numbers: Indices) -> Any:
        """A batch of each part."""
        return self._of_each({name: part.take(numbers) for name, part in self.parts.items()})

    def part(self, start: int, stop: int) -> Part:
        """With what is faster for each part."""
        parts = {name: part.part(start, stop) for name, part in self.parts.items()}
        return self._replace(parts=parts)

    def _of_each(self, found: dict[Any, Any]) -> Any:
        return found if self.kind is dict else tuple(found.values())


def rows_of(data: Any) -> Source:
    """A source of an array, a table or a sequence in memory."""
    if isinstance(data, np.ndarray):
        return Rows(data)
    if is_of(data, "pandas") and hasattr(data, "iloc"):
        return Rows(data, "iloc")
    if (is_of(data, "datasets") and hasattr(data, "column_names")) or (
        is_of(data, "pyarrow") and hasattr(data, "num_columns")
    ):
        return Columns(data)
    if hasattr(data, "shape") and hasattr(data, "dtype"):
        return Rows(data)
    return Listed(data)


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


def not_an_end(where: str) -> RuntimeError:
    """The error of data that raises `StopIteration`, which would end a loop."""
    return RuntimeError(
        f"{where}: reading raised StopIteration; expected a record, or an IndexError."
    )
