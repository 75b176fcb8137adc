"""4 run: an operation under way on a worker, from its first message to its reply."""

from __future__ import annotations

import asyncio

from jobrunner.worker.outbox import Message
from jobrunner.worker.start_gate import StartGate


class Operation:
    """Something under way on the worker, and in the end its reply."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.start_gate: StartGate | None = None  # of a run whose tasks wait to be heard of
        self._reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def finish(self, reply: Message) -> None:
        """Say what came of it; the first one counts.

        But that all is done was said too early where a worker then could not be handed its values.
        """
        if self._reply.done():
            if self._reply.result()["status"] != "done" or "suspect" not in reply:
                return
            self._reply = asyncio.get_running_loop().create_future()
        self._reply.set_result(reply)

    @property
    def is_done(self) -> bool:
        """Whether the reply is there."""
        return self._reply.done()

    async def reply(self, wait_seconds: float) -> Message | None:
        """The reply, if it is there within that time, and before there is news to tell."""
        if not self._reply.done():
            if self.start_gate is None:
                await asyncio.wait((self._reply,), timeout=wait_seconds)
            else:
                await self._wait_for_news(wait_seconds, self.start_gate)
        return self._reply.result() if self._reply.done() else None

    async def _wait_for_news(self, wait_seconds: float, start_gate: StartGate) -> None:
        start_gate.clear()
        news = asyncio.ensure_future(start_gate.news())
        await asyncio.wait(
            (self._reply, news), timeout=wait_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        news.cancel()
        start_gate.tell()
