"""What a reader is, and the one that `from_records` and the other functions make."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

from jobrunner.define import Count, Interval, Natural, checked
from jobrunner.errors import DefinitionError, EndOfData


@runtime_checkable
class Reader(Protocol):
    """Reads records, pass after pass, and knows its position.

    As a blob, a reader is saved by its position: its data is not. An init task makes it, and the
    tasks that read name it in ``updates=``. Any class with these methods is a reader; with
    `ReaderPosition.merge_state_dicts`, its blob may be partitioned.
    """

    @property
    def finished(self) -> bool:
        """Whether the pass has ended and the next has not begun. Data without an end: False."""

    def read(self) -> Any:
        """The next record or batch. Raises `EndOfData` at the end of the pass, until the next one.

        After another error the next call tries the same again.
        """

    def __iter__(self) -> Iterator[Any]:
        """What is left of the pass. Begins the next pass if this one has ended.

        It may return the reader itself.
        """

    def __next__(self) -> Any:
        """As `read`, but raises `StopIteration` at the end of the pass."""

    def state_dict(self) -> dict[str, Any]:
        """The position, as `ReaderPosition.state_dict` says."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go to a position, as `ReaderPosition.load_state_dict` says."""


class ReaderPosition(Protocol):
    """Where a reader stands, in pass after pass."""

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left of the pass."""

    def begin(self) -> None:
        """Begin the next pass."""

    def state_dict(self) -> dict[str, Any]:
        """The position of what was handed out, as plain values: numbers, strings, lists, dicts.

        What was read ahead and not handed out is left.
        """

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go to the position of a state of this shard, or to this shard's part of a merged state.

        It should raise `PlanMismatchError` if the state is of other data or of another shard.
        """

    def merge_state_dicts(self, states: Sequence[Mapping[str, Any]], /) -> dict[str, Any]:
        """The state of the whole, from those of all shards in order.

        Called on one of the new shards if a partitioned blob is loaded on another number of nodes.
        Each new shard then gets the merged state. What the old shards had left must be in exactly one
        of the new ones.
        """


@dataclass(frozen=True)
class Options:
    """How a reader reads its data."""

    seed: int | None = None
    by_block: bool = True
    shard: tuple[int, int] = (0, 1)
    batch: int | None = None
    drop_last: bool = False
    ahead: int = 0
    threads: int = 1
    # Of a loop, which ends sooner than the pass:
    loop_batches: int | None = None
    loop_seconds: float | None = None

    @property
    def size(self) -> int:
        """How many records are read at once."""
        return self.batch or 1

    @property
    def least(self) -> int:
        """How many records the smallest batch has."""
        return self.size if self.drop_last else 1

    @property
    def is_limited(self) -> bool:
        """Whether loops end sooner than the pass."""
        return self.loop_batches is not None or self.loop_seconds is not None


class Cursor(Protocol):
    """Reads on behalf of a `DataReader`, from a position on. Threads may share it."""

    @property
    def lock(self) -> threading.Lock:
        """Held by who looks at the position, or changes it."""

    @property
    def position(self) -> ReaderPosition:
        """That of what was handed out."""

    def read(self) -> Any:
        """The next record or batch; raises `EndOfData` at the end of the pass. Takes the lock."""

    def count(self) -> int:
        """How many records or batches a whole pass has; raises `TypeError` if that is not known."""


