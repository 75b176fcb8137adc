"""What reads on behalf of readers, and reading ahead in threads."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from jobrunner.data.pass_position import PassPosition
from jobrunner.data.ranges import Ranges
from jobrunner.errors import EndOfData


class Setup(NamedTuple):
    """What a reader reads, and how."""

    kind: Callable[[Setup], Any]  # of cursor
    source: Any
    seed: int | None = None
    by_block: bool = True
    shard: tuple[int, int] = (0, 1)
    batch: int | None = None
    drop_last: bool = False
    ahead: int = 0
    threads: int = 1

    @property
    def least(self) -> int:
        """How many records the smallest batch has."""
        return self.batch or 1 if self.drop_last else 1


class Cursor(Protocol):
    """Reads from a position on. Threads may share it. Its pickle is at the same position."""

    setup: Setup

    @property
    def fill(self) -> Callable[[], None] | None:
        """Makes `ready` of the position what is next, as far as it can; None if it never can."""

    @property
    def position(self) -> Any:
        """A `PassPosition`, or something with its methods."""

    def read(self) -> Any:
        """The next record or batch; raises `EndOfData` at the end of the pass."""

    def count(self) -> int:
        """How many records or batches a whole pass has; raises `TypeError` if that is not known."""


def opened(setup: Setup, state: Any = None) -> Cursor:
    """A cursor at the beginning, or where a state says."""
    cursor: Cursor = Ahead(setup) if setup.ahead else setup.kind(setup)
    if state is not None:
        cursor.position.load_state_dict(state)
    return cursor


def reduced(cursor: Cursor) -> tuple[Any, ...]:
    """How a cursor is pickled."""
    return (opened, (cursor.setup, cursor.position.state_dict()))


class Ahead:
    """Threads read the next batches ahead. Its position is that of what it has handed out."""

    fill = None

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.position: PassPosition = setup.kind(setup).position
        self._cursor = setup.kind(setup)  # reads ahead from a position of its own
        self.count = self._cursor.count
        self._moves = self.position.moves
        self._ahead: deque[Future[tuple[Any, Ranges]]] = deque()
        self._pool: ThreadPoolExecutor | None = None

    __reduce__ = reduced

    def read(self) -> Any:
        """The next record or batch."""
        position = self.position
        with position.lock:
            if self._moves != position.moves:
                self._forget()
                self._cursor.position.follow(position)
                self._moves = position.moves
            first = None
            try:
                self._fill(1)
                if not self._ahead:
                    self._cursor.plan()  # raises EndOfData
                first = self._ahead.popleft()
                self._fill(self.setup.ahead)
                item, position.rest = first.result()
            except EndOfData:
                position.rest = ()
                raise
            except BaseException:
                self._moves = -1  # the next read begins at the same batch
                raise
            finally:
                del first  # whose error refers to this frame
            return item

    def _fill(self, least: int) -> None:
        if self._pool is None:
            threads = self.setup.threads
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="jobrunner-prefetch")
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        while len(self._ahead) < least:
            try:
                plan = self._cursor.plan()
            except EndOfData:
                return
            self._ahead.append(self._pool.submit(plan))

    def _forget(self) -> None:
        while self._ahead:
            future = self._ahead.pop()
            if not future.cancel():
                future.exception()  # waits
