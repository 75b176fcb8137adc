"""What the figures of a report show of a story. Pure: no I/O."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from jobrunner.names import described_nodes
from jobrunner.positions import Position, PublicPosition
from jobrunner.story.figures import (
    Axis,
    Block,
    Box,
    Chart,
    Curve,
    Mark,
    Timeline,
    axis_of,
    chart,
    merge,
    stacked,
    timeline,
)
from jobrunner.story.model import EpochStory, Ledger, RunStory, SaveStory, Story
from jobrunner.texts import counted, format_seconds, listed, whole_metrics

MOST_METRICS = 24
MOST_NODES = 20  # whose curves are drawn for a metric
MOST_RUNS = 50  # whose curves are drawn
MOST_MARKS = 100  # of a chart
MOST_LANES = 40
MOST_BLOCKS = 2000  # of a kind, in the newest timeline; others have a quarter
_LARGEST = 1e300  # a number that can be drawn

_LEGEND = {
    "curve": "Recorded",
    "node": "Values on nodes",
    "aside": "Set aside: run again, or not continued",
    "resume": "Resume",
    "loss": "Loss",
}


@dataclass
class Charts:
    """Charts beside each other, what their colours mean, and remarks."""

    charts: list[Chart]
    legend: Mapping[str, str]
    notes: list[str] = field(default_factory=list)


def ledger_bar(ledger: Ledger, texts: Mapping[str, str]) -> list[Box]:
    """The parts of a ledger that have a text."""
    return stacked([(part, text, getattr(ledger, part)) for part, text in texts.items()])


# ---- metrics


def metric_charts(story: Story) -> Charts | None:
    """A chart for each metric that was a number once; None if nothing was reported."""
    kept = [epoch for run in story.runs for epoch in run.epochs if not epoch.is_set_aside]
    kept.sort(key=lambda epoch: epoch.number)
    reported = dict.fromkeys(name for epoch in kept for name in epoch.metrics)
    if not reported:
        return None
    numeric = {}
    for epoch in kept:
        for name, value in epoch.metrics.items():
            if _is_number(value):
                numeric[name] = True
    nodes = {node for run in story.runs for node in described_nodes(run.plan)}
    plain = whole_metrics(reported, nodes)
    # A metric -> its values on nodes, which are drawn with it.
    families: dict[str, list[str]] = {}
    for name in numeric:
        _, _, base = name.partition("/")
        if name not in plain and base in numeric:
            families.setdefault(base, []).append(name)
        else:
            families.setdefault(name, [])
    x = axis_of(float(epoch.number) for epoch in kept)
    marks = [mark for mark in _marks(story) if x.low <= mark.x <= x.high][-MOST_MARKS:]
    charts = []
    kinds = {mark.kind for mark in marks}
    for name in list(families)[:MOST_METRICS]:
        curves = [Curve("node", _points(kept, own)) for own in families[name][:MOST_NODES]]
        curves += _set_aside_curves(story, name)
        whole = _points(kept, name)
        curves.append(Curve("curve", whole))
        kinds |= {curve.kind for curve in curves}
        number, last = next(point for point in reversed(whole) if math.isfinite(point[1]))
        label = f"{name} over {counted(len(whole), 'epoch')}, {last:.4g} at the end"
        charts.append(chart(name, f"{last:.4g} at epoch {number:.0f}", label, x, curves, marks))
    notes = []
    if len(families) > MOST_METRICS:
        notes.append(f"The first {MOST_METRICS} of {counted(len(families), 'metric')}.")
    others = [name for name in plain if name not in numeric]
    if others:
        notes.append(f"Not drawn, because they were no numbers: {listed(others, 12)}.")
    legend = {kind: title for kind, title in _LEGEND.items() if kind in kinds}
    return Charts(charts, legend, notes)


def _marks(story: Story) -> list[Mark]:
    marks = []
    for run in story.runs:
        if run.resumed_from is not None:
            text = f"run {run.number} resumed from epoch {run.resumed_from}"
            marks.append(Mark(_number(run.resumed_from), "resume", text))
        for loss in run.losses:
            if loss.resumed_from is not None:
                text = f"lost, back to epoch {loss.resumed_from}"
                marks.append(Mark(_number(loss.resumed_from), "loss", text))
    return marks


def _set_aside_curves(story: Story, name: str) -> list[Curve]:
    curves = []
    for run in story.runs[-MOST_NODES:]:
        points = _points([epoch for epoch in run.epochs if epoch.is_set_aside], name)
        if points:
            curves.append(Curve("aside", points))
    return curves


def _points(epochs: Iterable[EpochStory], name: str) -> list[tuple[float, float]]:
    """A point for each epoch with that metric; no number where none can be drawn."""
    points = []
    for epoch in epochs:
        if name in epoch.metrics:
            value = epoch.metrics[name]
            points.append((float(epoch.number), float(value) if _is_number(value) else math.nan))
    return points


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and -_LARGEST < value < _LARGEST


def _number(epoch: PublicPosition) -> float:
    return float(Position.of(epoch).epoch)


# ---- checkpoints


def checkpoint_charts(story: Story) -> Charts | None:
    """How large checkpoints were, and how long their saves took; None if there are none."""
    saves = [save for run in story.runs for save in run.saves]
    if not saves:
        return None
    x = axis_of(_place(save, run) for run in story.runs for save in run.saves)
    largest = max(save.nbytes for save in saves)
    power = min(4, max(0, math.floor(math.log2(largest) / 10))) if largest else 0
    unit = ("bytes", "KiB", "MiB", "GiB", "TiB")[power]
    sizes, times, waits = [], [], []
    for run in story.runs[-MOST_RUNS:]:
        ordered = sorted(run.saves, key=lambda save: Position.of(save.epoch))
        if not ordered:
            continue
        places = [_place(save, run) for save in ordered]
        # How long epochs waited for a save is recorded with what comes after it.
        unknown = run.saves[-1] if run.ended is None else None
        wait_seconds = [math.nan if save is unknown else save.wait_seconds for save in ordered]
        nbytes = [save.nbytes / 1024**power for save in ordered]
        seconds = [save.seconds for save in ordered]
        sizes.append(Curve("curve", list(zip(places, nbytes, strict=True))))
        times.append(Curve("curve", list(zip(places, seconds, strict=True))))
        waits.append(Curve("second", list(zip(places, wait_seconds, strict=True))))
    return Charts(
        [
            chart(f"Size of each checkpoint, in {unit}", "", "Sizes", x, sizes, from_zero=True),
            chart(
                "Time of each save, in seconds", "", "Times", x, [*times, *waits], from_zero=True
            ),
        ],
        {"curve": "Save", "second": "Epochs waited"},
    )


def _place(save: SaveStory, run: RunStory) -> float:
    """Where a checkpoint lies among the epochs."""
    if not save.step:
        return _number(save.epoch)
    steps = run.plan.get("steps_per_epoch")
    if isinstance(steps, int) and steps >= save.step:
        return _number(save.epoch) + save.step / steps
    return _number(save.epoch) + 0.5


# ---- what ran where


def run_timeline(run: RunStory, *, is_newest: bool) -> tuple[Timeline, str]:
    """What a run did, and what its nodes did; with a remark."""
    nodes = list(dict.fromkeys(node for save in run.saves for node in save.nodes))
    most_blocks = MOST_BLOCKS if is_newest else MOST_BLOCKS // 4
    grain = (run.last_seen - run.began) * (min(len(nodes), MOST_LANES) + 1) / most_blocks
    rows = [("run", run_blocks(run, grain))]
    for node in nodes[:MOST_LANES]:
        rows.append((node, merge(_save_blocks(run, node), grain)))
    marks = [Mark(loss.time, "loss", f"lost: {loss.text}") for loss in run.losses[-MOST_MARKS:]]
    return timeline(rows, Axis(run.began, run.last_seen), marks), _first_lanes(nodes)


def run_blocks(run: RunStory, grain: float) -> list[Block]:
    """What the run as a whole did; later blocks are drawn over earlier ones."""
    epochs = sorted(run.epochs, key=lambda epoch: epoch.ended)
    saves = sorted(run.saves, key=lambda save: save.ended)
    begins = [epoch.ended - epoch.seconds for epoch in epochs[:1]]
    begins += [save.ended - save.seconds for save in saves[:1]]
    start = max(run.began, min(begins, default=run.last_seen))
    ran = _epoch_blocks(epochs, saves, start)
    waits = []
    for save in saves:
        if save.wait_seconds > 0:
            text = _name_save(save, save.wait_seconds)
            waits.append(Block(save.ended - save.wait_seconds, save.ended, "save_wait", text))
    recoveries = _recovery_blocks(run)
    # What was not recorded when a worker, or the run, was lost: since the last block before it.
    ends = sorted([start, *(block.ended for block in (*ran, *waits, *recoveries))])
    losses = [loss.time for loss in run.losses]
    if run.state in ("lost", "failed"):
        losses.append(run.last_seen)
    vain = []
    for time in losses:
        vain.append(Block(ends[max(0, bisect(ends, time) - 1)], time, "redone", "lost"))
    blocks = [
        Block(run.began, run.last_seen, "idle", "idle"),
        Block(run.began, start, "start", "start"),
    ]
    for kind in (ran, vain, waits, recoveries):
        blocks += merge(kind, grain)
    return blocks


def _epoch_blocks(
    epochs: Sequence[EpochStory], saves: Sequence[SaveStory], start: float
) -> list[Block]:
    """The recorded epochs, each with those before it that were not recorded."""
    blocks = []
    number: int | None = None
    until = start
    num_saves = 0
    for epoch in epochs:
        seconds = epoch.seconds * (1 if number is None else max(1, epoch.number - number))
        # Waits for saves in the middle of an epoch lie within it.
        while num_saves < len(saves) and saves[num_saves].ended <= epoch.ended:
            if saves[num_saves].ended > until:
                seconds += saves[num_saves].wait_seconds
            num_saves += 1
        kind = "redone" if epoch.is_set_aside else "compute"
        began = max(until, epoch.ended - seconds)
        aside = ", set aside" if epoch.is_set_aside else ""
        text = f"epoch {epoch.number}, {format_seconds(epoch.seconds)}{aside}"
        blocks.append(Block(began, max(began, epoch.ended), kind, text))
        number = epoch.number
        until = epoch.ended
    return blocks


def _recovery_blocks(run: RunStory) -> list[Block]:
    blocks = []
    for loss in run.losses:
        if loss.resumed is not None:
            text = f"recovery, {format_seconds(loss.resumed - loss.time)}"
            blocks.append(Block(loss.time, loss.resumed, "recovery", text))
    return sorted(blocks)


def _save_blocks(run: RunStory, node: str) -> list[Block]:
    blocks = []
    for save in run.saves:
        if node in save.nodes:
            began, seconds = save.ended - save.seconds, save.nodes[node]
            blocks.append(Block(began, began + seconds, "save_wait", _name_save(save, seconds)))
    return blocks


def _name_save(save: SaveStory, seconds: float) -> str:
    return f"save of epoch {save.epoch}, {format_seconds(seconds)}"


def _first_lanes(nodes: Sequence[str]) -> str:
    if len(nodes) <= MOST_LANES:
        return ""
    return f"The first {MOST_LANES} of {counted(len(nodes), 'node')}."
