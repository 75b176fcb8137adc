"""What a run decides: after losses, at a resume, and when workers join."""

import math

import pytest

from jobrunner.positions import Position
from jobrunner.run.decisions import (
    MOST_EPOCHS,
    Losses,
    Stopwatch,
    is_move_worthwhile,
    next_decision,
    remainder,
)


def test_tasks_that_ran_at_each_of_several_losses_are_named():
    losses = Losses(9).after_loss(["a/x", "b/y"])
    assert losses.describe().endswith(" max_restarts is 9.")
    losses = losses.after_loss(["a/x", "b/y"])
    assert losses.describe().endswith(" Running each time: a/x, b/y.")
    losses = losses.after_loss(["b/y", "b/z"])
    assert losses.describe().endswith(" Running each time: b/y.")
    assert losses.after_record() == Losses(9, in_all=3)


@pytest.mark.parametrize(
    ("epoch", "recorded", "left"),
    [
        (3, {}, "epochs"),
        (5, {}, "last groups"),
        ((5, 2), {}, "epochs"),
        (3, {"fired": ["a/met"]}, "last groups"),
        (3, {"fired": ["a/met"], "is_done": True}, "nothing"),
        (5, {"later": [Position(6)], "is_done": True}, "last groups"),
        (3, {"is_done": True}, "epochs"),
    ],
)
def test_what_is_left_after_a_resume(epoch, recorded, left):
    assert remainder(Position.of(epoch), 5, **recorded) == left


THREADS = {"w1": 1, "w2": 1, "w3": 2}


def pays(now, after, **facts):
    facts = {"epoch_seconds": 1.0, "epochs_left": 100, "save_seconds": 0.01, **facts}
    placements = ({f"n{i}": worker for i, worker in enumerate(it.split())} for it in (now, after))
    return is_move_worthwhile(*placements, THREADS, **facts)


def test_a_worker_that_halves_the_fullest_one_is_worth_a_move():
    assert pays("w1 w1", "w1 w2")
    assert pays("w1 w1", "w3 w3")
    assert not pays("w1 w2", "w2 w1")
    assert not pays("w1 " * 11, "w1 " * 10 + "w2", epoch_seconds=1000.0)  # a tenth is the least
    assert not pays("w1 w1 w2 w2", "w1 w1 w2 w3")  # the fullest has as much as before


def test_a_move_must_pay_for_itself_in_the_epochs_that_are_left():
    assert not pays("w1 w1", "w1 w2", epochs_left=0)
    assert not pays("w1 w1", "w1 w2", epochs_left=10, epoch_seconds=0.01)
    assert pays("w1 w1", "w1 w2", epochs_left=math.inf, epoch_seconds=0.01)
    assert not pays("w1 w1", "w1 w2", save_seconds=MOST_EPOCHS, epochs_left=10_000_000)
    assert pays("w1 w1", "w1 w2", epoch_seconds=math.inf)


def test_a_loss_is_told_once_and_at_the_end_again_though_nothing_went_on():
    now = [100.0]
    watch = Stopwatch(now[0], clock=lambda: now[0])

    def losses(epoch):
        return watch.capture(Position(epoch))["timing"].get("losses", ())

    watch.enter("compute")
    now[0] += 16
    watch.lose("first")
    now[0] += 5
    watch.go_back(Position(2))
    watch.enter("compute")
    now[0] += 4
    assert losses(3) == [{"at": 16, "text": "first", "resumed": 21, "epoch": 2}]
    assert not losses(4)
    watch.lose("second")
    ended = watch.end("failed", Position(4))
    assert [loss["text"] for loss in ended["timing"]["losses"]] == ["first", "second"]
    assert "resumed" not in ended["timing"]["losses"][1]
    assert ended["outcome"] == "failed"


def test_what_comes_after_an_epoch():
    assert next_decision() == "run an epoch"
    assert next_decision(stopped_by="a/met", stop_asked="SIGTERM") == "finish"
    assert next_decision(stop_asked="SIGTERM", is_leaving=True) == "stop"
    assert next_decision(is_leaving=True) == "run an epoch"  # moving would undo one
    assert next_decision(is_leaving=True, is_recorded=True) == "move"
    assert next_decision(has_room=True, is_recorded=True) == "move"


def test_losses_in_a_row_are_too_many_after_the_last_restart():
    losses = Losses(limit=2).after_loss().after_loss()
    assert not losses.are_too_many
    assert losses.after_loss().are_too_many
    assert losses.after_record() == Losses(limit=2, in_all=2)
