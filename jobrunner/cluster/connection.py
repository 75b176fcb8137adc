"""How a session gets its client: from the user, by connecting, or by starting a cluster."""

from __future__ import annotations

import gc
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from multiprocessing import resource_tracker
from tempfile import TemporaryDirectory
from typing import Any, Self, TypeVar

import dask
from distributed import Client, LocalCluster, Nanny, Security
from distributed.comm.addressing import get_address_host

from jobrunner.cluster.scheduler import SchedulerLink
from jobrunner.config import get_choice
from jobrunner.dask_internals import OwnClient, count_workers, nanny_class
from jobrunner.errors import DefinitionError, ExecutionError, SchedulerLostError
from jobrunner.texts import get_logger
from jobrunner.worker import UNIX, MemoryOnly, make_socket_directory

logger = get_logger(__name__)
_ASYNCIO_LOG = logging.getLogger("asyncio")
_T = TypeVar("_T")

RECONNECT_POLL_SECONDS = 0.1
START_SECONDS = 300.0
"""How long workers may take to start; they import the script and its modules."""
STOP_SECONDS = 2.0
"""How long to wait for the end of a start that failed or was interrupted."""
KILL_AGAIN_SECONDS = 0.02
CLOSE_SECONDS = 30.0
"""How long a cluster may take to close until its worker processes are killed, and then again."""


class Connection:
    """A client, and the cluster that was started for it, if any."""

    def __init__(
        self,
        client: Client,
        *,
        cluster: OwnCluster | None = None,
        connect: Callable[..., Client] | None = None,  # makes such a client again
        close_seconds: float = CLOSE_SECONDS,
    ) -> None:
        self.client = client  # `reconnect` may replace it
        most_workers = math.inf
        if cluster is not None:
            most_workers = cluster.most_workers
        self.scheduler = SchedulerLink(client, most_workers)
        self._cluster = cluster
        self._connect = connect
        self._close_seconds = close_seconds

    @classmethod
    def to(cls, address: str, **client_kwargs: Any) -> Self:
        """Connect to the scheduler at an address; see `Session.connect`."""
        if set("@?#") & set(address):
            raise DefinitionError(
                "The address of the scheduler contains '@', '?' or '#', so it may contain "
                "credentials and is not repeated here. Pass an address like tcp://host:8786, and "
                "security= for TLS."
            )
        try:
            get_address_host(address)  # a client would take a minute to report it
        except (TypeError, ValueError, AttributeError) as error:
            raise DefinitionError(
                f"{address!r} is not the address of a Dask scheduler: {error}. Pass one like "
                f"tcp://host:8786."
            ) from error
        connect = partial(OwnClient, address, **{"set_as_default": False, **client_kwargs})
        try:
            return cls(connect(), connect=connect)
        except (OSError, TypeError, RuntimeError) as error:  # Dask has no class of its own for TLS
            raise ExecutionError(
                f"No Dask scheduler answers at {address}: {error}. Check the address, and that the "
                f"scheduler is running and reachable from here; with TLS also require-encryption, "
                f"tls.ca-file and tls.client.cert below distributed.comm in Dask's configuration, or "
                f"security=."
            ) from error

    def reconnect(self, address: str, wait_seconds: float) -> None:
        """Wait until a lost scheduler is back at its address; see `Session.reconnect`.

        Replaces a client that was made here and has given up after its own ``timeout``.
        """
        deadline = time.monotonic() + wait_seconds
        while True:
            left = deadline - time.monotonic()
            with suppress(SchedulerLostError):
                self.scheduler.check_open()
                self.client.sync(self.scheduler.identity)
                self.scheduler.forget_watches()
                return
            if left <= 0:
                break
            if self.client.status == "closed":
                if self._connect is None:
                    break
                try:
                    self.client = self._connect(timeout=left)
                    self.scheduler = SchedulerLink(self.client)
                    continue
                except (OSError, TimeoutError):
                    logger.debug("No scheduler at %s yet", address, exc_info=True)
            # A client does not report that it has reconnected, and a refused one fails at once.
            time.sleep(min(RECONNECT_POLL_SECONDS, left))
        raise SchedulerLostError(
            f"The scheduler at {address} did not return within {wait_seconds:g} s; the client is "
            f"{self.client.status}. Start it again at that address, or connect to another one."
        )

    def kill(self) -> None:
        """End the cluster's worker processes at once, so that `close` does not wait for them."""
        if self._cluster is not None:
            self._cluster.kill()

    def close(self) -> None:
        """Close the client and the cluster that were opened here; Ctrl-C kills what it waits for."""
        if self._cluster is None and self._connect is None:
            return
        # In the main thread, Ctrl-C would cancel Dask's own close, which cannot begin again.
        closing = run_in_thread(self._close, "jobrunner-close")
        try:
            wait([closing], self._close_seconds)
        finally:
            if not closing.done():  # also after Ctrl-C
                self.kill()
                wait([closing], self._close_seconds)
        if closing.done():
            closing.result()
        else:
            logger.warning(
                "The %s did not close within %g s, and is left to the end of this process.",
                "client" if self._cluster is None else "local cluster",
                self._close_seconds,
            )

    def _close(self) -> None:
        self.client.close()
        if self._cluster is not None:
            self._cluster.close()


