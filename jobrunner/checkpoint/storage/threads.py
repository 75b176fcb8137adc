"""Runs work on files and memory in a few threads."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable

from jobrunner.checkpoint.storage.posix import PosixFiles

THREADS = PosixFiles.threads
"""Also for work that only copies memory."""

_WORTH_A_THREAD_BYTES = 1 << 20

_NEAR_THREADS = max(PosixFiles.threads, PosixFiles.removals)

_TRIED_JOBS = 64
_QUICK_SECONDS = 100e-6
"""Jobs shorter than this are not faster in two threads, because of the GIL."""

_GENTLE = 15


def run_all(jobs: Iterable[Callable[[], None]], threads: int, nbytes: int) -> None:
    """Call all jobs, which access `nbytes`, in threads; the first error stops them and is raised.

    `threads` is a limit that includes the calling thread. Up to the number that `PosixFiles` uses,
    short work with quick first jobs stays in one thread. More threads are always started, because
    they wait for a network.
    """
    pending = list(jobs)
    if threads <= _NEAR_THREADS and nbytes < _WORTH_A_THREAD_BYTES:
        patience = time.perf_counter() + _TRIED_JOBS * _QUICK_SECONDS
        for tried, job in enumerate(pending[:_TRIED_JOBS], 1):
            job()
            if time.perf_counter() > patience:
                pending = pending[tried:]
                break
        else:
            threads, pending = 1, pending[_TRIED_JOBS:]
    queue = iter(pending)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for job in queue:  # a list's iterator hands each item out once, to any thread
                if failures:
                    return
                job()
        except BaseException as error:
            failures.append(error)

    helpers = [
        threading.Thread(target=work, name=f"jobrunner-files-{i}", daemon=True)
        for i in range(min(threads, len(pending)) - 1)
    ]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]


def run_gently(write: Callable[[], None]) -> None:
    """Call `write` in a thread of low priority, where the system supports that."""
    failures: list[BaseException] = []

    def work() -> None:
        # Linux has priorities per thread; a lowered one cannot be raised again.
        with contextlib.suppress(AttributeError, OSError):
            if sys.platform == "linux":
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _GENTLE)
        try:
            write()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="jobrunner-gentle-files", daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
