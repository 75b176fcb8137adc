"""What is concluded from losses in a row."""

from jobrunner import Job, NodeLostError
from jobrunner.run.callbacks import Callbacks
from jobrunner.run.decisions import Losses
from jobrunner.run.losses import Survival


def test_care_is_called_for_after_two_losses_in_a_row_in_the_epochs_where_they_came():
    once = Losses(3).after_loss((), range(4, 5))
    assert not once.call_for_care(4)
    twice = once.after_loss((), range(6, 9))
    assert [epoch for epoch in range(12) if twice.call_for_care(epoch)] == [4, 5, 6, 7, 8]
    assert not twice.after_record().call_for_care(4)
    assert not Losses(3).after_loss().after_loss().call_for_care(0)


def test_what_is_known_for_certain_outweighs_what_was_heard():
    losses = Losses(9).after_loss(["a/x", "b/y"]).after_loss(["a/x", "b/y"])
    assert losses.suspects == ["a/x", "b/y"]
    losses = losses.after_loss(["b/z"], was_careful=True)
    assert losses.suspects == ["b/z"]
    assert losses.after_loss(["b/z", "a/x"], was_careful=True).suspects == ["b/z"]
    assert losses.after_loss(["a/x"], was_careful=True).suspects == []
    assert losses.after_record() == Losses(9, in_all=3)


def test_what_runs_in_one_go_after_a_careful_group_accuses_nobody_for_certain():
    survival = Survival(Job("j"), 9, Callbacks(()), lambda: "the start")

    def lose(task):
        survival.count(NodeLostError("lost", nodes=(), worker="w", epoch=None, running=(task,)))

    for _ in range(2):
        survival.begin(range(1))
        assert not survival.is_careful
        lose("a/x")
    survival.begin(range(1))
    assert survival.is_careful
    survival.begin(range(50, 60))
    lose("b/y")
    assert survival.losses.careful == 0
    assert "told of before it began" not in survival.losses.accusation
