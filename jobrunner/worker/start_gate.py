"""Makes a task wait until the client knows that it is about to run. No Dask.

A task that kills its worker at once leaves no trace of having run. When workers die repeatedly,
tasks therefore run one at a time, and each waits until the client knows which one it is.
"""

from __future__ import annotations

import asyncio
import threading


class StartGate:
    """Makes the threads of a run wait. Any thread may call `wait`; the rest is for the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: list[threading.Event] = []
        self._reported: list[threading.Event] = []
        self.has_news = asyncio.Event()  # a thread waits that no reply has named yet
        self._is_open = False

    def wait(self) -> None:
        """Return once the client knows which task this thread is about to run."""
        passed = threading.Event()
        with self._lock:
            if self._is_open:
                return
            self._waiting.append(passed)
        self._loop.call_soon_threadsafe(self.has_news.set)
        passed.wait()

    def report(self) -> None:
        """Note that the next reply names the tasks of all threads that wait now."""
        with self._lock:
            self._reported, self._waiting = self._reported + self._waiting, []
            self.has_news.clear()

    def confirm(self) -> None:
        """Release the reported threads: the client asks again, so it has got the last reply."""
        reported, self._reported = self._reported, []
        for passed in reported:
            passed.set()

    def open(self) -> None:
        """Release all threads, now and later."""
        with self._lock:
            self._is_open = True
            waiting, self._waiting = self._waiting, []
        for passed in waiting:
            passed.set()
        self.confirm()
