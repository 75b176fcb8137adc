"""What views say, in words: of events, and of a run's state as `RunState.to_dict` gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jobrunner.texts import (
    counted,
    format_bytes,
    format_metrics,
    format_seconds,
    listed,
    printable,
    whole_metrics,
)
from jobrunner.view.state import LONG_SECONDS

Known = Mapping[str, Any]
"""A run's state, as `RunState.to_dict` gives it; or what is known of an event."""

PHASES = {
    "starting": "starts",
    "init": "runs its init group",
    "loading": "loads a checkpoint",
    "epochs": "runs",
    "recovering": "recovers from a loss",
    "finished": "has finished",
    "stopped": "was stopped",
    "failed": "has failed",
}
"""What the job does in a phase."""
ENDS = ("finished", "stopped", "failed")
"""The phases after a run."""
GROUPS_SECONDS = 2.0
"""Epochs of this length show what each node does, also just after one has begun."""


class Node(NamedTuple):
    """A row of what nodes do."""

    name: str
    share: float | None  # of its tasks that have ended, in the epoch or group that runs
    does: str


def told(event: str, about: Known) -> str:
    """What stays on the screen of an event; empty: nothing."""
    if event == "start":
        return str(about["text"])
    if event == "warning":
        return f"{about['level']}: {about['message']}"
    if event == "print":
        return printable(f"{about['node']}/{about['task']}: {about['text']}", kept="\t")
    if event == "prints_left_out":
        return f"{about['lines']} more lines were printed at once; they are in the output of the workers"
    if event == "recovery":
        when = format_seconds(about["seconds"])
        return f"recovered after {when}; continues from {_position(about)}"
    if event == "stop_asked":
        return (
            f"{about['reason']}: the run ends once its epoch is recorded; {about['at_once']} ends "
            f"it now."
        )
    return ""


def position(known: Known) -> str:
    """Which epoch has ended, of how many."""
    total = known["total_epochs"]
    step = f", step {known['step']}" if known["step"] else ""
    steps = known["steps_per_epoch"]
    of = f"/{steps}" if step and steps else ""
    return f"epoch {known['epoch']}" + ("" if total is None else f"/{total}") + step + of


def share(known: Known) -> float | None:
    """How much of the job is done, from 0 to 1; None if nobody knows."""
    total, steps = known["total_epochs"], known["steps_per_epoch"]
    if not total:
        return None
    done = known["epoch"] + (known["step"] / steps if steps else 0)
    return min(1.0, float(done / total))


def under_way(known: Known) -> str:
    """What has run for long; empty: nothing."""
    run = known["under_way"]
    if run is None or run["seconds"] < LONG_SECONDS:
        return ""
    what = f"epoch {run['epoch']}" if run["group"] == "epoch" else f"{run['group']} group"
    tasks = f": {listed(run['tasks'], 3)}" if run["tasks"] else ""
    return f"[{what} for {format_seconds(run['seconds'])}{tasks}]"


def times(known: Known) -> list[str]:
    """How long an epoch and a save take, and how long all the others will."""
    found = []
    if known["epoch_seconds"]:
        pace = f"{format_seconds(known['epoch_seconds'])} an epoch"
        if known["saves"] or known["failed_saves"]:
            pace += f" + {format_seconds(known['save_seconds'])} a save"
        found.append(pace)
    if known["eta_seconds"] is not None:
        found.append(f"{format_seconds(known['eta_seconds'])} left")
    return found


def saves(known: Known) -> list[str]:
    """The save in flight, and the last one."""
    found = []
    if (saving := known["saving"]) is not None:
        where = f"{saving['epoch']}" + (f".s{saving['step']}" if saving["step"] else "")
        found.append(f"saving epoch {where} for {format_seconds(saving['seconds'])}")
    if (saved := known["saved"]) is not None:
        found.append(f"saved epoch {saved['epoch']} ({format_bytes(saved['nbytes'])})")
    return found


def troubles(known: Known) -> list[str]:
    """What went wrong."""
    found = []
    if known["failed_saves"]:
        found.append(f"saves failed: {known['failed_saves']}")
    if known["losses"]:
        found.append(counted(known["losses"], "loss"))
        recovered = known["recoveries"]
        found.append(f"{recovered} recovered" if known["phase"] != "recovering" else "recovering")
    if known["stop_asked"] and known["phase"] not in ENDS:
        found.append(f"stops after this epoch ({known['stop_asked']})")
    return found


def workers(known: Known) -> list[str]:
    """How many nodes are where."""
    nodes = known["nodes"]
    there = len({node["worker"] for node in nodes})
    return [f"{counted(len(nodes), 'node')} on {counted(there, 'worker')}"] if nodes else []


def shown_metrics(known: Known) -> dict[str, Any]:
    """The metrics that are not of single nodes."""
    return whole_metrics(known["metrics"], {node["node"] for node in known["nodes"]})


def metrics(known: Known, most: int) -> list[str]:
    """The first metrics, and how many more there are."""
    whole = shown_metrics(known)
    more = [f"and {counted(len(whole) - most, 'more metric')}"] if len(whole) > most else []
    return format_metrics(whole, most) + more


def takes_long(known: Known) -> bool:
    """Whether what nodes do takes long enough to be read."""
    if known["phase"] in ENDS or (known["phase"] == "recovering" and known["under_way"] is None):
        return False
    doing = (it["seconds"] for it in (known["under_way"], known["saving"]) if it is not None)
    return max(doing, default=0.0) >= LONG_SECONDS or known["epoch_seconds"] >= GROUPS_SECONDS


def nodes(known: Known) -> list[Node]:
    """What each node does, while this takes long."""
    if not takes_long(known):
        return []
    run = known["under_way"]
    rows = []
    for node in known["nodes"]:
        does = node["does"]
        text = f"runs {node['task']}" if does == "runs" else does
        if (
            not does
            and run is None
            and (saved := known["saved"]) is not None
            and node["saved_bytes"] is not None
        ):
            text = f"saved epoch {saved['epoch']} ({format_bytes(node['saved_bytes'])})"
        part = node["ended"] / node["tasks"] if node["tasks"] else None
        if run is not None and run["group"] == "epoch" and (steps := known["steps_per_epoch"]):
            part = (known["step"] + (part or 0.0)) / steps
        rows.append(Node(node["node"], part, text))
    return rows


def line(known: Known, most_metrics: int = 20) -> str:
    """A whole state in one line."""
    parts = [position(known), under_way(known), *times(known), *metrics(known, most_metrics)]
    parts += [*saves(known), *troubles(known)]
    return "  ".join(part for part in parts if part)


def _position(about: Known) -> str:
    return f"epoch {about['epoch']}" + (f", step {about['step']}" if about["step"] else "")
