"""A client's link to its scheduler: which workers there are, and which leave or are lost.

The only module that uses private attributes of distributed: `Client._loop_runner`, to end the
thread of a client that found no scheduler, and `Client._event_handlers`, since a topic has only one
handler, and an earlier one must still be called.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
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

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

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


class _Handler:
    """Handles a topic of a client, and then calls the handler that it replaces."""

    def __init__(self, hear: Callable[[Any], None], before: Callable[[Any], Any] | None) -> None:
        self._hear = hear
        self.before: Callable[[Any], Any] | None
        self.before = before.before if isinstance(before, _Handler) else before

    def __call__(self, event: tuple[float, Any]) -> Any:
        self._hear(event)
        return None if self.before is None else self.before(event)


class LossWatch:
    """Reports workers that leave or are lost to all sessions of one client.

    The scheduler logs the removal of a worker under the topic of its address.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, list[Listener]] = {}
        self._handlers: dict[str, _Handler] = {}

    def add(self, client: Client, address: str, listener: Listener) -> None:
        """Call a listener, on the client's event loop, if that worker leaves or is lost."""
        with self._lock:
            listeners = self._listeners.setdefault(address, [])
            if not listeners:
                before = _handlers_of(client).get(address)
                handler = self._handlers[address] = _Handler(partial(self._hear, address), before)
                client.subscribe_topic(address, handler)
            listeners.append(listener)

    def remove(self, client: Client, address: str, listener: Listener) -> None:
        """Undo `add`."""
        with self._lock:
            listeners = self._listeners.get(address, [])
            if listener in listeners:
                listeners.remove(listener)
                if not listeners:
                    del self._listeners[address]
                    self._unsubscribe(client, address)

    def clear(self) -> None:
        """Remove all listeners; a new scheduler has no subscriptions."""
        with self._lock:
            self._listeners.clear()
            self._handlers.clear()

    def _unsubscribe(self, client: Client, address: str) -> None:
        handler = self._handlers.pop(address)
        if client.status != "running":
            return
        if _handlers_of(client).get(address, handler) is not handler:
            return  # other code has replaced it
        if handler.before is not None:
            client.subscribe_topic(address, handler.before)
        else:
            client.unsubscribe_topic(address)

    def _hear(self, address: str, event: tuple[float, Any]) -> None:
        message = event[1]
        if not isinstance(message, Mapping):
            return
        is_removed = message.get("action") == "remove-worker"
        if is_removed or message.get("status") in LEAVING_STATUSES:
            # A worker that is retired still serves until its nodes have moved.
            is_lost = is_removed and not message.get("expected")
            for listener in tuple(self._listeners.get(address, ())):
                listener(address, is_lost)


def _handlers_of(client: Client) -> Mapping[str, Callable[[Any], Any]]:
    handlers: Mapping[str, Callable[[Any], Any]] = getattr(client, "_event_handlers", {})
    return handlers


_watches: weakref.WeakKeyDictionary[Client, LossWatch] = weakref.WeakKeyDictionary()


class SchedulerLink:
    """A synchronous client's link to its scheduler. Coroutines run on the client's event loop."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.silence_seconds = get_number("worker-silence-seconds")
        self._watch = _watches.setdefault(client, LossWatch())

    def check_open(self) -> None:
        """Raise a `SchedulerLostError` if the client is closed or lost its scheduler."""
        if self.client.status != "running":
            raise SchedulerLostError(
                f"The client of this session is {self.client.status}, so it cannot reach its "
                f"workers: it was closed, or the scheduler is gone. Connect again and start the "
                f"same command again; it resumes from the last recorded epoch."
            )

    def responds(self) -> bool:
        """Whether the scheduler answers now."""
        try:
            self.check_open()
            self.client.sync(self.identity)
        except SchedulerLostError:
            return False
        return True

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
        for address in addresses:
            self._watch.add(self.client, address, listener)

    def unwatch(self, addresses: Collection[str], listener: Listener) -> None:
        """Undo `watch`."""
        for address in addresses:
            self._watch.remove(self.client, address, listener)

    def forget_watches(self) -> None:
        """Undo every `watch`, after a new scheduler has started."""
        self._watch.clear()
