"""A cluster on this machine, whose worker processes ignore Ctrl-C.

A terminal's Ctrl-C reaches every process of a group. Only the client reacts to it, even while the
workers start or while a task does not return.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from multiprocessing import resource_tracker
from typing import Any

import dask
from distributed import LocalCluster, Nanny, Status

from jobrunner.errors import ExecutionError
from jobrunner.worker import MemoryOnly

_ASYNCIO_LOG = logging.getLogger("asyncio")

START_SECONDS = 300.0
"""How long workers may take to start; they import the script and its modules."""
STOP_SECONDS = 2.0
"""How long to wait for the end of a start that failed or was interrupted."""
KILL_AGAIN_SECONDS = 0.02


class OwnCluster:
    """A `LocalCluster` for one session; no worker is left if it is interrupted while it starts.

    Processes start from a thread that blocks SIGINT, and inherit that: until they load
    `jobrunner.worker.preload`, they would print a traceback. Until `close`, Dask logs only about
    memory.
    """

    def __init__(
        self,
        workers: int | None,
        threads_per_worker: int | None,
        processes: bool,
        start_seconds: float = START_SECONDS,
    ) -> None:
        if processes and getattr(multiprocessing.current_process(), "_inheriting", False):
            sys.exit(1)  # a worker process that imports the script; the client explains
        self._nannies: list[Nanny] = []
        self._filter = MemoryOnly()
        self._filter.start()
        self._is_killed = False
        self._starting: Future[LocalCluster] = Future()
        options = {
            "n_workers": workers,
            "threads_per_worker": threads_per_worker,
            "processes": processes,
            "dashboard_address": ":0",  # any free port
        }
        threading.Thread(
            target=self._start, args=(options,), name="jobrunner-cluster", daemon=True
        ).start()
        try:
            wait([self._starting], start_seconds)
            if not self._starting.done():
                raise ExecutionError(
                    f"The local cluster did not start within {start_seconds:g} s. Worker processes "
                    f"import the script: check that it only defines things before its "
                    f"`if __name__ == '__main__':`, or use Session.local(processes=False)."
                )
            error = self._starting.exception()
            if isinstance(error, RuntimeError):
                raise ExecutionError(
                    f"The local cluster did not start: {_innermost(error)}. Call "
                    f"Session.local under `if __name__ == '__main__':`, since worker processes "
                    f"import the script, or use Session.local(processes=False)."
                ) from error
            self.cluster = self._starting.result()
        except BaseException:
            self._give_up()
            raise

    def close(self) -> None:
        """End the workers; Dask waits a while for their tasks."""
        try:
            self.cluster.close()
        finally:
            self._restore_logs()

    def kill(self) -> None:
        """End the worker processes at once, so that `close` does not wait for them."""
        if not self._is_killed:
            self._is_killed = True
            _ASYNCIO_LOG.addFilter(self._filter)  # it would report abandoned futures
        for nanny in self._nannies:
            pid = nanny.pid
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _start(self, options: dict[str, Any]) -> None:
        settings: dict[str, Any] = {}
        try:
            if options["processes"]:
                options["worker_class"] = self._nanny_class()
                preload = dask.config.get("distributed.worker.preload")
                settings["distributed.worker.preload"] = [*preload, "jobrunner.worker.preload"]
                resource_tracker.ensure_running()  # starting it later would unblock signals
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            with dask.config.set(settings):
                self._starting.set_result(LocalCluster(**options))
        except BaseException as error:
            self._starting.set_exception(error)

    def _nanny_class(self) -> type[Nanny]:
        own = self

        class OwnNanny(Nanny):
            """A nanny that `kill` knows from the beginning, and that then restarts no worker."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                own._nannies.append(self)

            async def instantiate(self) -> Status:
                return Status.failed if own._is_killed else await super().instantiate()

        return OwnNanny

    def _give_up(self) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        while not self._starting.done() and time.monotonic() < deadline:
            self.kill()
            wait([self._starting], KILL_AGAIN_SECONDS)
        try:
            if self._starting.done() and self._starting.exception() is None:
                self.kill()
                self._starting.result().close()
        finally:
            self._restore_logs()

    def _restore_logs(self) -> None:
        if self._is_killed:
            gc.collect()  # or abandoned futures would be reported later
            _ASYNCIO_LOG.removeFilter(self._filter)
        self._filter.stop()


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
