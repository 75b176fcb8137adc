"""Reading records that have numbers, in any order."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from jobrunner.data.cursors import Setup, reduced
from jobrunner.data.order import WINDOW, Indices, Shuffled
from jobrunner.data.position import OPEN, Position, Ranges, cut, end_of
from jobrunner.data.sources import Part

Index = int | slice | Indices

_MOST_READY = 1024  # records or batches


class Indexed:
    """The cursor of a source whose records have numbers."""

    def __init__(self, setup: Setup) -> None:
        self.setup, source, seed = setup, setup.source, setup.seed
        self._total: int = sum(source.lengths)
        self._lengths = source.lengths if setup.by_block or seed is None else (self._total,)
        self._ends = list(accumulate(self._lengths))
        identity = {"length": self._total, "order": _describe(seed, self._lengths)}
        self.position = Position(range(self._total), setup.shard, identity, setup.least)
        self._order = None if seed is None else Shuffled(self._lengths, seed)
        self._batch, self._size = setup.batch, setup.batch or 1

    __reduce__ = reduced

    def count(self) -> int:
        """How many records or batches the shard has."""
        (i, n), total = self.setup.shard, self._total
        own = (i + 1) * total // n - i * total // n
        return own // self._size if self.setup.drop_last else -(-own // self._size)

    def read(self) -> Any:
        """The next record or batch."""
        for item in self.position.ready:
            return item
        with self.position.lock:
            read, index = self._next()
        return read(index)

    def plan(self) -> Callable[[], tuple[Any, Ranges]]:
        """Reads the next batch in another thread; returns it, and what is left of the pass then."""
        with self.position.lock:
            (read, index), rest = self._next(), self.position.rest
        return lambda: (read(index), rest)

    def _next(self) -> tuple[Callable[[Any], Any], Index]:
        """What reads the next record or batch, which counts as read from now on, and its index."""
        position, size = self.position, self._size
        for index in position.indices:
            return position.read, index
        if ready := self._whole_batches():
            part, indices = ready
            is_taken = self._order is not None and self._batch is not None
            read = part.take if is_taken else part.get
            position.at += size
            position.prepare(indices[1:], size, read)
            return read, indices[0]
        rest = position.rest
        if not rest:
            raise end_of(position.number)
        get, take = self.setup.source.part(0, self._total)
        taken, position.rest = cut(rest, 0, size), cut(rest, size, OPEN)
        if self._order is None and len(taken) == 1:
            start, stop = taken[0].start, taken[0].stop
            return get, start if self._batch is None else slice(start, stop)
        found = np.concatenate([self._numbers(each.start, each.stop, each.stop) for each in taken])
        return (get, int(found[0])) if self._batch is None else (take, found)

    def _whole_batches(self) -> tuple[Part, Sequence[Index]] | None:
        """What the next reads take, and of what: as much as is in one block, and in this range.

        None if that is less than a batch, or may be the last one.
        """
        position, size = self.position, self._size
        start, until = position.at, position.until
        stop = until - self.setup.least
        if start + size > stop:
            return None
        first = start if self._order is None else self._numbers(start, start + 1, until)[0]
        block = bisect_right(self._ends, first)
        end = self._ends[block]
        part = self.setup.source.part(end - self._lengths[block], end)
        stop = min(stop, end if self._order is None else self._order.end(start))
        count = min(stop - start, size * _MOST_READY, max(size, WINDOW)) // size
        if count == 0:
            return None
        stop = start + count * size
        if self._order is not None:
            numbers = self._numbers(start, stop, until)
            return part, list(numbers.reshape(-1, size)) if self._batch else numbers.tolist()
        starts = range(start, stop, size)
        if self._batch is None:
            return part, starts
        return part, list(map(slice, starts, range(start + size, stop + size, size)))

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
