"""What a reader is, and the one that `from_records` and the other functions make."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

from jobrunner.define import Count, Interval, Natural, checked
from jobrunner.errors import DefinitionError, EndOfData


@runtime_checkable
class Reader(Protocol):
    """Reads records, pass after pass, and knows its position.

    As a blob, a reader is saved by its position: its data is not. An init task makes it, and the
    tasks that read name it in ``updates=``. Any class with these methods is a reader.

    With ``merge_state_dicts(states)``, its blob may be partitioned. If such a blob is loaded on another
    number of nodes, this is called on one of the new shards, with the states of all old ones in order.
    It returns the state of the whole, which each new shard then gets: what the old shards had left must
    be in exactly one of the new ones.
    """

    @property
    def finished(self) -> bool:
        """Whether the pass has ended and the next has not begun. Data without an end: False."""

    def read(self) -> Any:
        """The next record or batch. Raises `EndOfData` at the end of the pass, until the next one."""

    def __iter__(self) -> Iterator[Any]:
        """What is left of the pass. Begins the next pass if this one has ended.

        It may return the reader itself.
        """

    def __next__(self) -> Any:
        """As `read`, but raises `StopIteration` at the end of the pass."""

    def state_dict(self) -> dict[str, Any]:
        """The position of what was handed out, as plain values: numbers, strings, lists, dicts.

        What was read ahead and not handed out is left.
        """

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Go to the position of a state of this shard, or to this shard's part of a merged state.

        It should raise `PlanMismatchError` if the state is of other data or of another shard.
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

    @property
    def size(self) -> int:
        """How many records are read at once."""
        return self.batch or 1

    @property
    def least(self) -> int:
        """How many records the smallest batch has."""
        return self.size if self.drop_last else 1


AS_STORED = Options()


class DataReader(ABC):
    """Reads records or batches, as a `Reader`. Made by `from_records` and the other functions.

    `shuffled`, `sharded`, `batched` and `prefetched` return new readers of the same data, at the
    beginning, so call them before reading. Threads may share a reader: each record goes to one of
    them.
    """

    def __init__(self, source: Any, options: Options = AS_STORED) -> None:
        self._source, self._options = source, options
        self._lock = threading.Lock()  # held by who looks at the position, or changes it

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
    def limited(
        self, *, batches: Count | None = None, seconds: Interval | None = None
    ) -> Iterator[Any]:
        """What is left of the pass, for a loop that ends sooner; the next loop goes on.

        Begins the next pass if this one has ended, as a loop over the reader does:
        ``for batch in reader.limited(batches=100)``.

        Parameters
        ----------
        batches : int, optional
            How many batches (or records, if there are no batches) the loop reads at most.
        seconds : float, optional
            After this time the loop reads no further batch; it reads at least one.
        """
        started = time.monotonic()
        for count, batch in enumerate(iter(self), start=1):
            yield batch
            if count == batches:
                return
            if seconds is not None and time.monotonic() - started >= seconds:
                return

    def _with(self, **options: Any) -> Self:
        return type(self)(self._source, replace(self._options, **options))

    def __iter__(self) -> Iterator[Any]:
        with self._lock:
            # Another thread may have begun it.
            if self._has_ended():
                self._begin()
        return self._loop()

    def _loop(self) -> Iterator[Any]:
        try:
            while True:
                yield self.read()
        except EndOfData:
            return

    def __next__(self) -> Any:
        try:
            return self.read()
        except EndOfData:
            raise StopIteration from None

    def __bool__(self) -> bool:
        return True  # also if its length is 0 or not known

    @property
    def finished(self) -> bool:
        """Whether the pass has ended and the next has not begun."""
        with self._lock:
            return self._has_ended()

    @abstractmethod
    def read(self) -> Any:
        """The next record or batch.

        Raises `EndOfData` at the end of the pass, until the next one has begun. After another error
        the next call tries the same again, in any thread; but for a loader, whose readers then
        raise.
        """

    @abstractmethod
    def __len__(self) -> int:
        """How many batches (records, without batches) a whole pass of this shard has.

        Raises `TypeError` if only the end of the pass tells.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """The position: the number of the pass, and what is left of it."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position, or to this shard's part of what is left of the whole.

        Raises
        ------
        PlanMismatchError
            If the state is not of such a reader, of the same data in the same order.
        """

    @abstractmethod
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

    @abstractmethod
    def _has_ended(self) -> bool:
        """Whether nothing is left of the pass."""

    @abstractmethod
    def _begin(self) -> None:
        """Begin the next pass."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restore, (type(self), self._source, self._options, self.state_dict()))


def _restore(
    cls: type[DataReader], source: Any, options: Options, state: dict[str, Any]
) -> DataReader:
    """A reader from its pickle."""
    reader = cls(source, options)
    reader.load_state_dict(state)
    return reader


def end_of(number: int) -> EndOfData:
    """What a read beyond the end of pass `number` raises."""
    return EndOfData(
        f"Pass {number} has ended. To begin the next one, iterate over the reader: "
        f"for batch in reader."
    )
