"""What `JobRunner` promises beyond Caffe2's scenarios."""

import os
import threading
from pathlib import Path

import pytest

from jobrunner import (
    Blob,
    CheckpointWriteError,
    CopyTo,
    DefinitionError,
    ExecutionError,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Position,
    SaveEvery,
    Session,
    Task,
    TaskFailedError,
    WorkspaceType,
    current_task,
)
from jobrunner.checkpoint.storage.posix import PosixFiles
from tests.jobs import Listener, RefusingFiles, count_until, counter


@pytest.mark.processes
def test_a_failing_task_is_named_and_the_job_resumes_from_the_last_epoch(session, manager):
    with pytest.raises(TaskFailedError) as caught:
        JobRunner(counter(5, count_until(3)), manager).run(session)
    error = caught.value
    assert (error.job, error.node, error.task, error.epoch) == ("counter", "a", "count", 3)
    assert "count_or_fail" in error.remote_traceback
    assert isinstance(error.__cause__, ZeroDivisionError)
    for part in ("'counter'", "'a'", "'count'", "epoch 3", "by hand"):
        assert part in str(error)
    assert manager.latest() == 2

    mended = JobRunner(counter(5), manager)
    assert mended.plan_resume().changes == ("task epoch:a/count has other code",)
    result = mended.run(session)
    assert (result.resumed_from, result.epoch, session.fetch(Node("a")["n"])) == (2, 5, 5)


def test_resume_none_starts_afresh_and_sets_older_epochs_aside(session, manager):
    JobRunner(counter(4), manager).run(session)
    stores = {path.name for path in Path(manager.path).iterdir()}
    runner = JobRunner(counter(2, start=10), manager, None)
    assert runner.plan_resume().sets_aside == (0, 1, 2, 3, 4)
    result = runner.run(session)
    assert (result.resumed_from, manager.epochs()) == (None, [0, 1, 2])
    assert manager.open(2)["a"]["n"] == 12
    # Set aside, not deleted.
    assert stores <= {path.name for path in Path(manager.path).iterdir()}


def test_a_resume_from_an_older_epoch_sets_later_ones_aside(session, manager):
    JobRunner(counter(4), manager).run(session)
    plan = JobRunner(counter(3), manager, 1).plan_resume()
    assert (plan.epoch, plan.sets_aside) == (1, (2, 3, 4))
    result = JobRunner(counter(3), manager, 1).run(session)
    assert (result.resumed_from, result.epoch) == (1, 3)
    assert manager.epochs() == [0, 1, 2, 3]


def test_a_blob_that_cannot_be_saved_is_named_before_epoch_1(session, manager):
    ran = []
    job = counter(3)
    with job.init_group:
        Task(threading.Lock, outputs="lock", node="a")

    class Listener:
        def on_epoch(self, *args):
            ran.append(args)

    with pytest.raises(DefinitionError) as caught:
        JobRunner(job, manager, callbacks=[Listener()]).run(session)
    for part in ("'lock'", "'a'", "transient", "codec", "allow_pickle"):
        assert part in str(caught.value)
    assert ran == []


def test_one_runner_at_a_time_in_a_session(session):
    refusals = []

    class StartsAnother:
        def on_epoch(self, *_):
            with pytest.raises(ExecutionError, match="one runner at a time") as refused:
                JobRunner(counter(1)).run(session)
            refusals.append(refused)

    JobRunner(counter(2), callbacks=[StartsAnother()]).run(session)
    assert len(refusals) == 2


def test_a_run_does_not_start_if_the_directory_is_not_writable(session, tmp_path):
    ran = tmp_path / "ran"
    job = counter(2)
    with job.init_group:
        Task(ran.touch, node="a", name="touch")
    (tmp_path / "file").write_text("")
    manager = MultiNodeCheckpointManager(tmp_path / "file")
    with pytest.raises(CheckpointWriteError, match="file cannot be a checkpoint"):
        JobRunner(job, manager, on_save_error="refuse").run(session)
    assert not ran.exists()


