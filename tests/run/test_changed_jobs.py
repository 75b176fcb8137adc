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
    Node,
    PlanMismatchError,
    Session,
    Task,
    current_task,
    epoch_limiter,
)
from jobrunner.testing import FaultyFiles, PowerCutError
from tests.jobs import Listener
from tests.sampling import sampled


@pytest.fixture(scope="module")
def session(inproc_cluster):
    with Client(inproc_cluster, set_as_default=False) as client, Session(client) as session:
        yield session


def job_of(nodes, epochs, fails_at=None, transient_errors=()):
    """Each node counts its blobs up; `nodes` are Node -> blob -> first value."""

    def add_one(value):
        task = current_task()
        if task.epoch == fails_at and not task.attempt:
            raise ZeroDivisionError
        return value + 1

    with Job("changing") as job:
        for node, blobs in nodes.items():
            for name, value in blobs.items():
                with job.init_group:
                    kwargs = {"shape": 3, "fill_value": value}
                    Task(np.full, outputs=name, kwargs=kwargs, node=node, name=f"make {name}")
                about = {"name": f"count {name}", "transient_errors": transient_errors}
                Task(add_one, inputs=[name], outputs=name, node=node, **about)
        epoch_limiter(job, epochs)
    return job


def blobs_in(session, manager, epoch):
    """Node -> blob -> first item, as recorded."""
    checkpoint = manager.open(epoch)
    return {n: {b: int(checkpoint[n].load(b)[0]) for b in checkpoint[n]} for n in checkpoint}


A10 = {"a": {"w": 10}}
A20_B30 = {"a": {"w": 20}, "b": {"w": 30}}


def test_a_renamed_node_and_blob_are_loaded_and_recorded_at_once(session, manager):
    JobRunner(job_of(A20_B30, 2), manager).run(session)
    seen = Listener()
    renamed = job_of({"server": {"w": 0}, "b": {"weights": 0}}, 3)
    options = {"rename": {"a": "server", "b/w": "b/weights"}, "callbacks": [seen]}
    runner = JobRunner(renamed, manager, **options)
    plan = runner.plan_resume()
    assert plan.renames == (
        "node 'a' as 'server'",
        "blob 'w' of node 'b' as blob 'weights' of node 'b'",
    )
    assert (plan.makes, plan.drops, plan.rebuilds) == ((), (), ())
    assert "save epoch 2 with the nodes and blobs of this job" in plan.steps
    assert "loads under another name:\n  node 'a' as 'server'" in str(plan)
    result = runner.run(session)
    assert [report.epoch for report in result.saves] == [2, 3]
    assert blobs_in(session, manager, 2) == {"server": {"w": 22}, "b": {"weights": 32}}
    assert blobs_in(session, manager, 3) == {"server": {"w": 23}, "b": {"weights": 33}}
    assert len(seen.warnings) == 1
    assert "node 'a' as 'server' is loaded" in seen.warnings[0]
    # Given again, it means nothing more; and it need not be given.
    for epochs, again in ((4, options), (5, {})):
        job = job_of({"server": {"w": 0}, "b": {"weights": 0}}, epochs)
        runner = JobRunner(job, manager, **again)
        assert runner.plan_resume().renames == ()
        assert [report.epoch for report in runner.run(session).saves] == [epochs]
    assert blobs_in(session, manager, 5) == {"server": {"w": 25}, "b": {"weights": 35}}
    assert len(seen.warnings) == 1


def test_a_new_node_may_take_the_name_of_a_renamed_one(session, manager):
    JobRunner(job_of(A10, 1), manager).run(session)
    wider = {"a": {"w": 50}, "b": {"w": 0}}
    for epochs in (2, 3):
        runner = JobRunner(job_of(wider, epochs), manager, rename={"a": "b"}, missing="init")
        runner.run(session)
    assert blobs_in(session, manager, 1) == {"a": {"w": 50}, "b": {"w": 11}}
    assert blobs_in(session, manager, 3) == {"a": {"w": 52}, "b": {"w": 13}}


@pytest.mark.parametrize("resume", ["latest", None])
def test_a_fresh_run_refuses_a_rename_to_what_the_job_lacks(manager, resume):
    runner = JobRunner(job_of(A10, 1), manager, resume, rename={"old": "typo", "a/v": "a/w"})
    with pytest.raises(PlanMismatchError, match=r"rename=\{'old': 'typo'\}: job .* no 'typo'"):
        runner.plan_resume()
    chain = {"oldest": "old", "old": "a", "*/v": "*/w"}
    JobRunner(job_of(A10, 1), manager, resume, rename=chain).plan_resume()


