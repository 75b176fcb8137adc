"""Records in blocks, each read as a whole: chunks of an array, row groups, partitions, parts of files."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jobrunner.data.sources import Index, Source, joined, rows_of

_HELD = 2
"""Blocks in memory: a batch ends one and begins the next."""


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
    load : callable
        Returns the block of a number: anything that `rows_of` accepts.
    """

    def __init__(self, lengths: Sequence[int], load: Callable[[int], Any]) -> None:
        self.lengths: Sequence[int] = tuple(lengths) or (0,)
        self._load = load
        self._ends = np.cumsum(self.lengths)
        self._held: OrderedDict[int, _Block] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, index: Index) -> Any:
        """One record, or a batch of them."""
        if isinstance(index, int):
            block = self._number_of(index)
            return self._block(block).take(index - self._start(block))
        if isinstance(index, slice):
            return self._slice(index.start, index.stop)
        numbers = np.searchsorted(self._ends, index, side="right")
        if (numbers == numbers[0]).all():
            block = int(numbers[0])
            return self._block(block).take(index - self._start(block))
        order = np.argsort(numbers, kind="stable")
        ordered = numbers[order]
        cuts = np.flatnonzero(np.diff(ordered)) + 1
        pieces = [
            self._block(block).take(index[part] - self._start(block))
            for part in np.split(order, cuts)
            for block in (int(numbers[part[0]]),)
        ]
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
                pieces.append(self._block(block).take(slice(start - first, until - first)))
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
                source = rows_of(self._load(number))
                if len(source) != self.lengths[number]:
                    raise ValueError(
                        f"Block {number} of the data has {len(source)} records; expected "
                        f"{self.lengths[number]}, as when the reader was made. The data must not change."
                    )
                block.source = source
            return block.source

    def __reduce__(self) -> tuple[Any, ...]:
        return (Blocks, (self.lengths, self._load))
