"""Tasks that run in each step, and once an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobrunner import (
    DefinitionError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    SaveEvery,
    Session,
    Task,
    TaskFailedError,
    current_task,
    epoch_limiter,
)
from tests.sampling import examples

CALLS: list[tuple[str, int | None, int]] = []
"""Tasks that ran, with epoch and step; they run in this process."""


@pytest.fixture
def session(inproc_session: Session) -> Session:
    return inproc_session


@pytest.fixture(autouse=True)
def _calls() -> None:
    CALLS.clear()


def note(*values: Any) -> list[Any]:
    task = current_task()
    CALLS.append((task.name, task.epoch, task.step))
    task.report(**{task.name: len(CALLS)})
    return [task.name, task.epoch, task.step, float(task.rng.random()), *values]


def calls(name: str) -> list[tuple[int | None, int]]:
    return [(epoch, step) for task, epoch, step in CALLS if task == name]


def train(path: Path, epochs: int = 2, **options: Any) -> tuple[Job, JobRunner]:
    """Four steps an epoch on nodes a and b; validation on node b once an epoch."""
    with Job("j", steps_per_epoch=4) as job:
        with job.init_group:
            Task(list, outputs="w", node="a")
            Task(list, outputs="loss", node="b")
        train = Task(note, "w", "w", name="train", node="a").output()
        Task(note, train, "seen", name="reader", node="b", workspace_type="global")
        with job.epoch_end_group:
            Task(note, [job_blob("a", "w"), "seen"], "loss", name="validate", node="b")
    epoch_limiter(job, epochs)
    manager = MultiNodeCheckpointManager(path, **options)
    return job, JobRunner(job, manager)


def job_blob(node: str, name: str) -> Any:
    from jobrunner import Node

    return Node(node)[name]


def test_tasks_run_in_each_step_and_once_an_epoch(session: Session, tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    "last", [5, 8, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 6, 7))]
)
def test_a_run_interrupted_at_any_step_gives_the_same_bits(
    session: Session, tmp_path: Path, last: int
) -> None:
    _, runner = train(tmp_path / "whole")
    runner.run(session)
    whole = MultiNodeCheckpointManager(tmp_path / "whole").open(2)
    asked = iter([*[False] * last, True])

    class Stop:
        def on_save(self, report: Any) -> None:
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


def test_a_stop_condition_may_be_of_the_epoch_end_group(session: Session) -> None:
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


def test_an_epoch_has_at_least_one_step() -> None:
    with pytest.raises(DefinitionError, match="steps_per_epoch must be an int >= 1"):
        Job("j", steps_per_epoch=0)


def test_a_failure_in_the_end_group_repeats_only_what_was_not_saved(
    session: Session, tmp_path: Path
) -> None:
    fail = True

    def validate() -> None:
        if fail:
            raise ValueError

    with Job("j", steps_per_epoch=2) as job:
        with job.init_group:
            Task(list, outputs="w", node="a")
        Task(note, "w", "w", name="train", node="a")
        with job.epoch_end_group:
            Task(validate, node="a")
    epoch_limiter(job, 1)
    manager = MultiNodeCheckpointManager(tmp_path, save=SaveEvery(steps=1))
    with pytest.raises(TaskFailedError, match="validate"):
        JobRunner(job, manager).run(session)
    fail = False
    JobRunner(job, manager).run(session)
    assert calls("train") == [(1, 0), (1, 1), (1, 1)]


class Drawn(NamedTuple):
    """A task of a random job: which blobs and earlier tasks it reads, and what it writes."""

    node: str
    reads: Sequence[tuple[str, str]]
    of_tasks: Sequence[int]  # how far up, among the tasks whose output it may read
    output: str
    updates: str


drawn_tasks = st.builds(
    Drawn,
    st.sampled_from("ab"),
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyp")), max_size=2),
    st.lists(st.integers(1, 3), max_size=1),
    st.sampled_from(["", "x", "y", "p"]),
    st.sampled_from(["", "", "x", "y"]),
)


def compute(number: int, *values: list[int]) -> list[int]:
    """What a task of a random job does; the last value may be one that it updates."""
    task = current_task()
    CALLS.append((task.name, task.epoch, task.step))
    return computed(number, (task.epoch, task.step), values)


def update(number: int, *values: list[int]) -> list[int]:
    values[-1][0] += number + 1
    return compute(number, *values)


def computed(number: int, at: tuple[int | None, int], values: Sequence[list[int]]) -> list[int]:
    return [hash((number, at, *(value[0] for value in values)))]


class Sequential:
    """What the steps of an epoch must do: its tasks, one after another."""

    def __init__(self, drawn: Sequence[Drawn], steps: int) -> None:
        self.steps = steps
        self.blobs = {(node, name): [0] for node in "ab" for name in "xy"}
        self.results: dict[int, list[int]] = {}
        self.calls: list[tuple[str, int | None, int]] = []
        made: set[tuple[str, str]] = set()  # private blobs
        self.tasks: list[tuple[Drawn, list[tuple[str, str]], list[int]]] = []
        for task in drawn:
            if task.updates == task.output or (task.node, task.updates) in task.reads:
                task = task._replace(updates="")
            read = [key for key in task.reads if key[1] != "p" or key in made]
            sources = [len(self.tasks) - up for up in task.of_tasks if up <= len(self.tasks)]
            self.tasks.append((task, read, sources))
            if task.output == "p":
                made.add((task.node, "p"))

    def build(self) -> tuple[Job, list[Task]]:
        """The job with these tasks."""
        tasks: list[Task] = []
        with Job("j", steps_per_epoch=self.steps) as job:
            with job.init_group:
                for node, name in self.blobs:
                    Task(lambda: [0], outputs=name, node=node, name=name)
            for number, (task, read, sources) in enumerate(self.tasks):
                inputs = [job_blob(*key) for key in read]
                tasks.append(
                    Task(
                        partial(update if task.updates else compute, number),
                        [*inputs, *(tasks[source].output() for source in sources)],
                        task.output or (),
                        updates=task.updates or (),
                        node=task.node,
                        name=f"t{number}",
                    )
                )
                tasks[-1].output()
        epoch_limiter(job, 3)
        return job, tasks

    def run(self, epoch: int, step: int) -> None:
        """Run one step."""
        for number, (task, read, sources) in enumerate(self.tasks):
            self.calls.append((f"t{number}", epoch, step))
            values = [self.blobs[key] for key in read]
            values += [self.results[source] for source in sources]
            if task.updates:
                key = (task.node, task.updates)
                self.blobs[key] = [self.blobs[key][0] + number + 1]
                values.append(self.blobs[key])
            result = computed(number, (epoch, step), values)
            self.results[number] = result
            if task.output:
                self.blobs[task.node, task.output] = result


@settings(
    max_examples=examples(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(drawn=st.lists(drawn_tasks, min_size=1, max_size=7), steps=st.integers(1, 6))
def test_steps_are_as_if_their_tasks_ran_one_after_another(
    session: Session, drawn: Sequence[Drawn], steps: int
) -> None:
    CALLS.clear()
    model = Sequential(drawn, steps)
    job, tasks = model.build()
    JobRunner(job).run(session)
    for epoch in (1, 2, 3):
        for step in range(steps):
            model.run(epoch, step)
    assert sorted(CALLS) == sorted(model.calls)
    for (node, name), value in model.blobs.items():
        if name != "p":
            assert session.fetch(job_blob(node, name)) == value
    for number, task in enumerate(tasks):
        if number in model.results:
            assert task.output().fetch() == model.results[number]


def test_a_task_that_fails_is_told_with_its_step(session: Session) -> None:
    def fail():
        task = current_task()
        if (task.epoch, task.step) == (2, 1):
            raise ValueError("by hand")

    with Job("failing", steps_per_epoch=3) as job, Node("a"):
        Task(fail)
    epoch_limiter(job, 3)
    with pytest.raises(TaskFailedError, match=r"failed at epoch 2, step 2: ValueError: by hand"):
        JobRunner(job).run(session)
