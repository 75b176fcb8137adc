"""Choose the view for a stream."""

from __future__ import annotations

from typing import TextIO

from jobrunner.view.lines import JSONLines, Lines
from jobrunner.view.live import Live


def show_on(stream: TextIO) -> Live:
    """Show a run on a stream: on a terminal as lines that change, else line by line."""
    if stream.isatty():
        from jobrunner.view.terminal import Terminal

        return Live(Terminal(stream), interval_seconds=0.2)
    return Live(Lines(stream), interval_seconds=1.0, patience_seconds=10.0)


def show_lines(stream: TextIO) -> Live:
    """Show a run as JSON objects, one a line."""
    return Live(JSONLines(stream), interval_seconds=1.0, patience_seconds=10.0)
