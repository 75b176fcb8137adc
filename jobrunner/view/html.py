"""A run's state as HTML, for notebooks and dashboards; readable on light and dark pages."""

from __future__ import annotations

from itertools import groupby, islice
from operator import itemgetter

from jobrunner.texts import (
    Html,
    counted,
    format_bytes,
    format_seconds,
    join,
    metric_texts,
    table,
    tag,
)
from jobrunner.view import wording
from jobrunner.view.wording import Known

MOST_NODES, MOST_METRICS = 200, 40
"""Rows that are drawn."""


def draw(known: Known) -> Html:
    """Draw a state, as `RunState.to_dict` gives it."""
    phase = wording.PHASES.get(str(known["phase"]), str(known["phase"]))
    done = wording.share(known)
    bar = tag(
        "progress",
        aria_label="epochs",
        max="1",
        value=None if done is None else f"{done:.4f}",
        style="width: 100%",
    )
    facts = (
        wording.position(known),
        f"{format_seconds(known['seconds'])} elapsed",
        *wording.times(known),
        *wording.saves(known),
        *wording.workers(known),
        wording.under_way(known),
    )
    troubles = [*wording.troubles(known), *([known["error"]] if known["error"] else [])]
    return tag(
        "section",
        tag("div", tag("strong", known["job"]), " ", phase, style="font-size: 1.15em"),
        bar if known["phase"] not in ("stopped", "failed") else "",
        tag("div", *_spaced(fact for fact in facts if fact)),
        tag("div", *_spaced(troubles), role="status", style="font-weight: bold")
        if troubles
        else "",
        _metrics(known),
        _nodes(known),
        *(tag("div", warning) for warning in known["warnings"]),
        class_="jobrunner-run",
    )


def _spaced(parts: object) -> list[object]:
    style = "display: inline-block; margin-right: 1.5em"
    return [tag("span", part, style=style) for part in parts]  # type: ignore[attr-defined]


def _metrics(known: Known) -> Html | str:
    whole = wording.shown_metrics(known)
    rows = list(islice(metric_texts(whole), MOST_METRICS))
    more = len(whole) - len(rows)
    rest = tag("div", f"and {counted(more, 'more metric')}") if more else ""
    return join((table(("metric", "value"), rows, left={0}), rest)) if rows else ""


def _nodes(known: Known) -> Html | str:
    """What each node does, by worker."""
    rows = []
    shown = sorted(known["nodes"], key=itemgetter("worker", "node"))[:MOST_NODES]
    for worker, nodes in groupby(shown, itemgetter("worker")):
        for i, node in enumerate(nodes):
            does = f"runs {node['task']}" if node["does"] == "runs" else node["does"]
            saved = node["saved_bytes"]
            size = "" if saved is None else format_bytes(saved)
            tasks = f"{node['ended']}/{node['tasks']}" if node["tasks"] else ""
            rows.append(("" if i else worker, node["node"], does, tasks, size))
    if not rows:
        return ""
    more = len(known["nodes"]) - len(rows)
    head = ("worker", "node", "does", "tasks", "saved")
    used = [0, 1, *((2, 3) if wording.takes_long(known) else ()), *((4,) if known["saved"] else ())]
    return join(
        (
            table(
                [head[i] for i in used],
                [[row[i] for i in used] for row in rows],
                left={at for at, i in enumerate(used) if i < 3},
            ),
            tag("div", f"and {counted(more, 'more node')}") if more else "",
        )
    )


def age(seconds: float) -> str:
    """How long ago a state was told, if that is long."""
    return f"last heard of {format_seconds(seconds)} ago" if seconds > 5 else ""