def test_a_fresh_run_notes_the_renames_it_was_given(session, manager):
    for epochs in (1, 2):
        JobRunner(job_of(A20_B30, epochs), manager, rename={"a": "b"}).run(session)
    assert blobs_in(session, manager, 2) == {"a": {"w": 22}, "b": {"w": 32}}


def test_a_blob_renamed_on_every_node_and_one_that_moves_to_another_node(session, manager):
    JobRunner(job_of({**A20_B30, "a": {"w": 20, "x": 5}}, 1), manager).run(session)
    replaced = JobRunner(job_of({"b": {"w": 0}}, 2), manager, rename={"a": "b"}).plan_resume()
    assert "node 'b' ('w')" in replaced.drops
    names = {"b": "c", "*/w": "*/v", "a/x": "c/y"}
    runner = JobRunner(job_of({"a": {"v": 0}, "c": {"v": 0, "y": 0}}, 2), manager, rename=names)
    assert runner.plan_resume().renames[:2] == ("node 'b' as 'c'", "blob 'w' of every node as 'v'")
    runner.run(session)
    assert blobs_in(session, manager, 2) == {"a": {"v": 22}, "c": {"v": 32, "y": 7}}


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


def test_a_renamed_node_draws_the_random_numbers_of_its_first_name(session, tmp_path):
    def run(name, epochs, path, **options):
        with Job("drawing", seed=3) as job:
            for group in (job.init_group, job.epoch_group):
                with group:
                    Task(lambda: current_task().rng.random(), outputs="x", node=name, name="draw")
        epoch_limiter(job, epochs)
        manager = MultiNodeCheckpointManager(tmp_path / path)
        runner = JobRunner(job, manager, **options)
        runner.run(session)
        if path == "parts":
            assert runner.replay(session, epochs).is_equal
        return session.fetch(Node(name)["x"])

    expected = run("a", 4, "whole")
    run("a", 1, "parts")
    run("b", 2, "parts", rename={"a": "b"})
    run("c", 3, "parts", rename={"b": "c"})
    # The name of every record is mapped to the first one, without `rename` too.
    assert run("c", 4, "parts") == expected
    assert run("b", 4, "other") != expected


def test_a_loss_before_the_next_save_loads_the_new_shape(session, manager):
    JobRunner(job_of(A20_B30, 1), manager).run(session)
    job = job_of(
        {"c": {"w": 0}, "b": {"w": 0, "m": 7}}, 3, fails_at=2, transient_errors=ZeroDivisionError
    )
    result = JobRunner(job, manager, rename={"a": "c"}, missing="init").run(session)
    assert result.restarts > 0
    assert blobs_in(session, manager, 3) == {"c": {"w": 23}, "b": {"w": 33, "m": 9}}


def test_the_former_shape_stays_on_disk_and_pins_stay(session, tmp_path):
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt")
    JobRunner(job_of(A10, 1), manager).run(session)
    manager.pin(1, "mine")
    JobRunner(job_of({"b": {"w": 0}}, 1), manager, rename={"a": "b"}).plan_resume()
    JobRunner(job_of({"b": {"w": 0}}, 2), manager, rename={"a": "b"}).run(session)
    assert manager.pins() == {1: ["mine"]}
    assert (tmp_path / "ckpt" / "a.1" / "w").is_dir()
    assert manager.open(1).nodes == ("b",)


def test_replay_and_partial_loads_know_the_names(session, manager):
    JobRunner(job_of(A10, 2), manager).run(session)
    job = job_of({"b": {"v": 0}}, 3)
    runner = JobRunner(job, manager, rename={"a": "b", "a/w": "b/v"})
    report = runner.replay(session, 2)
    assert report.is_equal
    assert report.num_equal == 1
    assert runner.load_blobs_from_checkpoints("v", 1, session)
    assert session.fetch(Node("b")["v"])[0] == 11
    runner.run(session)
    assert runner.replay(session, 3).is_equal


@pytest.mark.parametrize(
    ("rename", "match"),
    [
        ({"a": "b/w"}, r"nodes to nodes"),
        ({"*/w": "b/w"}, r"nodes to nodes"),
        ({"a/w": "a/"}, "is empty"),
        ({"a": "c", "b": "c"}, r"'a' and 'b' the same name, 'c'"),
    ],
)
def test_renames_that_mean_nothing_are_refused(rename, match, manager):
    with pytest.raises(DefinitionError, match=match):
        JobRunner(job_of(A10, 1), manager, rename=rename)


