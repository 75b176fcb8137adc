"""Curves of any length are drawn from few points, on axes with round numbers."""

import math

from jobrunner.story.charts import axis_of, draw_chart, metric_charts, thin
from tests.story.stories import make_story


def test_a_long_curve_keeps_its_ends_and_every_peak():
    points = [(float(i), math.sin(i / 50)) for i in range(20_000)]
    points[7_777] = (7_777.0, 9.0)
    points[12_345] = (12_345.0, -9.0)
    drawn = thin(points)
    assert len(drawn) <= 1000
    assert drawn == sorted(drawn)
    assert {(7_777.0, 9.0), (12_345.0, -9.0)} <= set(drawn)


def test_an_axis_has_round_numbers():
    for values, labels in (
        ((0.01, 100.0), ["0.01", "0.1", "1", "10", "100"]),  # logarithmic
        ((3.0, 3.0), ["2", "3", "4"]),
    ):
        points = [(float(i), value) for i, value in enumerate(values)]
        drawn = draw_chart("loss", axis_of([0, 1]), [("curve", points)], [])
        assert [tick.text for tick in drawn.y_ticks] == labels


def test_a_metric_is_drawn_with_its_values_on_nodes_losses_and_what_was_set_aside():
    metrics = ["loss", "trainer:0/loss", "trainer:1/loss", "trainer:1/alone"]
    drawn = metric_charts(make_story(40, metrics=metrics))
    assert [chart.title for chart in drawn.charts] == ["loss", "trainer:1/alone"]
    kinds = [line.kind for line in drawn.charts[0].lines]
    assert (kinds.count("node"), kinds.count("curve"), kinds.count("aside")) == (2, 1, 1)
    assert {"resume", "loss"} <= set(kinds)
    assert drawn.kinds == set(kinds)
