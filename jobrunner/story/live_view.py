"""Show a run while it runs: choose where, pass on what happens, and draw its state now and then."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self, TextIO

from jobrunner.cluster import Session
from jobrunner.story.live import RunState
from jobrunner.story.places import (
    Dashboard,
    JSONLines,
    Lines,
    Notebook,
    Terminal,
    View,
    has_dashboard,
    is_terminal,
)
from jobrunner.texts import get_logger

logger = get_logger(__name__)

LOOK_SECONDS = 0.5
"""How often to see whether it is time to draw, at least."""
DRAWING_SHARE = 800
"""Drawing may take one of so many seconds."""


class Live:
    """Shows a run in a view: its `state` is the callback, and it is the context to run in."""

    def __init__(self, view: View, clock: Callable[[], float] = time.monotonic) -> None:
        # Signal handlers put events, too, which this kind of queue allows.
        self._events: queue.SimpleQueue[tuple[str, Mapping[str, Any]] | None] = queue.SimpleQueue()
        self.state = RunState(self._tell, clock)
        self._view = view
        self._has_failed = False
        self._warnings = _Warnings(self._tell)
        self._rest_seconds = view.interval_seconds
        self._clock = clock
        self._drawn_at = clock()
        self._drawn = self.state.mark
        work = partial(contextvars.copy_context().run, self._work)  # a notebook's cell is in there
        self._thread = threading.Thread(target=work, name="jobrunner-view", daemon=True)

    def _tell(self, event: str, facts: Mapping[str, Any]) -> None:
        """Let the view show an event, soon."""
        self._events.put((event, facts))

    def look(self) -> None:
        """Draw if it is time."""
        seconds = self._clock() - self._drawn_at
        is_new = self.state.mark != self._drawn
        if seconds >= self._rest_seconds and (is_new or seconds >= self._view.repeat_seconds):
            self._draw()

    def _draw(self) -> None:
        self._drawn_at, self._drawn = self._clock(), self.state.mark
        started = time.thread_time()
        self._show(lambda: self._view.draw(self.state.now()))
        used_seconds = time.thread_time() - started
        self._rest_seconds = max(self._view.interval_seconds, DRAWING_SHARE * used_seconds)

    def _work(self) -> None:
        seconds = min(self._view.interval_seconds, LOOK_SECONDS)
        while True:
            with contextlib.suppress(queue.Empty):
                event = self._events.get(timeout=seconds)
                if event is None:
                    return
                self._show(self._view.tell, *event)
            self.look()

    def __enter__(self) -> Self:
        if self._view.shows_lines:  # else Python itself writes warnings, to stderr
            logging.getLogger("jobrunner").addHandler(self._warnings)
        self._show(self._view.open)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger("jobrunner").removeHandler(self._warnings)
        try:
            self._events.put(None)
            self._thread.join()
            if self.state.mark != self._drawn or self._view.repeat_seconds <= 1:
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


class _Warnings(logging.Handler):
    """Shows logged warnings in a view, so that they do not cut through it."""

    def __init__(self, tell: Callable[[str, Mapping[str, Any]], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        """Show one warning."""
        self._tell("warning", {"level": record.levelname.lower(), "message": record.getMessage()})


# ---- where


@contextlib.contextmanager
def show_run(progress: bool | None, session: Session) -> Iterator[Sequence[object]]:
    """Show the run in the block, and yield the callbacks that do; None: where somebody looks.

    It is also shown on the dashboard of the session's scheduler, if that shows runs.
    """
    with contextlib.ExitStack() as views:
        shown = []
        if progress is None:
            progress = _is_watched()
        if progress and _is_notebook():
            shown.append(views.enter_context(Live(Notebook())))
        elif progress:
            shown.append(views.enter_context(show_on(sys.stderr)))
        if has_dashboard(session.client):
            shown.append(views.enter_context(Live(Dashboard(session.client))))
        yield [live.state for live in shown]


def show_on(stream: TextIO | None) -> Live:
    """Show a run on a stream: on a terminal as lines that change, else line by line."""
    if stream is not None and is_terminal(stream):
        return Live(Terminal(stream))
    return Live(Lines(stream))


def show_lines(stream: TextIO) -> Live:
    """Show a run as JSON objects, one a line."""
    return Live(JSONLines(stream))


def _is_watched() -> bool:
    """Whether somebody looks, and not at tests."""
    return (_is_notebook() or is_terminal(sys.stderr)) and "PYTEST_CURRENT_TEST" not in os.environ


def _is_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")
