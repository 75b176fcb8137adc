"""Find the task that first made a different value.

Tasks report digests of the values they make as metrics; the plan says which values they read.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec import structs

from jobrunner.checkpoint import Codec
from jobrunner.compile import (
    Argument,
    BlobArgument,
    CrossingArgument,
    GroupPlan,
    PlannedTask,
    ResultArgument,
    UpdateArgument,
)
from jobrunner.define import Metric
from jobrunner.run.replay.compare import digest_value
from jobrunner.worker import current_task, seed_calls

_PREFIX = "\0made "


class Call(NamedTuple):
    """A task in one run of its group."""

    group: str
    epoch: int
    step: int
    node: str
    task: str

    @property
    def name(self) -> str:
        """``node/task``."""
        return f"{self.node}/{self.task}"


class Value(NamedTuple):
    """A value that a call made: part `what` of its return value, or the updated blob `what`."""

    call: Call
    what: int | str


Trace = dict[Value, tuple[str, ...]]
"""Digests of each value, one for each instance of the task; "" if it cannot be digested."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A task's function that also reports digests of the values it returns and updates."""

    task: PlannedTask
    codecs: Sequence[Codec]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        value = self.task.callee()(*args, **kwargs)
        made: dict[int | str, Any] = {
            argument.name: args[place]
            for place, argument in enumerate(self.task.arguments)
            if isinstance(argument, UpdateArgument)
        }
        num_parts = len(self.task.outputs)
        if num_parts <= 1:
            made[0] = value
        else:
            with suppress(Exception):  # the run raises if the value is no such sequence
                made.update((part, value[part]) for part in range(num_parts))
        task = current_task()
        for what, part in made.items():
            name = json.dumps([task.node, task.name, what, task.instance])
            try:
                digest = digest_value(part, self.codecs)
            except Exception:  # a socket, a model on a GPU, an array that another thread resizes
                digest = ""
            task.report(**{_PREFIX + name: digest})
        return value

    def seeded_within(self, _: Traced) -> Traced:
        """Seed the calls of the task's function, if they are, as in a run without a trace."""
        return Traced(structs.replace(self.task, fn=seed_calls(self.task.fn)), self.codecs)


def traced(group: GroupPlan, codecs: Sequence[Codec]) -> GroupPlan:
    """Trace every task of a group."""
    slices = {
        node: structs.replace(
            part,
            tasks=tuple(
                structs.replace(task, fn=Traced(task, codecs), places=()) for task in part.tasks
            ),
        )
        for node, part in group.slices.items()
    }
    return structs.replace(group, slices=slices)


def read_trace(metrics: Mapping[str, Metric], group: str, epoch: int, step: int) -> Trace:
    """Read the digests from a run's metrics."""
    found: dict[Value, dict[int, str]] = {}
    for name, digest in metrics.items():
        if name.startswith(_PREFIX):
            node, task, what, instance = json.loads(name.removeprefix(_PREFIX))
            value = Value(Call(group, epoch, step, node, task), what)
            found.setdefault(value, {})[instance] = str(digest)
    return {value: tuple(by[i] for i in sorted(by)) for value, by in found.items()}


class Dataflow:
    """Which values were made from which, over several runs of groups."""

    def __init__(self) -> None:
        # (node, blob) -> the value that a run wrote last
        self.blobs: dict[tuple[str, str], Value] = {}
        # call -> those of its inputs that runs made; in order of the calls
        self.reads: dict[Call, list[Value]] = {}

    def add_run(self, plan: GroupPlan, group: str, epoch: int, step: int) -> None:
        """Add a run, as if its tasks ran in order of definition."""
        before = dict(self.blobs)
        made: dict[tuple[int, int | str], Value] = {}  # by a task's index, and part or blob
        private: set[tuple[str, str]] = set()

        def source(node: str, argument: Argument) -> Value | None:
            if isinstance(argument, BlobArgument | UpdateArgument):
                return self.blobs.get((node, argument.name))
            if isinstance(argument, ResultArgument):
                return made[argument.task, argument.part]
            assert isinstance(argument, CrossingArgument)
            crossing = plan.crossings[argument.crossing]
            what = crossing.part if crossing.blob is None else crossing.blob
            assert what is not None  # a crossing without a value is no argument
            if crossing.source_task is None:
                return before.get((crossing.source, str(what)))
            return made[crossing.source_task, what]

        tasks = [(node, task) for node, part in plan.slices.items() for task in part.tasks]
        for node, task in sorted(tasks, key=lambda pair: pair[1].index):
            call = Call(group, epoch, step, node, task.name)
            sources = [source(node, argument) for argument in task.arguments]
            self.reads[call] = [value for value in sources if value is not None]
            for argument in task.arguments:
                if isinstance(argument, UpdateArgument):
                    value = Value(call, argument.name)
                    made[task.index, argument.name] = self.blobs[node, argument.name] = value
            for part in range(max(1, len(task.outputs))):
                made[task.index, part] = Value(call, part)
            for part, output in enumerate(task.outputs):
                made[task.index, output.name] = Value(call, part)
                if output.is_kept:
                    self.blobs[node, output.name] = Value(call, part)
                if not output.is_global:
                    private.add((node, output.name))
        for key in private:
            self.blobs.pop(key, None)

    def unrepeatable(self, one: Trace, other: Trace) -> list[Call]:
        """The calls that made different values from equal inputs in two traces, in order."""
        differs = {v for v in one.keys() & other.keys() if _is_other(one[v], other[v])}
        makers = {value.call for value in differs}
        return [
            call
            for call, reads in self.reads.items()
            if call in makers and not differs.intersection(reads)
        ]

    def made_of(self, value: Value, except_of: Collection[Value] = ()) -> set[Value]:
        """All values that `value` was made from, directly or not, except through `except_of`."""
        found: set[Value] = set()
        left = [value]
        while left:
            reads = self.reads[left.pop().call]
            new = [read for read in reads if read not in found and read not in except_of]
            found.update(new)
            left += new
        return found

    def suspects(
        self, value: Value, equal: Collection[Value], other: Collection[Value]
    ) -> list[Call]:
        """The calls of which one first made a value that differs from the recorded one.

        `value` and the values in `other` differ from the recorded ones, those in `equal` do not;
        the rest is unknown.
        """
        first = {
            found
            for found in {value, *self.made_of(value).intersection(other)}
            if not self.made_of(found).intersection(other)
        }
        calls = {
            made.call for found in first for made in {found, *self.made_of(found, except_of=equal)}
        }
        return [call for call in self.reads if call in calls]


def _is_other(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether the digests show that two values differ."""
    return len(one) != len(other) or any(
        a != b and a and b for a, b in zip(one, other, strict=True)
    )
