"""What readers have in common whose position is a place in an order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

from jobrunner.data.position import Position, Ranges
from jobrunner.define import COUNT, FLAG, NATURAL, checked
from jobrunner.errors import DefinitionError, EndOfData

if TYPE_CHECKING:
    from jobrunner.data.prefetch import PrefetchedReader


class Positioned:
    """Position, shards and batches of a reader that is made of a source and options."""

    _most_threads: int | None = None
    """How many threads may read ahead."""

    def __init__(self, source: Any, position: Position, options: dict[str, Any]) -> None:
        self._source = source
        self._position = position
        self._options = options
        self._lock = threading.Lock()
        self._start()

    if TYPE_CHECKING:
        # What a reader has of its own.
        _start: Callable[[], None]  # prepares to read from the position
        job: Callable[[], Callable[[], tuple[Any, Ranges]]]

    @checked(i=NATURAL, n=COUNT)
    def sharded(self, i: int, n: int) -> Self:
        """Only the records of shard `i` of `n`. In each pass, each record is in one of the shards.

        If the number of records is known, a shard is a contiguous part of the pass, and the lengths
        of the shards differ by one record at most. Else it is each `n`-th record.
        """
        if i >= n:
            raise DefinitionError(f"{type(self).__name__}.sharded: i must be an int < n; got {i}.")
        return self._with(shard=(i, n))

    @checked(size=COUNT, drop_last=FLAG)
    def batched(self, size: int, *, drop_last: bool = False) -> Self:
        """In batches of `size` records.

        Parameters
        ----------
        size : int
        drop_last : bool
            Leave out the last batch of a pass if it is smaller.
        """
        return self._with(batch=size, drop_last=drop_last)

    @checked(batches=COUNT, threads=COUNT)
    def prefetched(self, batches: int = 2, *, threads: int = 1) -> PrefetchedReader:
        """Return a reader whose threads read ahead, in the same order, while tasks compute.

        Parameters
        ----------
        batches : int
            How many batches (or records, if there are no batches) it reads ahead at most.
        threads : int
            How many of them it reads at a time.
        """
        from jobrunner.data.prefetch import PrefetchedReader

        if self._most_threads is not None and threads > self._most_threads:
            raise DefinitionError(
                f"{type(self).__name__}.prefetched: threads must be {self._most_threads}, since one "
                f"thread can go through an iterable; got {threads}."
            )
        return PrefetchedReader(self._with(), batches, threads)

    @property
    def finished(self) -> bool:
        """Whether the pass has ended and the next has not begun."""
        return self._position.has_ended

    def read(self) -> Any:
        """The next record or batch. Raises `EndOfData` at the end of the pass, until the next one."""
        return self.job()()[0]

    def state_dict(self, rest: Ranges | None = None) -> dict[str, Any]:
        """The position: the number of the pass, and the ranges of its order that are left."""
        with self._lock:
            self._settle()
            return self._position.state_dict(rest)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position, or to this shard's part of what is left of the whole.

        Raises
        ------
        PlanMismatchError
            If the state is not of such a reader, of the same data in the same order.
        """
        with self._lock:
            self._position.load_state_dict(state)
            self._start()

    def merge_state_dicts(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of the whole, from those of all shards in order.

        Each shard, of as many as there are then, takes its part of it in `load_state_dict`.

        Raises
        ------
        PlanMismatchError
            If a state is not that of its shard, or two shards have the same record left.
        """
        return self._position.merge_state_dicts(states)

    @property
    def rest(self) -> Ranges:
        """What is left of the pass."""
        with self._lock:
            self._settle()
            return self._position.rest

    def _settle(self) -> None:
        """Bring the position up to date, for readers that do so only when asked."""

    def _begin(self) -> None:
        with self._lock:
            self._position.begin()
            self._start()

    def _end(self) -> EndOfData:
        return EndOfData(
            f"Pass {self._position.number} has ended. To begin the next one, iterate over the reader: "
            f"for batch in reader."
        )

    def _with(self, **options: Any) -> Self:
        return type(self)(self._source, **{**self._options, **options})

    def at(self, state: dict[str, Any]) -> Self:
        """A reader of the same data at a position."""
        reader = self._with()
        reader.load_state_dict(state)
        return reader

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self._source, self._options, self.state_dict()))


def _rebuild(cls: Any, source: Any, options: dict[str, Any], state: dict[str, Any]) -> Any:
    reader = cls(source, **options)
    reader.load_state_dict(state)
    return reader
