"""Runs work on files and memory in a few threads."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.checkpoint.storage.protocol import Result

THREADS = PosixFiles.threads
"""Also for work that only copies memory."""

REMOVALS = 4
"""Trees that are removed at once at least: a disk or a server may delay each file."""

_WORTH_A_THREAD_BYTES = 1 << 20

Jobs = list[Callable[[], object]]
"""Work that several threads may do in any order."""

_LOW_PRIORITY = 15
"""A nice value."""


def run_all(jobs: Iterable[Callable[[], object]], threads: int, nbytes: int) -> None:
    """Call all jobs, which access `nbytes`, in threads; the first error stops them and is raised.

    Short work on local files stays in this thread; more threads than these use are always started,
    because they wait for a network.
    """
    if threads <= THREADS and nbytes < _WORTH_A_THREAD_BYTES:
        for job in jobs:
            job()
        return
    with ThreadPoolExecutor(threads, "jobrunner-files") as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def run_gently(write: Callable[[], Result]) -> Result:
    """Call `write` in a thread of low priority, where the system has priorities of threads."""
    # A lowered priority cannot be raised again, so the thread is one of its own.
    with ThreadPoolExecutor(1, "jobrunner-gentle-files", _lower_priority) as pool:
        return pool.submit(write).result()


def _lower_priority() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
