"""The threads that run one binding's user functions."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class ThreadPool:
    """Daemon threads that run calls at once, each in a copy of one context.

    A call never waits for a thread: if none is idle, another one starts. The caller bounds how
    many calls run at once. After `close` each thread ends when its current call returns.

    Parameters
    ----------
    name : str
        Prefix of the threads' names.
    context : contextvars.Context
        The context that calls see.
    ended : callable
        Called once, in any thread, when the pool is closed and its last thread has ended.
    failed : callable
        Called with the exception that a call raised, in its thread. Calls report the failures of
        user functions themselves, so this is a bug of ours; whoever waits for the call must know.
    """

    # Not `distributed.threadpoolexecutor`: it has a fixed number of threads and queues calls beyond
    # it (the instances of a task that wait for each other would block), runs them outside of the
    # lease task's context, cannot report its last thread's end while a function that cannot be
    # stopped still runs, and makes a future for each call.

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
        """Run `call()` in a thread. Ignored after `close`."""
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
                    daemon=True,  # a function that never returns must not keep the process alive
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
        while (call := self._calls.get()) is not None:
            try:
                call()
            except BaseException as error:
                logger.exception("A call in thread pool %s failed", self._name)
                self._failed(error)
            del call  # it would keep what it refers to alive until the next call
            with self._lock:
                self._idle += 1
        with self._lock:
            self._alive -= 1
            is_last = self._alive == 0
        if is_last:
            self._ended()


def call_on_loop(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: Any
) -> None:
    """Call back on an event loop, from any thread. Ignored if the loop has closed."""
    try:
        loop.call_soon_threadsafe(callback, *args)
    except RuntimeError:
        logger.debug("The worker closed before %r", callback, exc_info=True)
