"""Sends values and notes from this worker to others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from distributed.protocol.serialize import to_serialize

from jobrunner.texts import get_logger

logger = get_logger(__name__)

Message = dict[str, Any]
Frames = Annotated[Sequence[Any], msgspec.Meta(min_length=1)]
RunValues = Sequence[tuple[int, Sequence[tuple[int, Frames]]]]
"""Items ``(run number, [(crossing, frames), ...])``."""

SMALL_FRAME_BYTES = 1 << 16
"""Up to this size it is cheaper to copy a frame into its message."""

PING_SECONDS = 5.0
"""A ping of a worker, or of the scheduler, must be answered within this time, or `silence_seconds`."""

ABORT_SECONDS = 5.0


@dataclass(eq=False)
class Outbox:
    """Sends values to other workers: to each address one message at a time.

    Values made meanwhile travel together in the next message. Any thread may call `put`; everything
    else runs on the event loop that the outbox was made on.
    """

    binding: str
    call_peer: Callable[[str, Message], Awaitable[Message]]
    silence_seconds: float  # a worker that leaves a message unanswered so long must answer a ping
    failed: Callable[[str, RunValues, str], None]  # gets the address, values not taken, the problem
    sent: Callable[[], None]  # called each time a worker has taken a message

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._made: list[tuple[int, tuple[str, ...], int, list[Any]]] = []
        self._number = 0
        self._pending: dict[str, dict[int, list[Any]]] = {}
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._sending_bytes: dict[str, int] = {}

    def waiting_bytes(self) -> int:
        """Bytes not yet taken by other workers; a value for several workers counts for each."""
        with self._lock:
            total = sum(frame_bytes(frames) * len(to) for _, to, _, frames in self._made)
        pending = sum(map(_values_bytes, self._pending.values()))
        return total + pending + sum(self._sending_bytes.values())

    def start(self, number: int) -> None:
        """Drop unsent values of runs before `number`."""
        with self._lock:
            self._made, self._pending = [], {}
        self._number = number

    def put(
        self, number: int, addresses: tuple[str, ...], crossing: int, frames: list[Any]
    ) -> None:
        """Send a value of run `number` to other workers."""
        with self._lock:
            is_first = not self._made
            self._made.append((number, addresses, crossing, frames))
        if is_first:
            self._loop.call_soon_threadsafe(self._sort)

    async def abort(self, address: str, number: int, reason: str) -> None:
        """Ask another worker to start nothing more of a run."""
        message = {"call": "abort", "binding": self.binding, "number": number, "reason": reason}
        try:
            await asyncio.wait_for(self.call_peer(address, message), ABORT_SECONDS)
        except Exception:  # the client also aborts it
            logger.info("Could not abort the run on %s (%s)", address, reason, exc_info=True)

    def close(self) -> None:
        """Stop sending."""
        for task in self._sending.values():
            task.cancel()

    def _sort(self) -> None:
        with self._lock:
            values, self._made = self._made, []
        for number, addresses, crossing, frames in values:
            for address in addresses if number >= self._number else ():
                pending = self._pending.setdefault(address, {}).setdefault(number, [])
                pending.append((crossing, frames))
                if address not in self._sending:
                    self._sending[address] = asyncio.ensure_future(self._send_to(address))

    async def _send_to(self, address: str) -> None:
        values: RunValues = []
        problem = None
        try:
            while problem is None and (runs := self._pending.pop(address, None)):
                # Lists, since Dask's messages within a process lose what is apart in tuples.
                lists: Any = [
                    [number, [[crossing, wrap_frames(frames)] for crossing, frames in run_values]]
                    for number, run_values in runs.items()
                ]
                values = lists
                self._sending_bytes[address] = _values_bytes(runs)
                problem = await self._push(address, values)
                del self._sending_bytes[address]
                if problem is None:
                    self.sent()
        finally:
            self._sending_bytes.pop(address, None)
            del self._sending[address]
        if problem is not None and max(number for number, _ in values) >= self._number:
            self.failed(address, values, problem)

    async def _push(self, address: str, values: RunValues) -> str | None:
        """Send values and wait until the worker has room for more; returns any problem."""
        message = {"call": "push", "binding": self.binding, "values": values}
        try:
            reply = await self._ask(address, message)
            while reply.get("is_full"):
                reply = await self._ask(address, {**message, "values": []})
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None if reply.get("status") == "done" else f"it replied {reply}"

    async def _ask(self, address: str, message: Message) -> Message:
        """Return a worker's reply. Large values may take any time, as long as pings are answered."""
        asking = asyncio.ensure_future(self.call_peer(address, message))
        ping_seconds = min(PING_SECONDS, self.silence_seconds)
        try:
            while not (await asyncio.wait((asking,), timeout=self.silence_seconds))[0]:
                ping = self.call_peer(address, {"call": "hello"})
                try:
                    await asyncio.wait_for(ping, ping_seconds)
                except TimeoutError:
                    seconds = self.silence_seconds + ping_seconds
                    raise TimeoutError(f"it did not answer within {seconds:g} s") from None
            return asking.result()
        finally:
            asking.cancel()


def frame_bytes(frames: Sequence[Any]) -> int:
    """Total size of frames."""
    return sum(memoryview(frame).nbytes for frame in frames)


def wrap_frames(frames: Sequence[Any]) -> list[Any]:
    """Prepare frames for a message: small ones inside it, large ones apart and not copied."""
    return [
        bytes(frame) if memoryview(frame).nbytes <= SMALL_FRAME_BYTES else to_serialize(frame)
        for frame in frames
    ]


def _values_bytes(runs: dict[int, list[Any]]) -> int:
    return sum(frame_bytes(frames) for values in runs.values() for _, frames in values)
