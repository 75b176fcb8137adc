"""Random tasks that keep, change, alias, nest and cache what they get and return.

What the blobs are then is compared with the five sentences of the guide, as `five_sentences.py` has
them.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from distributed import Client, LocalCluster
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobrunner import Job, JobRunner, MultiNodeCheckpointManager, Node, Session, Task
from tests.run.five_sentences import Act, Box, Model, Perform, Play, describe, items_of
from tests.sampling import examples

NODES = ("a", "b", "c")
NAMES = ("x", "y")
EPOCHS = 3


def named_by(play: Play) -> list[str]:
    """The blobs of its own node that a task reads."""
    return [name for node, name in play.reads if node == play.node]


MAKES = ["array", "view", "list", "dict", "tuple", "box", "keep", "change", "change"]
acts = st.lists(
    st.builds(Act, st.sampled_from(MAKES), st.integers(0, 9), st.integers(0, 9)), max_size=6
)
plays = st.lists(
    st.builds(
        Play,
        st.sampled_from(NODES),
        st.lists(st.tuples(st.sampled_from(NODES), st.sampled_from(NAMES)), max_size=2),
        st.sampled_from(["", *NAMES]),
        acts,
        st.sampled_from(["", *NAMES]),
        st.integers(0, 9),
    ).filter(lambda play: not play.updates or play.updates not in (play.output, *named_by(play))),
    min_size=1,
    max_size=6,
)
RUNS = itertools.count()


def first_value(node: str, name: str) -> Any:
    array = np.arange(3.0)
    return array if name == "x" else {"one": array, "two": [array, (1, [2])]}


def without_boxes(drawn: Sequence[Play]) -> list[Play]:
    """The same tasks, but for objects: two blobs of a checkpoint may not share one."""
    return [
        play._replace(
            acts=[act._replace(what="list") if act.what == "box" else act for act in play.acts]
        )
        for play in drawn
    ]


def build(drawn: Sequence[Play], run: str) -> Job:
    with Job("sentences") as job:
        with job.init_group:
            for node in NODES:
                for name in NAMES:
                    kwargs = {"node": node, "name": name}
                    Task(first_value, outputs=name, node=node, kwargs=kwargs, name=name)
        before: dict[str, Task] = {}
        for number, play in enumerate(drawn):
            inputs = [Node(node)[name] for node, name in play.reads]
            before[play.node] = Task(
                Perform(play, run),
                inputs=inputs,
                updates=play.updates or [],
                outputs=play.output or [],
                node=play.node,
                name=f"task {number}",
                after=[before[play.node]] if play.node in before else [],  # they share a cache
            )
    return job


def check(cluster: LocalCluster, drawn: Sequence[Play], way: str) -> None:
    run = f"run {next(RUNS)}"
    keys = list(itertools.product(NODES, NAMES))
    model = Model({key: first_value(*key) for key in keys}, f"model of {run}")
    with tempfile.TemporaryDirectory() as directory:
        manager = None
        if way != "not saved":
            drawn = without_boxes(drawn)
            manager = MultiNodeCheckpointManager(directory, asynchronous="background" in way)
        for _ in range(EPOCHS):
            model.epoch(drawn)
        if too_large(model):
            return
        with Client(cluster, set_as_default=False) as client, Session(client) as session:
            JobRunner(build(drawn, run), manager, num_epochs=EPOCHS, callbacks=[]).run(session)
            if manager is not None:
                run += " resumed"
                model.resume(f"model of {run}")
                for _ in range(2):
                    model.epoch(drawn)
                job = build(drawn, run)
                JobRunner(job, manager, num_epochs=EPOCHS + 2, callbacks=[]).run(session)
            for node, name in keys:
                fetched = describe(session.fetch(Node(node)[name]))
                assert fetched == describe(model.blobs[node, name]), (node, name)


def too_large(model: Model) -> bool:
    """Whether values nest deeper, or hold more, than this test is about."""
    return any(size_of(value) > 300 for value in model.blobs.values())


def size_of(value: Any) -> int:
    if type(value) is Box:
        return 1 + size_of(value.value)
    return 1 + sum(size_of(item) for item in items_of(value))


PLACES = [
    pytest.param((1, False), id="a worker in this process"),
    pytest.param((3, False), id="workers in this process"),
    *(
        pytest.param((count, True), id=f"{count} processes", marks=pytest.mark.nightly)
        for count in (1, 2, 3)
    ),
]


@pytest.fixture(scope="module", params=PLACES)
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    workers, processes = request.param
    with LocalCluster(
        n_workers=workers, threads_per_worker=2, processes=processes, dashboard_address=None
    ) as cluster:
        yield cluster


ways = st.sampled_from(["not saved", "not saved", "saved", "saved in the background"])
checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=examples(4, nightly=1_000), suppress_health_check=checks, deadline=None)
@given(drawn=plays, way=ways)
def test_values_are_as_the_five_sentences_say(cluster: LocalCluster, drawn: Any, way: str) -> None:
    check(cluster, drawn, way)
