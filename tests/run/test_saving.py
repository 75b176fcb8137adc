"""When a run saves, what it keeps, and where it begins."""

import errno
import os
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import dask
import numpy as np
import pytest

from jobrunner import (
    BlobNotFoundError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    CommitConflictError,
    DefinitionError,
    ExecutionError,
    JobRunner,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    MultiNodeCheckpointManager,
    Node,
    PlanMismatchError,
    Position,
    SaveEvery,
    Session,
    TaskFailedError,
    current_task,
)
from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.workspace.workspace import Workspace
from tests.cli.directories import invoke
from tests.jobs import At, Listener, RefusingFiles, count_until, counter
from tests.saves import save_epoch


def approach_3(n):
    current_task().report(n=n + 1, loss=abs(n + 1 - 3))
    return n + 1


def manager_of(tmp_path, **options):
    return MultiNodeCheckpointManager(tmp_path / "ckpt", **options)


def test_epochs_are_saved_by_policy_and_the_last_one_always(inproc_session, tmp_path):
    manager = manager_of(tmp_path, save=SaveEvery(epochs=3))
    result = JobRunner(counter(7), manager).run(inproc_session)
    assert manager.epochs() == [0, 3, 6, 7]
    assert [report.epoch for report in result.saves] == [0, 3, 6, 7]
    assert JobRunner(counter(7), manager).plan_resume().is_finished


def test_policies_get_what_was_measured(inproc_session, tmp_path):
    class Told:
        def __init__(self):
            self.moments = []

        def is_due(self, moment):
            self.moments.append(moment)
            return True

    def step(n):
        if n == 2 and not current_task().attempt:
            raise OSError("a moment")
        time.sleep(0.02 if n == 0 else 0)
        return n + 1

    job = counter(9, step, transient_errors=(OSError,))
    told = Told()
    began = time.time()
    JobRunner(job, manager_of(tmp_path, save=told)).run(inproc_session)
    longest = [moment.seconds_to_next for moment in told.moments]
    assert min(longest[:5]) >= 0.02
    assert all(moment.seconds_to_record > 0 for moment in told.moments)
    assert began < told.moments[0].time < told.moments[-1].time <= time.time()


def test_a_run_resumes_from_the_position_asked_for(inproc_session, tmp_path):
    manager = manager_of(tmp_path, save=SaveEvery(steps=1), keep=KeepAll(partial=True))
    JobRunner(counter(2, steps_per_epoch=3), manager).run(inproc_session)
    runner = JobRunner(counter(3, steps_per_epoch=3), manager, resume_from_epoch="1.s1")
    assert runner.plan_resume().sets_aside == (Position(1, 2), 2)
    assert "sets aside epochs:\n  1.s2, 2" in str(runner.plan_resume())
    assert runner.run(inproc_session).resumed_from == Position(1, 1)
    assert inproc_session.fetch(Node("a")["n"]) == 9
    missing = JobRunner(counter(3, steps_per_epoch=3), manager, resume_from_epoch=(1, 7))
    with pytest.raises(CheckpointNotFoundError, match=r"Epoch 1\.s7 of .* 1\.s1, 1\.s2"):
        missing.run(inproc_session)


def test_an_epoch_that_has_begun_is_finished_even_if_the_limit_is_lower_now(
    inproc_session, tmp_path
):
    manager = manager_of(tmp_path, save=SaveEvery(steps=2))
    with pytest.raises(TaskFailedError):
        JobRunner(counter(9, count_until(9), steps_per_epoch=3), manager).run(inproc_session)
    assert manager.latest() == Position(2, 2)
    result = JobRunner(counter(1, steps_per_epoch=3), manager).run(inproc_session)
    assert (result.epoch, inproc_session.fetch(Node("a")["n"])) == (3, 9)


def test_a_step_that_the_job_no_longer_has_is_refused(inproc_session, tmp_path):
    manager = manager_of(tmp_path, save=SaveEvery(steps=4))
    with pytest.raises(TaskFailedError):
        JobRunner(counter(9, count_until(5), steps_per_epoch=5), manager).run(inproc_session)
    with pytest.raises(PlanMismatchError, match=rf"{tmp_path}.*after step 4.*steps_per_epoch=3"):
        JobRunner(counter(9, steps_per_epoch=3), manager).run(inproc_session)


