"""What users of the systems that this one unites rely on, where no other test shows it."""

import threading
from pathlib import Path

import pytest

from jobrunner import (
    CheckpointNotFoundError,
    Job,
    JobRunner,
    KeepLast,
    MultiNodeCheckpointManager,
    Node,
    Task,
    epoch_limiter,
)
from jobrunner.checkpoint.storage.posix import PosixFiles


@pytest.fixture
def manager(tmp_path):
    return MultiNodeCheckpointManager(tmp_path / "ckpt")


def counter(limit, *, fails_at=None):
    def step(n):
        if n + 1 == fails_at:
            raise RuntimeError("interrupted")
        return n + 1

    with Job("counter") as job, Node("a"):
        with job.init_group:
            Task(lambda: 0, outputs="n", name="zero")
        Task(step, inputs="n", outputs="n", name="count")
        epoch_limiter(job, limit)
    return job


def test_without_a_manager_nothing_is_written_and_every_run_begins_at_the_start(
    inproc_session, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        result = JobRunner(counter(3)).run(inproc_session)
        assert (result.resumed_from, len(result.metrics), result.saves) == (None, 3, [])
    assert not list(tmp_path.iterdir())


BEGUN = threading.Event()
"""Another store is about to be made."""


class SlowToDelete(PosixFiles):
    """Storage that deletes only once the next save begins, unless that waits for it."""

    most = 0

    def before(self, operation, path):
        root = Path(path).parent
        if operation == "mkdir" and Path(path).name.startswith("a."):
            BEGUN.set()
            stores = [p for p in root.iterdir() if p.name.startswith("a.")]
            SlowToDelete.most = max(SlowToDelete.most, len(stores) + 1)
        elif operation == "unlink" and root.name.startswith("a."):
            BEGUN.clear()
            BEGUN.wait(0.1)


def test_keep_last_1_has_at_most_two_epochs_on_disk(inproc_session, tmp_path):
    path = tmp_path / "ckpt"
    manager = MultiNodeCheckpointManager(path, keep=KeepLast(1), files=SlowToDelete())
    JobRunner(counter(5), manager).run(inproc_session)
    assert SlowToDelete.most == 2
    assert [p.name for p in path.iterdir() if p.name.startswith("a.")] == ["a.5"]


def test_a_resume_falls_back_past_all_damaged_epochs(inproc_session, manager):
    JobRunner(counter(6), manager).run(inproc_session)
    for epoch in (4, 5, 6):
        manifest = Path(manager.get_ckpt_db_name("a", epoch), "zarr.json")
        manifest.write_bytes(manifest.read_bytes()[:-1] + b" ")
    result = JobRunner(counter(8), manager).run(inproc_session)
    assert (result.resumed_from, result.epoch, inproc_session.fetch(Node("a")["n"])) == (3, 8, 8)
    assert manager.epochs() == list(range(9))


def test_a_directory_is_named_and_neither_those_below_nor_the_one_above_are_searched(
    inproc_session, tmp_path
):
    path = tmp_path / "runs" / "this"
    manager = MultiNodeCheckpointManager(path)
    JobRunner(counter(10), manager).run(inproc_session)
    JobRunner(counter(12), MultiNodeCheckpointManager(path / "earlier")).run(inproc_session)
    assert manager.latest() == 10
    above = MultiNodeCheckpointManager(tmp_path / "new", load_path=tmp_path / "runs")
    with pytest.raises(CheckpointNotFoundError, match="Name a directory that does"):
        JobRunner(counter(12), above).run(inproc_session)
    again = MultiNodeCheckpointManager(tmp_path / "new", load_path=path)
    assert JobRunner(counter(12), again).run(inproc_session).resumed_from == 10
