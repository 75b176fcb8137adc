"""What a reader is, and the one that `from_records` and the other functions make."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, Protocol, Self, runtime_checkable

from jobrunner.data.cursors import Cursor, Setup, opened
from jobrunner.define import Count, Interval, Natural, checked
from jobrunner.errors import DefinitionError, EndOfData


@runtime_checkable
class Reader(Protocol):
    """Reads records, pass after pass, and knows its position.

    As a blob, a reader is saved by its position: its data is not. An init task makes it, and the
    tasks that read name it in ``updates=``.

    ``for item in reader`` reads the rest of the pass. It begins the next pass if the last one has
    ended.
    """

    @property
    def finished(self) -> bool:
        """Whether the pass has ended and the next has not begun."""

    def read(self) -> Any:
        """The next record or batch. Raises `EndOfData` at the end of the pass, until the next one.

        After another error the next call tries the same again.
        """

    def state_dict(self) -> dict[str, Any]:
        """The position, as plain values."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go to the position that a `state_dict` describes."""

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...


def reader_of(kind: Callable[[Setup], Cursor], source: Any) -> DataReader:
    """A reader of the records of a source, one after another."""
    return DataReader(opened(Setup(kind, source)))


class DataReader:
    """Reads records or batches, as a `Reader`. Made by `from_records` and the other functions.

    `shuffled`, `sharded`, `batched` and `prefetched` return new readers of the same data, at the
    beginning, so call them before reading. Threads may share a reader: each record goes to one of
    them.
    """

    def __init__(
        self,
        cursor: Cursor,
        batches: int | None = None,
        seconds: float | None = None,
        taken: int = 0,
    ) -> None:
        self._cursor = cursor
        self._batches, self._seconds = batches, seconds  # at most, in a loop
        self._is_limited = batches is not None or seconds is not None
        self._taken = taken
        self._started: float | None = None  # with the loop's first read
        self._lock = threading.Lock()

    @checked
    def shuffled(self, seed: Natural = 0, *, by_block: bool = True) -> Self:
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
        return type(self)(self._cursor, batches or self._batches, seconds or self._seconds)

    def _with(self, **options: Any) -> Self:
        cursor = opened(self._cursor.setup._replace(**options))
        return type(self)(cursor, self._batches, self._seconds)

    @property
    def finished(self) -> bool:
        """Whether the pass has ended and the next has not begun."""
        return bool(self._cursor.position.has_ended)

    def read(self) -> Any:
        """The next record or batch.

        Raises `EndOfData` at the end of the pass, until the next one has begun, and at the end of a
        limited loop. After another error the next call tries the same again, in any thread.
        """
        if not self._is_limited:
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
        if self._batches is not None and self._taken >= self._batches:
            raise EndOfData(f"The loop has read {self._batches} batches; the next loop goes on.")
        if self._seconds is not None:
            now = time.monotonic()
            if self._started is None:
                self._started = now
            if now - self._started >= self._seconds:
                raise EndOfData(
                    f"The loop has read for {self._seconds:g} s; the next loop goes on."
                )

    def __iter__(self) -> Iterator[Any]:
        if self._cursor.position.has_ended:
            self._cursor.position.begin()
        self._taken, self._started = 0, None
        return chain.from_iterable(self._loop())

    def _loop(self) -> Iterator[Iterable[Any]]:
        cursor, position = self._cursor, self._cursor.position
        fill = None if self._is_limited else cursor.fill
        with suppress(EndOfData):
            while not position.has_ended:
                if fill:
                    fill()
                    yield position.ready
                    if position.has_ended:
                        return
                yield (self.read(),)

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
        state = self._cursor.position.state_dict()
        return {**state, "loop": self._taken} if self._is_limited else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, or to this shard's part of what is left of the whole.

        The time of a limited loop counts anew.

        Raises
        ------
        PlanMismatchError
            If the state is not of such a reader, of the same data in the same order.
        """
        self._cursor.position.load_state_dict(state)
        self._taken, self._started = state.get("loop", 0), None

    def merge_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of the whole, from those of all shards in order.

        Each shard, of as many as there are then, takes its part of it in `load_state_dict`.

        Raises
        ------
        PlanMismatchError
            If a state is not that of its shard, two shards have the same record left, or the reader
            is of a loader with a state of its own.
        """
        merged: dict[str, Any] = self._cursor.position.merge_state_dicts(states)
        return merged

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self._cursor, self._batches, self._seconds, self._taken))