class DataReader:
    """Reads records or batches, as a `Reader`. Made by `from_records` and the other functions.

    `shuffled`, `sharded`, `batched` and `prefetched` return new readers of the same data, at the
    beginning, so call them before reading. Threads may share a reader: each record goes to one of
    them.
    """

    def __init__(
        self,
        open_cursor: Callable[[Options], Cursor],
        options: Options = Options(),
        cursor: Cursor | None = None,
    ) -> None:
        self._open_cursor, self._options = open_cursor, options
        self._cursor = open_cursor(options) if cursor is None else cursor
        self._lock = threading.Lock()
        # Of the present loop: how much it has read, and since when.
        self._taken = 0
        self._started: float | None = None

    @checked
    def shuffled(self, seed: Natural = 0, *, by_block: bool = True) -> Self:
        """In a shuffled order, another one in each pass.

        The order depends only on the seed, the number of the pass and the lengths of the data's
        blocks, so a resumed run reads in the same order.

        Parameters
        ----------
        seed : int
        by_block : bool
            Data that is stored in chunks is read chunk by chunk: the chunks come in a shuffled order,
            and the records of each in another. False: all records are mixed, so that a batch may
            need as many chunks as it has records.

        Notes
        -----
        The orders of two blocks, of 8 bytes a record, are in memory; data without blocks is one block.
        """
        return self._with(seed=seed, by_block=by_block)

    @checked
    def sharded(self, i: Natural, n: Count) -> Self:
        """Only the records of shard `i` of `n`. In each pass, each record is in one of the shards.

        If the number of records is known, a shard is a contiguous part of the pass, and the lengths
        of the shards differ by one record at most. Else it is each `n`-th record.
        """
        if i >= n:
            raise DefinitionError(f"DataReader.sharded: i must be an int < n = {n}; got {i}.")
        return self._with(shard=(i, n))

    @checked
    def batched(self, size: Count, *, drop_last: bool = False) -> Self:
        """In batches of `size` records.

        Parameters
        ----------
        size : int
        drop_last : bool
            Leave out the last batch of a pass if it is smaller.
        """
        return self._with(batch=size, drop_last=drop_last)

    @checked
    def prefetched(self, batches: Count = 2, *, threads: Count = 1) -> Self:
        """Return a reader whose threads read ahead, in the same order, while tasks compute.

        The position is that of what was handed out, not of what was read ahead. An error arrives at
        the `read` of its batch. The threads start with the first `read` and end when the reader is
        dropped.

        Parameters
        ----------
        batches : int
            How many batches (or records, if there are no batches) it reads ahead at most.
        threads : int
            How many of them it reads at a time.
        """
        return self._with(ahead=batches, threads=threads)

    @checked
    def limited(self, *, batches: Count | None = None, seconds: Interval | None = None) -> Self:
        """Return a reader for loops that end sooner; the pass goes on in the next loop.

        It shares the position with this one: ``for batch in reader.limited(batches=100)``. Each loop
        counts anew. `finished` tells of the pass, not of the loop.

        Parameters
        ----------
        batches : int, optional
            How many batches (or records, if there are no batches) a loop reads at most.
        seconds : float, optional
            After this time the loop reads no further batch; it reads at least one.
        """
        options = replace(
            self._options,
            loop_batches=batches or self._options.loop_batches,
            loop_seconds=seconds or self._options.loop_seconds,
        )
        return type(self)(self._open_cursor, options, self._cursor)

    def _with(self, **options: Any) -> Self:
        return type(self)(self._open_cursor, replace(self._options, **options))

    @property
    def finished(self) -> bool:
        """Whether the pass has ended and the next has not begun."""
        with self._cursor.lock:
            return self._cursor.position.has_ended

    def read(self) -> Any:
        """The next record or batch.

        Raises `EndOfData` at the end of the pass, until the next one has begun, and at the end of a
        limited loop. After another error the next call tries the same again, in any thread.
        """
        if not self._options.is_limited:
            return self._cursor.read()
        with self._lock:
            self._check_limits()
            self._taken += 1
        try:
            return self._cursor.read()
        except BaseException:
            with self._lock:
                self._taken -= 1
            raise

    def _check_limits(self) -> None:
        batches, seconds = self._options.loop_batches, self._options.loop_seconds
        if batches is not None and self._taken >= batches:
            raise EndOfData(f"The loop has read {batches} batches; the next loop goes on.")
        if seconds is not None:
            now = time.monotonic()
            if self._started is None:
                self._started = now
            if now - self._started >= seconds:
                raise EndOfData(f"The loop has read for {seconds:g} s; the next loop goes on.")

    def __iter__(self) -> Iterator[Any]:
        with self._cursor.lock:
            # Another thread may have begun it.
            if self._cursor.position.has_ended:
                self._cursor.position.begin()
        self._taken, self._started = 0, None
        return self._loop()

    def _loop(self) -> Iterator[Any]:
        with suppress(EndOfData):
            while True:
                yield self.read()

    def __next__(self) -> Any:
        try:
            return self.read()
        except EndOfData:
            raise StopIteration from None

    def __len__(self) -> int:
        """How many batches (records, without batches) a whole pass of this shard has.

        Raises `TypeError` if only the end of the pass tells.
        """
        return self._cursor.count()

    def __bool__(self) -> bool:
        return True  # also if its length is 0 or not known

    def state_dict(self) -> dict[str, Any]:
        """The position: the number of the pass, what is left of it, and what a limited loop has read."""
        with self._cursor.lock:
            state = self._cursor.position.state_dict()
        return {**state, "loop": self._taken} if self._options.is_limited else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, or to this shard's part of what is left of the whole.

        The time of a limited loop counts anew.

        Raises
        ------
        PlanMismatchError
            If the state is not of such a reader, of the same data in the same order.
        """
        with self._cursor.lock:
            self._cursor.position.load_state_dict(state)
        self._taken, self._started = state.get("loop", 0), None

    def merge_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of the whole, from those of all shards in order.

        Each shard, of as many as there are then, takes its part of it in `load_state_dict`.

        Raises
        ------
        PlanMismatchError
            If a state is not that of its shard, two shards have the same record left, the shards of
            an iterable have not read equally much, or the reader is of a loader with a state of its
            own.
        """
        return self._cursor.position.merge_state_dicts(states)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore, (self._open_cursor, self._options, self.state_dict()))


def _restore(
    open_cursor: Callable[[Options], Cursor], options: Options, state: dict[str, Any]
) -> DataReader:
    """A reader from its pickle."""
    reader = DataReader(open_cursor, options)
    reader.load_state_dict(state)
    return reader
