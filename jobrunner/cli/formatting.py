"""Format metrics and tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jobrunner.texts import printable

_SHOWN_METRICS = 4


def format_metrics(metrics: Mapping[str, object]) -> list[str]:
    """Format the first few numeric metrics as ``name=value``."""
    shown = []
    for name, value in metrics.items():
        if name == "epoch":
            continue
        try:
            shown.append(f"{name}={float(value):.4g}")  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            continue
    return shown[:_SHOWN_METRICS]


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
