"""Choose the view."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from jobrunner.cluster import Session
from jobrunner.view.dashboard import MOST_RUNS, OnDashboard, has_dashboard
from jobrunner.view.lines import JSONLines, Lines, is_terminal
from jobrunner.view.live import Live
from jobrunner.view.prints import names_of


@contextlib.contextmanager
def show_run(progress: bool | None, session: Session) -> Iterator[Sequence[object]]:
    """Show the run in the block, and yield the callbacks that do; None: where somebody looks.

    It is also shown on the dashboard of the session's scheduler, if that shows runs.
    """
    with contextlib.ExitStack() as views:
        shown = []
        if _is_watched() if progress is None else progress:
            shown.append(views.enter_context(_show_here()))
        if has_dashboard(session.client):
            view = OnDashboard(session.client, secrets.token_hex(4))
            if len(session.at_close) >= MOST_RUNS:
                session.at_close.pop(0)()
            session.at_close.append(view.forget)
            shown.append(views.enter_context(Live(view, interval_seconds=1.0)))
        yield [live.state for live in shown]


def show_on(stream: TextIO | None) -> Live:
    """Show a run on a stream: on a terminal as lines that change, else line by line."""
    if stream is not None and is_terminal(stream):
        from jobrunner.view.terminal import Terminal

        # Workers on this machine would print through the bar.
        here = names_of(stream)
        return Live(Terminal(stream), interval_seconds=0.2, here=here, where="take")
    here = names_of(stream) | names_of(sys.stdout) | names_of(None)
    return Live(
        Lines(stream), interval_seconds=1.0, patience_seconds=10.0, here=here, where="leave"
    )


def show_lines(stream: TextIO) -> Live:
    """Show a run as JSON objects, one a line."""
    view = JSONLines(stream)
    return Live(view, interval_seconds=1.0, patience_seconds=10.0, where="copy")


def _show_here() -> Live:
    if not _is_notebook():
        return show_on(sys.stderr)
    from jobrunner.view.notebook import Notebook

    # What workers print in this process, or to its console, would get to the cell once more.
    here = names_of(None) | names_of(sys.__stdout__) | names_of(sys.__stderr__)
    view = Notebook(lambda reason: live.state.stop(reason))
    live = Live(view, interval_seconds=0.5, here=here, where="take")
    return live


def _is_watched() -> bool:
    """Whether somebody looks, and not at tests."""
    return (_is_notebook() or is_terminal(sys.stderr)) and "PYTEST_CURRENT_TEST" not in os.environ


def _is_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")
