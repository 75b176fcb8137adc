"""What the worker processes of `Session.local` load first.

A terminal's Ctrl-C, and a batch system's SIGTERM, reach every process of a group. The client lets
the epoch end and then stops the workers, so they must not be torn down by it under way.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from jobrunner.config import get_seconds

TERMINATED = 143


def dask_setup(worker: object) -> None:
    """Leave signals to the client; called by Dask in the worker's main thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave_later)


def _leave_later(number: int, frame: FrameType | None) -> None:
    """End in a while: by then a client that is alive has ended this process in order."""
    timer = threading.Timer(get_seconds("departure-seconds"), os._exit, (TERMINATED,))
    timer.daemon = True
    timer.start()
