"""Ask the workers what a view shows beside what the run tells: what tasks print, what has ended."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection
from functools import partial

from jobrunner.story.live import RunState, Tell
from jobrunner.story.prints import Where, listen

LOOK_SECONDS = 1.0
LOOKING_SHARE = 400
"""To look may keep a processor busy for one of so many seconds."""
PATIENCE_SECONDS = 1.0
"""How long a worker may take to answer; what it says later it says again."""

_ERRORS = Exception, asyncio.CancelledError
"""Of a look that failed: the run notices itself what is lost, and a view must not end it."""


class Watcher:
    """Asks the workers of a run now and then; for `here` and `where` see `prints.listen`.

    They keep what tasks print while `has_room` is false. Asks once per interval, or more rarely.
    """

    def __init__(
        self,
        state: RunState,
        tell: Tell,
        here: Collection[str],
        where: Where | None,
        has_room: Callable[[], bool],
        interval_seconds: float = 0.0,
    ) -> None:
        self._state = state
        self._tell = tell
        self._here, self._where = sorted(here), where
        self._has_room = has_room
        self._interval_seconds = max(LOOK_SECONDS, interval_seconds)
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="jobrunner-watcher", daemon=True)

    def begin(self) -> None:
        """Begin to look, or go on with other workers."""
        binding = self._state.binding
        if binding is None or self._is_over.is_set():
            return
        if not self._thread.ident:  # first: Ctrl-C may come while the workers are asked
            self._thread.start()
        if self._where is not None:
            about = binding.name, self._here, self._where
            with contextlib.suppress(*_ERRORS):
                binding.ask(listen, *about, patience=PATIENCE_SECONDS)
            binding.at_release.append(partial(self.look, is_over=True))

    def look(self, *, is_over: bool = False) -> None:
        """Ask all workers once, unless only their progress is of interest and is known."""
        binding = self._state.binding
        if binding is None:
            return
        with self._lock, contextlib.suppress(*_ERRORS):
            if self._where is None:
                is_known = time.monotonic() < binding.looked_at + self._rest_seconds
                if is_known or is_over:
                    return
            has_prints = self._where is not None and (is_over or self._has_room())
            left_out = 0
            for reply in binding.look(PATIENCE_SECONDS, prints=has_prints, is_over=is_over):
                left_out += reply.get("left_out", 0)
                for node, task, text in reply.get("lines", ()):
                    self._tell("print", {"node": node, "task": task, "text": text})
            if left_out:
                self._tell("prints_left_out", {"lines": left_out})

    def end(self) -> None:
        """Take what was printed last, and look no more."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        if self._thread.ident:
            self.look(is_over=True)
            self._thread.join()

    @property
    def _rest_seconds(self) -> float:
        binding = self._state.binding
        seconds = 0.0 if binding is None else binding.look_seconds
        return max(self._interval_seconds, LOOKING_SHARE * seconds)

    def _work(self) -> None:
        while not self._is_over.wait(self._rest_seconds):
            self.look()
