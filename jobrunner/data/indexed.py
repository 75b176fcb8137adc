"""Readers of records that have numbers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jobrunner.data.order import Shuffled
from jobrunner.data.position import OPEN, Position, Ranges, count, cut
from jobrunner.data.positioned import Positioned
from jobrunner.data.protocol import Loop
from jobrunner.data.sources import Index, Source
from jobrunner.define import FLAG, NATURAL, checked


class IndexedReader(Positioned, Loop):
    """Reads records that have numbers, in any order. See `Reader` for what all readers do.

    Made by `from_records` and others. Its methods `shuffled`, `sharded` and `batched` return new
    readers of the same data, at the beginning, so call them before reading. Threads may share a
    reader: each record goes to one of them.
    """

    def __init__(
        self,
        source: Source,
        *,
        seed: int | None = None,
        by_block: bool = True,
        shard: tuple[int, int] = (0, 1),
        batch: int | None = None,
        drop_last: bool = False,
    ) -> None:
        self._lengths = source.lengths if by_block else (len(source),)
        self._seed, self._batch, self._size = seed, batch, batch or 1
        self._drop_last = drop_last
        self._least = (batch or 1) if drop_last else 1
        self._order: Shuffled | None = None
        self._at = self._until = 0
        super().__init__(
            source,
            Position(
                range(len(source)),
                shard,
                {"length": len(source), "order": _describe(seed, self._lengths)},
            ),
            {
                "seed": seed,
                "by_block": by_block,
                "shard": shard,
                "batch": batch,
                "drop_last": drop_last,
            },
        )

    @checked(seed=NATURAL, by_block=FLAG)
    def shuffled(self, seed: int = 0, *, by_block: bool = True) -> IndexedReader:
        """In a shuffled order, another one in each pass.

        The order depends only on the seed, the number of the pass and the data's length, so a
        resumed run reads in the same order. It is computed while reading and takes no memory.

        Parameters
        ----------
        seed : int
        by_block : bool
            Data that is stored in chunks is read chunk by chunk: the chunks come in a shuffled order,
            and the records of each in another. False: all records are mixed, so that a batch may
            need as many chunks as it has records.
        """
        return self._with(seed=seed, by_block=by_block)

    def __len__(self) -> int:
        """How many batches (records, without batches) a whole pass of this shard has."""
        i, n = self._position.shard
        total = len(self._source)
        own = (i + 1) * total // n - i * total // n
        return own // self._size if self._drop_last else -(-own // self._size)

    def read(self) -> Any:
        """The next record or batch. Raises `EndOfData` at the end of the pass, until the next one."""
        with self._lock:
            index = self._next()
        return self._source.take(index)

    def job(self) -> Callable[[], tuple[Any, Ranges]]:
        """What another thread may call to read the next batch, and what is left then."""
        with self._lock:
            index = self._next()
            self._settle()
            rest = self._position.rest
        return lambda: (self._source.take(index), rest)

    def _start(self) -> None:
        if self._seed is not None:
            self._order = Shuffled(self._lengths, self._seed, self._position.number)
        self._keep_batches()

    def _settle(self) -> None:
        rest = self._position.rest
        if rest and rest[0].start != self._at:
            self._position.rest = (range(self._at, self._until), *rest[1:])

    def _next(self) -> Index:
        """The numbers of the next record or batch, which count as read from now on."""
        start, order = self._at, self._order
        stop = start + self._size
        if stop + self._least <= self._until:
            self._at = stop
            if self._batch is None:
                return start if order is None else int(order.at(start, stop)[0])
            return slice(start, stop) if order is None else order.at(start, stop)
        return self._last_of_range()

    def _last_of_range(self) -> Index:
        self._settle()
        position, size = self._position, self._size
        if not position.rest:
            raise self._end()
        taken = cut(position.rest, 0, size)
        position.rest = cut(position.rest, size, OPEN)
        self._keep_batches()
        if self._batch is not None and self._order is None and len(taken) == 1:
            return slice(taken[0].start, taken[0].stop)
        at = np.arange if self._order is None else self._order.at
        numbers = np.concatenate([at(each.start, each.stop) for each in taken])
        return int(numbers[0]) if self._batch is None else numbers

    def _keep_batches(self) -> None:
        """End the pass if what is left is no whole batch, where only such are read."""
        rest = self._position.rest
        if count(rest) < self._least:
            rest = self._position.rest = ()
        # The first range, without what was read of it; `_settle` tells the position.
        self._at, self._until = (rest[0].start, rest[0].stop) if rest else (0, 0)


def _describe(seed: int | None, lengths: Sequence[int]) -> str:
    """What tells this order from others of as many records."""
    if seed is None:
        return "as stored"
    if len(lengths) == 1:
        return f"shuffled, seed {seed}"
    crc = zlib.crc32(np.asarray(lengths, "<i8").tobytes())
    return f"shuffled, seed {seed}, in {len(lengths)} blocks {crc:08x}"
