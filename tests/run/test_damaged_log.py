"""Runs with a damaged or lost log report it, lose nothing, and resume after a repair."""

import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from jobrunner import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
)
from jobrunner.cli.command import main
from tests.cli.directories import lengthen_log
from tests.jobs import Listener, counter


@pytest.fixture
def manager(inproc_session, tmp_path):
    """The manager of a job that has ended after epoch 3."""
    # An entry of the log for each epoch, so that each can be damaged.
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt", asynchronous=False)
    JobRunner(counter(3), manager).run(inproc_session)
    return MultiNodeCheckpointManager(tmp_path / "ckpt")


def repair(manager):
    result = CliRunner().invoke(main, ["fsck", manager.path, "--repair"])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("resume_from", ["latest", None, 2])
def test_a_run_refuses_a_damaged_log_and_resumes_after_the_repair(
    inproc_session, manager, resume_from
):
    entry = Path(manager.path, "_log", "0000000003.json")  # the commit of epoch 1
    entry.write_bytes(entry.read_bytes()[:100])
    stores = sorted(Path(manager.path).glob("a.*"))
    for call in (
        lambda: JobRunner(counter(5), manager, resume_from).plan_resume(),
        lambda: JobRunner(counter(5), manager, resume_from).run(inproc_session),
    ):
        with pytest.raises(
            CheckpointCorruptError, match=r"Entry 3 .*cut or changed.*fsck .* --repair"
        ):
            call()
    assert sorted(Path(manager.path).glob("a.*")) == stores
    assert "cannot be read" in manager._repr_html_()
    told = repair(manager)
    assert "epochs recorded anew, from stores that were verified byte for byte: 1" in told
    assert "epochs that stay recorded: 0, 2, 3" in told
    assert manager.epochs() == [0, 1, 2, 3]
    result = JobRunner(counter(5), manager, resume_from).run(inproc_session)
    assert result.resumed_from == {"latest": 3, None: None, 2: 2}[resume_from]
    assert inproc_session.fetch(Node("a")["n"]) == 5


def test_a_lost_log_does_not_start_the_job_afresh(inproc_session, manager):
    shutil.rmtree(Path(manager.path, "_log"))
    with pytest.raises(
        CheckpointNotFoundError, match=r"must have lost its entry: .*fsck .* --repair"
    ):
        JobRunner(counter(5), manager, 2).plan_resume()
    runner = JobRunner(counter(5), MultiNodeCheckpointManager(manager.path))
    for call in (runner.plan_resume, lambda: runner.run(inproc_session)):
        with pytest.raises(
            CheckpointCorruptError, match=r"epochs 0 to 3 .*--repair.*--resume none"
        ):
            call()
    assert not Path(manager.path, "_log").exists()
    assert "recorded anew" in repair(manager)
    result = runner.run(inproc_session)
    assert (result.resumed_from, inproc_session.fetch(Node("a")["n"])) == (3, 5)


def test_lost_newest_entries_are_reported(inproc_session, manager):
    for entry in sorted(Path(manager.path, "_log").iterdir())[4:]:
        entry.unlink()

    listener = Listener()
    again = MultiNodeCheckpointManager(manager.path)
    plan = JobRunner(counter(5), again).plan_resume()
    assert plan.epoch == 1
    told = "stores of epoch 3 that no entry of its log mentions: its newest entries may be lost"
    assert told in str(plan)
    listed = CliRunner().invoke(main, ["ls", manager.path]).stdout
    assert "The log does not mention stores of epochs 3." in listed
    repair(manager)
    assert again.epochs() == [0, 1, 2, 3]
    for entry in sorted(Path(manager.path, "_log").iterdir())[4:]:
        entry.unlink()
    again = MultiNodeCheckpointManager(manager.path)
    result = JobRunner(counter(4), again, callbacks=[listener]).run(inproc_session)
    assert (result.resumed_from, result.epoch) == (1, 4)
    assert any(told in message for message in listener.warnings)
    again.verify(4)


def test_a_resume_plan_names_damaged_epochs_and_another_run(inproc_session, manager):
    lengthen_log(manager.path)
    for epoch in (2, 3):
        number = manager.record(epoch).number
        Path(manager.path, "_log", f"{number:010}.json").write_bytes(b"{}")
    manager = MultiNodeCheckpointManager(manager.path)
    plan = JobRunner(counter(5), manager).plan_resume()
    assert (plan.epoch, list(plan.damaged), plan.sets_aside) == (1, [3, 2], (2, 3))
    assert "epoch 3 is damaged: Entry " in str(plan)
    assert "sets aside epochs:\n  2, 3" in str(plan)
    other = MultiNodeCheckpointManager(manager.path)
    other.run.start(["a"], {})
    try:
        plan = JobRunner(counter(5), manager).plan_resume()
        assert f"another run uses {manager.path} (process " in str(plan)
    finally:
        other.run.end()
    assert JobRunner(counter(5), manager).plan_resume().warnings == ()


def test_a_run_with_no_whole_epoch_starts_afresh_and_says_so(inproc_session, manager):
    for epoch in range(4):
        Path(manager.get_ckpt_db_name("a", epoch), "zarr.json").unlink()
    result = JobRunner(counter(2), manager).run(inproc_session)
    assert (result.resumed_from, manager.epochs()) == (None, [0, 1, 2])
