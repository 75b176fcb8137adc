"""How a session gets its client: from the user, by connecting, or by starting a cluster."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Self

from distributed import Client
from distributed.comm.addressing import get_address_host

from jobrunner.cluster.local import OwnCluster
from jobrunner.cluster.scheduler import OwnClient, SchedulerLink
from jobrunner.define import check_int
from jobrunner.errors import DefinitionError, ExecutionError, SchedulerLostError

logger = logging.getLogger(__name__)

WARN_AFTER_SECONDS = 1.5
"""How long to wait for a scheduler before a warning."""
RECONNECT_POLL_SECONDS = 0.1


class Connection:
    """A client, and the cluster that was started for it, if any."""

    def __init__(
        self,
        client: Client,
        *,
        cluster: OwnCluster | None = None,
        connect: Callable[..., Client] | None = None,  # makes such a client again
    ) -> None:
        if not isinstance(client, Client):
            raise DefinitionError(
                f"A session needs a dask.distributed Client; got {type(client).__name__}. Use "
                f"Session.local() for a cluster on this machine, or Session.connect(address)."
            )
        if client.asynchronous:
            raise DefinitionError(
                "A session needs a synchronous client; this one is asynchronous. Make one with "
                "Client(..., asynchronous=False). If an event loop is running, run the session in "
                "another thread: await asyncio.to_thread(...)."
            )
        self.client = client  # `reconnect` may replace it
        self.scheduler = SchedulerLink(client)
        self._cluster = cluster
        self._connect = connect

    @classmethod
    def local(cls, workers: int | None, threads_per_worker: int | None, processes: bool) -> Self:
        """Start a cluster on this machine; see `Session.local`."""
        for what, count in (("workers", workers), ("threads_per_worker", threads_per_worker)):
            if count is not None:
                check_int(count, 1, f"Session.local: {what}")
        cluster = OwnCluster(workers, threads_per_worker, processes)
        try:
            return cls(Client(cluster.cluster, set_as_default=False), cluster=cluster)
        except BaseException:
            cluster.kill()
            cluster.close()
            raise

    @classmethod
    def to(cls, address: str, **client_kwargs: Any) -> Self:
        """Connect to the scheduler at an address; see `Session.connect`."""
        try:
            get_address_host(address)  # a client would take a minute to report it
        except (TypeError, ValueError, AttributeError) as error:
            raise DefinitionError(
                f"{address!r} is not the address of a Dask scheduler: {error}. Pass one like "
                f"tcp://host:8786."
            ) from error
        waiting = threading.Timer(
            WARN_AFTER_SECONDS, logger.warning, ("Waiting for the scheduler at %s.", address)
        )
        waiting.daemon = True
        waiting.start()
        connect = partial(OwnClient, address, **{"set_as_default": False, **client_kwargs})
        try:
            return cls(connect(), connect=connect)
        except (OSError, TimeoutError) as error:
            raise ExecutionError(
                f"No Dask scheduler answers at {address}: {error}. Check the address, and that "
                f"the scheduler is running and reachable from here."
            ) from error
        finally:
            waiting.cancel()

    @property
    def most_workers(self) -> float:
        """How many workers the cluster can have; infinite if unknown."""
        return math.inf if self._cluster is None else len(self._cluster.cluster.worker_spec)

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
                self.scheduler.install()
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
        """Close the client and the cluster that were opened here."""
        if self._cluster is not None or self._connect is not None:
            self.client.close()
        if self._cluster is not None:
            self._cluster.close()
