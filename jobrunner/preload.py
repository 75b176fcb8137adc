"""What the worker processes of `Session.local` load first.

A terminal's Ctrl-C reaches every process of its group. The client stops the tasks and then the
workers, so they must not be torn down by it under way, each with a traceback of its own.
"""

from __future__ import annotations

import signal


def dask_setup(worker: object) -> None:
    """Leave SIGINT to the client; called by Dask in the worker's main thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