@pytest.mark.parametrize(
    ("node", "rename", "match"),
    [
        ("b", {"trainer": "tester"}, r"epoch 1 of .* has no node 'trainer'\. Its nodes are 'a'"),
        ("b", {"trainer": "a"}, r"epoch 1 of .* has no node 'trainer'\. Its nodes are 'a'"),
        ("b", {"a": "c"}, r"job 'changing' saves no 'c'\. Its nodes are 'b'"),
        ("b", {"a/x": "b/w"}, r"has no blob 'x' of node 'a'\. Its blobs are 'w'"),
        ("b", {"*/x": "*/w"}, r"has no blob 'x' of node '\*'\. Its nodes are 'a'"),
        # The checkpoint has all that the job needs.
        ("a", {"typo": "a"}, "typo"),
        ("a", {"a/typo": "a/w"}, "typo"),
    ],
)
def test_renames_that_do_not_fit_are_refused_before_anything_runs(
    session, manager, node, rename, match
):
    JobRunner(job_of(A10, 1), manager).run(session)
    with pytest.raises(PlanMismatchError, match=match):
        JobRunner(job_of({node: {"w": 0}}, 2), manager, rename=rename).plan_resume()


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


def shared(nodes, epochs, part="u", replica="r", counter="c"):
    with Job("shared") as job:
        for i, node in enumerate(nodes):
            with job.init_group:
                Task(
                    lambda i: np.full(6, i),
                    outputs=Blob(part, partition=0),
                    kwargs={"i": i},
                    node=node,
                )
                Task(lambda: np.arange(3), outputs=Blob(replica, replicated=True), node=node)
                Task(Counter, outputs=counter, node=node)
            Task(bump, updates=counter, node=node)
        epoch_limiter(job, epochs)
    return job


def test_shared_blobs_and_objects_are_renamed_too(session, manager):
    JobRunner(shared("ab", 2), manager).run(session)
    runner = JobRunner(
        shared("xb", 3, "part", "replica", "counter"),
        manager,
        rename={"a": "x", "*/u": "*/part", "*/r": "*/replica", "*/c": "*/counter"},
    )
    assert (plan := runner.plan_resume()).drops == ()
    assert plan.makes == ()
    runner.run(session)
    checkpoint = manager.open(3)
    assert [checkpoint[n].load("part").tolist() for n in "xb"] == [[0] * 6, [1] * 6]
    assert [checkpoint[n].load("replica").tolist() for n in "xb"] == [[0, 1, 2]] * 2
    assert [checkpoint[n]["counter"]["n"] for n in "xb"] == [3, 3]
    # More nodes: parts are cut anew, independent state of new nodes is made anew.
    wider = shared("xbc", 4, "part", "replica", "counter")
    JobRunner(wider, manager, missing="init").run(session)
    checkpoint = manager.open(4)
    assert [checkpoint[n].load("part").tolist() for n in "xbc"] == [[0] * 4, [0, 0, 1, 1], [1] * 4]
    assert [checkpoint[n]["counter"]["n"] for n in "xbc"] == [4, 4, 1]
    fewer = shared("b", 5, "part", "replica", "counter")
    runner = JobRunner(fewer, manager)
    assert runner.plan_resume().drops == (
        "blob 'counter' of node 'x'",
        "blob 'counter' of node 'c'",
    )
    runner.run(session)
    assert manager.open(5)["b"].load("part").tolist() == [0] * 6 + [1] * 6


# ---- a fault at every operation of the client on storage


NEW = {"c": {"w": 0, "m": 7}, "b": {"v": 0}}


def resume_changed(session, path, files=None):
    """Resume a job that has changed, with all options; return what its manager recorded."""
    manager = MultiNodeCheckpointManager(path, files=files)
    options = {"rename": {"a": "c", "b/w": "b/v"}, "missing": "init"}
    JobRunner(job_of(NEW, 2), manager, **options).run(session)


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
        assert there in (former, {"c": {"w": 21, "m": 7}, "b": {"v": 31}}), (at, files.trace[-1])
        resume_changed(session, path)
        found = blobs_in(session, manager, 2)
        assert found == {"c": {"w": 22, "m": 8}, "b": {"v": 32}}, (at, files.trace[-1])
        assert manager.pins() == {}
        shutil.rmtree(path)
        at += every_kth
    assert at > 50
