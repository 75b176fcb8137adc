"""Show a run while it runs: pass on what happens, and draw its state now and then."""

from __future__ import annotations

import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Protocol, Self

from jobrunner.texts import get_logger
from jobrunner.view.prints import Where
from jobrunner.view.state import LONG_SECONDS, RunState
from jobrunner.view.watcher import Watcher

logger = get_logger(__name__)

LOOK_SECONDS = 0.5
"""How often to look, at least."""
DRAWING_SHARE = 400
"""Drawing may take one of so many seconds."""
MOST_WAITING = 10_000
"""While more events wait for the view, workers keep what tasks print."""


class View(Protocol):
    """A way to show a run. One thread calls it."""

    def open(self) -> None:
        """Begin."""

    def tell(self, event: str, about: Mapping[str, Any]) -> None:
        """Show an event."""

    def draw(self, known: Mapping[str, Any]) -> None:
        """Show a state, as `RunState.to_dict` gives it, in place of the one before."""

    def close(self) -> None:
        """End; what was drawn last stays."""


class Live:
    """Shows a run in a view: its `state` is the callback, and it is the context to run in.

    Draws what is new, at most once per interval. Without anything new, draws a group that runs for
    long again after `patience_seconds`, and after twice that time each time; 0: draws in any case.
    It shows what tasks print and what is logged if `where` is given: see `prints.listen` for that
    and `here`.
    """

    def __init__(
        self,
        view: View,
        *,
        interval_seconds: float,
        patience_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        here: Collection[str] = (),
        where: Where | None = None,
    ) -> None:
        # Signal handlers put events, too, which this kind of queue allows.
        self._events: queue.SimpleQueue[tuple[str, Mapping[str, Any]] | None] = queue.SimpleQueue()
        self.state = RunState(self.tell, clock)
        look_seconds = 2 * interval_seconds
        self._watcher = Watcher(self.state, self.tell, here, where, self._has_room, look_seconds)
        self._view = view
        self._has_failed = False
        self._warnings = _Warnings(self.tell)
        self._shows_lines = where is not None
        self._interval_seconds = self._rest_seconds = interval_seconds
        self._patience_seconds = self._pause_seconds = patience_seconds
        self._clock = clock
        self._drawn_at = clock()
        self._drawn = self.state.mark
        work = partial(contextvars.copy_context().run, self._work)  # a notebook's cell is in there
        self._thread = threading.Thread(target=work, name="jobrunner-view", daemon=True)

    def tell(self, event: str, about: Mapping[str, Any]) -> None:
        """Let the view show an event, soon."""
        if event == "over":
            self._watcher.end()
            return
        if event == "placement":
            self._watcher.begin()
            return
        self._events.put((event, about))

    def look(self) -> None:
        """Draw if it is time."""
        seconds = self._clock() - self._drawn_at
        if seconds < self._rest_seconds:
            return
        if self.state.mark != self._drawn:
            self._pause_seconds = self._patience_seconds
        elif self._patience_seconds:
            run = self.state.under_way()
            if run is None or run.seconds < LONG_SECONDS or seconds < self._pause_seconds:
                return
            self._pause_seconds *= 2
        self._draw()

    def _draw(self) -> None:
        self._drawn_at, self._drawn = self._clock(), self.state.mark
        started = time.thread_time()
        self._show(lambda: self._view.draw(self.state.to_dict()))
        took = time.thread_time() - started
        self._rest_seconds = max(self._interval_seconds, DRAWING_SHARE * took)

    def _work(self) -> None:
        seconds = min(self._interval_seconds, LOOK_SECONDS)
        while True:
            try:
                event = self._events.get(timeout=seconds)
                if event is None:
                    return
                self._show(self._view.tell, *event)
            except queue.Empty:
                pass
            self.look()

    def _has_room(self) -> bool:
        return self._events.qsize() < MOST_WAITING

    def __enter__(self) -> Self:
        if self._shows_lines:  # else Python itself writes warnings, to stderr
            logging.getLogger("jobrunner").addHandler(self._warnings)
        self._show(self._view.open)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("jobrunner").removeHandler(self._warnings)
        try:
            self._watcher.end()
            self._events.put(None)
            self._thread.join()
            if self.state.mark != self._drawn or not self._patience_seconds:
                self._draw()
        finally:
            self._events.put(None)  # again: it may have been Ctrl-C
            self._show(self._view.close)

    def _show(self, call: Callable[..., None], *args: Any) -> None:
        """Call the view, which must not end the run; after an error, only close it."""
        if self._has_failed and call != self._view.close:
            return
        try:
            call(*args)
        except Exception as error:
            self._has_failed = True
            logging.getLogger("jobrunner").removeHandler(self._warnings)
            logger.warning("The run is no longer shown: %s: %s", type(error).__name__, error)
            self._watcher.end()


class _Warnings(logging.Handler):
    """Shows logged warnings in a view, so that they do not cut through it."""

    def __init__(self, tell: Callable[[str, Mapping[str, Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Show one warning."""
        self._tell("warning", {"level": record.levelname.lower(), "message": record.getMessage()})
