"""What the worker processes of `Session.local` load first.

A terminal's Ctrl-C, and a batch system's SIGTERM, reach every process of a group. The client lets
the epoch end and then stops the workers, so they must not be torn down by it under way.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType

from jobrunner.config import get_seconds

TERMINATED = 143


class MemoryOnly(logging.Filter):
    """Lets pass what Dask's log says of memory, and nothing else.

    What becomes of a session's own workers, the run tells; of their memory, only Dask knows.
    """

    _TOLD = ("distributed.nanny.memory", "distributed.worker.memory")

    def start(self) -> None:
        """Filter what goes to a stream."""
        for handler in logging.getLogger("distributed").handlers:
            handler.addFilter(self)

    def stop(self) -> None:
        """Filter no more."""
        for handler in logging.getLogger("distributed").handlers:
            handler.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to say it."""
        return record.name in self._TOLD


def dask_setup(worker: object) -> None:
    """Leave signals to the client; called by Dask in the worker's main thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # for processes of tasks
    MemoryOnly().start()
    signal.signal(signal.SIGTERM, _leave_later)


def _leave_later(number: int, frame: FrameType | None) -> None:
    """End in a while: by then a client that is alive has ended this process in order."""
    timer = threading.Timer(get_seconds("departure-seconds"), os._exit, (TERMINATED,))
    timer.daemon = True
    timer.start()
