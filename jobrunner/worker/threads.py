"""A binding's threads, and the way from them to its event loop."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jobrunner.texts import get_logger

logger = get_logger(__name__)


@dataclass(eq=False)
class ThreadPool:
    """Daemon threads that run calls at once, each in a copy of one context.

    If no thread is idle, another one starts, so no call waits; the caller limits how many run at
    once. After `close`, each thread ends when its call returns.
    """

    # `distributed.threadpoolexecutor` does not serve: it queues calls beyond a fixed number of
    # threads (instances that wait for each other would block), has no context for calls, cannot
    # report its last thread's end, and makes a future for each call.

    name: str
    context: contextvars.Context
    ended: Callable[[], object]  # called in any thread, once closed and the last thread has ended
    # Gets an exception that a call raised, in its thread. Calls catch those of user functions, so it
    # is a bug in this package.
    failed: Callable[[BaseException], object]

    def __post_init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._started = 0
        self._alive = 0
        self._is_closed = False

    def submit(self, call: Callable[[], object]) -> bool:
        """Run `call()` in a thread; after `close`, do nothing and return False."""
        with self._lock:
            if self._is_closed:
                return False
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(
                    target=self.context.copy().run,
                    args=(self._run,),
                    name=f"{self.name}-{self._started}",
                    daemon=True,  # a function that never returns must not keep the process alive
                ).start()
                self._started += 1
                self._alive += 1
            self._calls.put(call)
        return True

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
            self.ended()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:
                logger.exception("A call in thread pool %s failed", self.name)
                self.failed(error)
            del call  # it would keep its values alive until the next call
            with self._lock:
                self._idle += 1
        with self._lock:
            self._alive -= 1
            is_last = self._alive == 0
        if is_last:
            self.ended()


def call_on_loop(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any
) -> None:
    """Call back on an event loop, from any thread; do nothing if the loop has closed."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        logger.debug("The worker closed before %r was called", callback, exc_info=True)
