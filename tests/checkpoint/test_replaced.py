"""A checkpoint directory that is replaced by an older copy of itself while a run uses it."""

import shutil

import pytest

from jobrunner import CheckpointError, JobRunner, MultiNodeCheckpointManager
from tests.jobs import At, counter


class Directory:
    """A checkpoint directory that can be copied and replaced, all but its heartbeats."""

    def __init__(self, path):
        self.path = path / "runs"
        self.older = path / "older"

    def copy(self):
        shutil.copytree(self.path, self.older, ignore=shutil.ignore_patterns("_runs"))

    def exchange(self):
        """Put the other one in its place, and keep it as the other one."""
        own = self.older.with_name(f"{self.older.name}.own")
        own.mkdir()
        for entry in list(self.path.iterdir()):
            if entry.name != "_runs":
                entry.rename(own / entry.name)
        shutil.copytree(self.older, self.path, dirs_exist_ok=True)
        self.older = own


@pytest.fixture
def directory(tmp_path):
    return Directory(tmp_path)


def run(directory, session, *callbacks, **options):
    """Run the job, and copy its directory once epoch 2 has ended."""
    manager = MultiNodeCheckpointManager(directory.path, asynchronous=False)
    callbacks = [At(2, directory.copy), *callbacks]
    return JobRunner(counter(8), manager, callbacks=callbacks, **options).run(session)


def test_a_replaced_directory_is_refused_at_the_next_save(directory, inproc_session):
    with pytest.raises(CheckpointError, match=r"was replaced while this run used it: expected e"):
        run(directory, inproc_session, At(6, directory.exchange), on_save_error="raise")
    # Nothing was added to the copy, and it is what a later run continues from.
    assert len(list(directory.path.glob("_log/*"))) == 4
    again = MultiNodeCheckpointManager(directory.path, take_over=True)
    assert again.epochs() == [0, 1]
    result = JobRunner(counter(8), again).run(inproc_session)
    assert (result.resumed_from, result.epoch) == (1, 8)


def test_a_run_that_only_warns_saves_again_once_its_own_directory_is_back(
    directory, inproc_session
):
    lost, back = At(4, directory.exchange), At(6, directory.exchange)
    result = run(directory, inproc_session, lost, back)
    assert [failed.epoch for failed in result.failed_saves] == [4, 5]
    assert all("was replaced" in failed.error for failed in result.failed_saves)
    manager = MultiNodeCheckpointManager(directory.path)
    assert manager.epochs() == [0, 1, 2, 3, 6, 7, 8]
    for epoch in manager.epochs():
        manager.verify(epoch)


class AfterSave:
    """A callback that replaces the directory once epoch 8 is saved."""

    def __init__(self, directory):
        self.directory = directory

    def on_save(self, report):
        if report.epoch == 8:
            self.directory.exchange()


def test_a_directory_replaced_after_the_last_save_does_not_end_ok(directory, inproc_session):
    with pytest.raises(CheckpointError, match="was replaced"):
        run(directory, inproc_session, AfterSave(directory))


def test_a_manager_that_only_reads_reads_a_replaced_directory_afresh(directory, inproc_session):
    run(directory, inproc_session)
    reader = MultiNodeCheckpointManager(directory.path)
    assert reader.latest() == 8
    directory.exchange()
    assert reader.latest() == 1
