"""Readers of records that have numbers."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jobrunner.data.order import Shuffled
from jobrunner.data.position import OPEN, Position, Ranges, count, cut
from jobrunner.data.protocol import Reading
from jobrunner.data.sources import Index, Source, source_of
from jobrunner.define import COUNT, FLAG, NATURAL, checked
from jobrunner.errors import DefinitionError, EndOfData


def from_records(data: Any) -> IndexedReader:
    """A reader of data that has a length, one record after another.

    Parameters
    ----------
    data : array, table, sequence, or a dict or tuple of these
        What has a length and records by number. The records of a dict or a tuple are dicts or tuples
        of the records of its parts, which must have the same length.

    Raises
    ------
    DefinitionError
        If the data has no length or no records by number, or its parts have other lengths.

    Examples
    --------
    >>> reader = from_records(np.arange(10)).shuffled(seed=7).batched(4)
    >>> [len(batch) for batch in reader]
    [4, 4, 2]
    """
    return IndexedReader(source_of(data))


class IndexedReader(Reading):
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
        self._source = source
        self._seed, self._by_block, self._shard = seed, by_block, shard
        self._batch, self._drop_last = batch, drop_last
        lengths = source.lengths if by_block else (len(source),)
        self._lengths = lengths
        identity = {"length": len(source), "order": _describe(seed, lengths)}
        self._position = Position(range(len(source)), shard, identity)
        self._lock = threading.Lock()
        self._order: Shuffled | None = None
        self._start()

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

    @checked(i=NATURAL, n=COUNT)
    def sharded(self, i: int, n: int) -> IndexedReader:
        """Only the records of shard `i` of `n`. In each pass, each record is in one of the shards.

        The shards' lengths differ by one record at most.
        """
        if i >= n:
            raise DefinitionError(f"IndexedReader.sharded: i must be an int < n = {n}; got {i}.")
        return self._with(shard=(i, n))

    @checked(size=COUNT, drop_last=FLAG)
    def batched(self, size: int, *, drop_last: bool = False) -> IndexedReader:
        """In batches of `size` records.

        Parameters
        ----------
        size : int
        drop_last : bool
            Leave out the last batch of a pass if it is smaller.
        """
        return self._with(batch=size, drop_last=drop_last)

    def __len__(self) -> int:
        """How many batches (records, without batches) a whole pass of this shard has."""
        i, n = self._shard
        total = len(self._source)
        own = (i + 1) * total // n - i * total // n
        if self._batch is None:
            return own
        return own // self._batch if self._drop_last else -(-own // self._batch)

    @property
    def finished(self) -> bool:
        """Whether the pass has ended and the next has not begun."""
        return self._position.has_ended

    def read(self) -> Any:
        """The next record or batch. Raises `EndOfData` at the end of the pass, until the next one."""
        return self._source.take(self._next())

    def state_dict(self) -> dict[str, Any]:
        """The position: the number of the pass, and the ranges of its order that are left."""
        with self._lock:
            return self._position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, or to this shard's part of what is left of the whole.

        Raises
        ------
        PlanMismatchError
            If the state is not of such a reader, of the same data in the same order.
        """
        with self._lock:
            self._position.load_state_dict(state)
            self._start()

    def merge_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of the whole, from those of all shards in order.

        Each shard, of as many as there are then, takes its part of it in `load_state_dict`.

        Raises
        ------
        PlanMismatchError
            If a state is not that of its shard, or two shards have the same record left.
        """
        return self._position.merge_state_dicts(states)

    def _begin(self) -> None:
        with self._lock:
            self._position.begin()
            self._start()

    def _start(self) -> None:
        """Prepare to read from the position."""
        if self._seed is not None:
            self._order = Shuffled(self._lengths, self._seed, self._position.number)
        if self._drop_last and count(self._position.rest) < (self._batch or 1):
            self._position.rest = ()

    def _next(self) -> Index:
        """The numbers of the next record or batch, which count as read from now on."""
        position, size = self._position, self._batch or 1
        with self._lock:
            rest = position.rest
            if not rest:
                raise EndOfData(
                    f"Pass {position.number} has ended. To begin the next one, iterate over the "
                    f"reader: for batch in reader."
                )
            first = rest[0]
            if len(first) > size:
                taken: Ranges = (first[:size],)
                position.rest = (first[size:], *rest[1:])
            else:
                taken = cut(rest, 0, size)
                position.rest = cut(rest, size, OPEN)
            if self._drop_last and count(position.rest) < size:
                position.rest = ()
            if self._order is None:
                if len(taken) == 1:
                    start, stop = taken[0].start, taken[0].stop
                    return start if self._batch is None else slice(start, stop)
                return np.concatenate([np.arange(each.start, each.stop) for each in taken])
            found = [self._order.at(each.start, each.stop) for each in taken]
        numbers = found[0] if len(found) == 1 else np.concatenate(found)
        return int(numbers[0]) if self._batch is None else numbers

    def _options(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "by_block": self._by_block,
            "shard": self._shard,
            "batch": self._batch,
            "drop_last": self._drop_last,
        }

    def _with(self, **options: Any) -> IndexedReader:
        return IndexedReader(self._source, **{**self._options(), **options})

    def __reduce__(self) -> tuple[Any, ...]:
        args = (self._source, self._options(), self.state_dict())
        return (_rebuild, args)


def _rebuild(source: Source, options: dict[str, Any], state: dict[str, Any]) -> IndexedReader:
    reader = IndexedReader(source, **options)
    reader.load_state_dict(state)
    return reader


def _describe(seed: int | None, lengths: Sequence[int]) -> str:
    """What tells this order from others of as many records."""
    if seed is None:
        return "as stored"
    if len(lengths) == 1:
        return f"shuffled, seed {seed}"
    crc = zlib.crc32(np.asarray(lengths, "<i8").tobytes())
    return f"shuffled, seed {seed}, in {len(lengths)} blocks {crc:08x}"
