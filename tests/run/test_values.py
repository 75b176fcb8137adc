"""A blob is one value: what is shared inside is kept; between blobs and tasks nothing is shared."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jobrunner import (
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Session,
    Task,
    WorkspaceType,
    current_task,
    epoch_limiter,
)


class Tag(NamedTuple):
    name: str
    weights: Any


@pytest.fixture(params=["one worker", "two workers", "saved", "saved in the background"])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Run an epoch function twice on blobs of node a, and more: see `_play`."""
    workers = 2 if request.param == "two workers" else 1
    options = {"asynchronous": "background" in request.param}
    with Session.local(workers=workers, processes=False) as session:

        def play(make: dict[str, Any], *tasks: tuple[Any, ...], epochs: int = 3) -> dict[str, Any]:
            manager = MultiNodeCheckpointManager(tmp_path / "k", **options)
            saves = request.param.startswith("saved")
            job = build(make, tasks, epochs)
            JobRunner(job, *([manager] if saves else [])).run(session)
            found = {name: session.fetch(Node("a")[name]) for name in make}
            if saves:
                again = build(make, tasks, epochs + 1)
                JobRunner(again, manager).run(session)
            return found

        yield play


def build(make: dict[str, Any], tasks: tuple[tuple[Any, ...], ...], epochs: int) -> Job:
    with Job("values") as job:
        with Node("a") as a:
            with job.init_group:
                for name, fn in make.items():
                    Task(fn, outputs=name, name=f"make {name}")
            for i, (fn, given) in enumerate(tasks):
                Task(fn, name=f"{i}", **given)
        with Node("b"):  # reads all, so that with two workers all blobs cross
            for name in make:
                Task(lambda value: None, inputs=a[name], name=f"read {name}")
        epoch_limiter(job, epochs)
    return job


def ones() -> np.ndarray:
    return np.ones(3)


def test_an_update_may_store_an_input_and_change_it_later(play: Any) -> None:
    def store(w: Any, d: Any) -> None:
        d["w"] = w
        d["first"] = w[:1]
        d["all"].append({"w": w})

    def step(d: Any) -> None:
        d["w"] += 1
        d["first"] += 5
        d["all"][-1]["w"] += 7

    found = play(
        {"w": ones, "d": lambda: {"all": []}},
        (store, {"inputs": "w", "updates": "d"}),
        (step, {"updates": "d"}),
    )
    assert found["w"].tolist() == [1, 1, 1]
    # One array twice in one blob is one array; a slice of it is another.
    assert found["d"]["w"].tolist() == [9, 9, 9]
    assert found["d"]["first"].tolist() == [6]
    assert len(found["d"]["all"]) == 3


def test_what_occurs_twice_in_a_blob_is_one_object_everywhere(play: Any) -> None:
    def make() -> Any:
        x, items = np.zeros(2), [0]
        return {"a": x, "b": x, "c": (x, items), "d": [items], "e": [(1, items)]}

    def is_tied(seen: Any) -> None:
        assert seen["a"] is seen["b"] is seen["c"][0]
        assert seen["c"][1] is seen["d"][0] is seen["e"][0][1]

    def step(d: Any) -> None:
        is_tied(d)
        d["a"] += 1
        d["d"][0].append(1)

    def renew(d: Any) -> Any:
        is_tied(d)
        return dict(d)

    found = play(
        {"d": make},
        (step, {"updates": "d"}),
        (is_tied, {"inputs": "d"}),
        (renew, {"inputs": "d", "outputs": "d"}),
        (is_tied, {"inputs": "d"}),
    )
    is_tied(found["d"])
    assert found["d"]["b"].tolist() == [3, 3]
    assert found["d"]["e"] == [(1, [0, 1, 1, 1])]


