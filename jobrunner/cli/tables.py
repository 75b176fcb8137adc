"""Tables for people: a column is one line of code, a row one line of text.

Rich's tables would do, but take 60 times as long: most of a second for 2,000 epochs.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_GAP = "  "
_INDENT = "      "


class Column(NamedTuple):
    """A column of a table: what rows have under a key, and how it is written."""

    title: str
    key: str
    text: Callable[[Any], str] = str


def draw_table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The lines of a table: numbers to the right, and no column in which all rows are empty."""
    shown = []
    for column in columns:
        texts = [column.title]
        align = str.ljust
        for row in rows:
            value = row.get(column.key)
            texts.append("" if value is None else column.text(value))
            if isinstance(value, int | float):
                align = str.rjust
        if any(texts[1:]):
            width = max(map(len, texts))
            shown.append([align(text, width) for text in texts])
    room = math.inf
    if sys.stdout.isatty():  # which would break lines anywhere
        room = shutil.get_terminal_size().columns
    return join_cells(shown, room)


def join_cells(columns: Sequence[Sequence[str]], room: float) -> list[str]:
    """The rows of some columns; what is too much for a line continues in the next, indented."""
    if not columns:
        return []
    parts: list[list[Sequence[str]]] = [[]]
    used = 0
    for cells in columns:
        used += len(cells[0])
        if parts[-1] and used > room:
            parts.append([])
            used = len(_INDENT) + len(cells[0])
        parts[-1].append(cells)
        used += len(_GAP)
    lines = []
    for row in range(len(columns[0])):
        indent = ""
        for part in parts:
            text = _GAP.join([cells[row] for cells in part]).rstrip()
            if text:
                lines.append(indent + text)
            indent = _INDENT
    return lines
