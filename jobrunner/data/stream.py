"""Reading what can only be iterated over."""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from msgspec.structs import replace

from jobrunner.data.reader import DataReader, Options
from jobrunner.data.saved_state import SavedInt, SavedShard, end_of
from jobrunner.errors import DefinitionError, PlanMismatchError

Factory = Callable[..., Iterable[Any]]


def from_iterable(factory: Factory) -> DataReader:
    """A reader of what a function returns, one item after another.

    Parameters
    ----------
    factory : callable
        Returns an iterable of the records of a pass. Called once for each pass, and again to resume
        in mid-pass: it must then return the same records in the same order. If it has a parameter,
        it gets the number of the pass, from 0, for example as a seed.

    Raises
    ------
    DefinitionError
        If it is no function, or one of several parameters.

    Notes
    -----
    A `read` raises `PlanMismatchError` if the function returns fewer records than were read before.
    A resumed reader skips what was read, so what came before is computed again. Records come in the
    iterable's order. All shards go through the whole iterable; each keeps every n-th record. Their
    states can be divided among another number of shards if all have read equally much. The reader is
    one record (with ``drop_last``, one batch) ahead of what it hands out, so that `finished` is true
    as soon as the last one is.

    Examples
    --------
    >>> list(from_iterable(lambda: range(5)).batched(2))
    [[0, 1], [2, 3], [4]]
    """
    return DataReader(partial(StreamCursor, factory, _takes_number(factory)))


class SavedStream(SavedShard, kw_only=True):
    """The shards share what comes after record `start`.

    Shard i of n reads the records start + i, start + i + n, and so on, and has read `count` of them.
    """

    start: SavedInt
    count: SavedInt
    finished: bool


