"""Choose the view."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from jobrunner.view.lines import JSONLines, Lines
from jobrunner.view.live import Live
from jobrunner.view.prints import names_of


@contextlib.contextmanager
def show_run(progress: bool | None) -> Iterator[Sequence[object]]:
    """Show the run in the block, and yield the callbacks that do; None: where somebody looks."""
    if progress is None:
        progress = _is_watched()
    if not progress:
        yield ()
        return
    with show_on(sys.stderr) as live:
        yield (live.state,)


def show_on(stream: TextIO) -> Live:
    """Show a run on a stream: on a terminal as lines that change, else line by line."""
    if stream.isatty():
        from jobrunner.view.terminal import Terminal

        # Workers on this machine would print through the bar.
        here = names_of(stream)
        return Live(Terminal(stream), interval_seconds=0.2, here=here, where="take")
    here = names_of(stream) | names_of(sys.stdout) | names_of(None)
    return Live(Lines(stream), interval_seconds=1.0, patience_seconds=10.0, here=here)


def show_lines(stream: TextIO) -> Live:
    """Show a run as JSON objects, one a line."""
    view = JSONLines(stream)
    return Live(view, interval_seconds=1.0, patience_seconds=10.0, where="copy")


def _is_watched() -> bool:
    """Whether stderr is a terminal or a notebook, and not that of tests."""
    return sys.stderr.isatty() and "PYTEST_CURRENT_TEST" not in os.environ
