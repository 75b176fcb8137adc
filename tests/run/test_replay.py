"""Replayed epochs are equal, or the report names the task that made them differ."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from jobrunner import (
    Blob,
    CheckpointCorruptError,
    CheckpointNotFoundError,
    DefinitionError,
    Job,
    JobRunner,
    KeepAll,
    MultiNodeCheckpointManager,
    Node,
    PlanMismatchError,
    Position,
    SaveEvery,
    Session,
    Task,
    current_task,
    epoch_limiter,
    pipe,
)
from jobrunner.cli.command import main
from jobrunner.data import from_records


def draw(x):
    return x + current_task().rng.standard_normal(x.size)


def mix(y, other):
    return 0.5 * (y + other)


def note(mean, log):
    log.append(float(mean))


def build(*, draw=draw, mix=mix, epochs=4, limit=None, **kwargs):
    """Two nodes: each draws into a blob of its own, and mixes that with the other's state."""
    with Job("drift", seed=5, **kwargs) as job:
        for name, other in (("a", "b"), ("b", "a")):
            with Node(name):
                with job.init_group:
                    Task(lambda: np.zeros(50), outputs="x", name="zeros")
                    Task(lambda: ([], {"k": (1, 2.0)}), outputs=["log", "about"], name="rest")
                    Task(lambda: object(), outputs=Blob("tool", transient=True), name="tool")
                drawn = Task(draw, inputs="x", outputs="y", name="draw")
                Task(mix, [drawn.output(), Node(other)["x"]], outputs="x", name="mix")
                mean = Task(np.mean, inputs="x", name="mean").output()
                Task(note, inputs=mean, updates="log", name="note")
    epoch_limiter(job, limit or epochs)
    return job


def contents(path):
    """Every file below a path, with its content."""
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(Path(path).rglob("*"))
        if file.is_file()
    }


def test_epochs_of_a_deterministic_job_are_equal_and_nothing_is_written(client, manager):
    with Session(client) as session:
        runner = JobRunner(build(), manager)
        runner.run(session)
        before = contents(manager.path)
        for epoch, base in ((0, None), (1, 0), (4, 3)):
            report = runner.replay(session, epoch)
            assert (report.epoch, report.from_epoch) == (epoch, base)
            assert (report.is_equal, report.num_equal, report.changes) == (True, 6, ())
        assert contents(manager.path) == before
        assert runner.run(session).epoch == 4  # and the directory is free


def test_an_epoch_saved_in_mid_epoch_is_run_up_to_that_step(inproc_session, tmp_path):
    keep = KeepAll(partial=True)
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt", save=SaveEvery(steps=2), keep=keep)
    job = build(epochs=2, steps_per_epoch=3)
    runner = JobRunner(job, manager)
    runner.run(inproc_session)
    at_2 = Position(0, 2)
    assert manager.positions()[1::2] == [at_2, Position(1, 1)]
    for epoch, step, base in ((at_2, 2, 0), (1, 0, at_2), (Position(1, 1), 1, 1), (2, 0, (1, 1))):
        base = Position(*base) if isinstance(base, tuple) else base
        report = runner.replay(inproc_session, epoch)
        assert (report.step, report.from_epoch, report.is_equal) == (step, base, True)
        found = json.loads(json.dumps(report.to_dict()))
        expected = [it if type(it) is int else str(it) for it in (epoch, base)]
        assert [found["epoch"], found["from_epoch"]] == expected


def unseeded(x, _=0):
    return x + np.random.random(x.size)


def test_the_first_task_that_writes_another_value_is_named_first(inproc_session, manager):
    with Job("mixed", seed=5) as job:
        for name in "ab":
            with Node(name):
                with job.init_group:
                    Task(lambda: np.zeros(50), outputs="x", name="zeros")
                    Task(lambda: 0.0, outputs="sum", name="zero")
                fn = unseeded if name == "b" else draw
                Task(fn, inputs="x", outputs="x", name="draw")
        total = Task(np.sum, inputs=Node("b")["x"], node="a", name="total").output()
        Task(lambda total: total, inputs=total, outputs="sum", node="a", name="keep")
    epoch_limiter(job, 3)
    runner = JobRunner(job, manager)
    runner.run(inproc_session)
    report = runner.replay(inproc_session, 2)
    assert [(d.node, d.blob, d.tasks) for d in report.differences] == [
        ("b", "x", ("b/draw",)),
        ("a", "sum", ("a/keep",)),
    ]
    assert report.num_equal == 2
    [how] = report.differences[0].how
    assert how["what"].startswith("50 of 50 elements differ")
    assert 0 < how["max_abs"] < 1
    assert "written by b/draw\n" in str(report)
    assert "random numbers not from current_task().rng" in str(report)


