"""When a run saves, what it keeps, and where it begins."""

import errno
import os
import re
import threading
import time
from pathlib import Path

import dask
import numpy as np
import pytest

from jobrunner import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    DefinitionError,
    ExecutionError,
    Job,
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
    Task,
    TaskFailedError,
    current_task,
    epoch_limiter,
    register_codec,
)
from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.run.saver import _Failures


def count(n):
    current_task().report(n=n + 1, loss=abs(n + 1 - 3))
    return n + 1


def counter(limit, *, fails_at=None, **kwargs):
    def step(n):
        if n + 1 == fails_at:
            raise ZeroDivisionError("by hand")
        return count(n)

    with Job("counter", **kwargs) as job, Node("a"):
        with job.init_group:
            Task(lambda: 0, outputs="n", name="zero")
        Task(step, inputs="n", outputs="n", name="count")
        epoch_limiter(job, limit)
    return job


def manager_of(tmp_path, **options):
    return MultiNodeCheckpointManager(tmp_path / "ckpt", **options)


def test_epochs_are_saved_by_policy_and_the_last_one_always(inproc_session, tmp_path):
    manager = manager_of(tmp_path, save=SaveEvery(epochs=3))
    result = JobRunner(counter(7), manager).run(inproc_session)
    assert manager.epochs() == [0, 3, 6, 7]
    assert [report.epoch for report in result.saves] == [0, 3, 6, 7]
    assert JobRunner(counter(7), manager).plan_resume().is_finished


def test_the_best_the_latest_and_every_nth_are_kept_together(inproc_session, tmp_path, caplog):
    manager = manager_of(tmp_path, keep=KeepBest("n") | KeepLast(2) | KeepEvery(5))
    JobRunner(counter(9), manager).run(inproc_session)
    assert manager.epochs() == [0, 1, 5, 8, 9]
    assert "KeepBest" not in caplog.text
    manager = manager_of(tmp_path, keep=KeepBest("nothing"))
    JobRunner(counter(12), manager).run(inproc_session)
    assert "no recorded epoch has reported 'nothing'" in caplog.text


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

    with Job("counter") as job, Node("a"):
        with job.init_group:
            Task(lambda: 0, outputs="n", name="zero")
        Task(step, inputs="n", outputs="n", transient_errors=(OSError,))
        epoch_limiter(job, 9)
    told = Told()
    began = time.time()
    JobRunner(job, manager_of(tmp_path, save=told)).run(inproc_session)
    longest = [moment.seconds_to_next for moment in told.moments]
    assert min(longest[:5]) >= 0.02
    assert all(moment.seconds_to_record > 0 for moment in told.moments)
    assert began < told.moments[0].time < told.moments[-1].time <= time.time()


def test_a_run_resumes_in_mid_epoch(inproc_session, tmp_path):
    manager = manager_of(tmp_path, save=SaveEvery(steps=3))
    with pytest.raises(TaskFailedError):
        JobRunner(counter(3, steps_per_epoch=5, fails_at=9), manager).run(inproc_session)
    # 6 steps are 5 of epoch 1 and the first of epoch 2.
    at = Position(1, 1)
    assert manager.positions() == [Position(0), Position(1), at]
    assert manager.record(at).at.step == 1
    runner = JobRunner(counter(3, steps_per_epoch=5), manager)
    plan = runner.plan_resume()
    assert (plan.epoch, plan.step) == (at, 1)
    assert "steps 2 to 5 of epoch 2" in str(plan)
    result = runner.run(inproc_session)
    assert (result.resumed_from, result.epoch) == (at, 3)
    assert result.to_dict()["resumed_from"] == "1.s1"
    assert inproc_session.fetch(Node("a")["n"]) == 15
    assert not manager.record(3).at.step
    assert [line["epoch"] for line in result.metrics] == [2, 3]


@pytest.mark.parametrize("asked", [Position(1, 1), (1, 1), "1.s1"])
def test_a_run_resumes_from_the_position_asked_for(asked, inproc_session, tmp_path):
    manager = manager_of(tmp_path, save=SaveEvery(steps=1), keep=KeepAll(partial=True))
    JobRunner(counter(2, steps_per_epoch=3), manager).run(inproc_session)
    runner = JobRunner(counter(3, steps_per_epoch=3), manager, resume_from_epoch=asked)
    assert runner.plan_resume().sets_aside == (Position(1, 2), 2)
    assert "sets aside epochs:\n  1.s2, 2" in str(runner.plan_resume())
    assert runner.run(inproc_session).resumed_from == Position(1, 1)
    assert inproc_session.fetch(Node("a")["n"]) == 9
    missing = JobRunner(counter(3, steps_per_epoch=3), manager, resume_from_epoch=(1, 7))
    with pytest.raises(CheckpointNotFoundError, match=r"Epoch 1\.s7 of .* 1\.s1, 1\.s2"):
        missing.run(inproc_session)


