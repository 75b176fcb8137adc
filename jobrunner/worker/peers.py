"""4 run: what a worker tells the others that take part in its runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from jobrunner.worker.outbox import Message, RunValues

logger = logging.getLogger(__name__)

PING_SECONDS = 5.0
"""How long another worker may take to say that it is there; or for as long as it may be silent."""

ABORT_SECONDS = 5.0


class Peers:
    """The other workers of a binding.

    Parameters
    ----------
    name : str
        The binding's.
    call : callable
        ``await call(address, message)`` gives another worker's reply.
    silence_seconds : float
        How long another worker may leave a message unanswered before it has to show, by the
        answer to a second one, that it can be reached.
    """

    def __init__(
        self,
        name: str,
        call: Callable[[str, Message], Awaitable[Message]],
        silence_seconds: float,
    ) -> None:
        self._name = name
        self._call = call
        self._silence_seconds = silence_seconds

    async def push(self, address: str, values: RunValues) -> str | None:
        """Hand over values, and wait until there is room for more; gives what went wrong."""
        message = {"call": "push", "binding": self._name, "values": values}
        try:
            reply = await self._ask(address, message)
            while reply.get("is_full"):
                reply = await self._ask(address, {**message, "values": []})
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None if reply.get("status") == "done" else f"it answered {reply}"

    async def abort(self, address: str, number: int, reason: str) -> None:
        """Tell a worker that nothing of a run is to start any more."""
        message = {"call": "abort", "binding": self._name, "number": number, "reason": reason}
        try:
            await asyncio.wait_for(self._call(address, message), ABORT_SECONDS)
        except Exception:  # the client tells it too
            logger.info("Could not tell %s that %s", address, reason, exc_info=True)

    async def _ask(self, address: str, message: Message) -> Message:
        """Another worker's reply; much may be long under way, so silence is what ends it."""
        asking = asyncio.ensure_future(self._call(address, message))
        ping_seconds = min(PING_SECONDS, self._silence_seconds)
        try:
            while not (await asyncio.wait((asking,), timeout=self._silence_seconds))[0]:
                try:
                    await asyncio.wait_for(self._call(address, {"call": "hello"}), ping_seconds)
                except TimeoutError:
                    seconds = self._silence_seconds + ping_seconds
                    raise TimeoutError(f"it did not answer within {seconds:g} s") from None
            return asking.result()
        finally:
            asking.cancel()
