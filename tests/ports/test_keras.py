"""What the tests of Keras' `BackupAndRestore` and `ModelCheckpoint` assert, in our words."""

from pathlib import Path

import numpy as np
import pytest

from jobrunner import (
    CheckpointManager,
    DefinitionError,
    JobRunner,
    KeepAll,
    KeepBest,
    MultiNodeCheckpointManager,
    Node,
    Position,
    SaveEvery,
)
from tests.ports.counting import N, counter, due, interrupted, kept, manager_of


@pytest.mark.parametrize("interval", [{"epochs": "batch"}, {"steps": 0.15}, {"epochs": "epoch"}])
def test_an_unknown_interval_is_refused(interval):
    with pytest.raises(DefinitionError, match="SaveEvery"):
        SaveEvery(**interval)


def test_interrupted_in_an_epoch_no_step_runs_twice(inproc_session, tmp_path):
    manager = manager_of(tmp_path, save=SaveEvery(steps=1))
    interrupted(JobRunner(counter(2, fails_at=3, steps_per_epoch=3), manager), inproc_session)
    assert manager.latest() == Position(0, 2)
    result = JobRunner(counter(5, steps_per_epoch=3), manager).run(inproc_session)
    assert (result.resumed_from, result.epoch) == (Position(0, 2), 5)
    assert inproc_session.fetch(N) == 15


def test_interrupted_after_an_epoch_the_rest_runs(inproc_session, tmp_path):
    manager = manager_of(tmp_path)
    interrupted(JobRunner(counter(6, fails_at=8, steps_per_epoch=3), manager), inproc_session)
    result = JobRunner(counter(5, steps_per_epoch=3), manager).run(inproc_session)
    assert (result.resumed_from, result.epoch, inproc_session.fetch(N)) == (2, 5, 15)


def test_a_damaged_backup_is_left_for_the_one_before(inproc_session, tmp_path, caplog):
    manager = manager_of(tmp_path)
    interrupted(JobRunner(counter(6, fails_at=3), manager), inproc_session)
    manifest = Path(manager.get_ckpt_db_name("a", 2), "zarr.json")
    manifest.write_text("0")
    result = JobRunner(counter(5), manager).run(inproc_session)
    assert (result.resumed_from, result.epoch, inproc_session.fetch(N)) == (1, 5, 5)
    assert "a.2" in caplog.text


@pytest.mark.parametrize("path", ["", None])
@pytest.mark.parametrize("kind", [MultiNodeCheckpointManager, CheckpointManager])
def test_a_directory_must_be_named(kind, path):
    nodes = (Node("a"),) if kind is CheckpointManager else ()
    with pytest.raises(DefinitionError, match="path"):
        kind(path, *nodes)


def test_only_the_best_is_kept_and_the_newest(inproc_session, tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: 5.0}
    manager = manager_of(tmp_path, keep=KeepBest("loss"))
    JobRunner(counter(4, losses=losses), manager).run(inproc_session)
    assert manager.epochs() == [2, 4]


def test_the_mode_is_not_guessed_from_the_name():
    accuracy = {1: {"accuracy": 0.9}, 2: {"accuracy": 0.5}}
    assert kept(KeepBest("accuracy"), accuracy) == [2]
    assert kept(KeepBest("accuracy", mode="max"), accuracy) == [1]
    for mode in ("auto", "unknown"):
        with pytest.raises(DefinitionError, match="mode"):
            KeepBest("accuracy", mode=mode)


def test_a_metric_that_nobody_reports_is_warned_of(inproc_session, tmp_path, caplog):
    manager = manager_of(tmp_path, keep=KeepBest("unknown"))
    assert JobRunner(counter(3), manager).run(inproc_session).epoch == 3
    assert "'unknown'" in caplog.text
    assert "Reported: loss" in caplog.text


def test_every_nth_batch_is_saved():
    assert due(SaveEvery(steps=3), 9) == [(3, 1), (6, 1), (9, 1)]
    assert due(SaveEvery(steps=15), 2, steps_per_epoch=5) == []
    assert due(SaveEvery(steps=15), 4, steps_per_epoch=5) == [(3, 5)]


def test_every_batch_of_every_epoch_has_a_checkpoint(inproc_session, tmp_path):
    manager = manager_of(tmp_path, save=SaveEvery(steps=1), keep=KeepAll(partial=True))
    JobRunner(counter(3, steps_per_epoch=2), manager).run(inproc_session)
    assert [str(it) for it in manager.positions()] == ["0", "0.s1", "1", "1.s1", "2", "2.s1", "3"]
    assert manager.open(Position(1, 1))["a"]["n"] == 3


def test_epochs_on_the_wrong_side_of_the_threshold_are_not_kept():
    values = {1: {"accuracy": 0.2, "loss": 0.5}, 2: {"accuracy": 0.4, "loss": 0.3}}
    assert kept(KeepBest("accuracy", mode="max", threshold=-0.01), values) == [2]
    assert kept(KeepBest("loss", threshold=0), values) == []
    assert kept(KeepBest("accuracy", mode="max", threshold=1), values) == []


def test_saved_weights_load_without_the_program_that_made_them(inproc_session, tmp_path):
    manager = manager_of(tmp_path)
    JobRunner(counter(3), manager).run(inproc_session)
    saved = MultiNodeCheckpointManager(tmp_path / "ckpt").open(3)["a"]
    np.testing.assert_equal(saved["n"], inproc_session.fetch(N))
