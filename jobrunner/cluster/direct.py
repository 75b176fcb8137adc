"""4 run: a client's own connections to workers.

Nothing depends on them: what is asked here may be asked again through the scheduler, and counts
once. So they are used where they work, and let go of for good at the first thing that goes wrong.
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
"""Those whose connections may be used in any thread, by one at a time."""


class DirectLines:
    """Connections to workers, used in the thread that asks.

    They have an event loop of their own, which runs there while somebody asks: that spares the
    changes to the client's thread and back, besides the way through the scheduler.

    Parameters
    ----------
    client : distributed.Client
        Whose security they have.
    most : int
        Connect to no more workers than that.
    connect_seconds : float
        How long it may take to reach them; meanwhile the scheduler passes messages on.
    late_seconds : float
        How long answers may take, beyond the time that the workers were allowed.

    Attributes
    ----------
    is_over : bool
        Nobody can be asked any more.

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
            Address -> which worker must be there.
        wait_seconds : float
            How long they may take by intent.

        Returns
        -------
        dict or None
            Address -> reply. None: the workers are not connected (yet, or any more). Some may
            have heard the message.
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
        """End what is under way, and ask nobody any more."""
        self.is_over = True
        task = self._task
        if task is not None:
            with suppress(RuntimeError):  # its loop has closed meanwhile
                task.get_loop().call_soon_threadsafe(task.cancel)

    def close(self) -> None:
        """Let go of the connections."""
        self.hang_up()
        with self._lock:
            self._drop()

    # ---- within, with the lock

    def _open(self, incarnations: Mapping[str, str]) -> None:
        with self._lock:
            self._run(self._connect(incarnations))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run the loop for some work; None where it failed, and then all is over."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        task = self._task = self._loop.create_task(work)
        try:
            if self.is_over:  # since before there was a task to cancel
                task.cancel()
            return self._loop.run_until_complete(task)
        except (Exception, asyncio.CancelledError) as error:
            logger.info("Going on through the scheduler alone: %r", error)
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
        comm.allow_offload = False  # or each message is weighed, longer than it takes to pack
        try:
            await comm.write({"op": OPERATION, "call": "hello", "reply": True})
            answer = await comm.read()
            # Behind another network's address may be anybody.
            if answer.get("incarnation") != incarnation:
                raise ConnectionError(f"at {address} is not the worker that it was, but {answer}")
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
