"""Curves and timelines of any length are drawn from few points and blocks."""

from __future__ import annotations

import math

import pytest

from jobrunner.story.figures import Block, Curve, Mark, axis_of, chart, merge, thin, timeline


def test_a_long_curve_keeps_its_ends_and_every_peak() -> None:
    points = [(float(i), math.sin(i / 50)) for i in range(20_000)]
    points[7_777] = (7_777.0, 9.0)
    points[12_345] = (12_345.0, -9.0)
    drawn = thin(points)
    assert len(drawn) <= 1000
    assert drawn == sorted(drawn)
    assert {(7_777.0, 9.0), (12_345.0, -9.0)} <= set(drawn)


def test_blocks_too_short_to_be_seen_are_drawn_as_one_with_the_next_of_their_kind() -> None:
    blocks = [Block(i / 10, (i + 1) / 10, "ab"[i % 2], f"number {i}") for i in range(10_000)]
    drawn = merge(blocks, 5.0)
    assert len(drawn) <= 2 * (1000 / 5.0 + 1)
    assert drawn[0] == Block(0.0, pytest.approx(4.9), "a", "number 0 … number 48")
    assert {block.kind for block in drawn} == {"a", "b"}
    assert max(block.ended for block in drawn) == 1000.0


def test_a_curve_has_a_gap_where_there_is_no_number() -> None:
    curve = Curve("curve", [(1, 1.0), (2, 2.0), (3, math.nan), (4, 1.0)])
    drawn = chart("loss", "", "", axis_of([1, 4]), [curve])
    assert [line.path for line in drawn.lines] == ["M0,100L333.33,0", "M1000,100L1000,100"]


def test_a_curve_of_very_many_gaps_is_drawn_through_them() -> None:
    curve = Curve("curve", [(i, math.nan if i % 2 else i) for i in range(10_000)])
    [line] = chart("loss", "", "", axis_of([0, 10_000]), [curve]).lines
    assert len(line.path) < 50_000


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ((0.01, 100.0), ["0.01", "0.1", "1", "10", "100"]),  # logarithmic
        ((0.0, 100.0), ["0", "20", "40", "60", "80", "100"]),
        ((3.0, 3.0), ["2", "3", "4"]),
        ((0.042, 0.958), ["0.2", "0.4", "0.6", "0.8"]),
        ((math.nan,), ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
    ],
)
def test_an_axis_has_round_numbers(values: tuple[float, ...], labels: list[str]) -> None:
    curve = Curve("curve", list(enumerate(values)))
    drawn = chart("loss", "", "", axis_of([0, 1]), [curve])
    assert [tick.text for tick in drawn.y_ticks] == labels


def test_a_timeline_says_in_words_what_it_draws() -> None:
    rows = [("run", [Block(0, 2, "compute", ""), Block(2, 5, "save_wait", "")]), ("<b>", [])]
    drawn = timeline(rows, axis_of([0, 10]), [Mark(3, "loss", "lost: x")])
    labels = [lane.label for lane in drawn.lanes]
    assert labels == ["run: compute 2.0 s, save wait 3.0 s", "<b>: nothing recorded"]
    assert [tick.percent for tick in drawn.ticks] == [0, 20, 40, 60, 80, 100]
    assert [len(lane.lines) for lane in drawn.lanes] == [1, 0]