def test_save_now_saves_after_the_step(inproc_session, tmp_path):
    manager = manager_of(tmp_path, save=SaveEvery(epochs=100))
    runner = JobRunner(counter(6), manager, callbacks=[At(4, lambda: runner.save_now())])
    runner.run(inproc_session)
    assert manager.epochs() == [0, 4, 6]


@pytest.mark.parametrize("keep", [KeepBest("los"), KeepLast(2) | (KeepEvery(4) | KeepBest("los"))])
def test_a_metric_that_no_task_reports_is_warned_about_once_a_run(
    inproc_session, tmp_path, caplog, keep
):
    manager = manager_of(tmp_path, keep=keep)
    for limit in (6, 9):
        caplog.clear()
        JobRunner(counter(limit, approach_3), manager).run(inproc_session)
        told = [record.getMessage() for record in caplog.records if "'los'" in record.getMessage()]
        assert len(told) == 1
        assert told[0].startswith(manager.path)
        assert "Reported: loss, n" in told[0]
    caplog.clear()
    JobRunner(counter(12, approach_3), manager_of(tmp_path, keep=KeepBest("loss"))).run(
        inproc_session
    )
    assert not [record for record in caplog.records if record.name.startswith("jobrunner")]


def test_a_run_that_succeeds_deletes_its_checkpoints_if_told_to(inproc_session, tmp_path):
    manager = manager_of(tmp_path, delete_on_success=True)
    with pytest.raises(TaskFailedError):
        JobRunner(counter(4, count_until(3)), manager).run(inproc_session)
    assert manager.epochs() == [0, 1, 2]
    assert JobRunner(counter(4), manager).run(inproc_session).resumed_from == 2
    assert manager.epochs() == []
    assert not [path for path in Path(manager.path).iterdir() if path.name.startswith("a.")]


def test_checkpoints_stay_if_the_last_epoch_could_not_be_saved(inproc_session, tmp_path):
    files = RefusingFiles(["/a.4"])
    manager = manager_of(tmp_path, delete_on_success=True, files=files)
    JobRunner(counter(4), manager).run(inproc_session)
    assert manager.epochs() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("on_save_error", "number"), [("warn", errno.ENOSPC), ("raise", errno.EROFS)]
)
def test_storage_lost_during_a_save_costs_no_recorded_epoch(
    inproc_session, tmp_path, number, on_save_error
):
    # The document of the blob, when the store has been begun already.
    manager = manager_of(tmp_path, files=RefusingFiles(["/a.2/zarr.json", "/a.3"], number))
    runner = JobRunner(counter(4), manager, on_save_error=on_save_error)
    what = os.strerror(number)
    if on_save_error == "raise":
        with pytest.raises(CheckpointWriteError, match=what):
            runner.run(inproc_session)
        assert manager.epochs() == [0, 1]
    else:
        result = runner.run(inproc_session)
        # Epoch 4 may have been of the same group; then it is tried alone.
        assert [report.epoch for report in result.failed_saves][:2] == [2, 3]
        assert all(what in report.error for report in result.failed_saves)
        assert (result.epoch, manager.epochs()) == (4, [0, 1, 4])
    again = manager_of(tmp_path)
    for epoch in again.epochs():
        again.verify(epoch)
    result = JobRunner(counter(5), again).run(inproc_session)
    assert (result.epoch, inproc_session.fetch(Node("a")["n"])) == (5, 5)


class ClosedAtFirst(PosixFiles):
    """Storage that cannot be written to until it is open."""

    is_open = False

    def before(self, operation, path):
        if not ClosedAtFirst.is_open and operation in ("mkdir", "create", "write"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)


class ClosedToStores(PosixFiles):
    """A directory in which only what is there already can be written to."""

    def is_writable(self, path):
        return False


