"""A view in a notebook: HTML below the cell, which changes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jobrunner.texts import Html, counted, folded, join, printable, tag
from jobrunner.view import html, wording

SHOWN_LINES = 200
"""How many of the lines that stay, such as what tasks print, are kept: the notebook saves them."""


class Notebook:
    """Draws in the output of the cell that runs now; `stop` asks the run to stop."""

    def __init__(self, stop: Callable[[str], None]) -> None:
        self._stop = stop
        self._lines: deque[str] = deque(maxlen=SHOWN_LINES)
        self._num_lines = 0
        # A cell that waits for its run handles no clicks; one that awaits it does.
        self._can_click = threading.current_thread() is not threading.main_thread()
        self._button: Any = None

    def open(self) -> None:
        """Begin to draw."""
        from IPython.display import HTML, display

        self._handle = display(HTML(""), display_id=True)
        if self._can_click:
            try:
                import ipywidgets
            except ImportError:
                return
            self._button = ipywidgets.Button(
                description="Stop after this epoch", layout={"width": "auto"}
            )
            self._button.on_click(lambda _: self._stop("the button"))
            display(self._button)

    def tell(self, event: str, about: Mapping[str, Any]) -> None:
        """Add an event that needs words to the lines that stay."""
        lines = printable(wording.told(event, about)).splitlines()
        self._num_lines += len(lines)
        self._lines.extend(lines)

    def draw(self, known: Mapping[str, Any]) -> None:
        """Draw a state in place of the one before."""
        from IPython.display import HTML

        if known["phase"] == "stopped":  # IPython says why, just below
            known = {**known, "error": None}
        page = join((html.draw(known), _fold(self._lines, self._num_lines)))
        self._handle.update(HTML(str(page)))

    def close(self) -> None:
        """End; what was drawn last stays."""
        if self._button is not None:
            self._button.close()


def _fold(lines: Sequence[str], count: int) -> Html | str:
    """The last lines, shown on a click."""
    if not count:
        return ""
    left_out = count - len(lines)
    first = [f"[{counted(left_out, 'earlier line')}]"] if left_out else []
    style = "max-height: 20em; overflow: auto; white-space: pre-wrap"
    text = tag("pre", join(f"{line}\n" for line in (*first, *lines)), style=style)
    return folded(f"{counted(count, 'line')} of output", text)
