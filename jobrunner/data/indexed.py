"""Reading records that have numbers, in any order."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from jobrunner.data.cursors import Setup, reduced
from jobrunner.data.order import WINDOW, Indices, Shuffled
from jobrunner.data.position import OPEN, Position, Ranges, cut, end_of
from jobrunner.errors import EndOfData

Index = int | slice | Indices

_MOST_READY = 1024


class Indexed:
    """The cursor of a source whose records have numbers."""

    def __init__(self, setup: Setup) -> None:
        self.setup, source, seed = setup, setup.source, setup.seed
        self._total: int = sum(source.lengths)
        lengths = source.lengths if setup.by_block else (self._total,)
        identity = {"length": self._total, "order": _describe(seed, lengths)}
        self.position = Position(range(self._total), setup.shard, identity, setup.least)
        self._order = None if seed is None else Shuffled(lengths, seed)
        self._batch, self._size = setup.batch, setup.batch or 1
        self._lock = self.position.lock
        is_taken = self._order is not None and self._batch is not None
        self._read_ready = source.take if is_taken else source.get

    __reduce__ = reduced

    def count(self) -> int:
        """How many records or batches the shard has."""
        (i, n), total = self.setup.shard, self._total
        own = (i + 1) * total // n - i * total // n
        return own // self._size if self.setup.drop_last else -(-own // self._size)

    def read(self) -> Any:
        """The next record or batch."""
        for index in self.position.ready:
            return self._read_ready(index)
        with self._lock:
            index = self._next()
        return self._records(index)

    def loop(self) -> Iterator[Any]:
        """What is left of the pass."""
        position, read_ready = self.position, self._read_ready
        with suppress(EndOfData):
            while True:
                for index in position.ready:
                    yield read_ready(index)
                yield self.read()

    def plan(self) -> Callable[[], tuple[Any, Ranges]]:
        """Reads the next batch in another thread; returns it, and what is left of the pass then."""
        with self._lock:
            index, rest = self._next(), self.position.rest
        return lambda: (self._records(index), rest)

    def _records(self, index: Index) -> Any:
        source = self.setup.source
        return source.take(index) if isinstance(index, np.ndarray) else source.get(index)

    def _next(self) -> Index:
        """The numbers of the next record or batch, which count as read from now on."""
        position, size = self.position, self._size
        index: Index
        for index in position.ready:
            return index
        # Of the last records of a range or of the pass, there may be too few for a batch.
        count = min((position.until - position.at - self.setup.least) // size, _MOST_READY)
        if count > 0:
            indices = self._indices(position.at, max(1, min(count, WINDOW // size)))
            position.at += size
            position.prepare(indices[1:], size)
            return indices[0]
        rest = position.rest
        if not rest:
            raise end_of(position.number)
        taken, position.rest = cut(rest, 0, size), cut(rest, size, OPEN)
        if self._order is None and len(taken) == 1:
            return taken[0].start if self._batch is None else slice(taken[0].start, taken[0].stop)
        found = np.concatenate([self._numbers(each.start, each.stop, each.stop) for each in taken])
        return int(found[0]) if self._batch is None else found

    def _indices(self, start: int, count: int) -> Sequence[Index]:
        """The numbers of so many records or batches."""
        size = self._size
        stop = start + count * size
        if self._order is None:
            starts = range(start, stop, size)
            if self._batch is None:
                return starts
            return list(map(slice, starts, range(start + size, stop + size, size)))
        numbers = self._numbers(start, stop, self.position.until)
        if self._batch is None:
            singles: list[int] = numbers.tolist()
            return singles
        return list(numbers.reshape(count, size))

    def _numbers(self, start: int, stop: int, limit: int) -> Indices:
        """The numbers of the records at these positions; those up to `limit` may be next."""
        if self._order is None:
            return np.arange(start, stop)
        return self._order.at(self.position.number, start, stop, limit)


def _describe(seed: int | None, lengths: Sequence[int]) -> str:
    """What tells this order from others of as many records."""
    if seed is None:
        return "as stored"
    if len(lengths) == 1:
        return f"shuffled, seed {seed}"
    crc = zlib.crc32(np.asarray(lengths, "<i8").tobytes())
    return f"shuffled, seed {seed}, in {len(lengths)} blocks {crc:08x}"
