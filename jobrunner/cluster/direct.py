"""A client's own connections to workers.

Nothing depends on them: a request may be sent again through the scheduler, and counts once. So they
are used where they work, and closed for good at the first error.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from distributed import Client
from distributed.comm.core import Comm, connect

from jobrunner.worker import OPERATION, Message

logger = logging.getLogger(__name__)

SCHEMES = ("tcp", "tls", "inproc")
"""Protocols whose connections any thread may use, one thread at a time."""


class DirectLines:
    """Connections to workers, used in the thread that asks.

    Their event loop runs in that thread while it asks. That saves the switches to the client's
    thread and back, besides the way through the scheduler.

    Parameters
    ----------
    client : distributed.Client
        Gives them its security.
    most : int
        Connect to no more workers than that.
    connect_seconds : float
        How long connecting may take; meanwhile messages go through the scheduler.
    late_seconds : float
        How much later than requested answers may come.

    Attributes
    ----------
    is_over : bool
        The lines are closed for good.

    Notes
    -----
    `ask` and `close` may be called in any thread, and `hang_up` on any event loop. Of two calls of
    `ask` at the same time one gives None.
    """

    def __init__(
        self,
        client: Client,
        most: int,
        *,
        connect_seconds: float = 2.0,
        late_seconds: float = 1.0,
    ) -> None:
        self._arguments: dict[str, Any] = client.connection_args
        self._most = most
        self._connect_seconds, self._late_seconds = connect_seconds, late_seconds
        self._lock = threading.Lock()  # who holds it may use what follows
        self._loop: asyncio.AbstractEventLoop | None = None
        self._comms: dict[str, Comm] = {}
        self._called: set[str] = set()
        self._task: asyncio.Task[Any] | None = None  # what the loop is running for
        self.is_over = False

    def ask(
        self, message: Message, incarnations: Mapping[str, str], wait_seconds: float
    ) -> dict[str, Message] | None:
        """Send workers a message and wait for the answers; connects first, in the background.

        Parameters
        ----------
        message : dict
        incarnations : mapping of str to str
            Address -> the worker's incarnation that must be there.
        wait_seconds : float
            How long the workers may hold back their answers.

        Returns
        -------
        dict or None
            Address -> reply. None: there is no connection to all workers, yet or any more. Some
            may have got the message.
        """
        if self.is_over or not 0 < len(incarnations) <= self._most or _is_on_loop():
            return None
        if not self._lock.acquire(blocking=False):
            return None  # they are being connected
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
        """Cancel what is under way, and send nothing more."""
        self.is_over = True
        task = self._task
        if task is not None:
            with suppress(RuntimeError):  # its loop has closed meanwhile
                task.get_loop().call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """Close the connections."""
        self.hang_up()
        with self._lock:
            self._drop()

    # ---- within, with the lock

    def _open(self, incarnations: Mapping[str, str]) -> None:
        with self._lock:
            self._run(self._connect(incarnations))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run the loop for some work; None where it failed, which closes the lines."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        task = self._task = self._loop.create_task(work)
        try:
            if self.is_over:  # since before there was a task to cancel
                task.cancel()
            return self._loop.run_until_complete(task)
        except (Exception, asyncio.CancelledError) as error:
            logger.info("Using only the scheduler from now on: %r", error)
        except BaseException:  # Ctrl-C
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                self._loop.run_until_complete(task)
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
        comm = await connect(
            address, timeout=self._connect_seconds, deserialize=False, **self._arguments
        )
        comm.allow_offload = False  # measuring each message takes longer than packing it
        try:
            await comm.write({"op": OPERATION, "call": "hello", "reply": True})
            answer = await comm.read()
            # In another network, the address may belong to somebody else.
            if answer.get("incarnation") != incarnation:
                raise ConnectionError(f"another worker answered at {address}: {answer}")
        except BaseException:
            comm.abort()
            raise
        self._comms[address] = comm

    async def _exchange(
        self, message: Message, addresses: Sequence[str], wait_seconds: float
    ) -> dict[str, Message]:
        task = asyncio.current_task()
        assert task is not None
        timer = task.get_loop().call_later(wait_seconds + self._late_seconds, task.cancel)
        comms = [self._comms[address] for address in addresses]
        for comm in comms:
            await comm.write({"op": OPERATION, "reply": True, **message})
        answers = {
            address: await comm.read() for address, comm in zip(addresses, comms, strict=True)
        }
        timer.cancel()
        return answers


def _is_on_loop() -> bool:
    """Whether this thread runs an event loop, as a notebook's does."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