def test_a_directory_in_which_no_store_can_be_made_is_refused_before_anything_runs(
    inproc_session, tmp_path
):
    manager = manager_of(tmp_path, files=ClosedToStores())
    runner = JobRunner(counter(2), manager, on_save_error="refuse")
    with pytest.raises(CheckpointWriteError, match="Worker .* may not make directories for stores"):
        runner.run(inproc_session)
    with pytest.raises(BlobNotFoundError):
        inproc_session.fetch(Node("a")["n"])


def test_a_directory_that_another_run_has_used_meanwhile_is_refused(inproc_session, tmp_path):
    class Other:
        def on_epoch(self, epoch, seconds, metrics):
            if epoch == 2:
                other = manager_of(tmp_path)
                other.run.start(["a"], {})
                save_epoch(other, Position(0), {"a": Workspace("a")})
                other.run.end()
                ClosedAtFirst.is_open = True

    runner = JobRunner(
        counter(4),
        manager_of(tmp_path, files=ClosedAtFirst(), asynchronous=False),
        on_save_error="warn",
        callbacks=[Other()],
    )
    try:
        with pytest.raises(CommitConflictError, match="now contains epochs of another run"):
            runner.run(inproc_session)
    finally:
        ClosedAtFirst.is_open = False
    assert manager_of(tmp_path).epochs() == [0]


def test_a_run_from_which_prune_took_the_directory_while_it_slept_records_nothing_more(
    inproc_session, tmp_path
):
    class Sleep:
        def on_epoch(self, epoch, seconds, metrics):
            if epoch == 3:
                options = ("--keep-last", 1, "--take-over")  # as it does after 15 seconds
                assert invoke("prune", manager.path, *options).exit_code == 0

    manager = manager_of(tmp_path, asynchronous=False)
    runner = JobRunner(counter(5), manager, callbacks=[Sleep()])
    with pytest.raises(CommitConflictError, match="Another run .* has taken over"):
        runner.run(inproc_session)
    again = manager_of(tmp_path)
    assert again.epochs() == [2]
    result = JobRunner(counter(5), again).run(inproc_session)
    assert (result.resumed_from, inproc_session.fetch(Node("a")["n"])) == (2, 5)
    for epoch in again.epochs():
        again.verify(epoch)


def test_a_run_begins_from_another_directory_and_keeps_its_own(inproc_session, tmp_path):
    origin = MultiNodeCheckpointManager(tmp_path / "origin")
    JobRunner(counter(3), origin).run(inproc_session)
    before = sorted(Path(origin.path).rglob("*"))
    manager = manager_of(tmp_path, load_path=tmp_path / "origin")
    runner = JobRunner(counter(5), manager)
    assert runner.plan_resume().epoch == 3
    assert JobRunner(counter(5), manager, 1).plan_resume().sets_aside == ()
    result = runner.run(inproc_session)
    assert (result.resumed_from, result.epoch, inproc_session.fetch(Node("a")["n"])) == (3, 5, 5)
    assert manager.epochs() == [3, 4, 5]
    assert sorted(Path(origin.path).rglob("*")) == before
    # Now the directory has epochs of its own.
    assert JobRunner(counter(6), manager).run(inproc_session).resumed_from == 5


def test_a_requested_epoch_that_vanishes_meanwhile_is_an_error(inproc_session, tmp_path):
    origin = MultiNodeCheckpointManager(tmp_path / "origin")
    JobRunner(counter(3), origin).run(inproc_session)

    class GivesItUp:
        def on_start(self, plan, total_epochs):
            pruned = MultiNodeCheckpointManager(origin.path, keep=KeepLast(1))
            pruned.run.start([], {})
            pruned.retention.retire()
            pruned.run.end()

    manager = manager_of(tmp_path, load_path=tmp_path / "origin")
    with pytest.raises(CheckpointNotFoundError, match="Epoch 2 of .*origin was retired while"):
        JobRunner(counter(5), manager, 2, callbacks=[GivesItUp()]).run(inproc_session)
    assert manager.epochs() == []


