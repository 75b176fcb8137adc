"""What a pipe's tasks do on their workers."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from jobrunner.worker import cancellation, renumber, seeded, set_up


class Options(NamedTuple):
    """What a task of a pipe does besides calling the user's functions."""

    num_inputs: int = 0  # the first arguments; the reader follows, and then the updates
    num_threads: int = 1
    capacity: int = 1
    ordered: bool = True
    limit: int | None = None
    first: int = 0  # the number of the first item
    begins: bool = True  # begin the next pass if the last one has ended
    blob: str = ""  # that holds the reader; "": it reads a list that a task returned


class _Item(NamedTuple):
    number: int
    value: Any
    error: BaseException | None = None


def drain(
    *arguments: Any,
    processor: Callable[..., Any] | None,
    into: Callable[..., Any] | None,
    instance_setup: Mapping[str, Callable[[], Any]],
    options: Options,
) -> list[Any]:
    """Read items, process them and pass them on; return what the last function returned."""
    count = options.num_inputs
    inputs, reader, updates = arguments[:count], arguments[count], arguments[count + 1 :]
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
    items = iter(reader) if options.begins else reader
    line = _Line(items, processor, inputs, instance_setup, options)
    if into is None:
        return line.run_here() if options.num_threads == 1 else line.run(lambda result: result)
    renumber(-1)
    return line.run(lambda result: into(result, *updates))


def _seed_within(call: partial[list[Any]]) -> partial[list[Any]]:
    """Seed each call of the functions that `drain` is to call, not the whole run of the pipe."""
    given = call.keywords
    functions = {what: given[what] and seeded(given[what]) for what in ("processor", "into")}
    setup = {name: seeded(make) for name, make in given["instance_setup"].items()}
    return partial(call, **functions, instance_setup=setup)


drain.seeded_within = _seed_within  # type: ignore[attr-defined]


def join(*parts: list[Any]) -> list[Any]:
    """Join the results of a pipe's parts."""
    return [result for part in parts for result in part]


@dataclass(eq=False)
class _Line:
    """Items on their way through a pipe's threads."""

    items: Iterator[Any]
    processor: Callable[..., Any] | None
    inputs: tuple[Any, ...]
    instance_setup: Mapping[str, Callable[[], Any]]
    options: Options
    is_cancelled: Callable[[], bool] = field(default_factory=cancellation)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._reading = threading.Lock()
        self._num_read = 0
        self._in_flight = 0  # items that are read, or about to be, and not yet passed on
        self._has_ended = False  # nothing more is read
        self._working = 0  # threads
        self._done: dict[int, _Item] = {}  # results, by number
        self._error: BaseException | None = None  # of a set-up or tear-down

    def run_here(self) -> list[Any]:
        """Process all items in this thread; return the results."""
        results = []
        renumber(-2)
        with set_up(self.instance_setup) as made:
            while not self.is_cancelled() and (item := self._read()) is not None:
                item = self._process(item, made)
                if item.error is not None:
                    raise item.error
                results.append(item.value)
        return results

    def run(self, pass_on: Callable[[Any], Any]) -> list[Any]:
        """Process all items in threads and pass the results on in this one; return what that gives."""
        self._working = self.options.num_threads
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._work, -2 - i),
                name=f"{threading.current_thread().name}-pipe-{i}",
                daemon=True,  # a function that never returns must not keep the process alive
            )
            for i in range(self._working)
        ]
        results: list[Any] = []
        try:
            for thread in threads:
                thread.start()
            while (item := self._next(len(results))) is not None:
                if item.error is not None:
                    raise item.error
                try:
                    results.append(pass_on(item.value))
                except BaseException as error:
                    self._note(error, item.number)
                    raise
                with self._changed:
                    self._in_flight -= 1
                    self._changed.notify_all()
        finally:
            self._end()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
        if self._error is not None:
            raise self._error
        return results

    def _next(self, number: int) -> _Item | None:
        """Wait for the next result; None if none will come."""

        def is_ready() -> bool:
            return number in self._done if self.options.ordered else bool(self._done)

        with self._changed:
            self._changed.wait_for(
                lambda: is_ready() or not self._working or self._error is not None
            )
            if self._error is not None or self.is_cancelled() or not is_ready():
                return None
            return self._done.pop(number if self.options.ordered else next(iter(self._done)))

    # ---- called in threads

    def _work(self, instance: int) -> None:
        """Read and process items until there are no more."""
        try:
            renumber(instance)
            with set_up(self.instance_setup) as made:
                while self._wait_for_room() and (item := self._read()) is not None:
                    item = self._process(item, made)
                    has_failed = item.error is not None
                    with self._changed:
                        self._done[item.number] = item
                        self._changed.notify_all()
                    del item  # it would keep the result alive
                    if has_failed:
                        break
        except BaseException as error:
            self._error = self._error or error
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        """Wait until another item may be read; False if there are no more."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._has_ended or self._in_flight < self.options.capacity
            )
            self._in_flight += 1
            return not self._has_ended

    def _read(self) -> _Item | None:
        """Read the next item; None at the end."""
        with self._reading:
            number = self._num_read
            if self._has_ended or number == self.options.limit:
                self._end()
                return None
            self._num_read += 1
            try:
                return _Item(number, next(self.items))
            except StopIteration:
                self._end()
                return None
            except BaseException as error:
                self._end()
                return _Item(number, None, self._note(error, number))

    def _end(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _process(self, item: _Item, made: Mapping[str, Any]) -> _Item:
        if self.processor is None or item.error is not None:
            return item
        renumber(self.options.first + item.number)
        try:
            return item._replace(value=self.processor(item.value, *self.inputs, **made))
        except BaseException as error:
            return _Item(item.number, None, self._note(error, item.number))

    def _note(self, error: BaseException, number: int) -> BaseException:
        error.add_note(f"In item {self.options.first + number} of this run, counted from 0.")
        return error
