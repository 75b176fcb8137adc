"""Holds a task back until the client knows that it is about to run. No Dask.

A task that kills its worker at once dies before anyone knows that it ran. So when workers die again
and again, their tasks run one at a time, and each waits until the client knows which one it is.
"""

from __future__ import annotations

import asyncio
import threading


class StartGate:
    """Holds the threads of one worker's run back until the client knows what they begin.

    Any thread may call `wait`. All else runs on the event loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: list[threading.Event] = []
        self._reported: list[threading.Event] = []
        self.has_news = asyncio.Event()  # a thread waits that was not yet reported
        self._is_open = False

    def wait(self) -> None:
        """Return once the client knows what this thread is about to begin."""
        passed = threading.Event()
        with self._lock:
            if self._is_open:
                return
            self._waiting.append(passed)
        self._loop.call_soon_threadsafe(self.has_news.set)
        passed.wait()

    def report(self) -> None:
        """Note that the reply being sent names all threads that wait now."""
        with self._lock:
            self._reported, self._waiting = self._reported + self._waiting, []
            self.has_news.clear()

    def confirm(self) -> None:
        """Let reported threads begin: the client asks again, so it has the last reply."""
        reported, self._reported = self._reported, []
        for passed in reported:
            passed.set()

    def open(self) -> None:
        """Hold nothing back any more."""
        with self._lock:
            self._is_open = True
            waiting, self._waiting = self._waiting, []
        for passed in waiting:
            passed.set()
        self.confirm()
