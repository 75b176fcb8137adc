"""What the tasks of random jobs do: all that a function may do with values, as long as it is repeatable.

A function may return its arguments, parts and views of them, constants of its own, or its own memory
that it will use again; keep references to anything; change what it may update in any way; and change
what it was given, where that raises no error.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jobrunner import current_task
from tests.fuzz.values import (
    Chance,
    contain,
    digest,
    fill,
    is_large,
    items_of,
    make,
    make_array,
    mutables,
)

Read = tuple[str, str] | int
"""Node and name of a blob; or the number of an earlier task, whose output is read."""


@dataclass(frozen=True)
class Call:
    """One task of a random job; `salt` decides everything that its function does."""

    number: int
    group: str
    node: str
    does: str
    salt: int
    reads: tuple[Read, ...] = ()
    updates: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    after: tuple[int, ...] = ()
    is_global: bool | None = None  # its workspace_type, if it has one
    is_transient: bool = False
    instances: int = 1
    is_fetched: bool = False
    has_objects: bool = False  # its values may have arrays of Python objects

    @property
    def name(self) -> str:
        """The task's name, unique in its job."""
        return f"t{self.number}"


def global_names(calls: Sequence[Call]) -> set[tuple[str, str]]:
    """Node and name of the global blobs that tasks make."""
    return {
        (call.node, name)
        for call in calls
        if call.is_global or (call.is_global is None and call.group == "init")
        for name in call.outputs
    }


Moment = tuple[int, int, int]
"""Epoch, step and instance of a call; all 0 outside the epoch group."""

FAULTS: set[tuple[str, int, int]] = set()
"""Task, epoch and step of calls that are to raise, once each."""


@dataclass
class Memory:
    """What functions keep: constant values that all return, and arrays that each fills again."""

    cache: dict[int, Any] = field(default_factory=dict)
    buffers: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)  # by task and instance

    def clear(self) -> None:
        """Forget what an earlier job kept."""
        self.cache.clear()
        self.buffers.clear()


MEMORY = Memory()
"""That of the functions of the job; the rules have another."""

KEPT: deque[Any] = deque(maxlen=40)
"""What functions keep and nobody looks at."""


class CrashError(Exception):
    """What such a call raises."""


class Function:
    """The function of a task."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def __call__(self, *arguments: Any, constant: Any = None) -> Any:
        task = current_task()
        moment = (0, 0, task.instance)
        if self.call.group.startswith("epoch"):
            moment = (task.epoch or 0, task.step, task.instance)
            fault = (self.call.name, *moment[:2])
            if fault in FAULTS:
                FAULTS.discard(fault)
                raise CrashError(*fault)
        return perform(self.call, moment, arguments, constant, MEMORY)


def constant_of(call: Call) -> Any:
    """What the task gets as a keyword argument, the same in every run."""
    return make(chance_of(call, call.salt)) if call.does == "constant" else None


def chance_of(call: Call, seed: object) -> Chance:
    """What decides what a call does."""
    chance = Chance(repr(seed))
    chance.has_objects = call.has_objects
    return chance


def perform(
    call: Call, moment: Moment, arguments: Sequence[Any], constant: Any, memory: Memory
) -> Any:
    """Do what a call does, and return its result."""
    chance = chance_of(call, (call.salt, moment))
    inputs = list(arguments[: len(call.reads)])
    updates = list(arguments[len(call.reads) :])
    if call.does == "scribble":
        for value in inputs:
            scribble(value)
    for value in updates:
        for _ in range(chance.randint(1, 2)):
            change(chance, value, inputs)
    count = len(call.outputs)
    known = [value for value in (*inputs, *updates) if not is_large(value)]
    results = []
    for _ in range(max(1, count)):
        if call.does == "buffer":
            new = np.empty((2, 3), ">i4")
            buffer = memory.buffers.setdefault((call.number, moment[2]), new)
            results.append(parts_of_buffer(chance, fill(buffer, digest(*inputs, *updates))))
        elif call.does == "cache":
            key = call.salt % 5 + 5 * call.has_objects
            value = memory.cache.setdefault(key, make(chance_of(call, key), 3))
            results.append(part_of(chance, value))
        elif call.does == "constant":
            results.append(part_of(chance, constant))
        else:
            results.append(result_of(call, chance, known))
    if chance.random() < 0.2:
        KEPT.extend([*arguments, *results])
    if count < 2:
        return results[0]
    if chance.random() < 0.3:
        results[-1] = results[0]
    return tuple(results) if chance.random() < 0.5 else results


def result_of(call: Call, chance: Chance, known: list[Any]) -> Any:
    """A new value, or one of those that are known, or something made of them."""
    if call.does == "make" or not known:
        return make(chance)
    if call.does == "mix":
        array = fill(make_array(chance, shape=chance.choice([(3,), (2, 3)])).copy(), digest(*known))
        return chance.choice([array, {"w": array}, [array, array[..., :1]]])
    value = chance.choice(known)
    if call.does == "same":
        return value
    if call.does == "part":
        return part_of(chance, value)
    items = [chance.choice([*known, *known, part_of(chance, value)]) for _ in range(3)]
    if chance.random() < 0.5:
        items.append(chance.choice(items))
    return contain(chance, items)  # "contain", "scribble"


def part_of(chance: random.Random, value: Any) -> Any:
    """A value, something in it, or a view of an array in it."""
    while chance.random() < 0.7:
        items = list(items_of(value))
        if not items:
            break
        value = chance.choice(items)
    if isinstance(value, np.ndarray) and chance.random() < 0.7:
        return view_of(chance, value)
    return value


def view_of(chance: random.Random, array: np.ndarray) -> Any:
    """Another view of an array's memory, or an item of it."""
    if array.ndim == 0:
        return array[()] if array.dtype != object else array
    # Whether `ravel` alone makes a copy depends on the order in memory, which is nobody's promise.
    views = [
        array[:1],
        array[::-1],
        array.T,
        array[1:],
        array[...],
        array[None],
        array.ravel().copy(),
    ]
    if array.dtype.names is not None:
        views.append(array["b"])
    if array.dtype.kind == "c":
        views.append(array.imag)
    if array.size and array.dtype != object:
        views.append(array.flat[0])
    return chance.choice(views)


