"""What the sections of a report are made of. Pure: no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jobrunner.report.story import RunStory
from jobrunner.texts import Html, counted, format_seconds, format_time, tag

MOST_ROWS = 50  # of a table
MOST_MARKS = 100  # of a chart

PARTS: Mapping[str, tuple[str, str]] = {
    "compute": ("Compute", "epochs that count"),
    "start": ("Start", "until the first epoch began"),
    "save_wait": ("Save wait", "the run waited for a save"),
    "redone": ("Redone", "epochs that were lost, and so ran in vain"),
    "recovery": ("Recovery", "from a loss to the next epoch; moves to other workers"),
    "idle": ("Idle", "all else: callbacks, and the upload, download and exit groups"),
}
"""The parts of a ledger -> their titles and what they mean."""


def section(title: str, *content: object) -> Html:
    """A part of the page."""
    return tag("section", tag("h2", title), *content)


def scrolled(what: str, content: Html) -> Html:
    """A table that is scrolled if it is wider than the screen, also by keyboard."""
    return tag("div", content, class_="scroll", tabindex=0, role="region", aria_label=what)


def note(text: str) -> Html:
    """A remark; nothing if there is none."""
    return tag("p", text, class_="quiet") if text else Html("")


def newest(items: Sequence[object], most: int, what: str) -> Html:
    """A remark if only the last `most` items are shown."""
    return note(f"The newest {most} of {counted(len(items), what)}." if len(items) > most else "")


def first(items: Sequence[object], most: int, what: str) -> Html:
    """A remark if only the first `most` items are shown."""
    return note(f"The first {most} of {counted(len(items), what)}." if len(items) > most else "")


def name_run(run: RunStory) -> str:
    """A run in one line."""
    since = (
        "from the start" if run.resumed_from is None else f"resumed from epoch {run.resumed_from}"
    )
    length = format_seconds(max(0.0, run.last_seen - run.began))
    return f"Run {run.number}: {run.state}, {since}, {length}, began {format_time(run.began)}"


def share(part: float, whole: float) -> str:
    """A share as a percentage."""
    return f"{part / whole:.1%}" if whole > 0 else ""


def swatch(kind: str) -> Html:
    """A sample of the colour of a kind."""
    return tag("i", class_=f"swatch {kind}", aria_hidden="true")


def legend(kinds: Mapping[str, str]) -> Html:
    """What the colours of a drawing mean."""
    items = [tag("li", swatch(kind), text) for kind, text in kinds.items()]
    return tag("ul", *items, class_="legend")
