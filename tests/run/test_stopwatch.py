"""Where a run's time goes, as it counts it for its records; the clock is the test's."""

from __future__ import annotations

from typing import Any

import pytest

from jobrunner.positions import Position
from jobrunner.run.decisions import MOST_SPANS, Stopwatch


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


def save(watch: Stopwatch, epoch: int, *, fails: bool = False) -> dict[str, Any]:
    at = Position(epoch)
    found = watch.capture(at)
    watch.note_save(at, is_recorded=not fails)
    return dict(found["timing"])


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


def test_moves_to_other_workers_are_recovery_and_told_once(watch, clock):
    spend(watch, clock, "compute", 3)
    watch.enter("idle")
    assert "moves" not in save(watch, 1)
    with watch.moving():
        clock.now += 2
    held = watch.capture(2, is_held=True)["timing"]
    assert (held["recovery"], "idle" in held, "moves" in held) == (2, False, False)
    assert save(watch, 2, fails=True)["moves"] == [[3, 5]]
    assert save(watch, 2)["moves"] == [[3, 5]]
    assert "moves" not in save(watch, 3)


def test_a_loss_is_told_again_if_its_record_failed_and_at_the_end_though_nothing_went_on(
    watch, clock
):
    spend(watch, clock, "compute", 1)
    watch.lose("first")
    watch.go_back(None)
    spend(watch, clock, "compute", 1)
    assert len(save(watch, 1, fails=True)["losses"]) == 1
    watch.lose("second")
    about = watch.end("failed")
    assert [loss["text"] for loss in about["timing"]["losses"]] == ["first", "second"]
    assert "resumed" not in about["timing"]["losses"][1]
    assert about["outcome"] == "failed"


@pytest.mark.parametrize(("outcome", "kept"), [("finished", 5), ("stopped", 2), ("failed", 2)])
def test_epochs_of_an_unfinished_run_that_were_not_saved_are_lost(watch, clock, outcome, kept):
    spend(watch, clock, "compute", 2)
    save(watch, 1)
    spend(watch, clock, "compute", 3)
    timing = watch.end(outcome)["timing"]
    assert timing["compute"] == kept
    assert timing.get("redone", 0) == 5 - kept


def test_the_spans_of_a_failed_save_are_in_the_next_record(watch, clock):
    watch.note_spans(3, clock(), [("a", "step", 0.5, 0.25)])
    save(watch, 3, fails=True)
    assert save(watch, 4)["spans"] == [["a", "step", 3, 0.5, 0.25]]
    assert "spans" not in save(watch, 5)


def test_the_spans_of_saves_that_all_failed_are_bounded(watch, clock):
    for epoch in range(3):
        watch.note_spans(epoch, clock(), [("a", "step", 0.0, 0.1)] * MOST_SPANS)
        watch.capture(epoch)
    for epoch in (2, 1, 0):
        watch.note_save(epoch, is_recorded=False)
    assert len(save(watch, 3)["spans"]) == MOST_SPANS


def test_a_state_that_is_only_held_leaves_the_spans_to_the_next_save(watch, clock):
    watch.note_spans(3, clock(), [("a", "step", 0.5, 0.25)])
    assert "spans" not in watch.capture(3, is_held=True)["timing"]
    assert save(watch, 4)["spans"] == [["a", "step", 3, 0.5, 0.25]]
    assert "spans" not in save(watch, 5)


def test_samples_become_rarer_and_are_bounded(watch, clock):
    taken = 0
    while clock() < 100 + 86_400:
        if watch.is_sample_due():
            taken += 1
            watch.note_spans(taken, clock(), [("a", "step", 0.0, 0.1)] * 40)
        clock.now += 0.2
    assert 200 < taken < 500
    assert len(save(watch, 1)["spans"]) <= MOST_SPANS


def test_nothing_is_recorded_if_timing_is_off(clock):
    watch = Stopwatch(clock(), is_on=False, clock=clock)
    assert not watch.is_sample_due()
    assert watch.capture(Position(1)) == watch.end("finished") == {}