def boxed(*items: Any) -> Any:
    array = np.empty(len(items), object)
    array[:] = items
    return array


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "object array": (lambda: boxed([1], {"a": 1}), lambda value: value[0].append(2)),
    "array in object array": (lambda: boxed(ones(), 1), lambda value: value[0].fill(2)),
    "deque": (lambda: collections.deque([[1]]), lambda value: value[0].append(2)),
    "deque itself": (lambda: collections.deque([[1]], maxlen=3), lambda value: value.append(2)),
    "defaultdict": (
        lambda: collections.defaultdict(list, a=[1]),
        lambda value: value["a"].append(2),
    ),
    "defaultdict itself": (lambda: collections.defaultdict(list), lambda value: value["a"]),
    "OrderedDict": (lambda: collections.OrderedDict(a=[1]), lambda value: value["a"].append(2)),
    "array in OrderedDict": (
        lambda: collections.OrderedDict(a=ones()),
        lambda value: value["a"].fill(2),
    ),
    "Counter": (lambda: collections.Counter("aab"), lambda value: value.update("a")),
    "namedtuple": (lambda: Tag("a", [1]), lambda value: value.weights.append(2)),
    "array in namedtuple": (lambda: Tag("a", ones()), lambda value: value.weights.fill(2)),
    "bytearray": (lambda: [bytearray(b"abc")], lambda value: value[0].extend(b"d")),
    "set": (lambda: ({1, 2},), lambda value: value[0].add(3)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_cannot_change_its_blob(inproc_session: Session, kind: str) -> None:
    make, change = KINDS[kind]

    def attempt(value: Any) -> None:
        try:
            change(value)
        except ValueError as error:
            assert "read-only" in str(error)  # noqa: PT017  (an array; containers are copies)

    with Job("kinds") as job, Node("a") as a:
        with job.init_group:
            Task(make, outputs="x")
        made = Task(make, outputs="y", workspace_type=WorkspaceType.GLOBAL)
        Task(attempt, inputs="x", name="blob")
        Task(attempt, inputs=made.output(), name="output")
        with Node("b"):
            Task(attempt, inputs=a["x"], name="other node")
        epoch_limiter(job, 2)
    JobRunner(job).run(inproc_session)
    for name in ("x", "y"):
        found = inproc_session.fetch(a[name])
        assert type(found) is type(make())
        np.testing.assert_equal(list(found), list(make()))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_checkpoint_has_its_epochs_containers(
    inproc_session: Session, tmp_path: Path, asynchronous: bool
) -> None:
    def grow(tree: Any) -> None:
        if current_task().epoch % 3 == 0:
            tree["rows"][0].append(current_task().epoch)

    def renew(table: Any) -> Any:
        return [*table, (current_task().epoch, "new")]

    def look(tree: Any, table: Any, fixed: Any) -> None:
        for value in (tree["rows"], table, fixed):
            value.append("a mistake")

    with Job("saved containers") as job, Node("a"):
        with job.init_group:
            Task(lambda: {"rows": [[0], [1]]}, outputs="tree", name="tree")
            Task(lambda: [(0, "first")], outputs="table", name="table")
            Task(lambda: [(i, [i]) for i in range(99)], outputs="fixed", name="fixed")
        Task(grow, updates="tree")
        Task(renew, inputs="table", outputs="table")
        Task(look, inputs=["tree", "table", "fixed"])
        epoch_limiter(job, 7)
    manager = MultiNodeCheckpointManager(tmp_path / "k", asynchronous=asynchronous)
    JobRunner(job, manager).run(inproc_session)
    for epoch in manager.epochs():
        found = manager.open(epoch)["a"]
        assert found.load("tree") == {"rows": [[0, *range(3, epoch + 1, 3)], [1]]}
        assert found.load("table") == [(0, "first"), *((i, "new") for i in range(1, epoch + 1))]
        assert found.load("fixed") == [(i, [i]) for i in range(99)]


def test_two_outputs_that_map_one_file_come_apart(inproc_session: Session, tmp_path: Path) -> None:
    def twice(path: str) -> tuple[Any, Any]:
        mapped = np.memmap(path, "u1", "w+", shape=(4,))
        return mapped, mapped

    def change(x: np.ndarray) -> None:
        x[:] = 7

    with Job() as job, Node("a"):
        with job.init_group:
            Task(twice, outputs=["x", "y"], kwargs={"path": str(tmp_path / "map")})
        Task(change, updates="x")
    JobRunner(job, num_epochs=1).run(inproc_session)
    assert inproc_session.fetch(Node("a")["x"]).tolist() == [7, 7, 7, 7]
    assert inproc_session.fetch(Node("a")["y"]).tolist() == [0, 0, 0, 0]