def test_a_limit_above_that_of_the_job_is_said_to_have_no_effect(session, manager):
    listeners = [Listener(), Listener()]
    runners = [
        JobRunner(counter(2), manager, num_epochs=5, callbacks=[listener]) for listener in listeners
    ]
    runners[0].run(session)
    assert runners[1].result_if_finished().epoch == 2
    for listener, runner in zip(listeners, runners, strict=True):
        assert listener.warnings == list(runner.plan_resume().warnings)
        assert "'counter' ends at epoch 2" in listener.warnings[0]
    assert JobRunner(counter(2), manager, num_epochs=2).plan_resume().warnings == ()


def test_the_directory_of_all_runs_is_not_taken_for_that_of_one(session, manager, tmp_path):
    JobRunner(counter(1), manager).run(session)
    before = sorted(tmp_path.rglob("*"))
    for path, what in (
        (tmp_path, "contains some: ckpt. Name one of them"),
        (tmp_path / "ckpt" / "a.1", "within the checkpoint directory"),
    ):
        runner = JobRunner(counter(1), MultiNodeCheckpointManager(path))
        for call in (runner.plan_resume, lambda runner=runner: runner.run(session)):
            with pytest.raises(DefinitionError, match=what):
                call()
    assert sorted(tmp_path.rglob("*")) == before


def test_download_and_exit_run_again_if_they_had_not_ended(session, manager, tmp_path):
    flag = tmp_path / "flag"

    def leave():
        if not flag.exists():
            flag.write_text("")
            raise RuntimeError("not yet")

    def build():
        job = counter(2)
        Task(leave, node="a", group=job.exit_group)
        return job

    with pytest.raises(TaskFailedError, match="exit"):
        JobRunner(build(), manager).run(session)
    assert not manager.directory.snapshot().is_done
    result = JobRunner(build(), manager).run(session)
    assert (result.resumed_from, result.metrics) == (2, [])
    assert manager.directory.snapshot().is_done


@pytest.mark.parametrize(
    "arguments",
    [
        {"checkpoint_manager": "runs/kmeans"},
        {"callbacks": print},
        {"callbacks": [PosixFiles]},
        {"resume_from_epoch": 3},
        {"upload_task_group_builder": CopyTo("/elsewhere")},  # without a manager
        {"upload_task_group_builder": CopyTo},
    ],
)
def test_invalid_arguments_are_refused(arguments):
    with pytest.raises(DefinitionError, match="counter"):
        JobRunner(counter(1), **arguments)


def draw(n=None):
    return float(current_task().rng.random())


def test_tasks_that_run_again_at_a_resume_draw_the_same_numbers(client, tmp_path):
    def build(limit):
        job = counter(limit, nodes_to_checkpoint=["a"])
        with job.init_group:
            Task(draw, outputs="noise", node="b")
            Task(draw, outputs=Blob("lens", transient=True), node="a", name="grind")
        return job

    def ends_with(path, limits):
        for limit in limits:
            with Session(client) as session:
                manager = MultiNodeCheckpointManager(tmp_path / path)
                JobRunner(build(limit), manager).run(session)
                found = [session.fetch(Node("b")["noise"]), session.fetch(Node("a")["lens"])]
            assert list(manager.open(limit)["a"]) == ["n"]  # the others are never saved
        return found

    assert ends_with("resumed", [2, 4]) == ends_with("straight", [4])


