"""What a pipe's task does on its worker: its own thread reads and passes on, others process."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Self

from jobrunner.worker import cancellation, renumber, seeded, set_up


@dataclass(frozen=True)
class Options:
    """What a pipe does besides calling the user's functions."""

    num_inputs: int  # the first arguments; the reader follows, and then the updates
    num_threads: int
    capacity: int
    ordered: bool
    limit: int | None
    blob: str  # that holds the reader; "": it reads a list that a task returned


def drain(
    *arguments: Any,
    processor: Callable[..., Any] | None,
    into: Callable[..., Any] | None,
    instance_setup: Mapping[str, Callable[[], Any]],
    options: Options,
) -> list[Any]:
    """Read items, process them and pass them on; return what the last function returned."""
    place = options.num_inputs
    inputs, reader, updates = arguments[:place], arguments[place], arguments[place + 1 :]
    if options.blob and not (hasattr(reader, "__iter__") and hasattr(reader, "__next__")):
        raise TypeError(
            f"the pipe reads from blob {options.blob!r}, which is {type(reader).__qualname__}. "
            f"Expected a reader of jobrunner.data or another iterator that can be saved: without a "
            f"position, each run would read all of it again. Make from_records(x) of a list or an "
            f"array x, from_iterable(f) of a function f that returns a generator."
        )
    if not hasattr(reader, "__iter__"):
        kind = type(reader).__qualname__
        raise TypeError(f"the pipe reads the list that a task returns; expected one, found {kind}")
    renumber(-1)
    results = []
    with _Threads(processor, inputs, instance_setup, options.num_threads) as threads:
        for item in _processed(islice(iter(reader), options.limit), threads, options):
            try:
                result = item.result.result()
                results.append(result if into is None else into(result, *updates))
            except BaseException as error:
                error.add_note(f"In item {item.number} of this run, counted from 0.")
                raise
    return results


def _seed_within(call: partial[list[Any]]) -> partial[list[Any]]:
    """Seed each call of the functions that `drain` is to call, not the whole run of the pipe."""
    keywords = call.keywords
    functions = {name: keywords[name] and seeded(keywords[name]) for name in ("processor", "into")}
    setup = {name: seeded(make) for name, make in keywords["instance_setup"].items()}
    return partial(call, **functions, instance_setup=setup)


drain.seeded_within = _seed_within  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class _Item:
    number: int
    result: Future[Any]


def _processed(items: Iterator[Any], threads: _Threads, options: Options) -> Iterator[_Item]:
    """Read items, let threads process them, and yield those that are to be passed on next."""
    is_cancelled = cancellation()
    waiting: list[_Item] = []
    number, has_ended = 0, False
    while not is_cancelled():
        if len(waiting) < options.capacity and not has_ended:
            try:
                result = threads.submit(threads.process, number, next(items))
            except StopIteration:
                has_ended = True
                continue
            except Exception as error:
                # Those before it may fail, too: the first error in the order of items is raised.
                has_ended = True
                result = Future()
                result.set_exception(error)
            waiting.append(_Item(number, result))
            number += 1
            continue
        if not waiting:
            return
        item = waiting[0]
        if not options.ordered:
            wait([item.result for item in waiting], return_when=FIRST_COMPLETED)
            item = next(item for item in waiting if item.result.done())
        waiting.remove(item)
        yield item


class _Threads:
    """Threads that process items. Each sets up for itself before its first, and tears down at the end."""

    def __init__(
        self,
        processor: Callable[..., Any] | None,
        inputs: tuple[Any, ...],
        setup: Mapping[str, Callable[[], Any]],
        count: int,
    ) -> None:
        self._processor, self._inputs, self._setup, self._count = processor, inputs, setup, count
        self._pool = ThreadPoolExecutor(count, f"{threading.current_thread().name}-pipe")
        self._own = threading.local()
        self._is_closing = False

    def submit(self, fn: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function in one of the threads, as a part of the pipe's task."""
        return self._pool.submit(contextvars.copy_context().run, fn, *arguments)

    def process(self, number: int, item: Any) -> Any:
        """Call the processor, in one of the threads."""
        if self._processor is None or self._is_closing:
            return item
        renumber(number)
        values = self._own.values if self._setup else {}
        return self._processor(item, *self._inputs, **values)

    def __enter__(self) -> Self:
        try:
            self._call_in_each(self._set_up)
        except BaseException as failure:
            self.__exit__(failure)
            raise
        return self

    def __exit__(self, failure: object = None, *_: object) -> None:
        self._is_closing = True  # what still waits for a thread need not be processed
        try:
            self._call_in_each(self._tear_down)
        except BaseException:
            if failure is None:  # else that is the error to raise
                raise
        finally:
            self._pool.shutdown()

    def _call_in_each(self, fn: Callable[[int], None]) -> None:
        """Call a function once in each thread, if there is anything to set up.

        A thread that has ended its call could take that of another one, too. So all wait until each
        thread has its call.
        """
        if not self._setup:
            return
        together = threading.Barrier(self._count)

        def call(i: int) -> None:
            together.wait()
            fn(i)

        calls = [self.submit(call, i) for i in range(self._count)]
        wait(calls)
        for ended in calls:
            ended.result()

    def _set_up(self, i: int) -> None:
        renumber(-2 - i)
        self._own.stack = ExitStack()
        self._own.values = self._own.stack.enter_context(set_up(self._setup))

    def _tear_down(self, _: int) -> None:
        self._own.stack.close()
