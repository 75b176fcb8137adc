"""Data with a length: one interface over arrays, tables, sequences, and structures of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol

import numpy as np

from jobrunner.data.order import Indices
from jobrunner.errors import DefinitionError

Index = int | slice | Indices


class Source(Protocol):
    """Records by number."""

    @property
    def lengths(self) -> Sequence[int]:
        """Records of each block that is read as a whole; one block if any records can be read."""

    def __len__(self) -> int: ...

    def take(self, index: Index, /) -> Any:
        """One record; or a batch of those in a slice or an array of numbers, in its order."""


class Rows:
    """An array, whose batches are arrays. Those of a slice are views.

    What is read must not be changed, since it is not saved: so a view cannot be.
    """

    def __init__(self, array: np.ndarray) -> None:
        self.lengths = (len(array),)
        view = array.view()
        view.flags.writeable = False
        self.take = view.__getitem__

    def __len__(self) -> int:
        return self.lengths[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return (Rows, (self.take(slice(None)),))


class Listed:
    """A sequence of records, whose batches are lists."""

    def __init__(self, items: Any) -> None:
        self.lengths = (len(items),)
        self._items = items

    def __len__(self) -> int:
        return self.lengths[0]

    def take(self, index: Index) -> Any:
        """One record, or a list."""
        if isinstance(index, int):
            return self._items[index]
        numbers = (
            range(len(self))[index] if isinstance(index, slice) else np.asarray(index).tolist()
        )
        if hasattr(self._items, "__getitems__"):  # a PyTorch dataset that reads many at once
            return self._items.__getitems__(list(numbers))
        if len(numbers) < 2:
            return [self._items[i] for i in numbers]
        return list(itemgetter(*numbers)(self._items))


class Structure:
    """Sources of one length, in a dict or a tuple."""

    def __init__(self, parts: Mapping[Any, Source], build: Callable[[dict[Any, Any]], Any]) -> None:
        lengths = {name: len(part) for name, part in parts.items()}
        if len(set(lengths.values())) > 1:
            raise DefinitionError(
                f"from_records: all parts must have as many records as the first; found {lengths}."
            )
        self._parts, self._build = dict(parts), build
        blocks = [part.lengths for part in parts.values()]
        self.lengths: Sequence[int] = max(blocks, key=len)

    def __len__(self) -> int:
        return len(next(iter(self._parts.values())))

    def take(self, index: Index) -> Any:
        """One record or batch of each part."""
        return self._build({name: part.take(index) for name, part in self._parts.items()})


def source_of(data: Any) -> Source:
    """A source of any supported kind; one that is a source already as it is."""
    if isinstance(data, np.ndarray):
        if data.ndim == 0:
            raise _not_records(data)
        return Rows(data)
    if isinstance(data, dict | tuple) and not hasattr(data, "_fields"):
        if not data:
            raise _not_records(data)
        if isinstance(data, dict):
            return Structure({name: source_of(part) for name, part in data.items()}, dict)
        parts = {i: source_of(part) for i, part in enumerate(data)}
        return Structure(parts, lambda found: tuple(found.values()))
    if callable(getattr(type(data), "__len__", None)) and hasattr(data, "__getitem__"):
        if isinstance(data, str | bytes | Mapping):
            raise _not_records(data)
        return Listed(data)
    raise _not_records(data)


def _not_records(data: object) -> DefinitionError:
    return DefinitionError(
        f"from_records: data must have a length and records by number: an array, a table, a "
        f"sequence, or a dict or tuple of these; got {data!r:.200}. For data that can only be "
        f"iterated over, use from_iterable."
    )
