"""4 run: tasks that begin only once the client knows of it. No Dask.

A task that kills its worker right away was never heard to run. So where workers die again and
again, their tasks run one at a time, and each waits until the client has heard which it is.
"""

from __future__ import annotations

import asyncio
import threading


class StartGate:
    """Holds the threads of one worker's run back until the client has heard of what they begin.

    Notes
    -----
    `wait` is called in any thread, all else on the event loop.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._waiting: list[threading.Event] = []
        self._told: list[threading.Event] = []
        self._news = asyncio.Event()
        self._is_over = False

    def wait(self) -> None:
        """Return once the client has heard of what this thread is about to begin."""
        cleared = threading.Event()
        with self._lock:
            if self._is_over:
                return
            self._waiting.append(cleared)
        self._loop.call_soon_threadsafe(self._news.set)
        cleared.wait()

    async def news(self) -> None:
        """Return once a thread waits that the client has not been told of."""
        await self._news.wait()

    def tell(self) -> None:
        """The client is being told of all who wait now."""
        with self._lock:
            self._told, self._waiting = self._told + self._waiting, []
            self._news.clear()

    def clear(self) -> None:
        """The client asks again, so it has heard what it was told."""
        told, self._told = self._told, []
        for cleared in told:
            cleared.set()

    def end(self) -> None:
        """Hold nobody back any more."""
        with self._lock:
            self._is_over = True
            waiting, self._waiting = self._waiting, []
        for cleared in waiting:
            cleared.set()
        self.clear()
