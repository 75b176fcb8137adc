"""4 run: the threads that one binding's user functions run in."""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class ThreadPool:
    """Daemon threads that run calls at once, each in a copy of one context.

    A call never waits for a thread: where none is idle, another starts. Whoever submits bounds
    how many run at once. Threads end with `close`, each after the call that it runs.

    Parameters
    ----------
    name : str
        What the threads' names begin with.
    context : contextvars.Context
        The context that calls see.
    ended : callable
        Called once, in any thread, when it is closed and the last thread ends.
    failed : callable
        Takes what a call has raised, in its thread. Calls report their own failures, so that is a
        mistake of ours; somebody waits for what the call was to do.
    """

    def __init__(
        self,
        name: str,
        context: contextvars.Context,
        ended: Callable[[], object],
        failed: Callable[[BaseException], object],
    ) -> None:
        self._name = name
        self._context = context
        self._ended = ended
        self._failed = failed
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._started = 0
        self._alive = 0
        self._is_closed = False

    def submit(self, call: Callable[[], object]) -> None:
        """Run `call()` in a thread; after `close`, never."""
        with self._lock:
            if self._is_closed:
                return
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(
                    target=self._context.copy().run,
                    args=(self._run,),
                    name=f"{self._name}-{self._started}",
                    daemon=True,  # a function that never returns must not keep the process
                ).start()
                self._started += 1
                self._alive += 1
            self._calls.put(call)

    def close(self) -> None:
        """Let every thread end once it is idle. Does not wait."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for _ in range(self._alive):
                self._calls.put(None)
            is_empty = self._alive == 0
        if is_empty:
            self._ended()

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                with self._lock:
                    self._alive -= 1
                    is_last = self._alive == 0
                if is_last:
                    self._ended()
                return
            try:
                call()
            except BaseException as error:
                logger.exception("A call of %s failed", self._name)
                self._failed(error)
            del call  # or it would keep what it refers to alive until the next one
            with self._lock:
                self._idle += 1
