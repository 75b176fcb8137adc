"""Runs work on files and memory in a few threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from jobrunner.checkpoint.storage.posix import PosixFiles

THREADS = PosixFiles.threads
"""Also for work that only copies memory."""

REMOVALS = 4
"""Trees that are removed at once at least: a disk or a server may delay each file."""

_WORTH_A_THREAD_BYTES = 1 << 20
_TRIED_JOBS = 64
_QUICK_SECONDS = 100e-6
"""Jobs shorter than this are not faster in two threads, because of the GIL."""


def run_all(jobs: Iterable[Callable[[], object]], threads: int, nbytes: int) -> None:
    """Call all jobs, which access `nbytes`, in threads; the first error stops them and is raised.

    `threads` is a limit that includes the calling thread. Up to the number that local files use,
    short work with quick first jobs stays in one thread. More threads are always started, because
    they wait for a network.
    """
    pending = list(jobs)
    if threads <= REMOVALS and nbytes < _WORTH_A_THREAD_BYTES:
        pending = _try_alone(pending)
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


def _try_alone(jobs: list[Callable[[], object]]) -> list[Callable[[], object]]:
    """Call jobs in this thread as long as they are quick; returns those that are left."""
    deadline = time.perf_counter() + _TRIED_JOBS * _QUICK_SECONDS
    for i, job in enumerate(jobs):
        job()
        if i < _TRIED_JOBS and time.perf_counter() > deadline:
            return jobs[i + 1 :]
    return []
