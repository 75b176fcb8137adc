"""Curves and timelines as numbers for SVG, whose units a page stretches to its width. Pure: no I/O.

The drawings have no text of their own: the page labels them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from jobrunner.texts import format_seconds

WIDTH, HEIGHT = 1000, 100  # of a drawing, in its own units
MOST_POINTS = 1000  # of a curve
MOST_GAPS = 50
_WIDE = 1000  # an axis is logarithmic if its highest value is so many times the lowest
_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200)

Point = tuple[float, float]


class Curve(NamedTuple):
    """Points of a curve, in order of x, and its class in the page's style."""

    kind: str
    points: Sequence[Point]


class Block(NamedTuple):
    """What was going on from one second to another, and its class in the page's style."""

    began: float
    ended: float
    kind: str
    text: str


class Mark(NamedTuple):
    """A vertical line."""

    x: float
    kind: str
    text: str


class Axis(NamedTuple):
    """The values along an axis."""

    low: float
    high: float

    def place(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        return (value - self.low) / ((self.high - self.low) or 1.0)


class Tick(NamedTuple):
    """A label of an axis, and where it is, in percent."""

    text: str
    percent: float


class Box(NamedTuple):
    """A rectangle as high as the drawing."""

    x: float
    width: float
    kind: str
    text: str


class Line(NamedTuple):
    """A path."""

    kind: str
    path: str
    text: str = ""


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
class Lane:
    """A row of a timeline."""

    name: str
    label: str
    boxes: Sequence[Box]
    lines: Sequence[Line]


@dataclass(frozen=True)
class Timeline:
    """What was going on in several lanes, seconds from left to right."""

    lanes: Sequence[Lane]
    ticks: Sequence[Tick]


def axis_of(values: Iterable[float]) -> Axis:
    """The axis of some values, not empty even if they are all the same."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    return Axis(low, high)


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


def merge(blocks: Iterable[Block], grain: float) -> list[Block]:
    """Blocks of at least `grain` seconds: shorter ones are drawn as one with the next of their kind."""
    merged: list[Block] = []
    places: dict[str, int] = {}  # of the last block of each kind
    for block in blocks:
        place = places.get(block.kind)
        if place is not None and block.ended - merged[place].began < grain:
            last = merged[place]
            text = f"{last.text.partition(' … ')[0]} … {block.text}"
            merged[place] = Block(last.began, max(last.ended, block.ended), block.kind, text)
        else:
            places[block.kind] = len(merged)
            merged.append(block)
    return merged


def chart(
    title: str,
    value: str,
    label: str,
    x: Axis,
    curves: Sequence[Curve],
    marks: Sequence[Mark] = (),
    *,
    from_zero: bool = False,
) -> Chart:
    """Curves over epochs.

    The axis of values is logarithmic if it is to show numbers > 0 of very different size.
    """
    values = [0.0] if from_zero else []
    for curve in curves:
        values += [y for _, y in curve.points if math.isfinite(y)]
    is_log = min(values, default=0) > 0 and max(values) / min(values) > _WIDE
    measure: Callable[[float], float] = math.log10 if is_log else float
    y = axis_of(map(measure, values))
    most = max(100, 2 * MOST_POINTS // max(1, len(curves)))
    lines = [_vertical(mark, x) for mark in marks]
    for curve in curves:
        for part in _unbroken(curve.points):
            lines.append(Line(curve.kind, _path(thin(part, most), x, y, measure)))
    ticks = _round_numbers(y, 5)  # of which two are within any range
    if is_log:
        ticks = [tick for tick in ticks if tick == round(tick)]
    whole = [tick for tick in _round_numbers(x, 5) if tick == round(tick)]
    return Chart(
        title,
        value,
        label,
        is_log,
        lines,
        [Tick(_write(tick), 100 * x.place(tick)) for tick in whole],
        [
            Tick(f"{10**tick:.4g}" if is_log else _write(tick), 100 * (1 - y.place(tick)))
            for tick in ticks
        ],
    )


def timeline(
    rows: Sequence[tuple[str, Sequence[Block]]], x: Axis, marks: Sequence[Mark] = ()
) -> Timeline:
    """A row for each lane; the marks are in the first."""
    lanes = []
    lines = [_vertical(mark, x) for mark in marks]
    for name, blocks in rows:
        boxes = [_box(block, x) for block in blocks]
        lanes.append(Lane(name, f"{name}: {_count(blocks)}", boxes, lines))
        lines = []
    length = Axis(0, x.high - x.low)
    ticks = [Tick(format_seconds(tick), 100 * length.place(tick)) for tick in _durations(length)]
    return Timeline(lanes, ticks)


def stacked(parts: Sequence[tuple[str, str, float]]) -> list[Box]:
    """A stacked bar of (class, title, size)."""
    total = sum(size for _, _, size in parts) or 1.0
    boxes = []
    at = 0.0
    for kind, text, size in parts:
        width = size / total * WIDTH
        boxes.append(Box(_rounded(at), _rounded(width), kind, text))
        at += width
    return boxes


def _path(points: Sequence[Point], x: Axis, y: Axis, measure: Callable[[float], float]) -> str:
    places = []
    for a, b in points:
        across, down = WIDTH * x.place(a), HEIGHT * (1 - y.place(measure(b)))
        places.append(f"{_rounded(across):g},{_rounded(down):g}")
    # A line of no length draws a single point: its ends are round.
    return f"M{places[0]}L{' '.join(places[1:] or places)}"


def _unbroken(points: Sequence[Point]) -> list[list[Point]]:
    """The parts between points without a number; all in one if these are too many to be seen."""
    groups = groupby(points, key=lambda point: math.isfinite(point[1]))
    parts = [list(part) for is_number, part in groups if is_number]
    if len(parts) <= MOST_GAPS:
        return parts
    return [[point for part in parts for point in part]]


def _vertical(mark: Mark, x: Axis) -> Line:
    return Line(mark.kind, f"M{_rounded(WIDTH * x.place(mark.x)):g},0V{HEIGHT}", mark.text)


def _box(block: Block, x: Axis) -> Box:
    left, right = WIDTH * x.place(block.began), WIDTH * x.place(block.ended)
    return Box(_rounded(left), _rounded(max(right - left, 1)), block.kind, block.text)


def _write(value: float) -> str:
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e7 else f"{value:.4g}"


def _round_numbers(axis: Axis, count: int) -> list[float]:
    """Round numbers within a range, about `count` of them."""
    rough = (axis.high - axis.low) / count
    if not (math.isfinite(rough) and rough > 0):
        return []
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)
    return _multiples(axis, step)


def _durations(axis: Axis) -> list[float]:
    if axis.high <= 5:
        return _round_numbers(axis, 4)
    return _multiples(axis, next((step for step in _STEPS if axis.high / step <= 5), 86400.0))


def _multiples(axis: Axis, step: float) -> list[float]:
    first, last = math.ceil(axis.low / step), math.floor(axis.high / step)
    every = max(1, (last - first) // 6)
    return [number * step for number in range(first, last + 1, every)]


def _count(blocks: Sequence[Block]) -> str:
    kinds: dict[str, float] = {}
    for block in blocks:
        kinds[block.kind] = kinds.get(block.kind, 0.0) + block.ended - block.began
    return _write_kinds(kinds) or "nothing recorded"


def _write_kinds(kinds: Mapping[str, float]) -> str:
    texts = (f"{kind.replace('_', ' ')} {format_seconds(time)}" for kind, time in kinds.items())
    return ", ".join(texts)


def _rounded(value: float) -> float:
    return round(value, 2)
