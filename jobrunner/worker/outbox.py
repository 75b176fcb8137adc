"""Sends values and notes from this worker to others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distributed.protocol.serialize import to_serialize

from jobrunner.worker.messages import OPERATION, Message

SMALL_FRAME_BYTES = 1 << 16
"""Up to this size it is cheaper to copy a frame into its message."""

PING_SECONDS = 5.0
"""A ping of a worker, or of the scheduler, must be answered within this time, or `silence_seconds`."""


@dataclass(eq=False)
class Outbox:
    """Sends values to other workers: to each address one message at a time.

    Values made meanwhile travel together in the next message. Any thread may call `put`; everything
    else runs on the event loop that the outbox was made on.
    """

    binding: str
    call_peer: Callable[[str, str, Message], Awaitable[Any]]  # address, operation, message
    silence_seconds: float  # a worker that leaves a message unanswered so long must answer a ping
    failed: Callable[[str, int, str], None]  # gets the address, the latest run, the problem
    sent: Callable[[], None]  # called each time a worker has taken a message

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._number = 0
        self._pending: dict[str, dict[int, list[Any]]] = {}  # by address and run
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._sending_bytes: dict[str, int] = {}

    def waiting_bytes(self) -> int:
        """Bytes not yet taken by other workers; a value for several workers counts for each."""
        with self._lock:
            pending = sum(map(_values_bytes, self._pending.values()))
        return pending + sum(self._sending_bytes.values())

    def start(self, number: int) -> None:
        """Drop unsent values of runs before `number`."""
        with self._lock:
            self._pending, self._number = {}, number

    def put(
        self, number: int, addresses: tuple[str, ...], crossing: int, frames: list[Any]
    ) -> None:
        """Send a value of run `number` to other workers."""
        is_new = False
        with self._lock:
            if number < self._number:
                return
            for address in addresses:
                is_new = is_new or address not in self._pending
                runs = self._pending.setdefault(address, {})
                runs.setdefault(number, []).append((crossing, frames))
        if is_new:
            self._loop.call_soon_threadsafe(self._send)

    def close(self) -> None:
        """Stop sending."""
        for task in self._sending.values():
            task.cancel()

    def _send(self) -> None:
        with self._lock:
            idle = self._pending.keys() - self._sending.keys()
        for address in idle:
            self._sending[address] = asyncio.ensure_future(self._send_to(address))

    async def _send_to(self, address: str) -> None:
        problem, latest = None, 0
        try:
            while problem is None:
                with self._lock:
                    runs = self._pending.pop(address, None)
                if runs is None:
                    break
                latest = max(runs)
                self._sending_bytes[address] = _values_bytes(runs)
                problem = await self._push(address, runs)
                del self._sending_bytes[address]
                if problem is None:
                    self.sent()
        finally:
            self._sending_bytes.pop(address, None)
            del self._sending[address]
        if problem is not None and latest >= self._number:
            self.failed(address, latest, problem)

    async def _push(self, address: str, runs: dict[int, list[Any]]) -> str | None:
        """Send values and wait until the worker has room for more; returns any problem."""
        # Lists, since Dask's messages within a process lose what is apart in tuples.
        values = []
        for number, run_values in runs.items():
            wrapped = [[crossing, wrap_frames(frames)] for crossing, frames in run_values]
            values.append([number, wrapped])
        message = {"call": "push", "binding": self.binding, "values": values}
        try:
            reply = await self._ask(address, message)
            while reply.get("is_full"):
                reply = await self._ask(address, {**message, "values": []})
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if reply.get("status") != "done":
            return f"it replied {reply}"
        return None

    async def _ask(self, address: str, message: Message) -> Message:
        """Return a worker's reply. Large values may take any time, as long as pings are answered."""
        asking = asyncio.ensure_future(self.call_peer(address, OPERATION, message))
        ping_seconds = min(PING_SECONDS, self.silence_seconds)
        try:
            while not (await asyncio.wait((asking,), timeout=self.silence_seconds))[0]:
                try:
                    ping = self.call_peer(address, "identity", {})
                    await asyncio.wait_for(ping, ping_seconds)
                except TimeoutError:
                    seconds = self.silence_seconds + ping_seconds
                    raise TimeoutError(f"it did not answer within {seconds:g} s") from None
            reply: Message = asking.result()
            return reply
        finally:
            asking.cancel()


def frame_bytes(frames: Sequence[Any]) -> int:
    """Total size of frames."""
    return sum(memoryview(frame).nbytes for frame in frames)


def wrap_frames(frames: Sequence[Any]) -> list[Any]:
    """Prepare frames for a message: small ones inside it, large ones apart and not copied."""
    wrapped: list[Any] = []
    for frame in frames:
        if memoryview(frame).nbytes <= SMALL_FRAME_BYTES:
            wrapped.append(bytes(frame))
        else:
            wrapped.append(to_serialize(frame))
    return wrapped


def _values_bytes(runs: dict[int, list[Any]]) -> int:
    nbytes = 0
    for values in runs.values():
        for _, frames in values:
            nbytes += frame_bytes(frames)
    return nbytes
