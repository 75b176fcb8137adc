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
        self._seed, self._batch = seed, batch
        self._drop_last = drop_last
        self._least = (batch or 1) if drop_last else 1
        self._order: Shuffled | None = None
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
        size = self._batch or 1
        return own // size if self._drop_last else -(-own // size)

    def read(self) -> Any:
        """The next record or batch. Raises `EndOfData` at the end of the pass, until the next one."""
        return self._source.take(self._next())

    def job(self) -> Callable[[], tuple[Any, Ranges]]:
        """What another thread may call to read the next batch, and what is left then."""
        with self._lock:
            index = self._next_index()
            rest = self._position.rest
        return lambda: (self._source.take(index), rest)

    def _start(self) -> None:
        if self._seed is not None:
            self._order = Shuffled(self._lengths, self._seed, self._position.number)
        if count(self._position.rest) < self._least:
            self._position.rest = ()

    def _next(self) -> Index:
        with self._lock:
            return self._next_index()

    def _next_index(self) -> Index:
        """The numbers of the next record or batch, which count as read from now on."""
        position, size = self._position, self._batch or 1
        rest = position.rest
        if not rest:
            raise self._end()
        first = rest[0]
        if len(first) > size:
            taken: Ranges = (first[:size],)
            position.rest = (first[size:], *rest[1:])
        else:
            taken = cut(rest, 0, size)
            position.rest = cut(rest, size, OPEN)
        if self._least > 1 and count(position.rest) < self._least:
            position.rest = ()
        if self._order is not None:
            found = [self._order.at(each.start, each.stop) for each in taken]
        elif len(taken) > 1:
            found = [np.arange(each.start, each.stop) for each in taken]
        else:
            start, stop = taken[0].start, taken[0].stop
            return start if self._batch is None else slice(start, stop)
        numbers = found[0] if len(found) == 1 else np.concatenate(found)
        return int(numbers[0]) if self._batch is None else numbers


def _describe(seed: int | None, lengths: Sequence[int]) -> str:
    """What tells this order from others of as many records."""
    if seed is None:
        return "as stored"
    if len(lengths) == 1:
        return f"shuffled, seed {seed}"
    crc = zlib.crc32(np.asarray(lengths, "<i8").tobytes())
    return f"shuffled, seed {seed}, in {len(lengths)} blocks {crc:08x}"
