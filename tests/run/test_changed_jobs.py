"""A job that has other nodes and blobs than its checkpoint."""

import shutil
from contextlib import suppress

import numpy as np
import pytest
from distributed import Client

from jobrunner import (
    Blob,
    CheckpointError,
    DefinitionError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    PlanMismatchError,
    Session,
    Task,
    TaskFailedError,
    current_task,
    epoch_limiter,
)
from jobrunner.testing import FaultyFiles, PowerCutError
from tests.sampling import sampled


@pytest.fixture(scope="module")
def session(inproc_cluster):
    with Client(inproc_cluster, set_as_default=False) as client, Session(client) as session:
        yield session


@pytest.fixture
def manager(tmp_path):
    return MultiNodeCheckpointManager(tmp_path / "ckpt")


in_both_ways = pytest.mark.parametrize("is_asynchronous", [False, True])


def manager_of(path, is_asynchronous):
    return MultiNodeCheckpointManager(path / "ckpt", asynchronous=is_asynchronous)


def job_of(nodes, epochs, fails_at=None, transient_errors=()):
    """Each node counts its blobs up; `nodes` are Node -> blob -> first value."""

    def add_one(**values):
        task = current_task()
        if task.epoch == fails_at and not (transient_errors and task.attempt):
            raise ZeroDivisionError
        return [value + 1 for value in values.values()]

    with Job("changing") as job:
        for node, blobs in nodes.items():
            with job.init_group:
                for name, value in blobs.items():
                    Task(
                        lambda value: np.full(3, value),
                        outputs=name,
                        kwargs={"value": value},
                        node=node,
                        name=f"make {name}",
                    )
            for name in blobs:
                Task(
                    lambda it: add_one(it=it)[0],
                    inputs=name,
                    outputs=name,
                    node=node,
                    name=f"count {name}",
                    transient_errors=transient_errors,
                )
        epoch_limiter(job, epochs)
    return job


def blobs_in(session, manager, epoch):
    """Node -> blob -> first item, as recorded."""
    checkpoint = manager.open(epoch)
    return {n: {b: int(checkpoint[n].load(b)[0]) for b in checkpoint[n]} for n in checkpoint}


A10 = {"a": {"w": 10}}
A20_B30 = {"a": {"w": 20}, "b": {"w": 30}}


class Watch:
    def __init__(self):
        self.warnings, self.plans = [], []

    def on_warning(self, message):
        self.warnings.append(message)

    def on_start(self, plan, total):
        self.plans.append(plan)


def test_what_is_missing_is_made_by_its_init_tasks_and_what_they_need(session, manager):
    JobRunner(job_of({**A20_B30, "old": {"w": 1}}, 2), manager).run(session)
    calls = []
    job = job_of({"a": {"w": 0}, "b": {"w": 0}}, 3)
    with job.init_group:
        Task(lambda: calls.append("lr") or 0.5, outputs="lr", node="a", workspace_type="private")
        Task(lambda: calls.append("other"), outputs="other", node="a", workspace_type="private")
        Task(lambda w, lr: w * lr, inputs=["w", "lr"], outputs="m", node="a", name="make m")
        Task(lambda m: np.add(m, 100, out=m), updates="m", node="a", name="warm up")
        Task(lambda w: w + 1, inputs=Blob("w", "b"), outputs="w", node="new", name="copy")
    with pytest.raises(
        PlanMismatchError, match=r"lacks blob 'm' of node 'a', node 'new'.*--missing"
    ):
        JobRunner(job, manager).plan_resume()
    runner = JobRunner(job, manager, missing="init")
    plan = runner.plan_resume()
    assert plan.makes == ("blob 'm' of node 'a'", "blob 'w' of node 'new'")
    assert plan.drops == ("node 'old' ('w')",)
    assert len(plan.rebuilds) == 4
    runner.run(session)
    # From the loaded values of what they read.
    assert blobs_in(session, manager, 2) == {
        "a": {"w": 22, "m": 111},
        "b": {"w": 32},
        "new": {"w": 33},
    }
    JobRunner(job, manager).plan_resume()
    assert JobRunner(job, manager).replay(session, 3).is_equal


def test_an_init_task_may_make_a_new_blob_from_the_checkpoint(session, manager):
    JobRunner(job_of(A10, 2), manager).run(session)
    path = manager.path
    job = job_of({"a": {"w": 0}}, 3)
    with job.init_group:
        Task(
            lambda: 10 * MultiNodeCheckpointManager(path).open("latest")["a"].load("w"),
            outputs="m",
            node="a",
            name="make m",
        )
    JobRunner(job, manager, missing="init").run(session)
    assert blobs_in(session, manager, 3) == {"a": {"w": 13, "m": 120}}


def test_an_init_task_that_would_repeat_an_update_is_refused(session, manager):
    JobRunner(job_of(A10, 1), manager).run(session)
    job = job_of(A10, 2)
    with job.init_group:
        Task(lambda w: 1, updates="w", outputs="m", node="a", name="both")
    with pytest.raises(
        DefinitionError, match=r"'a/both'.*blobs that the checkpoint lacks.*'w' twice"
    ):
        JobRunner(job, manager, missing="init").run(session)
    assert blobs_in(session, manager, 1) == {"a": {"w": 11}}


@in_both_ways
def test_a_loss_before_the_next_save_loads_the_new_shape(session, tmp_path, is_asynchronous):
    manager = manager_of(tmp_path, is_asynchronous)
    JobRunner(job_of(A20_B30, 1), manager).run(session)
    job = job_of(
        {"a": {"w": 0}, "b": {"w": 0, "m": 7}}, 3, fails_at=2, transient_errors=ZeroDivisionError
    )
    result = JobRunner(job, manager, missing="init").run(session)
    assert result.restarts > 0
    assert blobs_in(session, manager, 3) == {"a": {"w": 23}, "b": {"w": 33, "m": 9}}