class _LoopbackCluster(LocalCluster):
    """Links to the dashboard at the address where it listens, also without processes."""

    @property
    def dashboard_link(self) -> str:
        """Dask takes the host from the scheduler's address: "inproc://192.0.2.1/123/1"."""
        link: str = super().dashboard_link
        host = self.scheduler_address.partition("://")[2].partition("/")[0]
        return link.replace(f"//{host}:", "//127.0.0.1:", 1)


class OwnCluster:
    """A `LocalCluster` for one session; no worker is left if it is interrupted while it starts.

    A terminal's Ctrl-C reaches every process of a group. Only the client reacts to it, even while
    the workers start or while a task does not return. Processes start from a thread that blocks
    SIGINT, and inherit that: until they load `jobrunner.worker.preload`, they would print a
    traceback. Until `close`, Dask logs only about memory.
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
        # Dask's own settings may require TLS.
        is_unix = get_choice("local-protocol", UNIX, "tcp") == UNIX
        is_unix = is_unix and processes and not Security().require_encryption
        self._sockets: TemporaryDirectory[str] | None = None
        if is_unix:
            self._sockets = make_socket_directory()
        self._nannies: list[Nanny] = []
        self._filter = MemoryOnly()
        self._filter.start()
        self._is_killed = False
        options: dict[str, Any] = {
            "n_workers": workers,
            "threads_per_worker": threads_per_worker,
            "processes": processes,
            "dashboard_address": "127.0.0.1:0",  # any free port
        }
        if not processes:
            options["worker_dashboard_address"] = "127.0.0.1:0"
        if self._sockets is not None:
            options |= {"protocol": UNIX, "host": f"127.0.0.1{self._sockets.name}"}
        self._starting = run_in_thread(partial(self._start, options), "jobrunner-cluster")
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
                    f"The local cluster did not start: {_innermost(error)}. Call Session.local under "
                    f"`if __name__ == '__main__':`, since worker processes import the script, or use "
                    f"Session.local(processes=False). If it is a socket that fails, set TMPDIR to a "
                    f"directory of a file system that has sockets, or jobrunner.local-protocol to tcp."
                ) from error
            self.cluster = self._starting.result()
            self.most_workers = count_workers(self.cluster)
            self.client = Client(self.cluster, set_as_default=False)
        except BaseException:
            deadline = time.monotonic() + STOP_SECONDS
            while not self._starting.done() and time.monotonic() < deadline:
                self.kill()
                wait([self._starting], KILL_AGAIN_SECONDS)
            self.kill()
            self.close()
            raise

    def close(self) -> None:
        """End the workers, if they have started; Dask waits a while for their tasks."""
        try:
            if self._starting.done() and self._starting.exception() is None:
                self._starting.result().close()
        finally:
            if self._sockets is not None:
                self._sockets.cleanup()
            if self._is_killed:
                gc.collect()  # or abandoned futures would be reported later
                _ASYNCIO_LOG.removeFilter(self._filter)
            self._filter.stop()

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

    def _start(self, options: dict[str, Any]) -> LocalCluster:
        settings: dict[str, Any] = {}
        if options["processes"]:
            # `kill` knows these from the beginning, and they then restart no worker.
            options["worker_class"] = nanny_class(self._nannies, lambda: self._is_killed)
            preload = dask.config.get("distributed.worker.preload")
            settings["distributed.worker.preload"] = [*preload, "jobrunner.worker.preload"]
            resource_tracker.ensure_running()  # starting it later would unblock signals
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        if get_choice("dashboard", True, False):
            preload = dask.config.get("distributed.scheduler.preload")
            settings["distributed.scheduler.preload"] = [*preload, "jobrunner.dashboard"]
        with dask.config.set(settings):
            return _LoopbackCluster(**options)  # type: ignore[no-untyped-call]


def run_in_thread(fn: Callable[[], _T], name: str) -> Future[_T]:
    """Call `fn()` in a daemon thread, for which this process does not wait when it ends."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(fn())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
