"""Saves that fail in a row: when to warn of them, and when they end the run."""

from __future__ import annotations

import time
from collections.abc import Callable

from jobrunner.errors import CheckpointWriteError
from jobrunner.positions import Position
from jobrunner.texts import counted

LEAST_FAILED, FAILING_SECONDS = 3, 600.0
"""After so many failed saves in a row, over so long a time, the run ends."""


class FailedSaves:
    """The saves that have failed since the last one that succeeded."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self.count = 0
        self._last: Position | None = None
        self._since = 0.0

    def add(self, at: Position | None, error: BaseException, text: str) -> None:
        """Count a save, or if `at` is None an attempt to take the directory; warn if it is the first.

        Raises CheckpointWriteError if saves have failed for long: the run computes in vain.
        """
        now = time.monotonic()
        if self.count == 0:
            self._since = now
            self._warn(text)
        self.count += 1
        self._last = at
        seconds = now - self._since
        if self.count >= LEAST_FAILED and seconds >= FAILING_SECONDS:
            raise CheckpointWriteError(
                f"The last {self.count} saves have failed, for {seconds:.0f} s, so the run ends "
                f"instead of computing in vain: {error}"
            ) from error

    def end(self) -> None:
        """Say how many more have failed, once a save succeeds or the run ends."""
        more, self.count = self.count - 1, 0
        if more > 0:
            self._warn(f"{counted(more, 'more save')} failed, the last that of epoch {self._last}.")