def test_the_former_shape_stays_on_disk_and_pins_stay(session, tmp_path):
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt")
    JobRunner(job_of(A10, 1), manager).run(session)
    manager.pin(1, "mine")
    for epochs in (1, 2):
        runner = JobRunner(job_of({"b": {"w": 0}}, epochs), manager, missing="init")
        assert runner.plan_resume().drops == (() if epochs > 2 else ("node 'a' ('w')",))
    runner.run(session)
    assert manager.pins() == {1: ["mine"]}
    assert (tmp_path / "ckpt" / "a.1" / "w").is_dir()
    assert manager.open(1).nodes == ("b",)


def test_a_failed_start_leaves_the_record_as_it_was(session, manager):
    JobRunner(job_of(A10, 2), manager).run(session)
    job = job_of({"b": {"w": 0}, "c": {"w": 0}}, 3)
    with job.init_group:
        Task(lambda: 1 / 0, outputs="m", node="c", name="fails")
    with pytest.raises(TaskFailedError):
        JobRunner(job, manager, missing="init").run(session)
    assert manager.epochs() == [0, 1, 2]
    assert blobs_in(session, manager, 2) == {"a": {"w": 12}}
    assert manager.pins() == {}


def test_from_another_directory_and_from_an_older_epoch(session, manager, tmp_path):
    JobRunner(job_of(A10, 3), manager).run(session)
    other = MultiNodeCheckpointManager(tmp_path / "other", load_path=manager.path)
    wider, options = {"a": {"w": 0}, "b": {"w": 0}}, {"missing": "init"}
    job = job_of(wider, 4)
    JobRunner(job, other, 2, **options).run(session)
    assert blobs_in(session, other, 4) == {"a": {"w": 14}, "b": {"w": 2}}
    JobRunner(job_of(wider, 5), other, **options).run(session)
    JobRunner(job_of(wider, 5), other, 3, **options).run(session)
    assert blobs_in(session, other, 5) == {"a": {"w": 15}, "b": {"w": 3}}


# ---- shared blobs and objects


class Counter:
    def __init__(self):
        self.n = 0

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


def bump(counter):
    counter.n += 1


def shared(nodes, epochs):
    with Job("shared") as job:
        for i, node in enumerate(nodes):
            with job.init_group:
                Task(
                    lambda i: np.full(6, i),
                    outputs=Blob("u", partition=0),
                    kwargs={"i": i},
                    node=node,
                )
                Task(lambda: np.arange(3), outputs=Blob("r", replicated=True), node=node)
                Task(Counter, outputs="c", node=node)
            Task(bump, updates="c", node=node)
        epoch_limiter(job, epochs)
    return job


def test_more_and_fewer_nodes_share_blobs(session, manager):
    JobRunner(shared("ab", 3), manager).run(session)
    # More nodes: parts are cut anew, independent state of new nodes is made anew.
    JobRunner(shared("abc", 4), manager, missing="init").run(session)
    checkpoint = manager.open(4)
    assert [checkpoint[n].load("u").tolist() for n in "abc"] == [[0] * 4, [0, 0, 1, 1], [1] * 4]
    assert [checkpoint[n].load("r").tolist() for n in "abc"] == [[0, 1, 2]] * 3
    assert [checkpoint[n]["c"]["n"] for n in "abc"] == [4, 4, 1]
    fewer = shared("b", 5)
    runner = JobRunner(fewer, manager)
    assert runner.plan_resume().drops == (
        "blob 'c' of node 'a'",
        "blob 'c' of node 'c'",
    )
    runner.run(session)
    assert manager.open(5)["b"].load("u").tolist() == [0] * 6 + [1] * 6


# ---- a fault at every operation of the client on storage


NEW = {"a": {"w": 0, "m": 7}, "c": {"v": 0}}


def resume_changed(session, path, files=None):
    """Resume a job that has changed, with all options; return what its manager recorded."""
    manager = MultiNodeCheckpointManager(path, files=files)
    JobRunner(job_of(NEW, 2), manager, missing="init").run(session)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@sampled("every_kth", sample=61, nightly=1)
@pytest.mark.parametrize("how", ["fail", "die"])
def test_the_same_command_goes_on_wherever_the_one_before_ended(session, tmp_path, how, every_kth):
    whole, former = tmp_path / "whole", {"a": {"w": 21}, "b": {"w": 31}}
    JobRunner(job_of(A20_B30, 1), MultiNodeCheckpointManager(whole)).run(session)
    at, files = 1, None
    while files is None or files.count >= files.at:
        files = FaultyFiles(how=how, at=at, sync=False)
        path = shutil.copytree(whole, tmp_path / str(at))
        manager = MultiNodeCheckpointManager(path)
        with suppress(CheckpointError, PowerCutError, OSError):
            resume_changed(session, path, files)
        there = blobs_in(session, manager, 1)
        assert there in (former, {"a": {"w": 21, "m": 7}, "c": {"v": 0}}), (at, files.trace[-1])
        resume_changed(session, path)
        found = blobs_in(session, manager, 2)
        assert found == {"a": {"w": 22, "m": 8}, "c": {"v": 1}}, (at, files.trace[-1])
        assert manager.pins() == {}
        shutil.rmtree(path)
        at += every_kth
    assert at > 50
