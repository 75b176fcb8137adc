"""Tables for people: a column is one line of code, a row one line of text.

Rich's tables would do, but take 60 times as long: most of a second for 2,000 epochs.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from jobrunner.texts import printable

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table."""

    title: str
    value: Callable[[Row], object]
    is_number: bool = False  # aligned to the right


def draw_table(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> list[str]:
    """The lines of a table; columns in which all rows are empty are left out."""
    shown = []
    for column in columns:
        texts = [printable(str(column.value(row)), kept="") for row in rows]
        if any(texts):
            shown.append(_align([column.title, *texts], column.is_number))
    return ["  ".join(cells).rstrip() for cells in zip(*shown, strict=True)]


def draw_rows(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table without titles."""
    columns = [[printable(cell, kept="") for cell in column] for column in zip(*rows, strict=True)]
    aligned = [_align(column, is_number=False) for column in columns]
    return ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]


def _align(texts: Sequence[str], is_number: bool) -> list[str]:
    width = max(map(count_cells, texts))
    aligned = []
    for text in texts:
        gap = " " * (width - count_cells(text))
        aligned.append(gap + text if is_number else text + gap)
    return aligned


def count_cells(text: str) -> int:
    """How many cells of a terminal a text takes: two for 日, none for an accent put on a letter."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def fit_items(items: Sequence[str], width: int | None) -> str:
    """The items in one line; "…" for those that do not fit."""
    text = " ".join(items)
    count = len(items)
    while width is not None and count_cells(text) > width and count:
        count -= 1
        text = " ".join([*items[:count], "…"])
    return text


def terminal_width() -> int | None:
    """The width of the terminal; None if stdout is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def format_age(then: float | None, now: float) -> str:
    """How long before `now` something was, both in seconds since 1970."""
    if then is None:
        return "-"
    seconds = max(0.0, now - then)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def format_briefly(seconds: float) -> str:
    """Format a duration in at most five characters."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f}ms" if seconds >= 0.0005 else "0"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes}m{rest:02}s" if minutes < 10 else f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    if hours < 100:
        return f"{hours}h{minutes:02}m" if hours < 10 else f"{hours}h"
    return f"{hours // 24}d"


def draw_with_items(
    columns: Sequence[Column[Row]],
    rows: Sequence[Row],
    items: Sequence[Sequence[str]],
    width: int | None,
) -> list[str]:
    """The lines of a table; below each row its items, as many as fit."""
    titles, *drawn = draw_table(columns, rows)
    lines = [titles]
    for line, row_items in zip(drawn, items, strict=True):
        lines.append(line)
        if row_items:
            escaped = [printable(item, kept="") for item in row_items]
            lines.append(f"  {fit_items(escaped, None if width is None else width - 2)}")
    return lines