def test_a_replay_draws_from_global_generators_as_the_run_did(inproc_session, manager):
    kept = {"workspace_type": "global"}
    with Job("drawing", seed_global_rng=True) as job, Node("a"):
        with job.init_group:
            Task(lambda: np.zeros(3), outputs="x")
            Task(lambda: from_records(range(5)), outputs="reader")
        Task(unseeded, outputs="x", setup={"_": lambda: np.random.random()})
        Task(lambda: np.random.random(), outputs="many", num_instances=2, **kept)
        pipe("reader", lambda _: np.random.random(), outputs="piped", num_threads=2, **kept)
    epoch_limiter(job, 2)
    runner = JobRunner(job, manager)
    runner.run(inproc_session)
    assert runner.replay(inproc_session, 2).is_equal


class Model:
    """Saved by its state; created with other weights each time."""

    def __init__(self):
        self.weights = np.random.random(4)

    def state_dict(self):
        return {"weights": self.weights, "bias": 1.0}

    def load_state_dict(self, state):
        self.weights = state["weights"].copy()


def train(noise, model):
    model.weights += current_task().rng.random() + np.random.random() * noise


@pytest.mark.parametrize("noise", [0, 1])
def test_objects_that_are_saved_by_their_state_are_compared_by_it(inproc_session, manager, noise):
    with Job("model") as job, Node("a"):
        with job.init_group:
            Task(Model, outputs="model", name="model")
        Task(lambda model: train(noise, model), updates="model", name="train", num_instances=2)
    epoch_limiter(job, 3)
    runner = JobRunner(job, manager)
    runner.run(inproc_session)
    report = runner.replay(inproc_session, 3)
    if not noise:
        assert report.is_equal
        return
    [difference] = report.differences
    assert difference.tasks == ("a/train",)
    assert [how["where"] for how in difference.how] == ["['weights']"]


def test_an_impossible_replay_is_refused_before_anything_runs(inproc_session, manager):
    ran = []
    runner = JobRunner(build(), manager)
    with pytest.raises(CheckpointNotFoundError, match="Epoch 3 .* is not recorded"):
        runner.replay(inproc_session, 3)
    with pytest.raises(DefinitionError, match="has no checkpoint_manager"):
        JobRunner(build()).replay(inproc_session, 1)
    runner.run(inproc_session)
    with pytest.raises(CheckpointNotFoundError, match="Epoch 9 .* is not recorded"):
        runner.replay(inproc_session, 9)
    with Job("other") as other, Node("c"):
        with other.init_group:
            Task(lambda: 0, outputs="n")
        Task(ran.append, inputs="n")
    epoch_limiter(other, 2)
    with pytest.raises(PlanMismatchError, match="lacks node 'c'"):
        JobRunner(other, manager).replay(inproc_session, 2)
    chunk = Path(manager.path, "a.3", "x", "c.0")
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    for epoch in (3, 4):  # the one that is compared, the one that it begins from
        with pytest.raises(CheckpointCorruptError, match=r"a\.3/x/c\.0 is not what was written"):
            runner.replay(inproc_session, epoch)
    assert ran == []


SCRIPT = """
import random
from jobrunner import Job, Node, Task, epoch_limiter

def step(n):
    return n + random.random()

with Job("count") as job:
    with job.init_group:
        Task(lambda: 0, outputs="n", node="a")
    Task(step, inputs="n", outputs="n", node="a", name="step")
epoch_limiter(job, 3)
"""


def invoke(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_the_command_reports_differences_in_text_and_exit_code(process_cluster, tmp_path):
    script, path = tmp_path / "count.py", tmp_path / "runs"
    script.write_text(SCRIPT)
    where = ["--scheduler", process_cluster.scheduler_address]
    assert invoke("run", script, "--checkpoint", path, *where).exit_code == 0
    result = invoke("verify", path, "--replay", "latest", "--job", script, *where)
    assert result.exit_code == 11, result.output
    assert "epoch 3, run again from epoch 2:" in result.stdout
    assert "  written by a/step\n" in result.stdout
    found = invoke("verify", path, "--replay", 3, "--job", script, *where, "--json")
    data = json.loads(found.stdout)
    assert (found.exit_code, data["is_equal"], data["from_epoch"]) == (11, False, 2)
    assert data["differences"][0]["tasks"] == ["a/step"]


def test_the_command_needs_the_job_and_only_for_a_replay(tmp_path):
    for wrong in (
        ["--replay", 1],
        ["1", "--replay", 1, "--job", "x.py"],
        ["--replay", 1, "--job", "x.py", "--deep"],
        ["--job", "x.py"],
        ["--workers", 2],
        ["--replay", 1, "--job", "x.py", "--workers", 2, "--scheduler", "tcp://a:1"],
    ):
        result = invoke("verify", tmp_path, *wrong)
        assert (result.exit_code, result.stdout) == (2, "")
