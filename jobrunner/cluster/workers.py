"""4 run: the client's side of Dask: which workers there are, messages to them, news of losses.

Every message goes to the scheduler, which passes it on: the workers need not be reachable from
here. Of distributed's private API two names are used, by what cleans up after a client: the
thread of one that nobody answered, and the handlers that it has.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from distributed import Client

from jobrunner.cluster.placement import WorkerInfo
from jobrunner.config import get_seconds
from jobrunner.errors import ExecutionError, SchedulerLostError
from jobrunner.worker import MOST_PINGS, OPERATION, PLUGIN_NAME, Message, WorkspaceHost

logger = logging.getLogger(__name__)

PING_SECONDS = 5.0
CLOSE_SECONDS = 2.0
MAX_SEPARATE_MESSAGES = 64

Answer = Message | BaseException


Listener = Callable[[str, bool], None]
"""Told a worker's address, and whether it is lost or about to leave."""

LEAVING_STATUSES = ("closing_gracefully", "closing")


class Silence(Exception):  # noqa: N818  (an event, not an error)
    """No answer came, for longer than a worker may be silent."""


class OwnClient(Client):
    """A client that leaves no thread behind where no scheduler answers it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

    def start(self, **kwargs: Any) -> None:
        """Connect."""
        try:
            super().start(**kwargs)  # type: ignore[no-untyped-call]
        except BaseException:
            # Dask closes such a client, and with it the way to end the thread that it started.
            with suppress(Exception):
                self.close(timeout=CLOSE_SECONDS)  # type: ignore[no-untyped-call]
            self._loop_runner.stop()
            raise


class _Handler:
    """Handles a topic of a client in our place, and in that of whoever handled it before."""

    def __init__(self, hear: Callable[[Any], None], before: Callable[[Any], Any] | None) -> None:
        self._hear = hear
        self.before: Callable[[Any], Any] | None
        self.before = before.before if isinstance(before, _Handler) else before

    def __call__(self, event: tuple[float, Any]) -> Any:
        self._hear(event)
        return None if self.before is None else self.before(event)


class LossWatch:
    """Hears which workers the scheduler has lost, and which leave, for all sessions of one client.

    The scheduler logs a worker's removal under its address; a client has one handler a topic, so
    ours calls the one that it finds there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: dict[str, list[Listener]] = {}
        self._handlers: dict[str, _Handler] = {}

    def add(self, client: Client, address: str, listener: Listener) -> None:
        """Call ``listener(address, is_lost)`` on the client's loop; see `Listener`."""
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
                    self._let_go(client, address)

    def clear(self) -> None:
        """Forget all listeners."""
        with self._lock:
            self._listeners.clear()
            self._handlers.clear()

    def _let_go(self, client: Client, address: str) -> None:
        handler = self._handlers.pop(address)
        if client.status != "running":
            return
        if _handlers_of(client).get(address, handler) is not handler:
            return  # somebody else's by now
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
            # A worker that is removed as planned still serves until its nodes have moved.
            is_lost = is_removed and not message.get("expected")
            for listener in tuple(self._listeners.get(address, ())):
                listener(address, is_lost)


def _handlers_of(client: Client) -> Mapping[str, Callable[[Any], Any]]:
    handlers: Mapping[str, Callable[[Any], Any]] = getattr(client, "_event_handlers", {})
    return handlers


_watches: weakref.WeakKeyDictionary[Client, LossWatch] = weakref.WeakKeyDictionary()