class StreamPosition:
    """The place of one shard in pass after pass of an iterable. Each move makes another `at`."""

    def __init__(self, shard: tuple[int, int]) -> None:
        self._shard = shard
        self._go_to_pass(0)

    def _go_to_pass(self, number: int) -> None:
        self.at = SavedStream(number=number, shard=self._shard, start=0, count=0, finished=False)

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left of the pass."""
        return self.at.finished

    def begin(self) -> None:
        """Begin the next pass."""
        self._go_to_pass(self.at.number + 1)

    @property
    def next_record(self) -> int:
        """The number of the record that this shard reads next."""
        i, n = self._shard
        return self.at.start + i + n * self.at.count

    @property
    def least(self) -> int:
        """How many records the pass has at least, since so many were read of it."""
        _, n = self._shard
        return self.next_record - n + 1 if self.at.count else self.at.start

    def state_dict(self) -> dict[str, Any]:
        """The place as plain values."""
        return self.at.write()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state of this shard was, or to where a merged state is."""
        saved = SavedStream.read(state)
        saved.check_shard(self._shard)
        self.at = replace(saved, shard=self._shard, loop=0)

    def merge_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of the whole, if all shards have read equally much of it, or all to the end."""
        shards = SavedStream.read_all(states)
        has_ended = all(state.finished for state in shards)
        places = {(state.number, state.start, has_ended or state.count) for state in shards}
        if len(places) > 1:
            raise PlanMismatchError(
                f"The states to merge: expected that all shards of the iterable have read equally much "
                f"of one pass, since what is left cannot be divided otherwise; found (pass, start, "
                f"count) {sorted(places)!r:.200}. Resume on {len(shards)} nodes, or at an epoch where "
                f"they have."
            )
        start = shards[0].start + sum(state.count for state in shards)
        return replace(
            shards[0], shard=None, start=start, count=0, finished=has_ended, loop=0
        ).write()


@dataclass(frozen=True)
class _Batch:
    records: list[Any]
    is_last: bool


_END = _Batch([], True)


class StreamCursor:
    """Goes through an iterable, and counts."""

    def __init__(self, factory: Factory, takes_number: bool, options: Options) -> None:
        if options.seed is not None:
            raise DefinitionError(
                "DataReader.shuffled: the records of from_iterable have no numbers, so they cannot be "
                "shuffled. Shuffle in the function, which may take the number of the pass as a seed, "
                "or write them to files that from_arrow or from_dask reads."
            )
        if options.threads > 1:
            raise DefinitionError(
                f"DataReader.prefetched: threads must be 1 for from_iterable, since one thread can go "
                f"through an iterable; got {options.threads}."
            )
        self.lock = threading.Lock()
        self.position = StreamPosition(options.shard)
        self._factory, self._takes_number, self._options = factory, takes_number, options
        self._batches: Iterator[_Batch] | None = None
        self._opened_at = self.position.at
        self._last_iterator: Any = None

    def count(self) -> int:
        """Raise `TypeError`."""
        raise TypeError("A reader of from_iterable has no len(): only the end of the pass tells.")

    def read(self) -> Any:
        """The next record or batch."""
        with self.lock:
            at = self.position.at
            if at.finished:
                raise end_of(at.number)
            try:
                if self._batches is None or self._opened_at is not at:
                    self._batches, self._opened_at = self._open(), at
                batch = next(self._batches, _END)
            except BaseException:
                self._batches = None  # the next read opens it again, at the same record
                raise
            at.count += len(batch.records)
            if batch.is_last:
                at.finished, self._batches = True, None
            if not batch.records:
                raise end_of(at.number)
            return batch.records[0] if self._options.batch is None else batch.records

    def _open(self) -> Iterator[_Batch]:
        """The batches that are left for this shard."""
        position, options = self.position, self._options
        everything = self._iterate(self._factory(*[position.at.number] * self._takes_number))
        skipped = sum(1 for _ in islice(everything, position.next_record))
        if skipped < position.least:
            raise PlanMismatchError(
                f"from_iterable: pass {position.at.number} has been read before: expected at least "
                f"{position.least} records of the function, found {skipped}. It must return the same "
                f"records each time it is called for a pass. To read other data, start afresh."
            )
        own = islice(everything, 0, None, options.shard[1])
        batches = _in_batches(own, options.size, options.least)
        return _read_ahead(batches, options.ahead) if options.ahead else batches

    def _iterate(self, iterable: Any) -> Iterator[Any]:
        is_iterable = hasattr(iterable, "__iter__") or hasattr(iterable, "__getitem__")
        if not is_iterable or iterable is self._last_iterator:
            fault = "was returned before" if is_iterable else "is none"
            raise DefinitionError(
                f"from_iterable: factory must return an iterable that begins anew; for pass "
                f"{self.position.at.number} it has returned {iterable!r:.200}, which {fault}. Make it in the "
                f"function."
            )
        iterator: Iterator[Any] = iter(iterable)
        self._last_iterator = iterable if iterable is iterator else None
        return iterator


def _in_batches(records: Iterator[Any], size: int, least: int) -> Iterator[_Batch]:
    """Batches of at least `least` records. Each knows whether it is the last one.

    So `least` records of the next batch are read before a batch is handed out. If they cannot be read,
    that is an error of the next batch: this one is handed out before it is raised.
    """
    ahead = list(islice(records, least))
    while len(ahead) == least:
        batch = ahead + list(islice(records, size - least))
        failure = None
        try:
            ahead = list(islice(records, least))
        except Exception as error:
            failure = error
        yield _Batch(batch, failure is None and len(ahead) < least)
        if failure is not None:
            raise failure


def _read_ahead(batches: Iterator[_Batch], depth: int) -> Iterator[_Batch]:
    """The same batches, of which a thread reads up to `depth` ahead."""
    pool = ThreadPoolExecutor(1, "jobrunner-prefetch")
    try:
        futures = deque(pool.submit(next, batches, _END) for _ in range(depth))
        batch = None
        while batch is None or not batch.is_last:
            futures.append(pool.submit(next, batches, _END))
            batch = futures.popleft().result()
            yield batch
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _takes_number(factory: object) -> bool:
    """Whether a factory wants the number of the pass."""
    if not callable(factory):
        raise DefinitionError(
            f"from_iterable: factory must be a function that returns an iterable, so that each pass "
            f"and each resumed run can begin anew; got {factory!r:.200}. For data with a length, use "
            f"from_records."
        )
    try:
        signature = inspect.signature(factory)
    except ValueError:  # of a class or function in C
        return False
    for takes_number in (False, True):
        with suppress(TypeError):
            signature.bind(*[0] * takes_number)
            return takes_number
    raise DefinitionError(
        f"from_iterable: factory must take nothing or the number of the pass; got {factory!r:.200} "
        f"with the parameters {signature}."
    )
