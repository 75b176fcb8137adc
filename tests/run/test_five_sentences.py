"""Random tasks that keep, change, alias, nest and cache what they get and return.

What the blobs are then is compared with the guide's five sentences on values as a program: tasks run
one after another, every value a copy. Nothing of the package is used to decide what a blob is; the
functions of the tasks run in the jobs and in this model alike.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from distributed import Client, LocalCluster
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jobrunner import Job, JobRunner, MultiNodeCheckpointManager, Node, Session, Task
from tests.sampling import examples

CACHES: dict[tuple[str, str], list[Any]] = {}
"""What user code keeps from call to call: of a run and a node, in this process."""


class Box:
    """An object of rule 3. Copies of a container share it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __deepcopy__(self, memo: dict[int, Any]) -> Box:
        return self


class Act(NamedTuple):
    """What a task does with the values that it has: of those numbered `one` and `two`."""

    what: str
    one: int
    two: int


class Play(NamedTuple):
    """One task."""

    node: str
    reads: Sequence[tuple[str, str]]  # node and name of blobs that are its inputs
    updates: str  # a blob of its node, or ""
    acts: Sequence[Act]
    output: str  # the blob that it returns, or ""
    result: int  # the number of the value that it returns


class Perform:
    """The function of a task."""

    def __init__(self, play: Play, run: str) -> None:
        self.play, self.run = play, run

    def __call__(self, *arguments: Any) -> Any:
        cache = CACHES.setdefault((self.run, self.play.node), [])
        values = [*arguments, *cache, 5]
        for act in self.play.acts:
            one, two = values[act.one % len(values)], values[act.two % len(values)]
            if act.what == "keep":
                cache.append(one)
            elif act.what == "change":
                change(one, act.two)
            else:
                values.append(make(act.what, one, two))
        return values[self.play.result % len(values)]


def make(what: str, one: Any, two: Any) -> Any:
    """A value that refers to one or two others."""
    if what == "array":
        return np.arange(3.0)
    if what == "view" and type(one) is np.ndarray:
        return one[1:]
    if what == "dict":
        return {"one": one, "two": two}
    if what == "box":
        return Box(one)
    if what == "tuple":
        return (one, [two])
    return [one, two, one]


def change(value: Any, number: int) -> None:
    """Change a value in place, and what it holds, as far as that is possible."""
    if type(value) is np.ndarray:
        if value.flags.writeable and value.size:
            value[number % value.size] += number + 1
    elif type(value) is list:
        if len(value) < 6:
            value.append(number)
    elif type(value) is dict:
        value[number % 3] = number
    elif type(value) is Box:
        change(value.value, number)
    for item in items_of(value):
        if number % 2:
            change(item, number // 2)


def items_of(value: Any) -> Iterator[Any]:
    """What a container holds."""
    if isinstance(value, dict):
        yield from list(value.values())
    elif isinstance(value, list | tuple):
        yield from list(value)


class Model:
    """The blobs of a job, as the sentences say."""

    def __init__(self, blobs: dict[tuple[str, str], Any], run: str) -> None:
        self.blobs = {key: at_rest(value) for key, value in blobs.items()}
        self.run = run
        self.saved: dict[int, bytes] = {}

    def epoch(self, plays: Sequence[Play]) -> None:
        """Run the tasks, in order."""
        # A value for another node is taken when the task that made it ends, or at the start.
        sent = {key: pickle.dumps(value) for key, value in self.blobs.items()}
        for play in plays:
            arguments = []
            for key in play.reads:
                is_here = key[0] == play.node
                value = at_rest(self.blobs[key]) if is_here else pickle.loads(sent[key])
                arguments.append(read_only(value))
            if play.updates:
                arguments.append(at_rest(self.blobs[play.node, play.updates]))
            returned = Perform(play, self.run)(*arguments)
            results = {}
            if play.output:
                results[play.node, play.output] = at_rest(returned)
            if play.updates:
                results[play.node, play.updates] = at_rest(arguments[-1])
            self.blobs |= results
            sent |= {key: pickle.dumps(value) for key, value in results.items()}

    def resume(self, run: str) -> None:
        """Go on in another run from a checkpoint of now."""
        self.blobs = {key: pickle.loads(pickle.dumps(at)) for key, at in self.blobs.items()}
        self.run = run


def at_rest(value: Any) -> Any:
    """A copy that shares nothing but objects of rule 3; its arrays can be written."""
    return copy.deepcopy(value)


def read_only(value: Any) -> Any:
    """Refuse changes of the arrays of a value, but not of those in its objects."""
    if type(value) is np.ndarray:
        value.flags.writeable = False
    for item in items_of(value):
        read_only(item)
    return value


def describe(value: Any, seen: list[Any] | None = None) -> Any:
    """What is in a value, and which objects in it are one."""
    seen = [] if seen is None else seen
    if isinstance(value, np.ndarray | list | dict | Box):
        for number, other in enumerate(seen):
            if other is value:
                return f"object {number}"
        seen.append(value)
    if type(value) is np.ndarray:
        return ("array", value.tolist())
    if type(value) is Box:
        return ("box", describe(value.value, seen))
    if isinstance(value, dict):
        return ("dict", [(key, describe(item, seen)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [describe(item, seen) for item in value])
    return value


# ---- random jobs


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
