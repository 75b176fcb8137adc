"""A checkpoint directory that is replaced by an older copy of itself while a run uses it."""

import shutil

import pytest

from jobrunner import CheckpointError, JobRunner, MultiNodeCheckpointManager
from jobrunner.checkpoint.storage.object_files import open_store
from tests.jobs import At, counter


class Directory:
    """A checkpoint directory, local or in a bucket, that can be copied and replaced."""

    def __init__(self, path):
        self.path = path

    def copy(self):
        self.saved = self._read()

    def replace(self):
        self._clear()
        for name, data in self.saved.items():
            self._write(name, data)

    def _read(self):
        return {
            file.relative_to(self.path): file.read_bytes()
            for file in self.path.rglob("*")
            if file.is_file()
        }

    def _clear(self):
        shutil.rmtree(self.path)

    def _write(self, name, data):
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def log(self):
        return sorted(str(name) for name in self._read() if "_log" in str(name))


class Bucket(Directory):
    def _read(self):
        store = open_store(self.path)
        names = [about["path"] for batch in store.list() for about in batch]
        return {name: store.get(name).bytes().to_bytes() for name in names}

    def _clear(self):
        open_store(self.path).delete(list(self._read()))

    def _write(self, name, data):
        open_store(self.path).put(name, data)


@pytest.fixture(params=["local", "memory"])
def directory(request, tmp_path):
    if request.param == "local":
        return Directory(tmp_path / "runs")
    pytest.importorskip("obstore")
    return Bucket(f"memory://{tmp_path.name}")


def run(directory, session, *callbacks, **options):
    """Run the job, and copy its directory once epoch 2 has ended."""
    manager = MultiNodeCheckpointManager(directory.path, asynchronous=False)
    callbacks = [At(2, directory.copy), *callbacks]
    return JobRunner(counter(8), manager, callbacks=callbacks, **options).run(session)


def test_a_replaced_directory_is_refused_at_the_next_save(directory, inproc_session):
    with pytest.raises(CheckpointError, match=r"was replaced while this run used it: expected e"):
        run(directory, inproc_session, At(6, directory.replace), on_save_error="raise")
    # Not a byte was added, and the copy is what a later run continues from.
    assert directory.log() == sorted(str(name) for name in directory.saved if "_log" in str(name))
    again = MultiNodeCheckpointManager(directory.path, take_over=True)
    assert again.epochs() == [0, 1]
    result = JobRunner(counter(8), again).run(inproc_session)
    assert (result.resumed_from, result.epoch) == (1, 8)


def test_a_run_that_only_warns_saves_again_once_its_own_directory_is_back(
    directory, inproc_session
):
    def lose():
        older = directory.saved
        directory.copy()
        directory.saved, directory.own = older, directory.saved
        directory.replace()

    def restore():
        directory.saved = directory.own
        directory.replace()

    result = run(directory, inproc_session, At(4, lose), At(6, restore))
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
            self.directory.replace()


def test_a_directory_replaced_after_the_last_save_does_not_end_ok(directory, inproc_session):
    with pytest.raises(CheckpointError, match="was replaced"):
        run(directory, inproc_session, AfterSave(directory))


def test_a_manager_that_only_reads_reads_a_replaced_directory_afresh(directory, inproc_session):
    run(directory, inproc_session)
    reader = MultiNodeCheckpointManager(directory.path)
    assert reader.latest() == 8
    directory.replace()
    assert reader.latest() == 1
