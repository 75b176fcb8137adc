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


def fit_items(items: Sequence[str], width: int) -> str:
    """The items in one line; of those that do not fit, "…"."""
    text = " ".join(items)
    count = len(items)
    while len(text) > width and count:
        count -= 1
        text = " ".join([*items[:count], "…"])
    return text


def format_table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Align columns to the left, and those in `right` to the right; a row is a line."""
    rows = [[printable(cell, kept="") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
