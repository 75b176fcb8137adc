"""Loops that end before the pass does."""

from __future__ import annotations

import time
from typing import Any, Self

from jobrunner.data.protocol import Reader
from jobrunner.errors import EndOfData


class LimitedReader:
    """Another reader, for loops that end after some batches or some time.

    Made by `limited`. Each loop (``for batch in reader``) counts anew. `finished` and the position
    are those of the other reader: they tell of the pass, not of the loop.
    """

    def __init__(self, reader: Reader, *, batches: int | None, seconds: float | None) -> None:
        self._reader = reader
        self._batches, self._seconds = batches, seconds
        self._taken = 0
        self._started: float | None = None  # with the loop's first read

    @property
    def finished(self) -> bool:
        """Whether the pass, not only the loop, has ended and the next has not begun."""
        return self._reader.finished

    def read(self) -> Any:
        """The next record or batch. Raises `EndOfData` at the end of the loop or the pass."""
        now = time.monotonic()
        if self._started is None:
            self._started = now
        if self._batches is not None and self._taken >= self._batches:
            raise EndOfData(
                f"The limit of {self._batches} batches is reached; the next loop goes on."
            )
        if self._seconds is not None and now - self._started >= self._seconds:
            raise EndOfData(f"The limit of {self._seconds:g} s is reached; the next loop goes on.")
        item = self._reader.read()
        self._taken += 1
        return item

    def state_dict(self) -> dict[str, Any]:
        """The position of the other reader, and how many batches the loop has read."""
        return {"reader": self._reader.state_dict(), "taken": self._taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. The time of a loop counts anew."""
        self._reader.load_state_dict(state["reader"])
        self._taken, self._started = state["taken"], None

    def __iter__(self) -> Self:
        iter(self._reader)
        self._taken, self._started = 0, None
        return self

    def __next__(self) -> Any:
        try:
            return self.read()
        except EndOfData:
            raise StopIteration from None
