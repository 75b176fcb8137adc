"""Readers of what can only be iterated over."""

from __future__ import annotations

import heapq
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice
from typing import Any

from jobrunner.data.position import OPEN, Position, Ranges, after, is_open
from jobrunner.data.positioned import Positioned
from jobrunner.data.protocol import Loop
from jobrunner.errors import DefinitionError

Factory = Callable[..., Iterable[Any]]


def from_iterable(factory: Factory) -> StreamReader:
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
    A resumed reader skips what was read, so what came before is computed again. Records come in the
    iterable's order. All shards go through the whole iterable; each keeps every n-th record.

    Examples
    --------
    >>> list(from_iterable(lambda: range(5)).batched(2))
    [[0, 1], [2, 3], [4]]
    """
    return StreamReader(factory)


class StreamReader(Positioned, Loop):
    """Reads what can only be iterated over. See `Reader` for what all readers do.

    Made by `from_iterable`. It is one record (with `drop_last`, one batch) ahead of what it hands
    out, so that `finished` is true as soon as the last one is.
    """

    _most_threads = 1

    def __init__(
        self,
        source: Factory,
        *,
        shard: tuple[int, int] = (0, 1),
        batch: int | None = None,
        drop_last: bool = False,
    ) -> None:
        self._takes_number = _takes_number(source)
        self._batch = batch
        self._least = (batch or 1) if drop_last else 1
        options = {"shard": shard, "batch": batch, "drop_last": drop_last}
        super().__init__(source, Position(range(OPEN), shard, {}), options)

    def job(self) -> Callable[[], tuple[Any, Ranges]]:
        """What another thread may call to read the next batch, and what is left then."""
        if self._position.has_ended:
            raise self._end()
        return self._read

    def _start(self) -> None:
        self._records: Iterator[Any] | None = None  # those left for this shard
        self._numbers: Iterator[int] | None = None  # theirs, if no range has them all
        self._ahead: list[Any] = []

    def _read(self) -> tuple[Any, Ranges]:
        with self._lock:
            position, size = self._position, self._batch or 1
            if position.has_ended:
                raise self._end()
            try:
                if self._records is None:
                    self._records = self._open()
                more = islice(self._records, max(0, size - len(self._ahead)))
                taken = [*self._ahead, *more]
            except BaseException:
                self._start()  # what was read ahead is read again
                raise
            self._ahead = []
            if len(taken) < self._least:
                self._start()
                position.rest = ()
                raise self._end()
            position.rest = self._after(len(taken))
            try:
                self._ahead = list(islice(self._records, self._least))
            except BaseException:  # the next read meets it again
                self._start()
            else:
                if len(self._ahead) < self._least:
                    self._start()
                    position.rest = ()
            return (taken[0] if self._batch is None else taken), position.rest

    def _open(self) -> Iterator[Any]:
        arguments = (self._position.number,) if self._takes_number else ()
        everything = iter(self._source(*arguments))
        rest = self._position.rest
        if len(rest) == 1:
            stop = None if is_open(rest[0]) else rest[0].stop
            return islice(everything, rest[0].start, stop, rest[0].step)
        self._numbers = _merged(rest)
        return _selected(everything, _merged(rest))

    def _after(self, taken: int) -> Ranges:
        rest = self._position.rest
        if self._numbers is None:
            rest = (rest[0][taken:],)
        else:
            rest = after(rest, deque(islice(self._numbers, taken), maxlen=1)[0])
        return tuple(each for each in rest if each)


def _merged(ranges: Ranges) -> Iterator[int]:
    """The numbers in ranges, in ascending order, each once."""
    return (number for number, _ in groupby(heapq.merge(*ranges)))


def _selected(everything: Iterator[Any], numbers: Iterator[int]) -> Iterator[Any]:
    """The records of these numbers, which ascend."""
    at = 0
    for number in numbers:
        for record in islice(everything, number - at, number - at + 1):
            yield record
            at = number + 1
        if at <= number:
            return


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
