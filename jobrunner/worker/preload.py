"""Preload of `Session.local`'s worker processes, which must not stop before their client.

A terminal's Ctrl-C and a batch system's SIGTERM reach every process of a group. The client lets the
epoch end and then stops the workers.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING

from jobrunner.config import get_number
from jobrunner.worker.prints import replace_streams

if TYPE_CHECKING:
    from distributed import Worker

TERMINATED = 143


class MemoryOnly(logging.Filter):
    """Passes only Dask's log records about memory; a run reports the rest itself."""

    _PASSED = ("distributed.nanny.memory", "distributed.worker.memory")

    def start(self) -> None:
        """Filter the output of Dask's log handlers."""
        for handler in logging.getLogger("distributed").handlers:
            handler.addFilter(self)

    def stop(self) -> None:
        """Stop filtering."""
        for handler in logging.getLogger("distributed").handlers:
            handler.removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to pass a record."""
        return record.name in self._PASSED


def dask_setup(worker: Worker) -> None:
    """Set signal handlers and streams; Dask calls this in the worker's main thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # for processes of tasks
    MemoryOnly().start()
    replace_streams(worker)
    signal.signal(signal.SIGTERM, _exit_later)


def _exit_later(number: int, frame: FrameType | None) -> None:
    # A client that is alive stops this process before the timer does.
    timer = threading.Timer(get_number("departure-seconds"), os._exit, (TERMINATED,))
    timer.daemon = True
    timer.start()
