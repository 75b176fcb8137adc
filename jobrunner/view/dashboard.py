"""Tell a Dask scheduler that shows runs on its dashboard what is known of a run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jobrunner.texts import printable

if TYPE_CHECKING:
    from distributed import Client

RUNS, IS_SHOWN = "jobrunner", "jobrunner-dashboard"
"""Keys of the scheduler's metadata: client -> run -> what is known of it; whether it shows runs."""

ASK_SECONDS = 5.0
MOST_NODES = 1000  # of which the scheduler is told
MOST_RUNS = 20  # of a session


def has_dashboard(client: Client) -> bool:
    """Whether the scheduler has loaded `jobrunner.dashboard`. Not for the client's event loop."""
    if client.status != "running":
        return False

    async def ask() -> Any:
        return await client.get_metadata(IS_SHOWN, default=None)

    loop: Any = client.loop
    with contextlib.suppress(Exception):  # then nothing is shown there
        asked = asyncio.run_coroutine_threadsafe(ask(), loop.asyncio_loop)
        return asked.result(ASK_SECONDS) is not None
    return False


class OnDashboard:
    """A view on the dashboard of a client's scheduler."""

    def __init__(self, client: Client, run: str) -> None:
        self._client = client
        self._keys = [RUNS, client.id, run]
        self._is_sending = False
        self._unsent: deque[Mapping[str, Any] | None] = deque(maxlen=1)

    def open(self) -> None:
        """Nothing to begin."""

    def tell(self, event: str, about: Mapping[str, Any]) -> None:
        """Events are part of the state."""

    def draw(self, known: Mapping[str, Any]) -> None:
        """Send a state."""
        # Dask's messages have ints of 64 bits, and no text that is not Unicode.
        metrics = {
            printable(name): value
            for name, value in known["metrics"].items()
            if not isinstance(value, int) or value.bit_length() < 64
        }
        nodes = known["nodes"][:MOST_NODES]
        self._send({**known, "nodes": nodes, "metrics": metrics, "time": time.time()})

    def close(self) -> None:
        """The last state stays until `forget`."""

    def forget(self) -> None:
        """Let the scheduler forget the run."""
        self._send(None)

    def _send(self, known: Mapping[str, Any] | None) -> None:
        """Send a state, unless a newer one comes while the one before is on its way."""
        self._unsent.append(known)

        async def send() -> None:
            if self._is_sending:
                return
            self._is_sending = True
            try:
                while self._unsent:
                    with contextlib.suppress(Exception):  # the run notices itself that it is alone
                        await self._client.set_metadata(self._keys, self._unsent.pop())
            finally:
                self._is_sending = False

        loop: Any = self._client.loop
        with contextlib.suppress(RuntimeError):  # the client's event loop has ended
            loop.add_callback(send)
