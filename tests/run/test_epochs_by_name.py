"""Epochs asked for as "latest" and "best:METRIC"."""

import math

import pytest
from click.testing import CliRunner

from jobrunner import (
    CheckpointNotFoundError,
    DefinitionError,
    JobRunner,
    MultiNodeCheckpointManager,
    current_task,
)
from jobrunner.checkpoint import restore_epoch
from jobrunner.cli import main
from jobrunner.positions import Position
from tests.jobs import counter

LOSSES = [5.0, 2.0, math.nan, 4.0]


def descend(n):
    current_task().report(loss=LOSSES[n], accuracy=-LOSSES[n])
    return n + 1


@pytest.fixture
def manager(inproc_session, tmp_path):
    manager = MultiNodeCheckpointManager(tmp_path / "k")
    JobRunner(counter(4, descend), manager).run(inproc_session)
    return manager


@pytest.mark.parametrize(
    ("name", "n"), [("latest", 4), ("best:loss", 2), ("best:loss:min", 2), ("best:loss:max", 1)]
)
def test_an_epoch_is_found_by_name(name, n, manager):
    assert manager.open(name)["a"]["n"] == n
    assert manager.record(name).epoch == n
    shown = CliRunner().invoke(main, ["info", manager.path, name]).output
    assert shown.startswith(f"epoch {n} of")


def test_a_run_goes_on_from_the_best_epoch(manager, inproc_session):
    runner = JobRunner(counter(3, descend), manager, resume_from_epoch="best:loss")
    plan = runner.plan_resume()
    assert (plan.epoch, plan.sets_aside) == (2, (3, 4))
    result = runner.run(inproc_session)
    assert (result.resumed_from, result.epoch) == (2, 3)
    assert manager.epochs() == [0, 1, 2, 3]


def test_the_best_epoch_has_a_number_and_a_metric_that_nobody_reported_is_named(manager):
    assert (manager.best("loss"), manager.best("loss", mode="max")) == (2, 1)
    with pytest.raises(
        CheckpointNotFoundError, match=r"has a number for 'los'. Reported: accuracy, loss"
    ):
        manager.open("best:los")
    with pytest.raises(DefinitionError, match=r"'latest' or 'best:METRIC'; got 'best:'"):
        manager.open("best:")


def test_an_epoch_that_was_restored_is_not_newer_than_later_ones(manager):
    manager.run.start(["a"], {})
    manager.run.rewind(Position(2), "by hand")
    manager.run.end()
    for epoch in (4, 3):  # the log has the older one last
        restore_epoch(manager.directory, Position(epoch))
    assert manager.latest() == 4
    assert JobRunner(counter(4, descend), manager).plan_resume().epoch == 4
