"""Charts as SVG without text: a page stretches them to its width, and its own text labels them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from jobrunner.texts import Html, abbreviate, format_seconds, tag

WIDTH, HEIGHT = 1000, 100  # of a drawing, in its own units
MOST_POINTS = 1000  # of a curve
MOST_GAPS = 50
_LETTERS = 24  # of a lane's name
_WIDE = 1000  # the highest value is so many times the lowest
_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200)

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


class Range(NamedTuple):
    """The values along an axis, which `place` maps to 0..1."""

    low: float
    high: float

    def place(self, value: float) -> float:
        """Where a value lies."""
        return (value - self.low) / ((self.high - self.low) or 1.0)


def range_of(values: Iterable[float]) -> Range:
    """The range of some values, not empty even if they are all the same."""
    found = [value for value in values if math.isfinite(value)]
    low, high = min(found, default=0.0), max(found, default=1.0)
    if low == high:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    return Range(low, high)


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about `most` points that draw the same curve: the lowest and highest of each part."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    found = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        ends = (min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1]))
        found += sorted(set(ends))
    return found


def merge(blocks: Iterable[Block], grain: float) -> list[Block]:
    """Blocks of at least `grain` seconds: shorter ones are drawn as one with the next of their kind."""
    found: list[Block] = []
    places: dict[str, int] = {}  # of the last block of each kind
    for block in blocks:
        place = places.get(block.kind)
        if place is not None and block.ended - (last := found[place]).began < grain:
            text = f"{last.text.partition(' … ')[0]} … {block.text}"
            found[place] = Block(last.began, max(last.ended, block.ended), block.kind, text)
        else:
            places[block.kind] = len(found)
            found.append(block)
    return found


def curves(
    title: object,
    label: str,
    x: Range,
    lines: Sequence[Curve],
    marks: Sequence[Mark] = (),
    *,
    least: Sequence[float] = (),
) -> Html:
    """A chart of curves over epochs, with its title, and `label`, which describes it in words.

    The axis has the values in `least` in any case. It is logarithmic if it is to show numbers > 0 of
    very different size.
    """
    values = [*least, *(v for line in lines for _, v in line.points if math.isfinite(v))]
    is_log = min(values, default=0) > 0 and max(values) / min(values) > _WIDE
    measure: Callable[[float], float] = math.log10 if is_log else float
    y = range_of(map(measure, values))
    most = max(100, 2 * MOST_POINTS // max(1, len(lines)))
    paths = [
        tag("path", class_=line.kind, d=Html(_path(thin(part, most), x, y, measure)))
        for line in lines
        for part in _unbroken(line.points)
    ]
    drawing = _svg(label, *(_vertical(mark, x) for mark in marks), *paths)
    ticks = _numbers(y, 5)  # of which two are within any range
    if is_log:
        ticks = [tick for tick in ticks if tick == round(tick)]
    return tag(
        "figure",
        tag("figcaption", title, " (logarithmic)" if is_log else ""),
        tag(
            "div",
            tag("div", *_labels("top", y, ticks, _write_power if is_log else _write), class_="y"),
            drawing,
            tag("div", *_labels("left", x, _whole_numbers(x), _write), class_="x"),
            class_="plot",
        ),
    )


def lanes(rows: Sequence[tuple[str, Sequence[Block]]], x: Range, marks: Sequence[Mark]) -> Html:
    """A timeline: a row for each lane, seconds from left to right; the marks are in the first."""
    lines = [_vertical(mark, x) for mark in marks]
    drawn = []
    for name, blocks in rows:
        boxes = [_box(block, x) for block in blocks]
        drawing = _svg(f"{name}: {_count(blocks)}", *boxes, *lines)
        title = tag("div", abbreviate(name, _LETTERS), class_="name", title=name)
        drawn.append(tag("div", title, drawing, class_="lane"))
        lines = []
    length = Range(0, x.high - x.low)
    ticks = _labels("left", length, _durations(length), format_seconds)
    axis = tag("div", tag("div", class_="name"), tag("div", *ticks, class_="x"), class_="lane")
    return tag("div", *drawn, axis, class_="lanes")


def bar(parts: Sequence[tuple[str, str, float]], label: str) -> Html:
    """A stacked bar of (class, title, size)."""
    total = sum(size for _, _, size in parts) or 1.0
    boxes, at = [], 0.0
    for kind, text, size in parts:
        width = size / total * WIDTH
        box = tag("title", text)
        boxes.append(
            tag("rect", box, class_=kind, x=_number(at), width=_number(width), height=HEIGHT)
        )
        at += width
    return tag("div", _svg(label, *boxes), class_="bar")


def _svg(label: str, *content: Html) -> Html:
    box = f"0 0 {WIDTH} {HEIGHT}"
    return tag(
        "svg", *content, viewBox=box, preserveAspectRatio="none", role="img", aria_label=label
    )


def _path(points: Sequence[Point], x: Range, y: Range, measure: Callable[[float], float]) -> str:
    places = [
        f"{_number(WIDTH * x.place(a))},{_number(HEIGHT * (1 - y.place(measure(b))))}"
        for a, b in points
    ]
    # A line of no length draws a single point: its ends are round.
    return f"M{places[0]}L{' '.join(places[1:] or places)}"


def _unbroken(points: Sequence[Point]) -> list[list[Point]]:
    """The parts between points without a number; all in one if these are too many to be seen."""
    groups = groupby(points, key=lambda point: math.isfinite(point[1]))
    parts = [list(part) for is_number, part in groups if is_number]
    return parts if len(parts) <= MOST_GAPS else [[point for part in parts for point in part]]


def _vertical(mark: Mark, x: Range) -> Html:
    at = _number(WIDTH * x.place(mark.x))
    return tag("path", tag("title", mark.text), class_=mark.kind, d=f"M{at},0V{HEIGHT}")


def _box(block: Block, x: Range) -> Html:
    at, end = WIDTH * x.place(block.began), WIDTH * x.place(block.ended)
    return tag(
        "rect",
        tag("title", block.text),
        class_=block.kind,
        x=_number(at),
        width=_number(max(end - at, 1)),
        height=HEIGHT,
    )


def _labels(
    side: str, axis: Range, ticks: Iterable[float], write: Callable[[float], str]
) -> list[Html]:
    made = []
    for tick in ticks:
        place = axis.place(tick) if side == "left" else 1 - axis.place(tick)
        made.append(tag("span", write(tick), style=f"{side}: {100 * place:.2f}%"))
    return made


def _write(value: float) -> str:
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e7 else f"{value:.4g}"


def _write_power(value: float) -> str:
    return f"{10**value:.4g}"


def _numbers(axis: Range, count: int) -> list[float]:
    """Round numbers within a range, about `count` of them."""
    rough = (axis.high - axis.low) / count
    if not (math.isfinite(rough) and rough > 0):
        return []
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)
    return _multiples(axis, step)


def _whole_numbers(axis: Range) -> list[float]:
    return [tick for tick in _numbers(axis, 5) if tick == round(tick)]


def _durations(axis: Range) -> list[float]:
    if axis.high <= 5:
        return _numbers(axis, 4)
    return _multiples(axis, next((it for it in _SECONDS if axis.high / it <= 5), 86400.0))


def _multiples(axis: Range, step: float) -> list[float]:
    first, last = math.ceil(axis.low / step), math.floor(axis.high / step)
    every = max(1, (last - first) // 6)
    return [number * step for number in range(first, last + 1, every)]


def _count(blocks: Sequence[Block]) -> str:
    kinds: dict[str, float] = {}
    for block in blocks:
        kinds[block.kind] = kinds.get(block.kind, 0.0) + block.ended - block.began
    found = (f"{kind.replace('_', ' ')} {format_seconds(it)}" for kind, it in kinds.items())
    return ", ".join(found) or "nothing recorded"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
