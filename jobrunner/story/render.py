"""A run that runs, in words; and these as lines of a terminal, as HTML, and as one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from rich.cells import chop_cells
from rich.console import Group
from rich.text import Text

from jobrunner.positions import Position
from jobrunner.story.live import ENDS, RunNow
from jobrunner.texts import (
    Html,
    counted,
    format_bytes,
    format_metrics,
    format_seconds,
    listed,
    metric_texts,
    printable,
    table,
    tag,
    whole_metrics,
)

LONG_SECONDS = 1.0
"""What has run for this long is shown before it ends."""
LEAST_SECONDS = 5e-5
"""What takes less is not worth its place."""
MOST_ROWS = 200
"""Of a table on a page."""
LINE_METRICS = 20
BAR_WIDTH = 20
GAP = "  "
LIMIT = "epoch_limiter"
"""What ended a job at its last epoch."""

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


# ---- words


def phase(run: RunNow) -> str:
    """What the job does; or what has ended it."""
    text = run.doing or PHASES[run.phase]
    if run.phase == "finished" and run.ended_by not in ("", LIMIT):
        text += f", ended by {run.ended_by}"
    return text


def position(run: RunNow) -> str:
    """Which epoch has ended, of how many."""
    text = f"epoch {run.epoch}"
    if run.total_epochs is not None:
        text += f"/{run.total_epochs}"
    if run.step:
        text += f", step {run.step}"
        if run.steps_per_epoch:
            text += f"/{run.steps_per_epoch}"
    return text


def share(run: RunNow) -> float | None:
    """How much of the job is done, from 0 to 1; None if nobody knows."""
    if run.phase == "finished":  # perhaps long before the limit of epochs
        return 1.0
    if not run.total_epochs:
        return None
    done = float(run.epoch)
    if run.steps_per_epoch:
        done += run.step / run.steps_per_epoch
    return min(1.0, done / run.total_epochs)


def times(run: RunNow) -> list[str]:
    """How long an epoch and a save take, and how long all the others will."""
    texts = []
    if run.epoch_seconds:
        pace = f"{format_seconds(run.epoch_seconds)} an epoch"
        if run.save_seconds >= LEAST_SECONDS:
            pace += f" + {format_seconds(run.save_seconds)} a save"
        texts.append(pace)
    if run.eta_seconds is not None:
        texts.append(f"{format_seconds(run.eta_seconds)} left")
    return texts


def activity(run: RunNow) -> list[str]:
    """The group that has run for long, the save in flight, and the last save."""
    texts = []
    group, saving, saved = run.under_way, run.saving, run.saved
    if group is not None and group.seconds >= LONG_SECONDS:
        name = f"{group.group} group"
        if group.group == "epoch":
            name = f"epoch {group.epoch}"
        text = f"{name} for {format_seconds(group.seconds)}"
        if group.tasks:
            text += f": {listed(group.tasks, 3)}"
        texts.append(f"[{text}]")
    if saving is not None:
        at = Position(saving.epoch, saving.step)
        texts.append(f"saving epoch {at} for {format_seconds(saving.seconds)}")
    if saved is not None:
        texts.append(f"saved epoch {saved.epoch} ({format_bytes(saved.nbytes)})")
    return texts


def troubles(run: RunNow) -> list[str]:
    """What went wrong."""
    texts = []
    if run.failed_saves:
        texts.append(f"saves failed: {run.failed_saves}")
    if run.losses:
        texts.append(counted(run.losses, "loss"))
        if run.phase == "recovering":
            texts.append("recovering")
        else:
            texts.append(f"{run.recoveries} recovered")
    if run.stop_asked and run.phase not in ENDS:
        texts.append(f"stops after this epoch ({run.stop_asked})")
    return texts


def metrics(run: RunNow, most: int) -> list[str]:
    """The first metrics that are not of single nodes, and how many more there are."""
    whole = whole_metrics(run.metrics, {node.node for node in run.nodes})
    texts = format_metrics(whole, most)
    if len(whole) > most:
        texts.append(f"and {counted(len(whole) - most, 'more metric')}")
    return texts


# ---- one line


def draw_line(run: RunNow) -> str:
    """The whole state in one line."""
    if run.phase == "starting" and run.doing:
        return f"starting for {format_seconds(run.seconds)}: {run.doing}"
    parts = [position(run)]
    if run.phase in ("init", "loading") or run.ended_by not in ("", LIMIT):
        parts.append(phase(run))
    parts += [*times(run), *metrics(run, LINE_METRICS), *activity(run), *troubles(run)]
    return GAP.join(parts)


# ---- a terminal


def draw_lines(run: RunNow, width: int, height: int) -> Group:
    """The state in lines of at most `width` cells, which take about half of a screen at most.

    No metric and no save is cut: what does not fit a line is continued in the next. Of metrics that
    do not fit, it is said how many more there are.
    """
    head = []
    if run.job:
        head.append(Text(printable(run.job, kept=""), "bold"))
    if run.phase == "starting":
        head.append(Text("starting"))
    else:
        head.append(Text(position(run)))
    done = share(run)
    if done is not None:
        count = int(done * BAR_WIDTH)
        bar = "━" * count + "─" * (BAR_WIDTH - count)
        head += [Text(bar, "green"), Text(f"{done:.0%}")]
    head += [Text(format_seconds(run.seconds)), *map(Text, times(run))]
    if run.doing or run.phase not in ("starting", "epochs", "recovering"):
        head.append(Text(printable(phase(run), kept=""), "bold"))
    state = [Text(printable(text, kept="")) for text in activity(run)]
    state += [Text(text, "bold red") for text in troubles(run)]
    lines = [*flow(head, width), *flow(state, width)]
    room = max(1, height // 2 - len(lines))
    most = len(run.metrics)
    while True:
        shown = flow([Text(printable(text, kept="")) for text in metrics(run, most)], width)
        if len(shown) <= room or most <= 1:
            return Group(*lines, *shown)
        most = most * 3 // 4


def flow(items: Iterable[Text], width: int) -> list[Text]:
    """Put items into lines, whole; one that is wider than a line continues in the next."""
    lines: list[Text] = []
    for item in items:
        size = item.cell_len
        if lines and lines[-1].cell_len + len(GAP) + size <= width:
            lines[-1].append(GAP).append_text(item)
        elif size <= width:
            lines.append(Text().append_text(item))
        else:
            lines += [Text(part, item.style) for part in chop_cells(item.plain, width)]
    return lines


# ---- a page


def draw_html(run: RunNow) -> Html:
    """The state as HTML, for notebooks and dashboards; readable on light and dark pages."""
    title = tag("div", tag("strong", run.job), " ", phase(run), style="font-size: 1.15em")
    parts = [title]
    if run.phase not in ("stopped", "failed"):
        value, done = None, share(run)
        if done is not None:
            value = f"{done:.4f}"
        style = "width: 100%"
        parts.append(tag("progress", aria_label="epochs", max="1", value=value, style=style))
    elapsed = f"{format_seconds(run.seconds)} elapsed"
    facts = [position(run), elapsed, *times(run), *activity(run)]
    parts.append(tag("div", *_spaced(facts)))
    wrong = troubles(run)
    wrong += [text for text in (run.save_error, run.error) if text]
    if wrong:
        parts.append(tag("div", *_spaced(wrong), role="status", style="font-weight: bold"))
    whole = whole_metrics(run.metrics, {node.node for node in run.nodes})
    if whole:
        parts.append(table(("metric", "value"), islice(metric_texts(whole), MOST_ROWS), {0}))
    if run.nodes:
        rows = []
        for node in sorted(run.nodes, key=lambda node: (node.worker, node.node))[:MOST_ROWS]:
            saved = ""
            if node.saved_bytes is not None:
                saved = format_bytes(node.saved_bytes)
            rows.append((node.worker, node.node, node.task or "", saved))
        parts.append(table(("worker", "node", "runs", "saved"), rows, {0, 1, 2}))
    return tag("section", *parts, class_="jobrunner-run")


def _spaced(texts: Sequence[str]) -> list[Html]:
    style = "display: inline-block; margin-right: 1.5em"
    return [tag("span", text, style=style) for text in texts]