def test_every_call_takes_an_epoch_or_a_position_in_any_form(inproc_session, tmp_path):
    manager = manager_of(tmp_path, save=SaveEvery(steps=1), keep=KeepAll(partial=True))
    runner = JobRunner(counter(2, steps_per_epoch=2), manager, resume_from_epoch=None)
    runner.run(inproc_session)
    for at, forms in (
        (Position(1, 1), [(1, 1), (np.int64(1), 1), "1.s1"]),
        (1, [np.int64(1), (1, 0)]),
    ):
        for form in (at, *forms):
            assert manager.open(form)["a"]["n"] == manager.open(at)["a"]["n"]
            assert manager.record(form).epoch == at
            assert manager.get_ckpt_db_name("a", form).endswith(f"/a.{at}")
            manager.verify(form)
            manager.pin(form)
            assert list(manager.pins()) == [at]
            assert manager.unpin(form)
            assert [epoch for epoch, _ in manager.records([form, 2])] == [at, 2]
            assert Position.of(next(manager.watch(form))) > Position.of(at)
            inproc_session.run(manager.load(epoch=form))
            assert runner.load_blobs_from_checkpoints(["n"], form, inproc_session)
            assert runner.replay(inproc_session, form).is_equal
            assert JobRunner(runner.job, manager, form).resume_from_epoch == Position.of(at)
    with pytest.raises(DefinitionError, match="epochs must be a collection of epochs"):
        manager.records(b"\1")
    for wrong in ("1", "newest", "best:", (1,), (1, -1), 1.0, True, np.True_, "1.s01", None):
        with pytest.raises(DefinitionError, match=r"epoch must be an int >= 0 or a Position such"):
            manager.open(wrong)


def test_a_whole_epoch_replaces_its_save_in_mid_epoch(inproc_session, tmp_path):
    manager = manager_of(tmp_path, save=SaveEvery(steps=1))
    JobRunner(counter(1, steps_per_epoch=3), manager).run(inproc_session)
    assert manager.epochs() == [0, 1]
    assert manager.open(1)["a"]["n"] == 3
    left = {path.name for path in Path(manager.path).iterdir() if path.name.startswith("a.")}
    assert left == {"a.0", "a.1"}


def test_an_epoch_that_has_begun_is_finished_even_if_the_limit_is_lower_now(
    inproc_session, tmp_path
):
    manager = manager_of(tmp_path, save=SaveEvery(steps=2))
    with pytest.raises(TaskFailedError):
        JobRunner(counter(9, steps_per_epoch=3, fails_at=9), manager).run(inproc_session)
    assert manager.latest() == Position(2, 2)
    result = JobRunner(counter(1, steps_per_epoch=3), manager).run(inproc_session)
    assert (result.epoch, inproc_session.fetch(Node("a")["n"])) == (3, 9)


def test_a_step_that_the_job_no_longer_has_is_refused(inproc_session, tmp_path):
    manager = manager_of(tmp_path, save=SaveEvery(steps=4))
    with pytest.raises(TaskFailedError):
        JobRunner(counter(9, steps_per_epoch=5, fails_at=5), manager).run(inproc_session)
    with pytest.raises(PlanMismatchError, match=rf"{tmp_path}.*after step 4.*steps_per_epoch=3"):
        JobRunner(counter(9, steps_per_epoch=3), manager).run(inproc_session)


def test_save_now_saves_after_the_step(inproc_session, tmp_path):
    class Asks:
        def on_epoch(self, epoch, seconds, metrics):
            if epoch == 4:
                runner.save_now()

    manager = manager_of(tmp_path, save=SaveEvery(epochs=100))
    runner = JobRunner(counter(6), manager, callbacks=[Asks()])
    runner.run(inproc_session)
    assert manager.epochs() == [0, 4, 6]


def test_the_best_epochs_by_a_reported_metric_are_kept(inproc_session, tmp_path):
    manager = manager_of(tmp_path, keep=KeepBest("loss", n=2))
    JobRunner(counter(6), manager).run(inproc_session)
    # The loss is 0 at epoch 3 and 1 at 2 and 4; of these the newer counts. 6 is the newest.
    assert manager.epochs() == [3, 4, 6]


@pytest.mark.parametrize("keep", [KeepBest("los"), KeepLast(2) | (KeepEvery(4) | KeepBest("los"))])
def test_a_metric_that_no_task_reports_is_warned_about_once_a_run(
    inproc_session, tmp_path, caplog, keep
):
    manager = manager_of(tmp_path, keep=keep)
    for limit in (6, 9):
        caplog.clear()
        JobRunner(counter(limit), manager).run(inproc_session)
        told = [record.getMessage() for record in caplog.records if "'los'" in record.getMessage()]
        assert len(told) == 1
        assert told[0].startswith(manager.path)
        assert "Reported: loss, n" in told[0]
    caplog.clear()
    JobRunner(counter(12), manager_of(tmp_path, keep=KeepBest("loss"))).run(inproc_session)
    assert not [record for record in caplog.records if record.name.startswith("jobrunner")]


