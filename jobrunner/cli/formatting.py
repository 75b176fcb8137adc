"""Format durations, times, metrics and tables for people."""

from __future__ import annotations

import datetime
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


def format_seconds(seconds: float) -> str:
    """Format a duration in ms, s, min or h."""
    if seconds < 0.01:
        return f"{seconds * 1e3:.2f} ms"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_time(text: str) -> str:
    """Format an ISO time as local time; another text stays as it is."""
    try:
        return datetime.datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError):
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
