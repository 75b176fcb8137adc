"""Format tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from jobrunner.texts import printable


def format_age(then: float | None, now: float) -> str:
    """How long before `now` something was, both in seconds since 1970."""
    if then is None:
        return "-"
    seconds = max(0.0, now - then)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def cells(text: str) -> int:
    """How many cells of a terminal a text takes: two for 日, none for an accent put on a letter."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def fit_items(items: Sequence[str], width: int) -> str:
    """The items in one line; of those that do not fit, "…"."""
    text = " ".join(items)
    count = len(items)
    while cells(text) > width and count:
        count -= 1
        text = " ".join([*items[:count], "…"])
    return text


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


def format_table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Align columns to the left, and those in `right` to the right; a row is a line."""
    rows = [[printable(cell, kept="") for cell in row] for row in rows]
    widths = [max(map(cells, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        line = ""
        for i, (cell, width) in enumerate(zip(row, widths, strict=True)):
            gap = " " * (width - cells(cell))
            line += f"  {gap}{cell}" if i in right else f"  {cell}{gap}"
        lines.append(line[2:].rstrip())
    return "\n".join(lines)
