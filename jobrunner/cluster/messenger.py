"""Sends messages to workers through the scheduler, and collects their answers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from jobrunner.cluster.exchange import (
    RETIRING_SECONDS,
    Answer,
    Ask,
    AwaitNews,
    Heard,
    Mailing,
    Members,
    Reply,
    Request,
    exchange,
)
from jobrunner.cluster.scheduler import SchedulerLink
from jobrunner.dask_internals import WorkerNews, broadcaster
from jobrunner.errors import SchedulerLostError
from jobrunner.texts import get_logger
from jobrunner.worker import OPERATION, Message, host

logger = get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

ABORT_SECONDS = 0.3
"""How long to wait until workers have got an abort, before a more urgent error."""
LOOK_SECONDS = 0.25
"""How often to look whether the client still has a scheduler, while it waits for something; how late
the handler of a signal may be called then; and what a wait for silent workers is counted in."""
MOST_MAILINGS = 64
"""How many messages are sent at the same time."""


class Messenger:
    """Sends the requests of one binding to its workers, and notes which of them are lost.

    Coroutines run on the client's event loop; `sync` runs one from another thread.
    """

    def __init__(self, scheduler: SchedulerLink, name: str, members: Members) -> None:
        self.run_number = 0  # of the latest run; 0 before the first
        self._number = 0
        self._numbering = threading.Lock()
        self.scheduler = scheduler
        self._client = scheduler.client
        self.name = name
        self.members = members
        self._broadcast = broadcaster(self._client)
        self._loss = asyncio.Event()
        self._news = asyncio.Event()

    # ---- for any thread except the client's event loop

    def sync(
        self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a coroutine function on the client's loop and wait for it.

        Raises a `SchedulerLostError` soon after the client has lost its scheduler.
        """
        self.scheduler.check_open()
        loop = self._client.loop.asyncio_loop  # type: ignore[union-attr]
        future = asyncio.run_coroutine_threadsafe(function(*args, **kwargs), loop)
        try:
            # In short steps, and not in Dask's of 10 s: a signal that comes in the moment after
            # Python has called the handlers of the one before, and before it waits again, does not
            # end that wait. Its handler is called when the step ends.
            while not wait([future], LOOK_SECONDS).done:
                # A message that is sent just when the scheduler is lost waits for the client's own
                # `timeout`, in which Dask tries to reach the scheduler again.
                self.scheduler.check_open()
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def call(
        self, request: Request, addresses: Sequence[str], num_runs: int = 1
    ) -> dict[str, Reply]:
        """Send workers a request, and wait until each has replied; see `exchange`.

        Each run that it may take has a number of its own.
        """
        with self._numbering:
            request.number = self._number + 1
            self._number += num_runs
            if request.call == "run":
                self.run_number = request.number
        return self.sync(self._exchange, request, addresses)

    def close(self) -> None:
        """Stop listening to news of the workers."""
        self.scheduler.unwatch(list(self.members.workers), self._hear)

    def part(self, addresses: Collection[str]) -> None:
        """Stop listening to news of workers that are not used, and forget what was heard."""
        self.scheduler.unwatch(addresses, self._hear)
        for address in addresses:
            self.members.lost.pop(address, None)
            self.members.leaving.pop(address, None)
        self._loss.clear()  # `lost` has those that remain

    # ---- on the client's event loop

    async def meet(self, addresses: Collection[str]) -> dict[str, Any]:
        """Get workers ready to host the binding; returns their incarnations, or what went wrong."""
        # Losses are reported from now on; a worker that was lost before does not answer.
        self.scheduler.watch(addresses, self._hear)
        patience = self.scheduler.silence_seconds
        return await self.scheduler.run(host, addresses, self.name, patience=patience)

    async def abort(
        self, reason: str, wait_seconds: float, addresses: Collection[str] | None = None
    ) -> None:
        """Stop workers, by default all, from starting more tasks of the current run."""
        message = {"call": "abort", "number": self.run_number, "reason": reason}
        await self.tell(message, wait_seconds, addresses)

    async def tell(
        self, message: Message, wait_seconds: float, addresses: Collection[str] | None = None
    ) -> None:
        """Send workers, by default all, a message that need not reach them."""
        if addresses is None:
            addresses = self.members.alive
        if addresses:
            try:
                await asyncio.wait_for(self._send(message, addresses), wait_seconds)
            except (OSError, SchedulerLostError) as error:
                logger.info("%s may not have reached %s: %r", message["call"], addresses, error)

    # ---- requests

    async def _exchange(self, request: Request, addresses: Sequence[str]) -> dict[str, Reply]:
        steps = exchange(request, addresses, self.members, time.monotonic())
        try:
            action = next(steps)
            while True:
                answers: Mapping[str, Answer] = {}
                if isinstance(action, Ask):
                    answers = await self._ask(action)
                elif isinstance(action, AwaitNews):
                    await self._await_news(action)
                elif self.run_number:
                    await self.abort(action.reason, ABORT_SECONDS, action.addresses)
                action = steps.send(Heard(time.monotonic(), answers))
        except StopIteration as end:
            replies: dict[str, Reply] = end.value
            return replies

    async def _ask(self, ask: Ask) -> Mapping[str, Answer]:
        """Send messages; returns the answers: none after a loss, or if there are none yet."""
        members = self.members
        for address, worker in members.workers.items():
            for lease in worker.leases:
                if lease.status in ("cancelled", "lost", "error"):
                    self.scheduler.check_open()  # a client without a scheduler cancels leases
                    members.lost.setdefault(address, f"its lease task was {lease.status}")
        if members.lost:
            return {}
        patience = self.scheduler.silence_seconds
        if not members.leaving.keys().isdisjoint(ask.addresses):
            patience = min(patience, RETIRING_SECONDS)
        if len(ask.mailings) == 1:
            sending = asyncio.ensure_future(self._send(*ask.mailings[0]))
        else:
            sending = asyncio.ensure_future(self._send_all(ask.mailings))
        losing = asyncio.ensure_future(self._loss.wait())
        try:
            # Count only time in which this loop ran: the process may have been suspended.
            seconds = ask.wait_seconds + patience
            for _ in range(int(seconds / LOOK_SECONDS) + 1):
                await asyncio.wait(
                    (sending, losing), timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                if sending.done():
                    return sending.result()
                if losing.done():
                    return {}
        finally:
            losing.cancel()
            sending.cancel()
        await self.scheduler.identity()  # raises if the scheduler is silent
        for address in await self.scheduler.find_silent(ask.addresses):
            members.lost.setdefault(address, f"it has not answered for {patience:g} s")
        return {}  # and ask again

    async def _await_news(self, wanted: AwaitNews) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(wanted.seconds):
                while not (self.members.lost or wanted.leaving in self.members.leaving):
                    self._news.clear()
                    await self._news.wait()

    # ---- messages

    async def _send_all(self, mailings: Sequence[Mailing]) -> dict[str, Answer]:
        slots = asyncio.Semaphore(MOST_MAILINGS)
        answers: dict[str, Answer] = {}

        async def send(mailing: Mailing) -> None:
            async with slots:
                answers.update(await self._send(*mailing))

        await asyncio.gather(*map(send, mailings))
        return answers

    async def _send(self, message: Message, addresses: Collection[str]) -> dict[str, Answer]:
        """Send a message through the scheduler; returns each worker's answer or an exception."""
        whole = {"op": OPERATION, "binding": self.name, **message}
        try:
            return await self._broadcast(msg=whole, workers=list(addresses))
        except OSError as error:
            raise self.scheduler.loss(error) from error

    # ---- news of losses

    def _hear(self, address: str, news: WorkerNews) -> None:
        """Note that a worker is lost or about to leave, as the scheduler says."""
        if news == "lost":
            self.members.lost.setdefault(address, "the scheduler removed it")
            self._loss.set()
        else:
            self.members.leaving.setdefault(address, "the scheduler retires it")
        self._news.set()
