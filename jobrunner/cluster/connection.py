"""4 run: how a session comes by its client: it is given one, connects, or starts a cluster."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import Any, Self

from distributed import Client
from distributed.comm.addressing import get_address_host

from jobrunner.cluster.local import OwnCluster
from jobrunner.cluster.workers import OwnClient
from jobrunner.errors import DefinitionError, ExecutionError

logger = logging.getLogger(__name__)

TELL_AFTER_SECONDS = 1.5
"""How long one may wait without knowing for what."""


class Connection:
    """A client, and what was opened to have it.

    Parameters
    ----------
    client : distributed.Client
        Somebody else's, who closes it.

    Attributes
    ----------
    client : distributed.Client
        Another one once `renew` has succeeded.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self._is_own = False
        self._cluster: OwnCluster | None = None
        self._connect: Callable[[float], Client] | None = None

    @classmethod
    def local(cls, workers: int | None, threads_per_worker: int | None, processes: bool) -> Self:
        """Start a cluster on this machine; see `Session.local`."""
        cluster = OwnCluster(workers, threads_per_worker, processes)
        try:
            connection = cls(Client(cluster.cluster, set_as_default=False))
        except BaseException:
            cluster.kill()
            cluster.close()
            raise
        connection._is_own = True
        connection._cluster = cluster
        return connection

    @classmethod
    def to(cls, address: str, **client_kwargs: Any) -> Self:
        """Connect to the scheduler at an address; see `Session.connect`."""
        try:
            get_address_host(address)  # a client takes a minute to end that never began
        except (TypeError, ValueError, AttributeError) as error:
            raise DefinitionError(
                f"{address!r} is no address of a Dask scheduler: {error}. One looks like "
                f"tcp://host:8786."
            ) from error
        told = threading.Timer(
            TELL_AFTER_SECONDS, logger.warning, ("Waiting for the scheduler at %s.", address)
        )
        told.daemon = True
        told.start()
        client_kwargs = {"set_as_default": False, **client_kwargs}
        try:
            connection = cls(OwnClient(address, **client_kwargs))
        except (OSError, TimeoutError) as error:
            raise ExecutionError(
                f"No Dask scheduler answers at {address}: {error}. Check the address, and that "
                f"the scheduler runs and can be reached from here."
            ) from error
        finally:
            told.cancel()
        connection._is_own = True
        connection._connect = lambda seconds: OwnClient(
            address, **{**client_kwargs, "timeout": seconds}
        )
        return connection

    @property
    def most_workers(self) -> float:
        """How many workers the cluster will ever have, where that is known."""
        return math.inf if self._cluster is None else len(self._cluster.cluster.worker_spec)

    @property
    def is_renewable(self) -> bool:
        """Whether there can be another client when this one is closed."""
        return self._connect is not None

    def renew(self, seconds: float) -> bool:
        """Connect once more, in place of a client that is closed; False if nobody answers."""
        assert self._connect is not None
        try:
            self.client = self._connect(seconds)
        except (OSError, TimeoutError):
            return False
        return True

    def kill(self) -> None:
        """End the processes of a cluster of its own at once, so that `close` need not wait."""
        if self._cluster is not None:
            self._cluster.kill()

    def close(self) -> None:
        """Close the client and the cluster that were opened here."""
        if self._is_own:
            self.client.close()
        if self._cluster is not None:
            self._cluster.close()