def test_blobs_made_after_the_epochs_do_not_prevent_a_resume(session, manager):
    def build(limit):
        job = counter(limit)
        with job.download_group:
            collect = {"name": "collect", "workspace_type": WorkspaceType.GLOBAL}
            Task(lambda n: [n], inputs="n", outputs="collected", node="a", **collect)
        with job.exit_group:
            Task(lambda collected: collected, inputs="collected", node="a", name="keep")
        return job

    JobRunner(build(2), manager).run(session)
    result = JobRunner(build(4), manager).run(session)
    assert (result.resumed_from, session.fetch(Node("a")["collected"])) == (2, [4])


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("{}")])
def test_a_finished_job_whose_last_epoch_is_damaged_finishes_again(session, manager, damage):
    def runner():
        job = counter(3)
        with job.exit_group:
            Task(lambda n: n, inputs="n", node="a", name="leave").output()
        return JobRunner(job, manager, callbacks=[heard])

    heard = Listener()
    assert runner().result_if_finished() is None
    runner().run(session)
    assert runner().result_if_finished().epoch == 3
    damage(Path(manager.get_ckpt_db_name("a", 3), "zarr.json"))
    again = runner()
    assert again.result_if_finished() is None or damage is not Path.unlink
    result = again.run(session)
    assert (result.resumed_from, result.epoch) == (2, 3)
    damaged, aside = heard.warnings
    assert "set aside" not in damaged  # not before an earlier epoch is loaded
    assert "Use another epoch" not in damaged  # the run does so by itself
    assert aside.startswith("Epoch 3, which is damaged, is now set aside")
    assert again.job.exit_group.find("a", "leave").output().fetch() == 3
    assert manager.directory.snapshot().is_done


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "in the background"])
@pytest.mark.parametrize(("steps", "store"), [(1, "a.2"), (2, "a.2")], ids=["whole", "partial"])
def test_an_epoch_that_is_not_recorded_is_not_uploaded_and_the_job_is_not_done(
    session, tmp_path, steps, store, asynchronous
):
    manager = MultiNodeCheckpointManager(
        tmp_path / "ckpt",
        files=RefusingFiles([f"/{store}"]),
        save=SaveEvery(steps=1),
        asynchronous=asynchronous,
    )
    job = counter(2, steps_per_epoch=steps)
    last = Task(lambda n: n, inputs="n", node="a", group=job.exit_group).output()
    upload = CopyTo(tmp_path / "copies")
    result = JobRunner(job, manager, upload_task_group_builder=upload).run(session)
    # In a group, the position within epoch 2 was passed over; then epoch 2 was tried alone.
    assert {save.epoch for save in result.failed_saves} - {Position(1, 1)} == {2}
    assert last.fetch() == session.fetch(Node("a")["n"]) == 2 * steps
    assert not (tmp_path / "copies").exists()
    assert not manager.directory.snapshot().is_done

    manager = MultiNodeCheckpointManager(tmp_path / "ckpt", save=SaveEvery(steps=1))
    job = counter(2, steps_per_epoch=steps)
    JobRunner(job, manager, upload_task_group_builder=upload).run(session)
    assert manager.directory.snapshot().is_done
    assert manager.open(2)["a"]["n"] == 2 * steps
    assert os.listdir(tmp_path / "copies")


@pytest.mark.parametrize("where", [".", "inside"])
def test_copies_never_go_over_the_checkpoint_itself(session, tmp_path, where):
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt")
    (tmp_path / "link").symlink_to(tmp_path / "ckpt")
    upload = CopyTo(tmp_path / "link" / where)
    with pytest.raises(DefinitionError, match="over themselves"):
        JobRunner(counter(1), manager, upload_task_group_builder=upload)
    JobRunner(counter(1), manager).run(session)
    with pytest.raises(DefinitionError, match="over themselves"):
        upload.build(1, manager)
    manager.verify(1)


@pytest.mark.parametrize(
    ("resume_from", "damaged"),
    [(None, []), (1, []), ("latest", [3]), ("latest", [0, 1, 2, 3])],
    ids=["afresh", "an epoch", "the last is damaged", "all are damaged"],
)
def test_a_start_that_fails_sets_nothing_aside(session, manager, resume_from, damaged):
    JobRunner(counter(3), manager).run(session)
    for epoch in damaged:
        Path(manager.get_ckpt_db_name("a", epoch), "zarr.json").unlink()

    def fails():
        raise RuntimeError("by hand")

    job = counter(5)
    with job.init_group:
        Task(fails, outputs=Blob("t", transient=True), node="a")
    with pytest.raises(TaskFailedError, match="by hand"):
        JobRunner(job, manager, resume_from).run(session)
    assert manager.epochs() == [0, 1, 2, 3]


@pytest.mark.processes
def test_a_run_whose_saves_fail_for_long_ends(session, tmp_path, monkeypatch):
    monkeypatch.setattr("jobrunner.run.failed_saves.FAILING_SECONDS", 0.0)
    files = RefusingFiles(["ckpt/a."])
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt", files=files, asynchronous=False)
    with pytest.raises(CheckpointWriteError, match="The last 3 saves have failed.*No space left"):
        JobRunner(counter(9), manager).run(session)
