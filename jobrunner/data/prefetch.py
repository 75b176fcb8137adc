"""Reading ahead in threads."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jobrunner.data.position import Ranges
from jobrunner.data.positioned import Positioned
from jobrunner.data.protocol import Loop
from jobrunner.errors import EndOfData


class PrefetchedReader(Loop):
    """Another reader, whose next batches threads read ahead.

    Made by `prefetched`. The position is that of what was handed out, not of what was read ahead. An
    error arrives at the `read` of its batch, which the next `read` tries again. The threads start
    with the first `read` and end when the reader is dropped.
    """

    def __init__(self, reader: Positioned, batches: int, threads: int) -> None:
        self._reader = reader
        self._batches, self._threads = batches, threads
        self._rest = reader.rest  # of what was handed out
        self._ahead: deque[Future[tuple[Any, Ranges]]] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()

    @property
    def finished(self) -> bool:
        """Whether the pass has ended and the next has not begun."""
        return not self._rest

    def read(self) -> Any:
        """The next record or batch. Raises `EndOfData` at the end of the pass, until the next one."""
        with self._lock:
            self._fill(1)
            if not self._ahead:
                self._reader.read()  # raises EndOfData
            first = self._ahead.popleft()
            self._fill(self._batches)
            try:
                item, self._rest = first.result()
            except EndOfData:
                self._rest = ()
                raise
            except BaseException:
                self._go_back()
                raise
            finally:
                del first  # whose error refers to this frame
            return item

    def _fill(self, least: int) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="jobrunner-prefetch")
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)
        while len(self._ahead) < least:
            try:
                job = self._reader.job()
            except EndOfData:
                return
            self._ahead.append(self._pool.submit(job))

    def _go_back(self) -> None:
        """Forget what was read ahead."""
        state = self._reader.state_dict(self._rest)
        self._forget()
        self._reader.load_state_dict(state)

    def _forget(self) -> None:
        while self._ahead:
            future = self._ahead.pop()
            if not future.cancel():
                future.exception()  # waits

    def state_dict(self) -> dict[str, Any]:
        """The position of what was handed out."""
        with self._lock:
            return self._reader.state_dict(self._rest)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position, with or without reading ahead; see the other reader."""
        with self._lock:
            self._go_back()
            self._reader.load_state_dict(state)
            self._rest = self._reader.rest

    def merge_state_dicts(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of the whole, from those of all shards in order; see the other reader."""
        return self._reader.merge_state_dicts(states)

    def _begin(self) -> None:
        with self._lock:
            self._forget()
            self._reader._begin()
            self._rest = self._reader.rest

    def __len__(self) -> int:
        """How many batches a whole pass of this shard has."""
        return len(self._reader)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        reader = self._reader.at(self.state_dict())
        return (PrefetchedReader, (reader, self._batches, self._threads))
