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
from jobrunner.data.pass_position import PassPosition, end_of
from jobrunner.data.ranges import OPEN, Ranges, cut

Index = int | slice | Indices

_MOST_READY = 1024  # records or batches
_MOST_VIEWS = 1 << 16  # of an array in memory


class Indexed:
    """The cursor of a source whose records have numbers."""

    def __init__(self, setup: Setup) -> None:
        self.setup, source, seed = setup, setup.source, setup.seed
        self._total: int = sum(source.lengths)
        self._lengths = source.lengths if setup.by_block or seed is None else (self._total,)
        self._ends = list(accumulate(self._lengths))
        self._order = None if seed is None else Shuffled(self._lengths, seed)
        order = _order_text(seed, self._lengths, source.order)
        identity = {"length": self._total, "order": order}
        self.position = PassPosition(range(self._total), setup.shard, identity, setup.least)
        self._batch, self._size = setup.batch, setup.batch or 1

    __reduce__ = reduced

    def count(self) -> int:
        """How many records or batches the shard has."""
        (i, n), total = self.setup.shard, self._total
        own = (i + 1) * total // n - i * total // n
        return own // self._size if self.setup.drop_last else -(-own // self._size)

    def fill(self) -> None:
        """Prepare what is next, if nothing is."""
        with self.position.lock:
            if not self.position.has_ready and not self.position.is_at_end:
                self._prepare()

    def read(self) -> Any:
        """The next record or batch."""
        for item in self.position.ready:
            return item
        with self.position.lock:
            read = self._next()
        return read()

    def plan(self) -> Callable[[], tuple[Any, Ranges]]:
        """Reads the next batch in another thread; returns it, and what is left of the pass then."""
        with self.position.lock:
            read, rest = self._next(), self.position.rest
        return lambda: (read(), rest)

    def _next(self) -> Callable[[], Any]:
        """What reads the next record or batch, which counts as read from now on."""
        position, size = self.position, self._size
        while (ready := position.take()) is None:
            if position.is_at_end:
                raise end_of(position.number)
            if not self._prepare():
                break
        else:
            return ready
        part = self.setup.source.part(0, self._total)
        rest = position.rest
        taken, position.rest = cut(rest, 0, size), cut(rest, size, OPEN)
        given_back = rest if position.is_at_end else taken  # with what `drop_last` leaves out
        if self._order is None and len(taken) == 1:
            start, stop = taken[0].start, taken[0].stop
            index: Index = start if self._batch is None else slice(start, stop)
            return position.reading(part.get, index, given_back)
        found = np.concatenate([self._numbers(each.start, each.stop, each.stop) for each in taken])
        if self._batch is None:
            return position.reading(part.get, int(found[0]), given_back)
        return position.reading(part.take, found, given_back)

    def _prepare(self) -> bool:
        """Prepare what the next reads take: as much as is in one block and range, if it is a batch."""
        position, size, order = self.position, self._size, self._order
        start, until = position.at, position.until
        if len(self._lengths) == 1:
            stop, part = until, self.setup.source.part(0, self._total)
        else:
            first = start if order is None else self._numbers(start, start + 1, until)[0]
            block = bisect_right(self._ends, first)
            end = self._ends[block]
            stop = min(until, end if order is None else order.end(start))
            part = self.setup.source.part(end - self._lengths[block], end)
        array = None if order is not None else part.array
        most = min(size * _MOST_READY, WINDOW) if array is None else size * _MOST_VIEWS
        stop = min(stop, start + max(size, most))
        if stop < until or position.behind or self.setup.drop_last:
            # The last batch may be filled up from behind, or left out: leave it to `_next`.
            stop = min(stop, until - self.setup.least)
            stop -= (stop - start) % size
        if stop <= start:
            return False
        if array is not None:
            # The batches are parts of an array: to iterate over it is fastest.
            count = (stop - start) // size
            found: Any = array[start : start + count * size if count else stop]
            if self._batch is not None:
                found = found.reshape(count, size, *array.shape[1:]) if count else [found]
            position.prepare_items(found, size)
            return True
        starts = range(start, stop, size)
        if order is None:
            stops = [*starts[1:], stop]
            indices = starts if self._batch is None else list(map(slice, starts, stops))
            position.prepare(part.get, indices, starts, stop)
            return True
        numbers = self._numbers(start, stop, until)
        if self._batch is None:
            position.prepare(part.get, numbers.tolist(), starts, stop)
        else:
            batches = _batches(numbers, size)
            position.prepare(part.take, batches, starts, stop, part.gather)
        return True

    def _numbers(self, start: int, stop: int, limit: int) -> Indices:
        """The numbers of the records at these positions; those up to `limit` may be next."""
        if (order := self._order) is None:
            return np.arange(start, stop)
        return order.at(self.position.number, start, stop, limit)


def _batches(numbers: Indices, size: int) -> list[Indices]:
    whole = len(numbers) - len(numbers) % size
    found = list(numbers[:whole].reshape(-1, size))
    return found if whole == len(numbers) else [*found, numbers[whole:]]


def _order_text(seed: int | None, lengths: Sequence[int], files: str) -> str:
    """What a saved state says of its order, so that no reader goes on in another one."""
    after = f", {files}" if files else ""
    if seed is None:
        return f"as stored{after}"
    if len(lengths) > 1:
        crc = zlib.crc32(np.asarray(lengths, "<i8").tobytes())
        after = f", in {len(lengths)} blocks {crc:08x}{after}"
    return f"shuffled, seed {seed}{after}"
