"""The parts of a report, from what the runs of a directory did. Pure: no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, TypeGuard

from jobrunner.names import described_nodes
from jobrunner.positions import Position, PublicPosition
from jobrunner.report.charts import Curve, Mark, bar, curves, range_of
from jobrunner.report.ledger import Ledger
from jobrunner.report.parts import (
    MOST_MARKS,
    MOST_ROWS,
    PARTS,
    first,
    legend,
    newest,
    note,
    scrolled,
    section,
    share,
    swatch,
)
from jobrunner.report.story import EpochStory, RunStory, SaveStory, Story
from jobrunner.texts import (
    Html,
    counted,
    folded,
    format_bytes,
    format_seconds,
    format_time,
    format_value,
    join,
    listed,
    table,
    tag,
    whole_metrics,
)

MOST_METRICS = 24
MOST_COLUMNS = 8  # of metrics in a table
MOST_NODES = 20  # whose curves are drawn for a metric
_LARGEST = 1e300  # a number that can be drawn


# ---- where time went


def time_section(story: Story) -> Html:
    """The ledger of all runs, and of each."""
    whole = story.ledger
    rows = [
        (
            join([swatch(key), title]),
            format_seconds(getattr(whole, key)),
            share(getattr(whole, key), whole.wall),
            what,
        )
        for key, (title, what) in PARTS.items()
    ]
    rows.append((tag("strong", "Wall time"), format_seconds(whole.wall), "", "of all runs"))
    runs = [
        (
            run.number,
            format_seconds(run.ledger.wall),
            f"{run.ledger.goodput:.1%}",
            _ledger_bar(run.ledger, f"run {run.number}"),
        )
        for run in story.runs[-MOST_ROWS:]
    ]
    guessed = [run.number for run in story.runs if run.is_estimated]
    each = table(("run", "wall time", "goodput", "where it went"), runs, left=(3,))
    return section(
        "Where time went",
        _ledger_bar(whole, "all runs"),
        scrolled(
            "Where the time of all runs went",
            table(("part", "time", "share", "meaning"), rows, left=(0, 3)),
        ),
        folded(
            "Each run",
            scrolled("Where the time of each run went", each),
            newest(story.runs, MOST_ROWS, "run"),
        )
        if len(story.runs) > 1
        else "",
        note("Goodput is the share of Compute: time in epochs that did not have to run again."),
        note(
            f"{format_seconds(story.gap_seconds)} passed between the runs, which is not counted."
            if story.gap_seconds
            else ""
        ),
        note(
            f"{counted(len(guessed), 'run')} recorded no timing; what is shown of "
            f"{'it' if len(guessed) == 1 else 'them'} is derived from the times of saves."
            if guessed
            else ""
        ),
    )


def _ledger_bar(ledger: Ledger, of: str) -> Html:
    parts = [
        (key, f"{title}: {format_seconds(size)}, {share(size, ledger.wall)}", size)
        for key, (title, _) in PARTS.items()
        if (size := getattr(ledger, key)) > 0
    ]
    return bar(parts, f"Where the time of {of} went: {'; '.join(text for _, text, _ in parts)}")


# ---- metrics


def metrics_section(story: Story) -> Html:
    """A chart for each metric that was a number once, and the last values of the others, too."""
    kept = sorted(
        (epoch for run in story.runs for epoch in run.epochs if not epoch.is_set_aside),
        key=lambda epoch: epoch.number,
    )
    names = list(
        dict.fromkeys(
            name for epoch in kept for name, value in epoch.metrics.items() if _is_number(value)
        )
    )
    found = dict.fromkeys(name for epoch in kept for name in epoch.metrics)
    plain = whole_metrics(found, {node for run in story.runs for node in described_nodes(run.plan)})
    numeric = set(names)  # a stranger may have reported very many
    others = [name for name in plain if name not in numeric]
    if not found:
        return Html("")
    x = range_of(float(epoch.number) for epoch in kept)
    marks = [
        *(
            Mark(_number(it), "resume", f"run {run.number} resumed from epoch {it}")
            for run in story.runs
            if (it := run.resumed_from) is not None
        ),
        *(
            Mark(_number(it), "loss", f"lost, back to epoch {it}")
            for run in story.runs
            for loss in run.losses
            if (it := loss.resumed_from) is not None
        ),
    ]
    marks = [it for it in marks if x.low <= it.x <= x.high][-MOST_MARKS:]
    nodes: dict[str, list[str]] = {name: [] for name in names}  # metric -> its values on nodes
    for name in names:
        _, _, base = name.partition("/")
        if name not in plain and base in nodes:
            nodes[base].append(name)
            del nodes[name]
    names = list(nodes)
    charts, drawn = [], {mark.kind for mark in marks}
    for name in names[:MOST_METRICS]:
        whole = _points(kept, name)
        aside = [[it for it in run.epochs if it.is_set_aside] for run in story.runs[-MOST_NODES:]]
        lines = [
            *(Curve("node", _points(kept, each)) for each in nodes[name][:MOST_NODES]),
            *(Curve("aside", points) for it in aside if (points := _points(it, name))),
            Curve("curve", whole),
        ]
        drawn |= {line.kind for line in lines}
        last, at = next((p[1], p[0]) for p in reversed(whole) if math.isfinite(p[1]))
        title = join([tag("strong", name), f" {last:.4g} at epoch {at:.0f}"])
        label = f"{name} over {counted(len(whole), 'epoch')}, {last:.4g} at the end"
        charts.append(curves(title, label, x, lines, marks))
    recent = kept[-MOST_ROWS:]
    shown = [*names[: MOST_COLUMNS - len(others[:2])], *others][:MOST_COLUMNS]
    rows = [
        (it.number, *(format_value(it.metrics.get(name)) for name in shown))
        for it in reversed(recent)
    ]
    titles = {
        "curve": "Recorded",
        "node": "Values on nodes",
        "aside": "Set aside: run again, or not continued",
        "resume": "Resume",
        "loss": "Loss",
    }
    kinds = {kind: title for kind, title in titles.items() if kind in drawn}
    return section(
        "Metrics",
        legend(kinds),
        tag("div", *charts, class_="charts"),
        first(names, MOST_METRICS, "metric"),
        note(f"Not drawn, because they were no numbers: {listed(others, 12)}." if others else ""),
        folded(
            "Values",
            scrolled("Values of metrics", table(("epoch", *shown), rows, left=())),
            newest(kept, MOST_ROWS, "epoch"),
        ),
    )


def _points(epochs: Iterable[EpochStory], name: str) -> list[tuple[float, float]]:
    """A point for each epoch with that metric; no number where none can be drawn."""
    values = ((float(it.number), it.metrics[name]) for it in epochs if name in it.metrics)
    return [(at, float(value) if _is_number(value) else math.nan) for at, value in values]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and -_LARGEST < value < _LARGEST


# ---- checkpoints


def checkpoints_section(story: Story) -> Html:
    """How large checkpoints were, and how long their saves took."""
    saves = [save for run in story.runs for save in run.saves]
    if not saves:
        return section("Checkpoints", tag("p", "No epoch is recorded."))
    x = range_of(_place(save, run) for run in story.runs for save in run.saves)
    largest = max(saves, key=lambda save: save.nbytes).nbytes
    power = min(4, max(0, math.floor(math.log2(largest) / 10))) if largest else 0
    unit = ("bytes", "KiB", "MiB", "GiB", "TiB")[power]

    def each(kind: str, value: Any) -> list[Curve]:
        found = []
        for run in story.runs[-MOST_ROWS:]:
            ordered = sorted(run.saves, key=lambda save: Position.of(save.epoch))
            found.append(Curve(kind, [(_place(it, run), value(it)) for it in ordered]))
        return [curve for curve in found if curve.points]

    sizes = each("curve", lambda save: save.nbytes / 1024**power)
    times = each("curve", lambda save: save.seconds)
    # How long epochs waited for a save is recorded with what comes after it.
    unknown = {id(run.saves[-1]) for run in story.runs if run.ended is None and run.saves}
    waits = each("second", lambda it: math.nan if id(it) in unknown else it.wait_seconds)
    rows = [
        (
            str(it.epoch),
            format_time(it.ended),
            format_bytes(it.nbytes),
            format_seconds(it.seconds),
            "unknown" if id(it) in unknown else format_seconds(it.wait_seconds),
            len(it.nodes),
            _slowest(it),
        )
        for it in reversed(saves[-MOST_ROWS:])
    ]
    head = ("epoch", "saved", "size", "took", "epochs waited", "nodes", "slowest node")
    return section(
        "Checkpoints",
        legend({"curve": "Save", "second": "Epochs waited"}),
        tag(
            "div",
            curves(
                f"Size of each checkpoint, in {unit}", "Sizes of checkpoints", x, sizes, least=[0]
            ),
            curves(
                "Time of each save, in seconds", "Times of saves", x, [*times, *waits], least=[0]
            ),
            class_="charts",
        ),
        folded(
            "Values",
            scrolled("Checkpoints", table(head, rows, left=(1, 6))),
            newest(saves, MOST_ROWS, "save"),
        ),
    )


def _place(save: SaveStory, run: RunStory) -> float:
    """Where a checkpoint lies among the epochs."""
    steps = run.plan.get("steps_per_epoch")
    part = save.step / steps if isinstance(steps, int) and steps >= max(1, save.step) else 0.5
    return _number(save.epoch) + (part if save.step else 0.0)


def _number(epoch: PublicPosition) -> float:
    return float(Position.of(epoch).epoch)


def _slowest(save: SaveStory) -> str:
    node = max(save.nodes, key=lambda name: save.nodes[name], default="")
    return f"{node}, {format_seconds(save.nodes[node])}" if node else ""
