"""A client's own connections to workers, faster than messages through the scheduler.

A request that was lost here can be sent again through the scheduler, and counts once. So the first
error closes the connections for good.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from distributed import Client
from distributed.comm.core import Comm

from jobrunner.dask_internals import connect_directly
from jobrunner.texts import get_logger
from jobrunner.worker import OPERATION, UNIX, Message

logger = get_logger(__name__)

SCHEMES = ("tcp", "tls", "inproc", UNIX)
"""Protocols whose connections are not bound to one thread."""


class DirectLines:
    """Connections to workers, with an event loop that runs in the thread that asks.

    That saves switching to the client's thread and back. `ask` and `close` may be called in any
    thread, and `hang_up` on any event loop.
    """

    def __init__(
        self,
        client: Client,  # for its security
        most: int,  # connect to no more workers than that
        *,
        connect_seconds: float = 2.0,
        late_seconds: float = 1.0,  # how much later than requested answers may come
    ) -> None:
        self._client = client
        self._most = most
        self._connect_seconds, self._late_seconds = connect_seconds, late_seconds
        self._lock = threading.Lock()  # for the loop and the connections
        self._loop: asyncio.AbstractEventLoop | None = None
        self._comms: dict[str, Comm] = {}
        self._called: set[str] = set()  # workers that `_open` has begun to connect to
        self._task: asyncio.Task[Any] | None = None  # what the loop is running for
        self.is_over = False  # closed for good

    def ask(
        self, message: Message, incarnations: Mapping[str, str], wait_seconds: float
    ) -> dict[str, Message] | None:
        """Send workers a message; returns their answers within about `wait_seconds`.

        Returns None if some workers are not connected, and connects these in the background. Also
        returns None while another thread asks, and after an error: then workers may have got the
        message. `incarnations` gives the incarnation that each address must have.
        """
        if self.is_over or not 0 < len(incarnations) <= self._most or _is_on_loop():
            return None
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if incarnations.keys() <= self._comms.keys():
                answers = self._run(self._exchange(message, list(incarnations), wait_seconds))
                return answers  # type: ignore[no-any-return]
        finally:
            self._lock.release()
        new = {
            address: name for address, name in incarnations.items() if address not in self._called
        }
        if new:
            self._called.update(new)
            threading.Thread(
                target=self._open, args=(new,), name="jobrunner-direct", daemon=True
            ).start()
        return None

    def hang_up(self) -> None:
        """Cancel what `ask` waits for, and send nothing more."""
        self.is_over = True
        task = self._task
        if task is not None:
            with suppress(RuntimeError):  # its loop has closed meanwhile
                task.get_loop().call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """Close the connections."""
        self.hang_up()
        # What `hang_up` cancels ends soon; Ctrl-C may have left the lock locked.
        if self._lock.acquire(timeout=self._connect_seconds):
            try:
                self._drop()
            finally:
                self._lock.release()

    # ---- with the lock

    def _open(self, incarnations: Mapping[str, str]) -> None:
        with self._lock:
            self._run(self._connect(incarnations))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run the loop for some work; a failure closes the connections and returns None."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        task = self._task = self._loop.create_task(work)
        try:
            if self.is_over:  # `hang_up` found no task to cancel
                task.cancel()
            return self._loop.run_until_complete(task)
        except (Exception, asyncio.CancelledError) as error:
            logger.info("A direct connection failed; using only the scheduler: %r", error)
        except BaseException:  # Ctrl-C
            task.cancel()
            # It may have ended the task, which no loop could run then, or lost what wakes it.
            with suppress(asyncio.CancelledError, Exception):
                self._loop.run_until_complete(asyncio.wait((task,), timeout=self._late_seconds))
            if task.done() and not task.cancelled():
                task.exception()  # or it would be reported
            self._drop()
            raise
        finally:
            self._task = None
        self._drop()
        return None

    def _drop(self) -> None:
        self.is_over = True
        for comm in self._comms.values():
            comm.abort()
        self._comms.clear()
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    # ---- on the loop

    async def _connect(self, incarnations: Mapping[str, str]) -> None:
        async with asyncio.timeout(self._connect_seconds), asyncio.TaskGroup() as calls:
            for address, incarnation in incarnations.items():
                calls.create_task(self._connect_to(address, incarnation))

    async def _connect_to(self, address: str, incarnation: str) -> None:
        if address.partition("://")[0] not in SCHEMES:
            raise ValueError(f"no direct connection to {address}")
        comm = await connect_directly(self._client, address, self._connect_seconds)
        try:
            await comm.write({"op": OPERATION, "call": "hello", "reply": True})
            answer = await comm.read()
            # Seen from this network, the address may be another machine's.
            if answer.get("incarnation") != incarnation:
                raise ConnectionError(f"another worker answered at {address}: {answer}")
        except BaseException:
            comm.abort()
            raise
        self._comms[address] = comm

    async def _exchange(
        self, message: Message, addresses: Sequence[str], wait_seconds: float
    ) -> dict[str, Message]:
        async with asyncio.timeout(wait_seconds + self._late_seconds):
            for address in addresses:
                await self._comms[address].write({"op": OPERATION, "reply": True, **message})
            return {address: await self._comms[address].read() for address in addresses}


def _is_on_loop() -> bool:
    """Whether this thread runs an event loop, as a notebook's does."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
