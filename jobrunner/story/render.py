"""A run that runs, in words; and these as lines of a terminal, as HTML, and as one line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

from rich.cells import cell_len, chop_cells
from rich.console import Group
from rich.text import Text

from jobrunner.story.live import ENDS, LONG_SECONDS, NodeNow, RunNow
from jobrunner.texts import (
    Html,
    abbreviate,
    counted,
    format_bytes,
    format_metrics,
    format_seconds,
    join,
    listed,
    metric_texts,
    printable,
    table,
    tag,
    whole_metrics,
)

GROUPS_SECONDS = 2.0
"""Epochs of this length show what each node does, also just after one has begun."""
MOST_NODES, MOST_METRICS = 200, 40
"""Rows of the tables of a page."""
LINE_METRICS = 20
BAR_WIDTH, DOES_WIDTH = 20, 26
GAP = "  "
SHORTEST_METRIC = len(f"a=1{GAP}")
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
DOING = {"runs": "running", "saves": "saving"}
"""What nodes do, the most telling first; and how that is said of many."""


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
        if run.saves or run.failed_saves:
            pace += f" + {format_seconds(run.save_seconds)} a save"
        texts.append(pace)
    if run.eta_seconds is not None:
        texts.append(f"{format_seconds(run.eta_seconds)} left")
    return texts


def group_under_way(run: RunNow) -> list[str]:
    """The group that has run for long."""
    group = run.long_group
    if group is None:
        return []
    name = f"epoch {group.epoch}" if group.group == "epoch" else f"{group.group} group"
    tasks = f": {listed(group.tasks, 3)}" if group.tasks else ""
    return [f"[{name} for {format_seconds(group.seconds)}{tasks}]"]


def saves(run: RunNow) -> list[str]:
    """The save in flight, and the last one."""
    texts = []
    if run.saving is not None:
        step = f".s{run.saving.step}" if run.saving.step else ""
        seconds = format_seconds(run.saving.seconds)
        texts.append(f"saving epoch {run.saving.epoch}{step} for {seconds}")
    if run.saved is not None:
        texts.append(f"saved epoch {run.saved.epoch} ({format_bytes(run.saved.nbytes)})")
    return texts


def troubles(run: RunNow) -> list[str]:
    """What went wrong."""
    texts = []
    if run.failed_saves:
        texts.append(f"saves failed: {run.failed_saves}")
    if run.losses:
        texts.append(counted(run.losses, "loss"))
        texts.append("recovering" if run.phase == "recovering" else f"{run.recoveries} recovered")
    if run.stop_asked and run.phase not in ENDS:
        texts.append(f"stops after this epoch ({run.stop_asked})")
    return texts


def placement(run: RunNow) -> list[str]:
    """How many nodes are on how many workers."""
    if not run.nodes:
        return []
    workers = {node.worker for node in run.nodes}
    return [f"{counted(len(run.nodes), 'node')} on {counted(len(workers), 'worker')}"]


def metrics(run: RunNow, most: int) -> list[str]:
    """The first metrics that are not of single nodes, and how many more there are."""
    whole = whole_metrics(run.metrics, {node.node for node in run.nodes})
    texts = format_metrics(whole, most)
    if len(whole) > most:
        texts.append(f"and {counted(len(whole) - most, 'more metric')}")
    return texts


def takes_long(run: RunNow) -> bool:
    """Whether what nodes do takes long enough to be read."""
    if run.phase in ENDS or (run.phase == "recovering" and run.under_way is None):
        return False
    is_saving = run.saving is not None and run.saving.seconds >= LONG_SECONDS
    return run.long_group is not None or is_saving or run.epoch_seconds >= GROUPS_SECONDS


def does(run: RunNow, node: NodeNow) -> str:
    """What a node does."""
    if node.does == "runs":
        return f"runs {node.task}"
    is_idle = not node.does and run.under_way is None
    if is_idle and run.saved is not None and node.saved_bytes is not None:
        return f"saved epoch {run.saved.epoch} ({format_bytes(node.saved_bytes)})"
    return node.does


# ---- one line


def draw_line(run: RunNow) -> str:
    """The whole state in one line."""
    if run.phase == "starting" and run.doing:
        return f"starting for {format_seconds(run.seconds)}: {run.doing}"
    parts = [position(run)]
    if run.phase in ("init", "loading") or run.ended_by not in ("", LIMIT):
        parts.append(phase(run))
    parts += [*group_under_way(run), *times(run), *metrics(run, LINE_METRICS)]
    return GAP.join([*parts, *saves(run), *troubles(run)])


# ---- a terminal


def draw_lines(run: RunNow, width: int, height: int) -> Group:
    """The state in lines of at most `width` cells, and about as many lines as `height` says.

    No metric and no save is cut: what does not fit a line is continued in the next. Of metrics that
    do not fit the screen, and of nodes, it is said how many more there are.
    """
    head = [Text(_plain(run.job), "bold")] if run.job else []
    if run.phase == "starting":
        head.append(Text("starting"))
    else:
        head.append(Text(position(run)))
    done = share(run)
    if done is not None:
        head += [Text(_bar(done, BAR_WIDTH), "green"), Text(f"{done:.0%}")]
    head += map(Text, [format_seconds(run.seconds), *times(run)])
    if run.doing or run.phase not in ("starting", "epochs", "recovering"):
        head.append(Text(_plain(phase(run)), "bold"))
    state = [*map(Text, saves(run)), *(Text(text, "bold red") for text in troubles(run))]
    state += map(Text, placement(run))
    top = [*flow(head, width), *flow(state, width)]
    nodes = run.nodes if takes_long(run) else []
    # What is printed above needs half of the screen.
    room = max(1, height - len(top) - min(len(nodes), height // 2))
    most = min(len(run.metrics), room * width // SHORTEST_METRIC)
    while True:
        shown = flow([Text(_plain(text)) for text in metrics(run, most)], width)
        if len(shown) <= room or most <= 1:
            break
        most = most * 3 // 4
    lines = [*top, *shown]
    node_height = max(1, min(height // 2, height - len(lines)))
    return Group(*lines, *_draw_nodes(run, nodes, width, node_height))


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


def _draw_nodes(run: RunNow, nodes: Sequence[NodeNow], width: int, height: int) -> list[Text]:
    others: Sequence[NodeNow] = ()
    if len(nodes) > height:
        order = [*DOING, ""]
        nodes = sorted(nodes, key=lambda node: order.index(node.does))
        nodes, others = nodes[: height - 1], nodes[height - 1 :]
    names = [_plain(node.node) for node in nodes]
    widest = max(map(cell_len, names), default=0)
    room = min(widest, max(width // 3, width - DOES_WIDTH))
    lines = []
    for name, node in zip(names, nodes, strict=True):
        line = Text(abbreviate(name, room, cell_len))
        line.pad_right(room - line.cell_len)
        line.append(f" {_plain(does(run, node))}")
        line.truncate(width, overflow="ellipsis")
        lines.append(line)
    if others:
        counts = Counter(DOING[node.does] for node in others if node.does)
        verbs = ", ".join(f"{count} {verb}" for verb, count in counts.items())
        text = f"and {counted(len(others), 'more node')}" + (f": {verbs}" if verbs else "")
        lines.append(Text(text, overflow="ellipsis", no_wrap=True))
    return lines


def _bar(done: float, width: int) -> str:
    count = int(done * width)
    return "━" * count + "─" * (width - count)


def _plain(text: str) -> str:
    return printable(text, kept="")


# ---- a page


def draw_html(run: RunNow) -> Html:
    """The state as HTML, for notebooks and dashboards; readable on light and dark pages."""
    facts = [
        position(run),
        f"{format_seconds(run.seconds)} elapsed",
        *times(run),
        *saves(run),
        *placement(run),
        *group_under_way(run),
    ]
    wrong = troubles(run)
    if run.error:
        wrong.append(run.error)
    title = tag("div", tag("strong", run.job), " ", phase(run), style="font-size: 1.15em")
    parts: list[object] = [title]
    if run.phase not in ("stopped", "failed"):
        done = share(run)
        value = None if done is None else f"{done:.4f}"
        style = "width: 100%"
        parts.append(tag("progress", aria_label="epochs", max="1", value=value, style=style))
    parts.append(tag("div", *_spaced(facts)))
    if wrong:
        parts.append(tag("div", *_spaced(wrong), role="status", style="font-weight: bold"))
    parts += [_metric_table(run), _node_table(run)]
    parts += [tag("div", warning) for warning in run.warnings]
    return tag("section", *parts, class_="jobrunner-run")


def _spaced(texts: Iterable[str]) -> list[Html]:
    style = "display: inline-block; margin-right: 1.5em"
    return [tag("span", text, style=style) for text in texts]


def _metric_table(run: RunNow) -> Html:
    whole = whole_metrics(run.metrics, {node.node for node in run.nodes})
    rows = list(islice(metric_texts(whole), MOST_METRICS))
    return _table(("metric", "value"), rows, {0}, len(whole), "more metric")


def _node_table(run: RunNow) -> Html:
    rows = []
    for node in sorted(run.nodes, key=attrgetter("worker", "node"))[:MOST_NODES]:
        saved = "" if node.saved_bytes is None else format_bytes(node.saved_bytes)
        does_text = f"runs {node.task}" if node.does == "runs" else node.does
        rows.append((node.worker, node.node, does_text, saved))
    head = ("worker", "node", "does", "saved")
    return _table(head, rows, {0, 1, 2}, len(run.nodes), "more node")


def _table(head: Sequence[str], rows: Sequence[Any], left: set[int], total: int, noun: str) -> Html:
    """The rows of a table of `total`, without empty columns; and how many more there are."""
    used = [i for i in range(len(head)) if any(row[i] for row in rows)]
    if not used:
        return Html("")
    cells = [[row[i] for i in used] for row in rows]
    aligned = {column for column, i in enumerate(used) if i in left}
    drawn = table([head[i] for i in used], cells, aligned)
    more = total - len(rows)
    return join((drawn, tag("div", f"and {counted(more, noun)}"))) if more else drawn
