"""The five sentences on values as a program: tasks run one after another, every value a copy.

Nothing of the package is used to decide what a blob is. The functions of the tasks run in the jobs
and in this model alike.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

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
    """One task.

    Attributes
    ----------
    node : str
    reads : sequence of (node, name)
        Blobs that are its inputs.
    updates : str
        A blob of its node, or "".
    acts : sequence of Act
    output : str
        The blob that it returns, or "".
    result : int
    """

    node: str
    reads: Sequence[tuple[str, str]]
    updates: str
    acts: Sequence[Act]
    output: str
    result: int


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
