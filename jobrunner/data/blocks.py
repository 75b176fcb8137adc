"""Records in blocks, each read as a whole: chunks of an array, row groups, partitions, parts of files."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jobrunner.data.order import Indices
from jobrunner.data.sources import Source, joined, rows_of

_HELD = 2
"""Blocks in memory: a batch ends one and begins the next."""


class Load(Protocol):
    """Reads blocks."""

    def __call__(self, number: int, /) -> Any:
        """The block of a number: anything that `rows_of` accepts."""

    def where(self, number: int, /) -> str:
        """Which block that is, for messages."""


class _Block:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.source: Source | None = None


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
        if isinstance(index, slice):
            return self._slice(index.start, index.stop)
        block = self._number_of(index)
        return self._block(block).get(index - self._start(block))

    def take(self, index: Indices) -> Any:
        """A batch of the records of these numbers."""
        numbers = np.searchsorted(self._ends, index, side="right")
        if (numbers == numbers[0]).all():
            block = int(numbers[0])
            return self._block(block).take(index - self._start(block))
        order = np.argsort(numbers, kind="stable")
        pieces = []
        for part in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            block = int(numbers[part[0]])
            pieces.append(self._block(block).take(index[part] - self._start(block)))
        found = joined(pieces)
        if (order[1:] > order[:-1]).all():
            return found
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return rows_of(found).take(places)

    def _slice(self, start: int, stop: int) -> Any:
        pieces = []
        block = self._number_of(start)
        while start < stop:
            first, until = self._start(block), min(stop, int(self._ends[block]))
            if until > start:
                pieces.append(self._block(block).get(slice(start - first, until - first)))
            start, block = until, block + 1
        return pieces[0] if len(pieces) == 1 else joined(pieces)

    def _number_of(self, record: int) -> int:
        return int(np.searchsorted(self._ends, record, side="right"))

    def _start(self, block: int) -> int:
        return int(self._ends[block]) - self.lengths[block]

    def _block(self, number: int) -> Source:
        with self._lock:
            block = self._held.setdefault(number, _Block())
            self._held.move_to_end(number)
            while len(self._held) > _HELD:
                self._held.popitem(last=False)
        with block.lock:  # so that threads that want the same block read it once
            if block.source is None:
                block.source = self.load(number)
            return block.source

    def load(self, number: int) -> Source:
        """The records of a block; errors name it."""
        try:
            source = rows_of(self._load(number))
        except Exception as error:
            error.add_note(f"While reading {self._load.where(number)}.")
            raise
        found, expected = sum(source.lengths), self.lengths[number]
        if found != expected:
            raise ValueError(
                f"{self._load.where(number)}: expected {expected} records, as counted or given when the reader was made, "
                f"found {found}. The data must not change while it is read."
            )
        return source

    def __reduce__(self) -> tuple[Any, ...]:
        return (Blocks, (self.lengths, self._load))
