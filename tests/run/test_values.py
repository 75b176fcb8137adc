"""Between blobs and tasks nothing is shared, of any kind; `test_five_sentences.py` has the rules."""

from __future__ import annotations

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jobrunner import (
    Job,
    JobRunner,
    Node,
    Session,
    Task,
    WorkspaceType,
    epoch_limiter,
)


class Tag(NamedTuple):
    name: str
    weights: Any


def ones() -> np.ndarray:
    return np.ones(3)


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
