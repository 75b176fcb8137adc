"""Reading what can only be iterated over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec.structs import replace

from jobrunner.data.reader import AS_STORED, DataReader, Options, end_of
from jobrunner.data.saved_state import SavedInt, SavedShard
from jobrunner.define import check_call
from jobrunner.errors import DefinitionError, PlanMismatchError

Factory = Callable[..., Iterable[Any]]


def from_iterable(factory: Factory) -> DataReader:
    """A reader of what a function returns, one item after another.

    Parameters
    ----------
    factory : callable
        Gets the number of a pass, from 0, and returns an iterable of its records. Called once for
        each pass, and again to resume in mid-pass: it must then return the same records in the same
        order.

    Raises
    ------
    DefinitionError
        If it cannot be called with the number of a pass.

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
    >>> list(from_iterable(lambda number: range(5)).batched(2))
    [[0, 1], [2, 3], [4]]
    """
    check_call(factory, 1, (), "from_iterable: factory", is_lazy=True)
    return StreamReader(factory)


class SavedStream(SavedShard, kw_only=True):
    """The shards share what comes after record `start`.

    Shard i of n reads the records start + i, start + i + n, and so on, and has read `count` of them.
    """

    start: SavedInt
    count: SavedInt
    finished: bool


class StreamReader(DataReader):
    """Goes through an iterable, and counts."""

    def __init__(self, source: Factory, options: Options = AS_STORED) -> None:
        if options.seed is not None:
            raise DefinitionError(
                "DataReader.shuffled: the records of from_iterable have no numbers, so they cannot be "
                "shuffled. Shuffle in the function, which gets the number of the pass as a seed, "
                "or write them to files that from_arrow or from_dask reads."
            )
        if options.ahead:
            raise DefinitionError(
                "DataReader.prefetched: the records of from_iterable have no numbers, so threads cannot "
                "read them ahead. Let the function do so, or let a pipe process the records in threads."
            )
        super().__init__(source, options)
        self._go_to_pass(0)
        self._last_iterator: Any = None

    def _go_to_pass(self, number: int) -> None:
        shard = self._options.shard
        self._at = SavedStream(number=number, shard=shard, start=0, count=0, finished=False)
        self._batches: Iterator[tuple[list[Any], bool]] | None = None

    def read(self) -> Any:
        """The next record or batch."""
        with self._lock:
            at = self._at
            if at.finished:
                raise end_of(at.number)
            try:
                if self._batches is None:
                    self._batches = self._open()
                batch, at.finished = next(self._batches, ([], True))
            except BaseException:
                self._batches = None  # the next read opens it again, at the same record
                raise
            at.count += len(batch)
            if not batch:
                raise end_of(at.number)
            if self._options.batch is None:
                return batch[0]
            return batch

    def _open(self) -> Iterator[tuple[list[Any], bool]]:
        """The batches that are left for this shard; each with whether it is the last one."""
        at, (i, n) = self._at, self._options.shard
        everything = self._iterate(self._source(at.number))
        next_record = at.start + i + n * at.count
        least = at.start  # of a pass of which so much was read
        if at.count:
            least = next_record - n + 1
        skipped = sum(1 for _ in islice(everything, next_record))
        if skipped < least:
            raise PlanMismatchError(
                f"from_iterable: pass {at.number} has been read before: expected at least {least} "
                f"records of the function, found {skipped}. It must return the same records each time "
                f"it is called for a pass. To read other data, start afresh."
            )
        own = islice(everything, 0, None, n)
        return _in_batches(own, self._options.size, self._options.least)

    def _iterate(self, iterable: Any) -> Iterator[Any]:
        is_iterable = hasattr(iterable, "__iter__") or hasattr(iterable, "__getitem__")
        if not is_iterable or iterable is self._last_iterator:
            fault = "was returned before" if is_iterable else "is none"
            raise DefinitionError(
                f"from_iterable: factory must return an iterable that begins anew; for pass "
                f"{self._at.number} it has returned {iterable!r:.200}, which {fault}. Make it in the "
                f"function."
            )
        iterator: Iterator[Any] = iter(iterable)
        self._last_iterator = iterable if iterable is iterator else None
        return iterator

    def __len__(self) -> int:
        raise TypeError("A reader of from_iterable has no len(): only the end of the pass tells.")

    def state_dict(self) -> dict[str, Any]:
        """The position as plain values."""
        with self._lock:
            return self._at.write()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position."""
        saved = SavedStream.read_own(state, self._options.shard)
        with self._lock:
            self._at = replace(saved, shard=self._options.shard)
            self._batches = None

    def merge_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of the whole, from those of all shards."""
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
        return replace(shards[0], shard=None, start=start, count=0, finished=has_ended).write()

    def _has_ended(self) -> bool:
        return self._at.finished

    def _begin(self) -> None:
        self._go_to_pass(self._at.number + 1)


def _in_batches(records: Iterator[Any], size: int, least: int) -> Iterator[tuple[list[Any], bool]]:
    """Batches of at least `least` records, each with whether it is the last one.

    So `least` records of the next batch are read before a batch is handed out.
    """
    ahead = list(islice(records, least))
    while len(ahead) == least:
        batch = ahead + list(islice(records, size - least))
        ahead = list(islice(records, least))
        yield batch, len(ahead) < least
