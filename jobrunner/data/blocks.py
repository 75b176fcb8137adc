"""Records in blocks, each read as a whole: chunks of an array, row groups, partitions, parts of files."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from jobrunner.data.order import Indices
from jobrunner.data.sources import Part, Source, joined, not_an_end, rows_of

_HELD = 2
"""Blocks in memory: a batch ends one and begins the next."""


class Load(Protocol):
    """Reads blocks."""

    def __call__(self, number: int, /) -> Any:
        """The block of a number: anything that `rows_of` accepts."""

    def where(self, number: int, /) -> str:
        """Which block that is, for messages."""


class _Block:
    """A block, which the first thread that reads in it loads. Its records have the numbers of all."""

    def __init__(self, start: int, load: Callable[[], Source]) -> None:
        self._start, self._load = start, load
        self._lock = threading.Lock()
        self._source: Source | None = None

    def get(self, index: int | slice) -> Any:
        source, start = self._source or self._loaded(), self._start
        if isinstance(index, int):
            return source.get(index - start)
        return source.get(slice(index.start - start, index.stop - start))

    def take(self, numbers: Indices) -> Any:
        return (self._source or self._loaded()).take(numbers - self._start)

    def _loaded(self) -> Source:
        with self._lock:
            self._source = self._source or self._load()
            return self._source


class Blocks:
    """A source whose blocks are read one at a time; the last two stay in memory.

    Parameters
    ----------
    lengths : sequence of int
        Records of each block.
    load : Load
    """

    def __init__(self, lengths: Sequence[int], load: Load) -> None:
        self.lengths: Sequence[int] = tuple(lengths) or (0,)
        self._load = load
        self._ends = np.cumsum(self.lengths)
        self._held: OrderedDict[int, _Block] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, index: int | slice) -> Any:
        """One record, or a batch of those in a slice."""
        if isinstance(index, int):
            return self._block(self._number_of(index)).get(index)
        pieces, start = [], index.start
        block = self._number_of(start)
        while start < index.stop:
            until = min(index.stop, int(self._ends[block]))
            if until > start:
                pieces.append(self._block(block).get(slice(start, until)))
            start, block = until, block + 1
        return pieces[0] if len(pieces) == 1 else joined(pieces)

    def take(self, numbers: Indices) -> Any:
        """A batch of the records of these numbers."""
        blocks = np.searchsorted(self._ends, numbers, side="right")
        order = np.argsort(blocks, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(blocks[order])) + 1)
        pieces = [self._block(int(blocks[part[0]])).take(numbers[part]) for part in parts]
        if len(pieces) == 1:
            return pieces[0]
        found = joined(pieces)
        if (order[1:] > order[:-1]).all():
            return found
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return rows_of(found).take(places)

    def part(self, start: int, stop: int) -> Part:
        """The block that has these records, or all if there is none."""
        number = self._number_of(start)
        return self._block(number) if stop <= self._ends[number] else self

    def _number_of(self, record: int) -> int:
        return int(np.searchsorted(self._ends, record, side="right"))

    def _block(self, number: int) -> _Block:
        with self._lock:
            if number not in self._held:
                length = self.lengths[number]
                load = partial(_loaded, self._load, number, length)
                self._held[number] = _Block(int(self._ends[number]) - length, load)
            self._held.move_to_end(number)
            while len(self._held) > _HELD:
                self._held.popitem(last=False)
            return self._held[number]

    def __reduce__(self) -> tuple[Any, ...]:
        return (Blocks, (self.lengths, self._load))


def _loaded(load: Load, number: int, expected: int) -> Source:
    """The records of a block; errors name it."""
    try:
        source = rows_of(load(number))
    except StopIteration as error:
        raise not_an_end(load.where(number)) from error
    except Exception as error:
        error.add_note(f"While reading {load.where(number)}.")
        raise
    found = sum(source.lengths)
    if found != expected:
        raise ValueError(
            f"{load.where(number)}: expected {expected} records, as counted or given when the reader was made, "
            f"found {found}. The data must not change while it is read."
        )
    return source
