"""Runs work on files and memory in a few threads."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable

from jobrunner.checkpoint.storage.posix import PosixFiles

THREADS = PosixFiles.threads
"""Also for work that only copies memory."""

REMOVALS = 4
"""Trees that are removed at once at least: a disk or a server may delay each file."""

_WORTH_A_THREAD_BYTES = 1 << 20

_LOW_PRIORITY = 15
"""A nice value."""


def run_all(jobs: Iterable[Callable[[], object]], threads: int, nbytes: int) -> None:
    """Call all jobs, which access `nbytes`, in threads; the first error stops them and is raised.

    `threads` is a limit that includes the calling thread. Short work on local files stays in one
    thread; more threads than these use are always started, because they wait for a network.
    """
    pending = list(jobs)
    if threads <= THREADS and nbytes < _WORTH_A_THREAD_BYTES:
        threads = 1
    failures: list[BaseException] = []
    queue = iter(pending)

    def work() -> None:
        try:
            for job in queue:  # a list's iterator hands each item out once, to any thread
                if failures:
                    return
                job()
        except BaseException as error:
            failures.append(error)

    helpers = []
    for i in range(min(threads, len(pending)) - 1):
        helper = threading.Thread(target=work, name=f"jobrunner-files-{i}", daemon=True)
        helper.start()
        helpers.append(helper)
    work()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]


def run_gently(write: Callable[[], None]) -> None:
    """Call `write` in a thread of low priority, where the system has priorities of threads."""
    failures: list[BaseException] = []

    def work() -> None:
        # A lowered priority cannot be raised again, so the thread is one of its own.
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW_PRIORITY)
        try:
            write()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="jobrunner-gentle-files", daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
