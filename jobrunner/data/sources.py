"""Data with a length: one interface over arrays, tables, sequences, and structures of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Protocol

import numpy as np

from jobrunner.data.order import Indices
from jobrunner.errors import DefinitionError


class Source(Protocol):
    """Records by number."""

    lengths: Sequence[int]
    """Records of each block that is read as a whole; one block if any records can be read."""

    def get(self, index: int | slice, /) -> Any:
        """One record, or a batch of those in a slice."""

    def take(self, numbers: Indices, /) -> Any:
        """A batch of the records of these numbers, in their order."""


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
        self.get: Callable[[int | slice], Any] = by.__getitem__
        self.take: Callable[[Indices], Any] = by.__getitem__
        if type(rows) in (np.ndarray, np.memmap) and rows.flags.c_contiguous and rows.flags.aligned:
            self.take = partial(rows.view(np.ndarray).take, axis=0)  # two times as fast

    def __reduce__(self) -> tuple[Any, ...]:
        return (Rows, (self._rows, self._through))


class Listed:
    """A sequence of records, whose batches are lists."""

    def __init__(self, items: Any) -> None:
        self.lengths: Sequence[int] = (len(items),)
        self._items = items

    def get(self, index: int | slice) -> Any:
        """One record, or a list."""
        if isinstance(index, int) or type(self._items) is list:
            return self._items[index]
        return self._listed(range(index.start, index.stop))

    def take(self, numbers: Indices) -> list[Any]:
        """A list of records."""
        return self._listed(numbers.tolist())

    def _listed(self, numbers: Sequence[int]) -> list[Any]:
        if hasattr(self._items, "__getitems__"):  # a PyTorch data set that reads many at once
            found: list[Any] = self._items.__getitems__(list(numbers))
            return found
        if len(numbers) == 1:
            return [self._items[numbers[0]]]
        return list(itemgetter(*numbers)(self._items))


class Columns:
    """An Arrow table, whose batches are tables, or a Hugging Face data set, whose are dicts."""

    def __init__(self, table: Any) -> None:
        self.lengths: Sequence[int] = (len(table),)
        self._table = table
        self._is_arrow = is_of(table, "pyarrow")

    def get(self, index: int | slice) -> Any:
        """One record as a dict, or a batch."""
        if not self._is_arrow:
            return self._table[index]
        if isinstance(index, int):
            return self._table.slice(index, 1).to_pylist()[0]
        return self._table.slice(index.start, index.stop - index.start)

    def take(self, numbers: Indices) -> Any:
        """A batch."""
        return self._table.take(numbers) if self._is_arrow else self._table[numbers.tolist()]


class Structure:
    """Sources of one length, in a dict or a tuple."""

    def __init__(self, parts: Mapping[Any, Source], kind: type[dict[Any, Any] | tuple[Any, ...]]):
        lengths = {name: sum(part.lengths) for name, part in parts.items()}
        if len(set(lengths.values())) > 1:
            raise DefinitionError(
                f"from_records: all parts must have as many records as the first; found {lengths}."
            )
        self._parts, self._kind = dict(parts), kind
        self.lengths: Sequence[int] = max((part.lengths for part in parts.values()), key=len)

    def get(self, index: int | slice) -> Any:
        """One record or batch of each part."""
        return self._of_each({name: part.get(index) for name, part in self._parts.items()})

    def take(self, numbers: Indices) -> Any:
        """A batch of each part."""
        return self._of_each({name: part.take(numbers) for name, part in self._parts.items()})

    def _of_each(self, found: dict[Any, Any]) -> Any:
        return found if self._kind is dict else tuple(found.values())


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
