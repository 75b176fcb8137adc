"""Reading what can only be iterated over."""

from __future__ import annotations

import heapq
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count, groupby, islice
from typing import Any

from jobrunner.data.cursors import Setup, reduced
from jobrunner.data.pass_position import PassPosition, end_of
from jobrunner.data.ranges import OPEN, Ranges, is_open
from jobrunner.data.reader import DataReader, reader_of
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
    iterable's order. All shards go through the whole iterable; each keeps every n-th record. The
    reader is one record (with ``drop_last``, one batch) ahead of what it hands out, so that
    `finished` is true as soon as the last one is.

    Examples
    --------
    >>> list(from_iterable(lambda: range(5)).batched(2))
    [[0, 1], [2, 3], [4]]
    """
    return reader_of(Stream, factory)


class Stream:
    """The cursor of an iterable."""

    fill = None

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._takes_number = _takes_number(setup.source)
        if setup.seed is not None:
            raise DefinitionError(
                "DataReader.shuffled: the records of from_iterable have no numbers, so they cannot be "
                "shuffled. Shuffle in the function, which may take the number of the pass as a seed, "
                "or write them to files that from_lines or from_parquet reads."
            )
        if setup.threads > 1:
            raise DefinitionError(
                f"DataReader.prefetched: threads must be 1 for from_iterable, since one thread can go "
                f"through an iterable; got {setup.threads}."
            )
        self.position = PassPosition(range(OPEN), setup.shard, {})
        self._size = setup.batch or 1
        self._records: Iterator[Any] | None = None
        self._ahead: list[Any] = []
        self._opened_at = -1
        self._last: Any = None  # what the factory has returned, if it was an iterator

    __reduce__ = reduced

    def count(self) -> int:
        """Raise `TypeError`."""
        raise TypeError("A reader of from_iterable has no len(): only the end of the pass tells.")

    def read(self) -> Any:
        """The next record or batch."""
        position, least = self.position, self.setup.least
        with position.lock:
            if position.is_at_end:
                raise end_of(position.number)
            try:
                if (records := self._records) is None or self._opened_at != position.moves:
                    records = self._open()
                taken = self._ahead
                if more := self._size - len(taken):
                    taken += islice(records, more)
                try:
                    self._ahead = list(islice(records, least))
                    has_more = len(self._ahead) == least
                except Exception:  # the next read meets it again
                    self._close()
                    has_more = True
            except BaseException:
                self._close()  # what was read ahead is read again
                raise
            self._skip(len(taken))
            if not has_more:
                self._close()
                position.rest = ()
            if len(taken) < least:
                raise end_of(position.number)
            return taken[0] if self.setup.batch is None else taken

    def plan(self) -> Callable[[], tuple[Any, Ranges]]:
        """Reads the next batch in another thread; returns it, and what is left of the pass then."""
        if self.position.has_ended:
            raise end_of(self.position.number)
        return lambda: (self.read(), self.position.rest)

    def _close(self) -> None:
        self._records = None
        self._ahead = []

    def _open(self) -> Iterator[Any]:
        """The records that are left for this shard."""
        position = self.position
        self._close()
        self._opened_at, rest = position.moves, position.rest
        arguments = (position.number,) if self._takes_number else ()
        everything = self._iterate(self.setup.source(*arguments))
        # At least this many were read, or seen ahead.
        least = max(each.start - each.step if is_open(each) else each[-1] for each in rest) + 1
        if len(rest) == 1 and is_open(rest[0]):
            seen = count()
            deque(zip(islice(everything, max(0, least)), seen, strict=False), maxlen=0)
            self._check_found(found := next(seen), least)
            self._records = islice(everything, rest[0].start - found, None, rest[0].step)
        else:
            self._numbers = _merged(rest)
            self._records = self._selected(everything, _merged(rest), least)
        return self._records

    def _selected(
        self, everything: Iterator[Any], numbers: Iterator[int], least: int
    ) -> Iterator[Any]:
        """The records of these numbers, which ascend."""
        at, seen = 0, count()
        numbered = zip(everything, seen, strict=False)
        for number in numbers:
            for record, _ in islice(numbered, number - at, number - at + 1):
                yield record
                at = number + 1
            if at <= number:
                self._check_found(next(seen), least)
                return

    def _check_found(self, found: int, least: int) -> None:
        if found < least:
            raise PlanMismatchError(
                f"from_iterable: pass {self.position.number} has been read before: expected at least "
                f"{least} records of the function, found {found}. It must return the same records each "
                f"time it is called for a pass. To read other data, start afresh."
            )

    def _iterate(self, found: Any) -> Iterator[Any]:
        is_iterable = hasattr(found, "__iter__") or hasattr(found, "__getitem__")
        if not is_iterable or found is self._last:
            why = "was returned before" if is_iterable else "is none"
            raise DefinitionError(
                f"from_iterable: factory must return an iterable that begins anew; for pass "
                f"{self.position.number} it has returned {found!r:.200}, which {why}. Make it in the "
                f"function."
            )
        everything: Iterator[Any] = iter(found)
        self._last = found if found is everything else None
        return everything

    def _skip(self, count: int) -> None:
        """Count records as read."""
        position = self.position
        if not position.behind:
            position.at += count * position.step
        elif count:
            last = deque(islice(self._numbers, count), maxlen=1)[0]
            position.rest = _after(position.rest, last)


def _after(ranges: Ranges, last: int) -> Ranges:
    """The positions greater than `last`."""
    found = (each[max(0, (last - each.start) // each.step + 1) :] for each in ranges)
    return tuple(each for each in found if each)


def _merged(ranges: Ranges) -> Iterator[int]:
    """The numbers in ranges, in ascending order, each once."""
    return (number for number, _ in groupby(heapq.merge(*ranges)))


def _takes_number(factory: object) -> bool:
    """Whether a factory wants the number of the pass."""
    if not callable(factory):
        raise DefinitionError(
            f"from_iterable: factory must be a function that returns an iterable, so that each pass "
            f"and each resumed run can begin anew; got {factory!r:.200}. For data with a length, use "
            f"from_records."
        )
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # of a class or function in C
        return False
    needed = [it for it in parameters if it.default is it.empty and it.kind not in (2, 4)]
    if len(needed) > 1 or any(it.kind == it.KEYWORD_ONLY for it in needed):
        raise DefinitionError(
            f"from_iterable: factory must take nothing or the number of the pass; got "
            f"{factory!r:.200} with the parameters {[it.name for it in needed]}."
        )
    return len(needed) == 1
