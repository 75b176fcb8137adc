"""Where a run's time goes, as it counts it for its records; the clock is the test's."""

from __future__ import annotations

from typing import Any

import pytest

from jobrunner.positions import Position
from jobrunner.run.decisions import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> Stopwatch:
    return Stopwatch(clock(), clock=clock)


def spend(watch: Stopwatch, clock: Clock, part: Any, seconds: float) -> None:
    watch.enter(part)
    clock.now += seconds


def save(watch: Stopwatch, epoch: int) -> dict[str, Any]:
    return dict(watch.capture(Position(epoch))["timing"])


def test_a_record_says_what_was_spent_until_its_save_began(watch, clock):
    clock.now += 2
    spend(watch, clock, "compute", 3)
    watch.enter("idle")
    assert save(watch, 1) == {"start": 2, "compute": 3}
    with watch.spending("save_wait"):
        clock.now += 1
    spend(watch, clock, "compute", 4)
    assert save(watch, 2) == {"start": 2, "compute": 7, "save_wait": 1}


def test_epochs_that_ran_after_the_one_that_a_run_goes_on_from_were_lost(watch, clock):
    for epoch in (1, 2, 3):
        spend(watch, clock, "compute", epoch)
        save(watch, epoch)
    spend(watch, clock, "compute", 10)
    watch.lose("worker lost")
    clock.now += 5
    watch.go_back(Position(2))  # 3 is damaged
    spend(watch, clock, "compute", 4)
    about = save(watch, 3)
    assert (about["compute"], about["redone"], about["recovery"]) == (7, 13, 5)
    assert about["losses"] == [{"at": 16, "text": "worker lost", "resumed": 21, "epoch": 2}]
    assert "losses" not in save(watch, 4)


def test_a_loss_is_told_once_and_at_the_end_again_though_nothing_went_on(watch, clock):
    spend(watch, clock, "compute", 1)
    watch.lose("first")
    watch.go_back(None)
    spend(watch, clock, "compute", 1)
    assert len(save(watch, 1)["losses"]) == 1
    assert "losses" not in save(watch, 2)
    watch.lose("second")
    about = watch.end("failed", Position(2))
    assert [loss["text"] for loss in about["timing"]["losses"]] == ["first", "second"]
    assert "resumed" not in about["timing"]["losses"][1]
    assert about["outcome"] == "failed"


@pytest.mark.parametrize(("outcome", "kept"), [("finished", 5), ("stopped", 2), ("failed", 2)])
def test_epochs_of_an_unfinished_run_that_were_not_saved_are_lost(watch, clock, outcome, kept):
    spend(watch, clock, "compute", 2)
    save(watch, 1)
    spend(watch, clock, "compute", 3)
    timing = watch.end(outcome, Position(1))["timing"]
    assert timing["compute"] == kept
    assert timing.get("redone", 0) == 5 - kept
