"""A client's link to its scheduler: which workers there are, and which leave or are lost.

The only module that uses private attributes of distributed: `Client._loop_runner`, to end the
thread of a client that found no scheduler, and `Client._event_handlers`, since a topic has only one
handler, and an earlier one must still be called.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

from distributed import Client

from jobrunner.cluster.placement import WorkerInfo
from jobrunner.config import get_number
from jobrunner.errors import ExecutionError, SchedulerLostError
from jobrunner.worker import PLUGIN_NAME, WorkspaceHost

PING_SECONDS = 5.0
"""How long the scheduler or a worker may take to answer a ping."""
CLOSE_SECONDS = 2.0
LEAVING_STATUSES = ("closing_gracefully", "closing")

Listener = Callable[[str, bool], None]
"""Called with a worker's address and True if it is lost, False if it is about to leave."""


class OwnClient(Client):
    """A client that ends its thread if no scheduler answers."""

    def start(self, **kwargs: Any) -> None:
        """Connect."""
        try:
            super().start(**kwargs)  # type: ignore[no-untyped-call]
        except BaseException:
            # Dask closes such a client, but not the thread that it started for it.
            with suppress(Exception):
                self.close(timeout=CLOSE_SECONDS)  # type: ignore[no-untyped-call]
            self._loop_runner.stop()
            raise


class _Topic:
    """Tells the sessions of a client what the scheduler logs of a worker, under its address.

    A client has one handler of a topic: this also calls the handler that it replaces.
    """

    def __init__(self, address: str, before: Callable[[Any], Any] | None) -> None:
        self._address = address
        self.before = before
        self.listeners: list[Listener] = []

    def __call__(self, event: tuple[float, Any]) -> Any:
        message = event[1]
        if isinstance(message, Mapping):
            is_removed = message.get("action") == "remove-worker"
            if is_removed or message.get("status") in LEAVING_STATUSES:
                # A worker that is retired still serves until its nodes have moved.
                is_lost = is_removed and not message.get("expected")
                for listener in tuple(self.listeners):
                    listener(self._address, is_lost)
        return None if self.before is None else self.before(event)


_lock = threading.Lock()  # for the topics of all clients


class SchedulerLink:
    """A synchronous client's link to its scheduler. Coroutines run on the client's event loop."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.silence_seconds = get_number("worker-silence-seconds")

    def check_open(self) -> None:
        """Raise a `SchedulerLostError` if the client is closed or lost its scheduler."""
        if self.client.status != "running":
            raise SchedulerLostError(
                f"The client of this session is {self.client.status}, so it cannot reach its "
                f"workers: it was closed, or the scheduler is gone. Connect again and start the "
                f"same command again; it resumes from the last recorded epoch."
            )

    async def identity(self, n_workers: int = 0, patience: float = PING_SECONDS) -> dict[str, Any]:
        """The scheduler's description of itself and of `n_workers` workers; -1 for all.

        Raises a `SchedulerLostError` if it does not answer within `patience` seconds.
        """
        try:
            rpc: Any = self.client.scheduler
            found: dict[str, Any] = await asyncio.wait_for(
                rpc.identity(n_workers=n_workers), patience
            )
        except (OSError, TimeoutError) as error:
            raise SchedulerLostError(
                f"The scheduler of {self.client!r} did not answer within {patience:g} s "
                f"({type(error).__name__}: {error}): it hangs, is gone, or cannot be reached. "
                f"Start the same command again; it resumes from the last recorded epoch."
            ) from error
        return found

    def install(self) -> None:
        """Install the plugin on all workers, future ones too, unless it is there already."""
        try:
            self.client.register_plugin(WorkspaceHost(), name=PLUGIN_NAME)
        except Exception as error:
            raise ExecutionError(
                f"The workers could not load jobrunner's plugin: {type(error).__name__}: {error}. "
                f"Install the same version of jobrunner on the cluster's workers."
            ) from error

    async def workers(self) -> list[WorkerInfo]:
        """The running workers, in order of their names and addresses."""
        identity = await self.identity(-1, max(PING_SECONDS, self.silence_seconds))
        found = [
            WorkerInfo(
                address=address,
                name=str(worker["name"]),
                host=str(worker["host"]),
                nthreads=int(worker["nthreads"]),
                resources=dict(worker["resources"]),
                limit_bytes=int((worker["nanny"] and worker["memory_limit"]) or 0),
            )
            for address, worker in identity["workers"].items()
            if worker["status"] == "running"
        ]
        return sorted(found, key=lambda worker: (len(worker.name), worker.name, worker.address))

    def watch(self, addresses: Collection[str], listener: Listener) -> None:
        """Call a listener, on the client's event loop, if one of the workers leaves or is lost."""
        with _lock:
            for address in addresses:
                topic = self.client._event_handlers.get(address)
                if not isinstance(topic, _Topic):
                    topic = _Topic(address, topic)
                if not topic.listeners:
                    self.client.subscribe_topic(address, topic)
                topic.listeners.append(listener)

    def unwatch(self, addresses: Collection[str], listener: Listener) -> None:
        """Undo `watch`."""
        with _lock:
            for address in addresses:
                topic = self.client._event_handlers.get(address)
                if not isinstance(topic, _Topic) or listener not in topic.listeners:
                    continue
                topic.listeners.remove(listener)
                if topic.listeners or self.client.status != "running":
                    continue
                if topic.before is not None:
                    self.client.subscribe_topic(address, topic.before)
                else:
                    self.client.unsubscribe_topic(address)

    def forget_watches(self) -> None:
        """Undo every `watch`; a new scheduler has no subscriptions."""
        with _lock:
            for topic in self.client._event_handlers.values():
                if isinstance(topic, _Topic):
                    topic.listeners.clear()