def test_another_directory_without_epochs_is_an_error(inproc_session, tmp_path):
    manager = manager_of(tmp_path, load_path=tmp_path / "nothing")
    with pytest.raises(CheckpointNotFoundError, match="records no epoch"):
        JobRunner(counter(2), manager).run(inproc_session)
    assert not Path(manager.path).exists()


def test_a_directory_cannot_be_its_own_origin(tmp_path):
    with pytest.raises(DefinitionError, match="load_path"):
        manager_of(tmp_path, load_path=tmp_path / "ckpt")


class HangingFiles(PosixFiles):
    """A file system without a server: a node's reads and writes of an epoch never end."""

    hangs = ""
    gone = threading.Event()

    def before(self, operation, path):
        if HangingFiles.hangs and HangingFiles.hangs in path:
            HangingFiles.gone.wait(60)


@pytest.fixture
def hanging():
    HangingFiles.gone.clear()
    yield HangingFiles
    HangingFiles.hangs = ""
    HangingFiles.gone.set()


def two_nodes(epochs):
    return counter(epochs, lambda w: w + 1, nodes="ab", start=np.zeros(3))


def test_storage_that_hangs_ends_the_run_with_the_nodes_that_are_late(
    inproc_client, tmp_path, hanging, caplog, monkeypatch
):
    monkeypatch.setattr("jobrunner.cluster.exchange.WARN_SECONDS", 0.3)
    monkeypatch.setattr("jobrunner.checkpoint.retention._DRAIN_SECONDS", 0.3)
    manager = MultiNodeCheckpointManager(tmp_path, files=hanging())
    hanging.hangs = f"b.2{os.sep}"
    with (
        dask.config.set({"jobrunner.checkpoint.deadline-seconds": 1.5}),
        Session(inproc_client) as session,
        pytest.raises(ExecutionError, match=r"save of epoch [2-5] did not end within 1\.5 s.*'b'"),
    ):
        JobRunner(two_nodes(5), manager).run(session)
    assert manager.latest() == 1
    assert re.search("save of epoch [2-5] has taken", caplog.text)
    hanging.gone.set()
    with Session(inproc_client) as session:
        assert JobRunner(two_nodes(5), manager).run(session).resumed_from == 1


def test_storage_that_hangs_during_a_load_ends_the_run(inproc_client, tmp_path, hanging):
    manager = MultiNodeCheckpointManager(tmp_path, files=hanging())
    with Session(inproc_client) as session:
        JobRunner(two_nodes(2), manager).run(session)
    hanging.hangs = f"b.2{os.sep}n"
    with (
        dask.config.set({"jobrunner.checkpoint.deadline-seconds": 1.0}),
        Session(inproc_client) as session,
        pytest.raises(ExecutionError, match=r"load group did not end within 1 s.*'b'"),
    ):
        JobRunner(two_nodes(3), manager).run(session)


def test_of_saves_that_fail_in_a_row_the_first_is_named_and_the_others_are_counted(
    inproc_session, tmp_path
):
    files = RefusingFiles([f"/a.{epoch}" for epoch in (2, 3, 4, 6)])
    manager = manager_of(tmp_path, files=files, asynchronous=False)
    listener = Listener()
    JobRunner(counter(6), manager, callbacks=[listener]).run(inproc_session)
    first, more, last = listener.warnings
    assert first.startswith("Epoch 2 was not saved: ")
    assert more == "2 more saves failed, the last that of epoch 4."
    assert last.startswith("Epoch 6 was not saved: ")


def test_a_disk_that_will_soon_be_full_is_warned_of_once(inproc_session, tmp_path, monkeypatch):
    names = iter(range(1000, 0, -1))

    def filling(path):
        return SimpleNamespace(f_bavail=10**9, f_frsize=4096, f_favail=next(names))

    monkeypatch.setattr("jobrunner.run.disk_watch.LOOK_SECONDS", 0.0)
    monkeypatch.setattr(os, "statvfs", filling)
    listener = Listener()
    JobRunner(counter(6), manager_of(tmp_path), callbacks=[listener]).run(inproc_session)
    [told] = listener.warnings
    assert told.startswith(f"The file system of {tmp_path / 'ckpt'} has free names of files for ")
    assert "--keep-last N" in told


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
