"""The metrics of runs as curves for SVG, whose units a page stretches to its width. Pure: no I/O.

The drawings have no text of their own: the page labels them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jobrunner.positions import Position, PublicPosition
from jobrunner.story.model import EpochStory, Story
from jobrunner.texts import counted

WIDTH, HEIGHT = 1000, 100  # of a drawing, in its own units
MOST_POINTS = 1000  # of a chart's curves
MOST_METRICS = 24
MOST_NODES = 20  # whose curves are drawn for a metric
MOST_RUNS = 20  # whose epochs that were set aside are drawn
MOST_MARKS = 100
_WIDE = 1000  # an axis is logarithmic if its highest value is so many times the lowest
_LARGEST = 1e300  # a number that can be drawn

Point = tuple[float, float]


class Line(NamedTuple):
    """A path, and its class in the page's style."""

    kind: str
    path: str
    text: str = ""


class Tick(NamedTuple):
    """A label of an axis, and where it is, in percent."""

    text: str
    percent: float


@dataclass(frozen=True)
class Chart:
    """Curves over epochs."""

    title: str
    value: str  # the last one, beside the title
    label: str  # describes it in words
    is_logarithmic: bool
    lines: Sequence[Line]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]


@dataclass(frozen=True)
class Charts:
    """Charts beside each other, the kinds of their lines, and how many metrics there are."""

    charts: Sequence[Chart]
    kinds: Collection[str]
    num_metrics: int


class Axis(NamedTuple):
    """The values along an axis."""

    low: float
    high: float

    def place(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        return (value - self.low) / ((self.high - self.low) or 1.0)

    def ticks(self) -> list[float]:
        """About five round numbers within its range."""
        rough = (self.high - self.low) / 5
        if not (math.isfinite(rough) and rough > 0):
            return []
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [number * step for number in range(first, last + 1)]


def axis_of(values: Iterable[float]) -> Axis:
    """The axis of some values, not empty even if they are all the same."""
    numbers = list(values)
    low, high = min(numbers, default=0.0), max(numbers, default=1.0)
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    return Axis(low, high)


def metric_charts(story: Story) -> Charts | None:
    """A chart for each metric that was a number once; None if nothing was reported."""
    kept = []
    for run in story.runs:
        for epoch in run.epochs:
            if isinstance(epoch.epoch, int) and not epoch.is_set_aside:
                kept.append(epoch)
    kept.sort(key=lambda epoch: _number(epoch.epoch))
    curves = _curves(kept)
    if not curves:
        return None
    aside = []
    for run in story.runs[-MOST_RUNS:]:
        aside.append(_curves(epoch for epoch in run.epochs if epoch.is_set_aside))
    # A value on a node is drawn with the metric of all nodes, if there is one.
    nodes: set[str] = set()
    for run in story.runs:
        nodes.update(run.nodes)
    own: dict[str, list[str]] = {}
    names = []
    for name in curves:
        node, _, metric = name.partition("/")
        if node in nodes and metric in curves:
            own.setdefault(metric, []).append(name)
        else:
            names.append(name)
    x = axis_of(_number(epoch.epoch) for epoch in kept)
    marks = _marks(story, x)
    charts = []
    for name in names[:MOST_METRICS]:
        drawn = [("node", curves[value]) for value in own.get(name, ())[:MOST_NODES]]
        drawn += [("aside", former[name]) for former in aside if name in former]
        charts.append(draw_chart(name, x, [*drawn, ("curve", curves[name])], marks))
    kinds: set[str] = set()
    for chart in charts:
        kinds.update(line.kind for line in chart.lines)
    return Charts(charts, kinds, len(names))


def draw_chart(
    name: str, x: Axis, curves: Sequence[tuple[str, Sequence[Point]]], marks: Sequence[Line]
) -> Chart:
    """The curves of a metric, each with its kind; the last is the one that counts.

    The axis of values is logarithmic if it is to show numbers > 0 of very different size.
    """
    values: list[float] = []
    for _, points in curves:
        values += [value for _, value in points]
    is_log = min(values) > 0 and max(values) / min(values) > _WIDE
    measure: Callable[[float], float] = math.log10 if is_log else float
    y = axis_of(map(measure, values))
    most = max(100, 2 * MOST_POINTS // len(curves))
    lines = list(marks)
    for kind, points in curves:
        places = []
        for epoch, value in thin(points, most):
            across, down = WIDTH * x.place(epoch), HEIGHT * (1 - y.place(measure(value)))
            places.append(f"{round(across, 2):g},{round(down, 2):g}")
        # A line of no length draws a single point: its ends are round.
        lines.append(Line(kind, f"M{places[0]}L{' '.join(places[1:] or places)}"))
    number, last = curves[-1][1][-1]
    y_ticks = []
    for tick in y.ticks():
        if not is_log or tick == round(tick):
            value = tick
            if is_log:
                value = 10**tick
            y_ticks.append(Tick(f"{value:.7g}", 100 * (1 - y.place(tick))))
    return Chart(
        name,
        f"{last:.4g} at epoch {number:.0f}",
        f"{name} over {counted(len(curves[-1][1]), 'epoch')}, {last:.4g} at the end",
        is_log,
        lines,
        [Tick(f"{tick:.7g}", 100 * x.place(tick)) for tick in x.ticks() if tick == round(tick)],
        y_ticks,
    )


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about `most` points that draw the same curve: the lowest and highest of each part."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    kept = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        lowest = min(part, key=lambda point: point[1])
        highest = max(part, key=lambda point: point[1])
        kept += sorted({lowest, highest})
    return kept


def _curves(epochs: Iterable[EpochStory]) -> dict[str, list[Point]]:
    """For each metric a point of each epoch where it is a number that can be drawn."""
    curves: dict[str, list[Point]] = {}
    for epoch in epochs:
        for name, value in epoch.metrics.items():
            if isinstance(value, int | float) and -_LARGEST < value < _LARGEST:
                curves.setdefault(name, []).append((_number(epoch.epoch), float(value)))
    return curves


def _marks(story: Story, x: Axis) -> list[Line]:
    marks: list[tuple[str, PublicPosition | None, str]] = []
    for run in story.runs:
        text = f"run {run.number} resumed from epoch {run.resumed_from}"
        marks.append(("resume", run.resumed_from, text))
        for loss in run.losses:
            marks.append(("loss", loss.resumed_from, f"lost, back to epoch {loss.resumed_from}"))
    lines = []
    for kind, epoch, text in marks[-MOST_MARKS:]:
        if epoch is None:
            continue
        place = x.place(_number(epoch))
        if 0 <= place <= 1:
            lines.append(Line(kind, f"M{round(WIDTH * place, 2):g},0V{HEIGHT}", text))
    return lines


def _number(epoch: PublicPosition) -> float:
    return float(Position.of(epoch).epoch)
