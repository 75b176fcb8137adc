"""Reading records that have numbers, in any order, and reading ahead in threads."""

from __future__ import annotations

import weakref
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from jobrunner.data.order import Indices, Order
from jobrunner.data.pass_position import PassPosition, Ranges
from jobrunner.data.reader import AS_STORED, DataReader, Options, end_of


class Records(Protocol):
    """Data with a length, whose records have numbers."""

    @property
    def lengths(self) -> Sequence[int]:
        """Records of each block that is read as a whole; one block if any records can be read."""

    def read(self, index: int | slice | Indices, /) -> Any:
        """The record of a number, or a batch of those in a slice or an array of numbers."""


@dataclass(frozen=True)
class _Ahead:
    """What threads read ahead of the position: a portion of a pass, and its records."""

    number: int  # of the pass
    ranges: Ranges
    records: Future[Any]


class RecordReader(DataReader):
    """Hands out the records of a source in the order of its passes.

    The position is that of what was handed out. Reading ahead takes nothing from it: threads look at
    what comes next, and what they have read waits in `_ahead` until `read` comes to it. So a save
    needs to know nothing of it, and what no longer comes next is forgotten.
    """

    _source: Records

    def __init__(self, source: Records, options: Options = AS_STORED) -> None:
        super().__init__(source, options)
        total = sum(source.lengths)
        lengths = source.lengths if options.by_block else (total,)
        order = None if options.seed is None else Order(lengths, options.seed)
        self._fetch = partial(_fetch, source, order, options.batch is not None)
        name = f"{total} records, {_describe_order(options.seed, lengths)}"
        self._position = PassPosition(total, name, options.shard, options.least)
        self._ahead: deque[_Ahead] = deque()
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        own = sum(map(len, self._position.whole_share(self._options.shard)))
        size = self._options.size
        return own // size if self._options.drop_last else -(-own // size)

    def read(self) -> Any:
        """The next record or batch."""
        with self._lock:
            if self._has_ended():
                raise end_of(self._position.number)
            if self._options.ahead:
                records = self._read_ahead()
            else:
                ranges = self._position.peek(self._options.size)
                records = self._fetch(self._position.number, ranges)
            self._position.advance(self._options.size)  # only what could be read
            return records

    def _read_ahead(self) -> Any:
        """The next batch; threads read it, and as many after it as the options say."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._options.threads, "jobrunner-prefetch")
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        number, size = self._position.number, self._options.size
        if self._ahead:
            first = self._ahead[0]
            if (first.number, first.ranges) != (number, self._position.peek(size)):
                self._forget_ahead()  # the reader went elsewhere
        skip = 0
        for ahead in self._ahead:
            skip += sum(map(len, ahead.ranges))
        while len(self._ahead) <= self._options.ahead:
            ranges = self._position.peek(size, skip)
            count = sum(map(len, ranges))
            if count < self._options.least:
                break
            records = self._pool.submit(self._fetch, number, ranges)
            self._ahead.append(_Ahead(number, ranges, records))
            skip += count
        try:
            records_read = self._ahead[0].records.result()
        except BaseException:
            self._forget_ahead()  # the next read tries again
            raise
        self._ahead.popleft()
        return records_read

    def _forget_ahead(self) -> None:
        while self._ahead:
            self._ahead.pop().records.cancel()

    def state_dict(self) -> dict[str, Any]:
        """The position as plain values."""
        with self._lock:
            return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position."""
        with self._lock:
            self._position.load_state_dict(state)

    def merge_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of the whole, from those of all shards."""
        return self._position.merge_state_dicts(states)

    def _has_ended(self) -> bool:
        return self._position.has_ended

    def _begin(self) -> None:
        self._position.begin()


def _fetch(
    records: Records, order: Order | None, in_batches: bool, number: int, ranges: Ranges
) -> Any:
    """Read a portion of a pass, in any thread. A thread that does so refers to no reader."""
    index: int | slice | Indices
    if order is not None:
        pieces = [order.at(number, piece) for piece in ranges]
        index = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    elif len(ranges) == 1:
        index = slice(ranges[0].start, ranges[0].stop)  # of which an array makes no copy
    else:
        index = np.concatenate([np.arange(piece.start, piece.stop) for piece in ranges])
    if not in_batches:
        index = index.start if isinstance(index, slice) else int(index[0])
    try:
        return records.read(index)
    except StopIteration as error:  # would end the caller's loop
        raise RuntimeError(
            f"Reading {index!r:.200} raised StopIteration; expected a record, or an IndexError."
        ) from error


def _describe_order(seed: int | None, lengths: Sequence[int]) -> str:
    """What a saved state says of its order, so that no reader goes on in another one."""
    if seed is None:
        return "as stored"
    if len(lengths) == 1:
        return f"shuffled, seed {seed}"
    checksum = zlib.crc32(np.asarray(lengths, "<i8").tobytes())
    return f"shuffled, seed {seed}, in {len(lengths)} blocks {checksum:08x}"
