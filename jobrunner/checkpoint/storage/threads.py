"""Work on files and memory in a few threads."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable

from jobrunner.checkpoint.storage.posix import PosixFiles

THREADS = PosixFiles.threads
"""For what only copies memory, too."""

_WORTH_A_THREAD_BYTES = 1 << 20

_NEAR_THREADS = max(PosixFiles.threads, PosixFiles.removals)

_TRIED_JOBS = 64
_QUICK_SECONDS = 100e-6
"""What a job takes that a second thread would but get in the way of, as both run Python."""

_GENTLE = 15


def run_all(jobs: Iterable[Callable[[], None]], threads: int, nbytes: int) -> None:
    """Call all jobs, from several threads; the first error ends it and is raised.

    Parameters
    ----------
    jobs : iterable of callable
    threads : int
        At most, the calling one included; of as few as `PosixFiles` asks for only one where the
        work is not worth another: short, and of quick jobs, which the first of them tell. More
        are for what waits for a network, and always worth it.
    nbytes : int
        How much they read or write.
    """
    pending = list(jobs)
    if threads <= _NEAR_THREADS and nbytes < _WORTH_A_THREAD_BYTES:
        patience = time.perf_counter() + _TRIED_JOBS * _QUICK_SECONDS
        tried = 0
        for job in pending[:_TRIED_JOBS]:
            job()
            tried += 1
            if time.perf_counter() > patience:
                break
        else:
            threads = 1
        pending = pending[tried:]
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
    """Call `write` in a thread that gives way to others, where the system knows priorities."""
    failures: list[BaseException] = []

    def work() -> None:
        # Only this thread's: Linux keeps them apart, and nobody may raise one again.
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
