"""Format tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from jobrunner.texts import printable


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
