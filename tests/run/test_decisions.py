"""What a run decides from losses in a row and from recorded epochs."""

import pytest

from jobrunner.positions import Position
from jobrunner.run.decisions import Losses, remainder


def test_tasks_that_ran_at_each_of_several_losses_are_named():
    losses = Losses(9).after_loss(["a/x", "b/y"])
    assert losses.describe().endswith(" max_restarts is 9.")
    losses = losses.after_loss(["a/x", "b/y"])
    assert losses.describe().endswith(" a/x and b/y were running each time.")
    losses = losses.after_loss(["b/y", "b/z"])
    assert losses.describe().endswith(" b/y was running each time.")
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
