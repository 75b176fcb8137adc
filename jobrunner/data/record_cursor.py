"""Reading records that have numbers, in any order, and reading ahead in threads."""

from __future__ import annotations

import threading
import weakref
import zlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jobrunner.data.order import Indices, Order
from jobrunner.data.pass_position import PassPosition, Portion
from jobrunner.data.reader import Options
from jobrunner.data.saved_state import end_of


class Records(Protocol):
    """Data with a length, whose records have numbers."""

    @property
    def lengths(self) -> Sequence[int]:
        """Records of each block that is read as a whole; one block if any records can be read."""

    def read(self, index: int | slice | Indices, /) -> Any:
        """The record of a number, or a batch of those in a slice or an array of numbers."""


class _Fetch:
    """Reads portions, in any thread. It knows nothing of the cursor, so that this can be dropped meanwhile."""

    def __init__(self, records: Records, order: Order | None, *, in_batches: bool) -> None:
        self._records, self._order, self._in_batches = records, order, in_batches

    def __call__(self, portion: Portion) -> Any:
        numbers = self._numbers(portion)
        index: int | slice | Indices = numbers
        if not self._in_batches:
            index = numbers.start if isinstance(numbers, slice) else int(numbers[0])
        try:
            return self._records.read(index)
        except StopIteration as error:  # would end the caller's loop
            raise RuntimeError(
                f"Reading {index!r:.200} raised StopIteration; expected a record, or an IndexError."
            ) from error

    def _numbers(self, portion: Portion) -> slice | Indices:
        """Those of the records: a slice, of which an array makes no copy, or else an array."""
        if self._order is not None:
            pieces = [self._order.at(portion.number, ranges) for ranges in portion.ranges]
        elif len(portion.ranges) == 1:
            return slice(portion.ranges[0].start, portion.ranges[0].stop)
        else:
            pieces = [np.arange(ranges.start, ranges.stop) for ranges in portion.ranges]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


@dataclass(frozen=True)
class _Ahead:
    """What threads read ahead of the position: a portion of it, and its records."""

    portion: Portion
    records: Future[Any]


class RecordCursor:
    """Hands out the records of a source in the order of its passes.

    The position is that of what was handed out. Reading ahead takes nothing from it: threads look at
    what comes next, and what they have read waits in `_ahead` until `read` takes its positions. So a
    save needs to know nothing of it.
    """

    def __init__(self, records: Records, options: Options) -> None:
        self.lock = threading.Lock()
        self._options = options
        self._total = sum(records.lengths)
        lengths = records.lengths if options.by_block else (self._total,)
        order = None if options.seed is None else Order(lengths, options.seed)
        self._fetch = _Fetch(records, order, in_batches=options.batch is not None)
        name = f"{self._total} records, {_describe_order(options.seed, lengths)}"
        self.position = PassPosition(self._total, name, options.shard, options.least)
        self._ahead: deque[_Ahead] = deque()
        self._pool: ThreadPoolExecutor | None = None

    def count(self) -> int:
        """How many records or batches the shard has."""
        own = sum(map(len, self.position.share([range(self._total)], self._options.shard)))
        size = self._options.size
        return own // size if self._options.drop_last else -(-own // size)

    def read(self) -> Any:
        """The next record or batch."""
        with self.lock:
            if self._options.ahead:
                self._read_ahead()
            if self.position.has_ended:
                raise end_of(self.position.number)
            portion = self.position.take(self._options.size)
            ahead = self._ahead.popleft() if self._ahead else None
        try:
            return self._fetch(portion) if ahead is None else ahead.records.result()
        except BaseException:
            with self.lock:
                self.position.give_back(portion)
                self._forget_ahead()  # for something else comes next now
            raise

    def _read_ahead(self) -> None:
        """Let threads read the next batch, and as many after it as the options say."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._options.threads, "jobrunner-prefetch")
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        if self._ahead and self._ahead[0].portion.generation != self.position.generation:
            self._forget_ahead()
        skip = sum(len(ahead.portion) for ahead in self._ahead)
        while len(self._ahead) <= self._options.ahead:
            portion = self.position.peek(self._options.size, skip)
            if len(portion) < self._options.least:
                break
            self._ahead.append(_Ahead(portion, self._pool.submit(self._fetch, portion)))
            skip += len(portion)

    def _forget_ahead(self) -> None:
        while self._ahead:
            self._ahead.pop().records.cancel()


def _describe_order(seed: int | None, lengths: Sequence[int]) -> str:
    """What a saved state says of its order, so that no reader goes on in another one."""
    if seed is None:
        return "as stored"
    if len(lengths) == 1:
        return f"shuffled, seed {seed}"
    checksum = zlib.crc32(np.asarray(lengths, "<i8").tobytes())
    return f"shuffled, seed {seed}, in {len(lengths)} blocks {checksum:08x}"