def parts_of_buffer(chance: random.Random, buffer: np.ndarray) -> Any:
    """A function's own memory, in one form or another."""
    whole = chance.choice([buffer, buffer[1:], buffer.T, np.asarray(memoryview(buffer.view("u1")))])
    return chance.choice(
        [whole, [whole, whole], {"all": whole, "row": buffer[0]}, (buffer, [whole])]
    )


def change(chance: random.Random, value: Any, inputs: Sequence[Any]) -> None:
    """Change something in a value in place; put inputs, and the value's own parts, into it."""
    targets = list(mutables(value).values())
    if not targets:
        return
    target = chance.choice([targets[0], chance.choice(targets)])
    if isinstance(target, np.ndarray):
        if not target.flags.writeable:  # an input, put there just now
            return
        if target.size and target.dtype == object:
            target.flat[0] = [chance.randrange(99)]
        elif target.size:
            target.flat[chance.randrange(target.size)] = fill(
                np.empty(1, target.dtype), chance.randrange(999)
            )[0]
        return
    if isinstance(target, set):
        target.add(chance.randrange(99))
        return
    if isinstance(target, bytearray):
        target.append(chance.randrange(256))
        return
    item = new_item(chance, value, target, inputs)
    if isinstance(target, dict):
        target[chance.choice(["k0", "new", 1])] = item
        if len(target) > 5:
            del target[next(iter(target))]
    elif target and chance.random() < 0.4:
        target[chance.randrange(len(target))] = item
    else:
        target.append(item)
        del target[:-5]
    if is_large(value):
        target.clear()


def new_item(chance: random.Random, value: Any, target: Any, inputs: Sequence[Any]) -> Any:
    """Something to put into a container of `value`: an input most of the time."""
    kind = chance.random()
    if inputs and kind < 0.5:
        given = chance.choice(inputs)
        if not is_large(given):
            return part_of(chance, given) if kind < 0.2 else given
    if kind < 0.75:
        own = part_of(chance, value)
        if id(target) not in mutables(own):  # else a cycle would begin
            return own  # a tie, or a view of the value's own memory
    return make(chance, 1)


def scribble(value: Any) -> None:
    """Change what a task was only given to read, wherever that raises no error."""
    for target in mutables(value).values():
        if isinstance(target, np.ndarray):
            if target.size and target.dtype == object:
                target.flat[0] = "scribbled"
            elif target.size:
                try:
                    target.flat[0] = target.flat[-1]
                except ValueError:
                    continue
                raise AssertionError("an input array could be changed")
        elif isinstance(target, dict):
            target["scribbled"] = 1
        elif isinstance(target, list):
            target.append("scribbled")
        elif isinstance(target, set):
            target.add(99)
        elif isinstance(target, bytearray):
            target.append(7)