class Cluster:
    """The workers that a client reaches through its scheduler.

    Parameters
    ----------
    client : distributed.Client
        A synchronous one.

    Notes
    -----
    Coroutines run on the client's event loop; `sync` runs one from another thread.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self.silence_seconds = get_seconds("worker-silence-seconds")
        self._watch = _watches.setdefault(client, LossWatch())

    @property
    def scheduler(self) -> Any:
        """The scheduler's remote procedures."""
        return self.client.scheduler

    def sync(self, coroutine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a coroutine function on the client's loop and wait for it."""
        self.check_open()
        return self.client.sync(coroutine, *args, **kwargs)

    def check_open(self) -> None:
        """Refuse to go on without a scheduler.

        Raises
        ------
        SchedulerLostError
            The client was closed, or lost its scheduler.
        """
        if self.client.status != "running":
            raise SchedulerLostError(
                f"The client of this session is {self.client.status}, so its workers cannot be "
                f"reached: it was closed, or the scheduler is gone. Connect anew and start the "
                f"same command again; it goes on from the last recorded epoch."
            )

    def is_answered(self) -> bool:
        """Whether the scheduler answers now."""
        try:
            self.sync(self.identity)
        except SchedulerLostError:
            return False
        return True

    async def identity(self, n_workers: int = 0, patience: float = PING_SECONDS) -> dict[str, Any]:
        """What the scheduler says of itself, and of so many workers, -1: of all.

        Raises
        ------
        SchedulerLostError
            It says nothing for so many seconds.
        """
        try:
            asking = self.scheduler.identity(n_workers=n_workers)
            found: dict[str, Any] = await asyncio.wait_for(asking, patience)
        except (OSError, TimeoutError) as error:
            raise SchedulerLostError(
                f"The scheduler of {self.client!r} gave no answer within {patience:g} s "
                f"({type(error).__name__}: {error}): it hangs, is gone, or cannot be reached any "
                f"more. Start the same command again; it goes on from the last recorded epoch."
            ) from error
        return found

    def forget_watches(self) -> None:
        """Listen to no worker any more: another scheduler knows of no subscription."""
        self._watch.clear()

    def install(self) -> None:
        """Put the plugin on all workers, those to come too; does nothing where it is there.

        Raises
        ------
        ExecutionError
            A worker cannot import it.
        """
        try:
            self.client.register_plugin(WorkspaceHost(), name=PLUGIN_NAME)
        except Exception as error:
            raise ExecutionError(
                f"The workers could not take jobrunner's plugin: {type(error).__name__}: {error}. "
                f"Install the same version of jobrunner on the scheduler's workers."
            ) from error

    async def workers(self) -> list[WorkerInfo]:
        """The running workers, in the order of their names and addresses.

        Raises
        ------
        SchedulerLostError
            The scheduler does not answer, for longer than a worker may be silent.
        """
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
        """Call ``listener(address, is_lost)`` on the client's loop when one is lost or leaves."""
        for address in addresses:
            self._watch.add(self.client, address, listener)

    def unwatch(self, addresses: Collection[str], listener: Listener) -> None:
        """Undo `watch`."""
        for address in addresses:
            self._watch.remove(self.client, address, listener)

    async def send(self, message: Message, addresses: Collection[str]) -> dict[str, Answer]:
        """Send one message to several workers.

        Returns
        -------
        dict
            Address -> reply, or the exception that came of it.
        """
        answers: dict[str, Answer] = await self.scheduler.broadcast(
            msg={"op": OPERATION, **message}, workers=list(addresses), on_error="return"
        )
        return answers

    async def send_each(self, messages: Mapping[str, Message]) -> dict[str, Answer]:
        """Send each worker a message of its own."""
        slots = asyncio.Semaphore(MAX_SEPARATE_MESSAGES)

        async def send_one(address: str, message: Message) -> dict[str, Answer]:
            async with slots:
                return await self.send(message, [address])

        found = await asyncio.gather(*(send_one(*item) for item in messages.items()))
        return {address: answer for answers in found for address, answer in answers.items()}

    async def ask(
        self,
        messages: Message | Mapping[str, Message],
        addresses: Collection[str],
        wait_seconds: float,
        interrupted: asyncio.Event,
    ) -> dict[str, Answer]:
        """Send messages that are answered within `wait_seconds`, and wait no longer than needed.

        Parameters
        ----------
        messages : dict
            One message for all, or by address (then none has a key ``"call"``).
        addresses : collection of str
        wait_seconds : float
            How long the workers may take by intent.
        interrupted : asyncio.Event
            Set from elsewhere, it ends the wait.

        Returns
        -------
        dict
            The answers; empty where it was interrupted.

        Raises
        ------
        Silence
            Some worker has not answered for `silence_seconds` longer.
        """
        if "call" in messages:
            sending = asyncio.ensure_future(self.send(messages, addresses))  # type: ignore[arg-type]
        else:
            sending = asyncio.ensure_future(self.send_each(messages))
        interruption = asyncio.ensure_future(interrupted.wait())
        try:
            # Only seconds in which this loop was itself alive count as another's silence.
            for _ in range(int(wait_seconds + self.silence_seconds) + 1):
                await asyncio.wait(
                    (sending, interruption), timeout=1.0, return_when=asyncio.FIRST_COMPLETED
                )
                if sending.done():
                    return sending.result()
                if interruption.done():
                    return {}
            raise Silence
        finally:
            interruption.cancel()
            if not sending.done():
                sending.cancel()

    async def find_silent(self, addresses: Collection[str]) -> list[str]:
        """Those of the workers that don't answer at once."""
        patience = min(PING_SECONDS, self.silence_seconds)

        async def is_silent(address: str) -> bool:
            try:
                answers = await asyncio.wait_for(self.send({"call": "hello"}, [address]), patience)
            except (TimeoutError, OSError):
                return True
            return isinstance(answers[address], BaseException)

        silent = await asyncio.gather(*(is_silent(address) for address in addresses))
        return [address for address, is_it in zip(addresses, silent, strict=True) if is_it]

    async def find_cuts(self, addresses: Collection[str]) -> set[frozenset[str]]:
        """Pairs of workers that don't reach each other, as far as they answer that."""
        patience = min(PING_SECONDS, self.silence_seconds)
        rounds = math.ceil(len(addresses) / MOST_PINGS)
        message = {"call": "reach", "addresses": list(addresses), "wait_seconds": patience}

        async def ask(address: str) -> Collection[str]:
            sending = self.send(message, [address])
            try:
                answers = await asyncio.wait_for(sending, rounds * patience + PING_SECONDS)
            except (TimeoutError, OSError) as error:
                logger.info("%s did not say whom it reaches: %r", address, error)
                return ()
            answer = answers[address]
            found: Collection[str] = answer.get("cut", ()) if isinstance(answer, Mapping) else ()
            return found

        cut = await asyncio.gather(*(ask(address) for address in addresses))
        return {
            frozenset((address, other))
            for address, others in zip(addresses, cut, strict=True)
            for other in others
        }
