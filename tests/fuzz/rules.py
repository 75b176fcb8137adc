"""The rules that the guide promises, as a program: tasks run one after another, every value a copy.

Nothing here uses the package. A blob is one value: ties inside it are kept. Between blobs, and
between a blob and what a task was given, nothing that can change is shared.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from tests.fuzz.calls import Call, Memory, constant_of, global_names, perform
from tests.fuzz.values import items_of

State = dict[tuple[str, str], Any]
"""Node and name of a blob -> value."""


class Rules:
    """One job, run by the rules.

    Attributes
    ----------
    blobs, private : State
        The global blobs; those of one run of a group.
    results : dict
        Number of a task and part -> what it returned when it ran last.
    steps_done : int
        How often the epoch group has run.
    checkpoints : dict
        Steps done -> the global blobs then.
    """

    def __init__(self, calls: Sequence[Call], steps: int = 1) -> None:
        self.steps, self.calls, self.memory = steps, calls, Memory()
        self.global_names = global_names(calls)
        self.transient = {
            (call.node, name) for call in calls if call.is_transient for name in call.outputs
        }
        self.by_number = {call.number: call for call in calls}
        self.start()

    def start(self) -> None:
        """Run the init group."""
        self.blobs: State = {}
        self.results: dict[tuple[int, int], Any] = {}
        self.steps_done = 0
        self.run("init")
        self.checkpoints = {0: copy_all(self.blobs)}

    def load(self, steps_done: int) -> None:
        """Continue from a checkpoint; the init tasks that make transient blobs run again."""
        kept = self.checkpoints[steps_done]
        self.blobs = copy_all({key: kept[key] for key in kept.keys() - self.transient})
        self.results = {}
        self.steps_done = steps_done
        self.run("init", only={call.number for call in self.calls if call.is_transient})
        self.checkpoints = {n: state for n, state in self.checkpoints.items() if n <= steps_done}

    def step(self) -> None:
        """Run the epoch group once."""
        epoch, step = divmod(self.steps_done, self.steps)
        self.run("epoch", (epoch, step))
        self.steps_done += 1
        if step == self.steps - 1:
            self.run("epoch_end", (epoch, self.steps))
        self.checkpoints[self.steps_done] = copy_all(self.blobs)

    def run(
        self, group: str, done: tuple[int, int] = (-1, 0), *, only: Collection[int] | None = None
    ) -> None:
        """Run a group's tasks in the order of their definition."""
        self.private: State = {}
        for call in self.calls:
            if call.group == group and (only is None or call.number in only):
                self.call(call, done[0] + 1, done[1])
        self.private = {}

    def call(self, call: Call, epoch: int, step: int) -> None:
        """Run one task."""
        updates = [self.where(call.node, name)[call.node, name] for name in call.updates]
        returned = []
        for instance in range(call.instances):
            inputs = [read_only(self.read(call, read)) for read in call.reads]
            constant = copy.deepcopy(constant_of(call))  # each call's own
            moment = (epoch, step, instance)
            returned.append(perform(call, moment, [*inputs, *updates], constant, self.memory))
        value = returned if call.instances > 1 else returned[0]
        # A copy is made before the function's memory can be used again.
        for name, updated in zip(call.updates, updates, strict=True):
            self.where(call.node, name)[call.node, name] = copy_of(updated)
        parts = value if len(call.outputs) > 1 else [value]
        for part, result in enumerate(parts):
            self.results[call.number, part] = copy_of(result)
        for name, result in zip(call.outputs, parts, strict=False):
            self.where(call.node, name)[call.node, name] = copy_of(result)

    def read(self, call: Call, read: tuple[str, str] | int) -> Any:
        """A copy of what a task reads."""
        if isinstance(read, int):
            source = self.by_number[read]
            if source.group == call.group:
                return copy_of(self.results[read, 0])
            read = (source.node, source.outputs[0])
        return copy_of(self.where(*read)[read])

    def where(self, node: str, name: str) -> State:
        """Where a blob lives."""
        return self.blobs if (node, name) in self.global_names else self.private


def copy_of(value: Any) -> Any:
    """A copy that shares nothing with the value; what is the same object in one is in the other."""
    return copy.deepcopy(value)


def copy_all(state: State) -> State:
    """A copy of each blob."""
    return {key: copy_of(value) for key, value in state.items()}


def read_only(value: Any) -> Any:
    """Refuse changes of a value's arrays; those of Python objects are the reader's own copies."""
    if isinstance(value, np.ndarray) and value.dtype != object:
        value.flags.writeable = False
    for item in items_of(value):
        read_only(item)
    return value
