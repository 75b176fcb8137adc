"""Records in blocks, each read as a whole: chunks of an array, row groups, partitions, parts of files."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from jobrunner.data.order import Indices
from jobrunner.data.sources import Part, joined, rows_of, without_end

_HELD = 2
"""Blocks in memory: a batch ends one and begins the next."""


class Load(Protocol):
    """Reads blocks."""

    def __call__(self, number: int, /) -> Any:
        """The block of a number: anything that `rows_of` accepts, with a length."""

    def where(self, number: int, /) -> str:
        """Which block that is, for messages."""


class _Block:
    """A block, which the first thread that reads in it loads. Its records have the numbers of all."""

    def __init__(self, start: int, load: Callable[[], Part]) -> None:
        self._start, self._load = start, load
        self._lock = threading.Lock()
        self._rows: Part | None = None

    def get(self, index: int | slice) -> Any:
        rows, start = self._rows or self._loaded(), self._start
        if isinstance(index, int):
            return rows.get(index - start)
        return rows.get(slice(index.start - start, index.stop - start))

    def take(self, numbers: Indices) -> Any:
        return (self._rows or self._loaded()).take(numbers - self._start)

    def _loaded(self) -> Part:
        with self._lock:
            self._rows = self._rows or self._load()
            return self._rows


class Blocks:
    """A source whose blocks are read one at a time; the last two stay in memory.

    Parameters
    ----------
    lengths : sequence of int
        Records of each block.
    load : Load
    order : str
        How the files are ordered, if there are several ways; a saved state names it.
    """

    def __init__(self, lengths: Sequence[int], load: Load, order: str = "") -> None:
        self.lengths: Sequence[int] = tuple(lengths) or (0,)
        self._load, self.order = load, order
        self._ends = list(accumulate(self.lengths))
        self._all_ends = np.array(self._ends)
        self._held: OrderedDict[int, _Block] = OrderedDict()
        self._lock = threading.Lock()

    def part(self, start: int, stop: int) -> Part:
        """What reads from one block, if all these records are in it."""
        number = self._number_of(start)
        if stop <= self._ends[number]:
            block = self._block(number)
            return Part(block.get, block.take)
        return Part(self._get, self._take)

    def _get(self, index: int | slice) -> Any:
        if isinstance(index, int):
            return self._block(self._number_of(index)).get(index)
        pieces, start = [], index.start
        block = self._number_of(start)
        while start < index.stop:
            until = min(index.stop, self._ends[block])
            if until > start:
                pieces.append(self._block(block).get(slice(start, until)))
            start, block = until, block + 1
        return pieces[0] if len(pieces) == 1 else joined(pieces)

    def _take(self, numbers: Indices) -> Any:
        blocks = np.searchsorted(self._all_ends, numbers, side="right")
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

    def _number_of(self, record: int) -> int:
        return bisect_right(self._ends, record)

    def _block(self, number: int) -> _Block:
        with self._lock:
            if number not in self._held:
                length = self.lengths[number]
                load = partial(_loaded, self._load, number, length)
                self._held[number] = _Block(self._ends[number] - length, load)
            self._held.move_to_end(number)
            while len(self._held) > _HELD:
                self._held.popitem(last=False)
            return self._held[number]

    def __reduce__(self) -> tuple[Any, ...]:
        return (Blocks, (self.lengths, self._load, self.order))


def _loaded(load: Load, number: int, expected: int) -> Part:
    """The records of a block; errors name it."""
    try:
        data = without_end(load)(number)
    except Exception as error:
        error.add_note(f"While reading {load.where(number)}.")
        raise
    if len(data) != expected:
        raise ValueError(
            f"{load.where(number)}: expected {expected} records, as counted or given when the reader was made, "
            f"found {len(data)}. The data must not change while it is read."
        )
    return rows_of(data)