def test_a_run_that_succeeds_deletes_its_checkpoints_if_told_to(inproc_session, tmp_path):
    manager = manager_of(tmp_path, delete_on_success=True)
    with pytest.raises(TaskFailedError):
        JobRunner(counter(4, fails_at=3), manager).run(inproc_session)
    assert manager.epochs() == [0, 1, 2]
    assert JobRunner(counter(4), manager).run(inproc_session).resumed_from == 2
    assert manager.epochs() == []
    assert not [path for path in Path(manager.path).iterdir() if path.name.startswith("a.")]


def test_a_job_that_has_deleted_its_checkpoints_begins_again(inproc_session, tmp_path):
    """As with Keras: a backup is for the run that was interrupted, not for the next one."""
    manager = manager_of(tmp_path, delete_on_success=True)
    JobRunner(counter(2), manager).run(inproc_session)
    again = manager_of(tmp_path, delete_on_success=True)
    plan = JobRunner(counter(2), again).plan_resume()
    assert (plan.epoch, plan.is_finished, plan.warnings) == (None, False, ())
    result = JobRunner(counter(2), again).run(inproc_session)
    assert (result.resumed_from, len(result.metrics), again.epochs()) == (None, 2, [])


class LostOnce(PosixFiles):
    """Storage that refuses to write some stores, but reads all."""

    def __init__(self, number, stores):
        super().__init__()
        self.number, self.stores = number, stores

    def before(self, operation, path):
        is_write = operation in ("mkdir", "create", "write")
        if is_write and any(f"/{store}" in path for store in self.stores):
            raise OSError(self.number, os.strerror(self.number), path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize("on_save_error", ["warn", "raise"])
def test_storage_lost_during_a_save_costs_no_recorded_epoch(
    inproc_session, tmp_path, number, on_save_error
):
    # The document of the blob, when the store has been begun already.
    manager = manager_of(tmp_path, files=LostOnce(number, ["a.2/zarr.json", "a.3"]))
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


def test_a_codec_that_cannot_decode_sets_nothing_aside(inproc_session, tmp_path):
    def runner(field, epochs):
        register_codec(Thing, lambda thing: {"v": thing.v}, lambda saved: Thing(saved[field]))
        with Job("things") as job, Node("a"):
            with job.init_group:
                Task(lambda: Thing(1), outputs="x", name="one")
            Task(lambda x: Thing(x.v + 1), inputs="x", outputs="x", name="inc")
            epoch_limiter(job, epochs)
        return JobRunner(job, manager)

    manager = manager_of(tmp_path)
    runner("v", 1).run(inproc_session)
    with pytest.raises(CheckpointError, match="whole, but cannot be decoded"):
        runner("value", 2).run(inproc_session)
    assert manager.epochs() == [0, 1]
    assert runner("v", 2).run(inproc_session).resumed_from == 1


class Thing:
    def __init__(self, v):
        self.v = v


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
    with Job("two") as job:
        for node in "ab":
            with job.init_group:
                Task(lambda: np.zeros(3), outputs="w", node=node)
            Task(lambda w: w + 1, inputs="w", outputs="w", node=node)
        epoch_limiter(job, epochs)
    return job


@pytest.mark.parametrize("is_asynchronous", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_storage_that_hangs_ends_the_run_with_the_nodes_that_are_late(
    inproc_client, tmp_path, hanging, caplog, monkeypatch, is_asynchronous
):
    monkeypatch.setattr("jobrunner.cluster.exchange.WARN_SECONDS", 0.3)
    monkeypatch.setattr("jobrunner.checkpoint.retention._DRAIN_SECONDS", 0.3)
    manager = MultiNodeCheckpointManager(tmp_path, files=hanging(), asynchronous=is_asynchronous)
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
    hanging.hangs = f"b.2{os.sep}w"
    with (
        dask.config.set({"jobrunner.checkpoint.deadline-seconds": 1.0}),
        Session(inproc_client) as session,
        pytest.raises(ExecutionError, match=r"load group did not end within 1 s.*'b'"),
    ):
        JobRunner(two_nodes(3), manager).run(session)


def test_of_saves_that_fail_in_a_row_the_first_is_named_and_the_others_are_counted():
    warnings = []
    failures = _Failures(warnings.append)
    for epoch in range(6):
        failures.add(Position(epoch), CheckpointWriteError("a: OSError: No space left."))
    failures.close()
    failures.close()
    failures.add(Position(7), CheckpointWriteError("b: OSError: Input/output error."))
    failures.close()
    assert warnings == [
        "Epoch 0 was not saved: a: OSError: No space left.",
        "5 more saves failed, the last that of epoch 5.",
        "Epoch 7 was not saved: b: OSError: Input/output error.",
    ]
