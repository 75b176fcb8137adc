"""Tasks that run in each step, in every k-th, and once an epoch."""

import pytest

from jobrunner import (
    DefinitionError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    SaveEvery,
    Task,
    current_task,
    epoch_limiter,
)

CALLS = []
"""Tasks that ran, with epoch and step; they run in this process."""


@pytest.fixture
def session(inproc_session):
    return inproc_session


@pytest.fixture(autouse=True)
def _calls():
    CALLS.clear()


def note(*values):
    task = current_task()
    CALLS.append((task.name, task.epoch, task.step))
    task.report(**{task.name: len(CALLS)})
    return [task.name, task.epoch, task.step, float(task.rng.random()), *values]


def calls(name):
    return [(epoch, step) for task, epoch, step in CALLS if task == name]


def train(path, epochs=2, **options):
    """Four steps an epoch on nodes a and b; validation on node b once an epoch."""
    with Job("j", steps_per_epoch=4) as job:
        with job.init_group:
            Task(list, outputs="w", node="a")
            Task(list, outputs="loss", node="b")
        train = Task(note, "w", "w", name="train", node="a").output()
        Task(note, train, "seen", name="reader", node="b", workspace_type="global")
        with job.epoch_end_group:
            Task(note, [Node("a")["w"], "seen"], "loss", name="validate", node="b")
    epoch_limiter(job, epochs)
    manager = MultiNodeCheckpointManager(path, **options)
    return job, JobRunner(job, manager)


def test_tasks_run_in_each_step_and_once_an_epoch(session, tmp_path):
    _, runner = train(tmp_path)
    result = runner.run(session)
    assert result.epoch == 2
    assert calls("train") == calls("reader") == [(e, s) for e in (1, 2) for s in range(4)]
    assert calls("validate") == [(1, 4), (2, 4)]
    assert [set(row) for row in result.metrics[-2:]] == [
        {"epoch", "train", "reader", "validate"}
    ] * 2
    # The end group read what the last step had written, and its result is in the checkpoint.
    assert MultiNodeCheckpointManager(tmp_path).open(2)["b"]["loss"][4][:3] == ["train", 2, 3]


@pytest.mark.parametrize("last", [5, 8])
def test_a_run_interrupted_at_any_step_gives_the_same_bits(session, tmp_path, last):
    _, runner = train(tmp_path / "whole")
    runner.run(session)
    whole = MultiNodeCheckpointManager(tmp_path / "whole").open(2)
    asked = iter([*[False] * last, True])

    class Stop:
        def on_save(self, report):
            if next(asked, False):
                raise KeyboardInterrupt

    stopped = train(tmp_path / "parts", save=SaveEvery(steps=1), asynchronous=False)[1]
    stopped.callbacks = (Stop(),)
    with pytest.raises(KeyboardInterrupt):
        stopped.run(session)
    again = train(tmp_path / "parts", save=SaveEvery(steps=1))[1]
    again.run(session)
    parts = MultiNodeCheckpointManager(tmp_path / "parts").open(2)
    for node in ("a", "b"):
        assert {k: str(v) for k, v in whole[node].items()} == {
            k: str(v) for k, v in parts[node].items()
        }
    assert again.replay(session, 2).is_equal


def test_a_stop_condition_may_be_of_the_epoch_end_group(session):
    with Job("j", steps_per_epoch=3) as job:
        with job.init_group:
            Task(int, outputs="n", node="a")
        Task(lambda n: n + 1, "n", "n", node="a")
        with job.epoch_end_group:
            met = Task(lambda n: n >= 6, "n", name="met", node="a")
    job.add_stop_condition(met)
    assert "validate" not in repr(job)
    result = JobRunner(job).run(session)
    assert (result.epoch, result.stopped_by) == (2, "a/met")
    assert "stop" not in JobRunner(job).plan_resume().reason
    assert any("until a/met" in step for step in JobRunner(job).plan_resume().steps)


def test_a_task_runs_in_every_kth_step_and_its_blobs_stay_in_between(session):
    with Job("j", steps_per_epoch=5) as job:
        with job.init_group:
            Task(list, outputs="seen", node="a")
        rare = Task(note, "seen", "seen", name="rare", node="a", every=2)
        Task(note, rare.output(), name="reader", node="b", every=4)
        Task(note, Node("a")["seen"], name="often", node="b")
    epoch_limiter(job, 2)
    JobRunner(job).run(session)
    assert calls("rare") == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert calls("reader") == [(1, 3), (2, 3)]
    assert len(calls("often")) == 10
    assert session.fetch(Node("a")["seen"])[1:3] == [2, 3]


def reads_its_output(job):
    rare = Task(int, name="rare", node="a", every=2)
    Task(note, rare.output(), name="often", node="b", every=3)


def reads_its_blob(job):
    Task(int, outputs="p", node="a", every=2)
    Task(note, "p", name="often", node="a")


def is_never_due(job):
    Task(int, name="rare", node="a", every=7)


def is_in_the_exit_group(job):
    with job.exit_group:
        Task(int, name="rare", node="a", every=2)


def stops_the_job(job):
    job.add_stop_condition(Task(bool, name="rare", node="a", every=2))


@pytest.mark.parametrize(
    ("define", "message"),
    [
        (reads_its_output, "'b/often' reads the output of 'a/rare', .* only every 2 steps"),
        (reads_its_blob, "'a/often' .* blob 'p' .* only tasks with every=2 make"),
        (is_never_due, "'a/rare' would never run: .* every 7 steps, .* epoch group has 6"),
        (is_in_the_exit_group, "'a/rare' would never run: .* exit group has 1"),
        (stops_the_job, "a/rare.* every=2.* read at the end of an epoch"),
    ],
)
def test_what_a_task_with_an_interval_cannot_give_is_refused(define, message):
    with Job("j", steps_per_epoch=6) as job:
        define(job)
    epoch_limiter(job, 1)
    with pytest.raises(DefinitionError, match=message):
        job.compile()
