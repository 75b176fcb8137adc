"""Runs work on files and memory in a few threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from jobrunner.checkpoint.storage.posix import PosixFiles

THREADS = PosixFiles.threads
"""Also for work that only copies memory."""

REMOVALS = 4
"""Trees that are removed at once at least: a disk or a server may delay each file."""

_WORTH_A_THREAD_BYTES = 1 << 20


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
