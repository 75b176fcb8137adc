"""A job gives the results of its tasks run one after another, whatever runs in parallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobrunner import Job, JobRunner, Node, Session, Task, WorkspaceType, current_task
from tests.sampling import examples

NODES = ("a", "b", "c")
BLOBS = ("w", "x", "y")
PRIVATE = ("p", "q")
EPOCHS = 9  # without a manager, so that workers run several for one message

KEEPERS = ("kept", "items")


@dataclass(frozen=True)
class Spec:
    """A task: what it reads (a blob, or an earlier task's output), updates and writes."""

    node: str
    kind: str
    salt: int
    reads: tuple[tuple[str, str] | int, ...]
    update: str | None
    output: str | None
    fetched: bool
    keeps: bool
    instances: int


class Kept(NamedTuple):
    """An object with an array."""

    value: object


def keep(value, kept, items):
    """Return inputs unchanged: one in an object, some in a list in a dictionary."""
    items["some"].append(value)
    del items["some"][:-3]
    return Kept(value) if current_task().epoch % 4 == 1 else kept


def work(kind, salt, has_update, *args):
    """Mix the arguments; each kind shares memory in another way."""
    *inputs, target = args if has_update else (*args, None)
    mixed = np.full(3, salt, dtype=np.uint64)
    for i, value in enumerate(inputs):
        # Several instances return a list.
        value = np.asarray(value).reshape(-1, 3).sum(axis=0, dtype=np.uint64)
        mixed = mixed * np.uint64(31) + value * np.uint64(i + 7)
    if target is not None:
        for part in target if isinstance(target, list) else [target]:
            part *= np.uint64(3)
            part += mixed
    if kind == "random":
        mixed += current_task().rng.integers(0, 1000, 3, dtype=np.uint64)
    if kind == "view" and inputs:
        return inputs[0]
    if kind == "slice" and inputs:
        return np.asarray(inputs[0])[::1]
    if kind == "alias" and target is not None:
        return target
    return mixed


@st.composite
def specs(draw):
    tasks: list[Spec] = []
    private: dict[str, set[str]] = {node: set() for node in NODES}
    for i in range(draw(st.integers(1, 12))):
        node = draw(st.sampled_from(NODES))
        there = [(n, b) for n in NODES for b in (*BLOBS, *sorted(private[n]))]
        choices = st.one_of(st.sampled_from(there), *([st.integers(0, i - 1)] if i else []))
        reads = draw(st.lists(choices, max_size=3))
        update = draw(st.one_of(st.none(), st.sampled_from([b for n, b in there if n == node])))
        reads = [read for read in reads if read != (node, update)]
        names = [b for b in (*BLOBS, *PRIVATE) if b != update]
        output = draw(st.one_of(st.none(), st.sampled_from(names)))
        kind = draw(st.sampled_from(["mix", "view", "slice", "alias", "random"]))
        fetched, keeps = draw(st.booleans()), draw(st.booleans())
        salt = draw(st.integers(0, 999))
        # They run in parallel on the same memory, so they must change nothing in place.
        can_be_several = update is None and kind in ("mix", "random")
        instances = draw(st.sampled_from([1, 1, 2, 3])) if can_be_several else 1
        tasks.append(
            Spec(node, kind, salt, tuple(reads), update, output, fetched, keeps, instances)
        )
        if output in PRIVATE:
            private[node].add(output)
    return tasks


def initial(node, blob):
    return np.arange(3, dtype=np.uint64) + np.uint64(hash_of(node + blob))


def hash_of(text):
    return sum(ord(letter) * 17**i for i, letter in enumerate(text))


def build(tasks):
    with Job("random") as job:
        with job.init_group:
            for node in NODES:
                for blob in BLOBS:
                    Task(initial, outputs=blob, node=node, kwargs={"node": node, "blob": blob})
                Task(lambda: (None, {"some": []}), outputs=list(KEEPERS), node=node, name="none")
        made = []
        for spec in tasks:
            inputs = [
                made[read].output() if isinstance(read, int) else Node(read[0])[read[1]]
                for read in spec.reads
            ]
            made.append(
                Task(
                    Work(spec.kind, spec.salt, spec.update is not None),
                    inputs=inputs,
                    updates=() if spec.update is None else spec.update,
                    outputs=() if spec.output is None else spec.output,
                    node=spec.node,
                    name=f"t{len(made)}",
                    num_instances=spec.instances,
                )
            )
            if spec.fetched:
                made[-1].output()
            if spec.keeps and inputs:
                Task(
                    keep,
                    inputs=[inputs[0], "kept"],
                    updates="items",
                    outputs="kept",
                    node=spec.node,
                    name=f"keep{len(made)}",
                )
    return job, made


class Work:
    """`work`, called with fixed first arguments; a class, so that every task has a name of its own."""

    def __init__(self, *fixed):
        self.fixed = fixed

    def __call__(self, *args):
        return work(*self.fixed, *args)


def run_in_order(tasks, rng_of):
    """The promised result: tasks run one after another, every value a copy."""
    state = {node: {blob: initial(node, blob) for blob in BLOBS} for node in NODES}
    for blobs in state.values():
        blobs.update(kept=None, items=[])
    for epoch in range(1, EPOCHS + 1):
        results = []
        for i, spec in enumerate(tasks):
            args = [
                results[read].copy() if isinstance(read, int) else state[read[0]][read[1]].copy()
                for read in spec.reads
            ]
            target = None if spec.update is None else state[spec.node][spec.update]
            kind = "mix" if spec.kind == "random" else spec.kind
            fixed = (kind, spec.salt, target is not None)
            value = np.array(work(*fixed, *args, *([] if target is None else [target])))
            values = [value] * spec.instances
            if spec.kind == "random":
                values = [
                    value
                    + rng_of(spec.node, f"t{i}", epoch, instance).integers(
                        0, 1000, 3, dtype=np.uint64
                    )
                    for instance in range(spec.instances)
                ]
            value = np.array(values) if spec.instances > 1 else values[0]
            results.append(value.copy())
            if spec.output is not None:
                state[spec.node][spec.output] = value.copy()
            if spec.keeps and args:
                first = spec.reads[0]
                seen = results[first] if isinstance(first, int) else state[first[0]][first[1]]
                mine = state[spec.node]
                mine["items"] = [*mine["items"], seen.copy()][-3:]
                if epoch % 4 == 1:
                    mine["kept"] = seen.copy()
        for blobs in state.values():
            for name in PRIVATE:
                blobs.pop(name, None)
    return state, results


def rng_of(node, task, epoch, instance):
    from jobrunner.worker.task_context import make_rng

    return make_rng(0, node=node, group="epoch", task=task, epoch=epoch, step=0, instance=instance)


def check(session, tasks):
    job, made = build(tasks)
    JobRunner(job, num_epochs=EPOCHS).run(session)
    state, results = run_in_order(tasks, rng_of)
    for node, blobs in state.items():
        for blob, value in blobs.items():
            if blob in KEEPERS:
                found = session.fetch(Node(node)[blob])
                found = found["some"] if blob == "items" else found and [found.value]
                found = found and [np.asarray(one) for one in found]
                value = [value] if blob == "kept" and value is not None else value
                assert str(found) == str(value), f"{node}/{blob}"
                continue
            np.testing.assert_array_equal(
                session.fetch(Node(node)[blob]), value, err_msg=f"{node}/{blob}"
            )
    for task, spec, value in zip(made, tasks, results, strict=True):
        if spec.fetched:
            np.testing.assert_array_equal(task.output().fetch(), value, err_msg=task.name)


@pytest.fixture(scope="module")
def inproc_session(inproc_cluster):
    yield from open_session(inproc_cluster)


@pytest.fixture(scope="module")
def process_session(process_cluster):
    yield from open_session(process_cluster)


def open_session(cluster):
    from distributed import Client

    with Client(cluster, set_as_default=False) as client, Session(client) as session:
        yield session


fixtures_are_shared = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.mark.nightly
@given(specs())
@settings(max_examples=examples(15, nightly=400), suppress_health_check=fixtures_are_shared)
def test_random_jobs_equal_running_their_tasks_in_order_in_process(inproc_session, tasks):
    check(inproc_session, tasks)


@given(specs())
@settings(max_examples=examples(5, nightly=150), suppress_health_check=fixtures_are_shared)
def test_random_jobs_equal_running_their_tasks_in_order_on_processes(process_session, tasks):
    check(process_session, tasks)


def test_a_global_blob_made_in_the_epoch_group_lasts(inproc_session):
    with Job() as job, Node("a"):
        with job.init_group:
            Task(lambda: 0, outputs="n")
        Task(lambda n: n + 1, inputs="n", outputs="n", name="count")
        Task(lambda n: n, inputs="n", outputs="g", workspace_type=WorkspaceType.GLOBAL)
        with job.exit_group:
            last = Task(lambda g: g * 10, inputs="g", name="last").output()
    JobRunner(job, num_epochs=4).run(inproc_session)
    assert last.fetch() == 40
