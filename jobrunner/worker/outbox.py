"""4 run: values on their way from one worker to others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from distributed.protocol.serialize import to_serialize

Message = dict[str, Any]
RunValues = list[list[Any]]
"""Numbers of runs, and for each a list of crossings with the frames of their values."""

SMALL_FRAME_BYTES = 1 << 16
"""Up to here a copy is cheaper than a frame of its own."""


class Outbox:
    """Sends what threads make, to each address one message after another.

    What is made while a message is under way goes with the next one, all together.

    Parameters
    ----------
    push : callable
        ``await push(address, batch)`` hands over what was made, the values of each run under its
        number; it gives None, or says what went wrong.
    failed : callable
        Takes address, the run's number and what went wrong.
    sent : callable
        Takes nothing; called when a message has been taken.

    Notes
    -----
    `put` may be called in any thread; all else happens on the loop it was made on.
    """

    def __init__(
        self,
        push: Callable[[str, RunValues], Awaitable[str | None]],
        failed: Callable[[str, int, str], None],
        sent: Callable[[], None],
    ) -> None:
        self._push = push
        self._failed = failed
        self._sent = sent
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._made: list[tuple[int, tuple[str, ...], int, list[Any]]] = []
        self._number = 0
        self._pending: dict[str, dict[int, list[Any]]] = {}
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._under_way: dict[str, int] = {}  # address -> bytes

    def waiting_bytes(self) -> int:
        """How much was made and not yet taken; what goes to several workers counts for each."""
        with self._lock:
            made = sum(size_of(frames) * len(to) for _, to, _, frames in self._made)
        pending = sum(
            size_of(frames)
            for runs in self._pending.values()
            for values in runs.values()
            for _, frames in values
        )
        return made + pending + sum(self._under_way.values())

    def start(self, number: int) -> None:
        """Drop what is left of runs before that one."""
        with self._lock:
            self._made, self._pending = [], {}
        self._number = number

    def put(
        self, number: int, addresses: tuple[str, ...], crossing: int, frames: list[Any]
    ) -> None:
        """Send a value of that run to some workers."""
        with self._lock:
            is_first = not self._made
            self._made.append((number, addresses, crossing, frames))
        if is_first:
            self._loop.call_soon_threadsafe(self._sort)

    def close(self) -> None:
        """Stop sending."""
        for task in self._sending.values():
            task.cancel()

    def _sort(self) -> None:
        with self._lock:
            made, self._made = self._made, []
        for number, addresses, crossing, frames in made:
            for address in addresses if number >= self._number else ():
                values = self._pending.setdefault(address, {}).setdefault(number, [])
                values.append((crossing, frames))
                if address not in self._sending:
                    self._sending[address] = asyncio.ensure_future(self._send_to(address))

    async def _send_to(self, address: str) -> None:
        newest, problem = self._number, None
        try:
            while problem is None and (runs := self._pending.pop(address, None)):
                newest = max(runs)
                batch = [
                    [number, [[crossing, wrap_frames(frames)] for crossing, frames in values]]
                    for number, values in runs.items()
                ]
                self._under_way[address] = sum(
                    size_of(frames) for values in runs.values() for _, frames in values
                )
                problem = await self._push(address, batch)
                del self._under_way[address]
                if problem is None:
                    self._sent()
        finally:
            self._under_way.pop(address, None)
            del self._sending[address]
        if problem is not None and newest >= self._number:
            self._failed(address, newest, problem)


def size_of(frames: Sequence[Any]) -> int:
    """How many bytes frames have, here or as they came over the wire."""
    return sum(memoryview(frame).nbytes for frame in frames)


def wrap_frames(frames: Sequence[Any]) -> list[Any]:
    """Frames for a message: small ones within it, others beside it, not copied."""
    return [
        bytes(frame) if memoryview(frame).nbytes <= SMALL_FRAME_BYTES else to_serialize(frame)
        for frame in frames
    ]
