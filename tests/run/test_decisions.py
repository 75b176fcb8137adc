"""What a run decides from losses in a row and from recorded epochs."""

import pytest

from jobrunner import NodeLostError
from jobrunner.positions import Position
from jobrunner.run.decisions import State, remainder
from jobrunner.run.losses import Losses


def test_after_two_losses_in_a_row_their_epochs_run_carefully():
    once = Losses(3).after_loss((), range(4, 5))
    assert 4 not in once.careful_epochs
    twice = once.after_loss((), range(6, 9))
    assert [epoch for epoch in range(12) if epoch in twice.careful_epochs] == [4, 5, 6, 7, 8]
    assert 4 not in twice.after_record().careful_epochs
    assert 0 not in Losses(3).after_loss().after_loss().careful_epochs


def test_losses_of_careful_runs_outweigh_others():
    losses = Losses(9).after_loss(["a/x", "b/y"]).after_loss(["a/x", "b/y"])
    assert losses.suspects == ["a/x", "b/y"]
    assert losses.describe().endswith(" a/x and b/y were running each time.")
    losses = losses.after_loss(["b/z"], was_careful=True)
    assert losses.suspects == ["b/z"]
    assert losses.after_loss(["b/z", "a/x"], was_careful=True).suspects == ["b/z"]
    assert losses.after_loss(["a/x"], was_careful=True).suspects == []
    assert losses.after_record() == Losses(9, in_all=3)


def test_a_loss_in_a_batch_after_a_careful_group_names_no_suspect():
    state = State(Losses(9))

    def lose(task):
        error = NodeLostError("lost", nodes=(), worker="w", epoch=None, running=(task,))
        state.losses = state.losses.after_error(
            error, state.under_way, was_careful=state.is_careful
        )

    for _ in range(2):
        state.begin(range(1))
        assert not state.is_careful
        lose("a/x")
    state.begin(range(1))
    assert state.is_careful
    state.begin(range(50, 60))
    lose("b/y")
    assert state.losses.suspects == []
    assert "the only task" not in state.losses.describe()


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
