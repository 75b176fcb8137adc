"""Find the task that first made a different value.

Tasks report digests of what they make, as metrics; the plan says what was made from what.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from jobrunner.checkpoint import Codec, PosixFiles, digest_blob
from jobrunner.compile import (
    Argument,
    BlobArgument,
    CrossingArgument,
    GroupPlan,
    PlannedTask,
    ResultArgument,
    UpdateArgument,
)
from jobrunner.run.replay.compare import encode
from jobrunner.worker import Metric, current_task

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
    """What a call made: part `what` of its return value, or the updated blob `what`."""

    call: Call
    what: int | str


Trace = dict[Value, tuple[str, ...]]
"""Digests of values, one for each instance of the task; "" for a value that has none."""


class Traced:
    """A task's function that also reports digests of what it returns and updates."""

    def __init__(self, task: PlannedTask, codecs: Sequence[Codec]) -> None:
        self._fn: Callable[..., Any] = task.fn
        self._num_parts = max(1, len(task.outputs))
        self._updates = [
            (place, argument.name)
            for place, argument in enumerate(task.arguments)
            if isinstance(argument, UpdateArgument)
        ]
        self._codecs = codecs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        value = self._fn(*args, **kwargs)
        made: dict[int | str, Any] = {name: args[place] for place, name in self._updates}
        if self._num_parts == 1:
            made[0] = value
        else:
            with suppress(Exception):  # the run reports a value that is no such sequence
                made.update((part, value[part]) for part in range(self._num_parts))
        task = current_task()
        for what, part in made.items():
            name = json.dumps([task.node, task.name, what, task.instance])
            task.report(**{_PREFIX + name: digest_value(part, self._codecs)})
        return value


def digest_value(value: Any, codecs: Sequence[Codec] = ()) -> str:
    """Digest of all that a save would keep of a value; "" if it cannot be saved."""
    try:
        return digest_blob(PosixFiles(), encode("", "", value, codecs))
    except Exception:  # a socket, a model on a GPU, a view that something else resizes
        return ""


def traced(group: GroupPlan, codecs: Sequence[Codec]) -> GroupPlan:
    """Trace every task of a group."""
    slices = {
        node: dataclasses.replace(
            part, tasks=tuple(dataclasses.replace(t, fn=Traced(t, codecs)) for t in part.tasks)
        )
        for node, part in group.slices.items()
    }
    return dataclasses.replace(group, slices=slices)


def read_trace(metrics: Mapping[str, Metric], group: str, epoch: int, step: int) -> Trace:
    """The digests that a run's metrics hold."""
    found: dict[Value, dict[int, str]] = {}
    for name, digest in metrics.items():
        if name.startswith(_PREFIX):
            node, task, what, instance = json.loads(name.removeprefix(_PREFIX))
            value = Value(Call(group, epoch, step, node, task), what)
            found.setdefault(value, {})[instance] = str(digest)
    return {value: tuple(by[i] for i in sorted(by)) for value, by in found.items()}


class Dataflow:
    """What was made from what, over several runs of groups."""

    def __init__(self) -> None:
        # (node, blob) -> its value after the last run, if a run has written it
        self.blobs: dict[tuple[str, str], Value] = {}
        # call -> its inputs that a run had made; in order of the calls
        self.reads: dict[Call, list[Value]] = {}

    def add_run(self, plan: GroupPlan, group: str, epoch: int, step: int) -> None:
        """Add one run, as if its tasks had run in order of definition."""
        before = dict(self.blobs)
        made: dict[tuple[int, int | str], Value] = {}  # by a task's index, and part or blob
        private: set[tuple[str, str]] = set()
        for node, task in _in_order(plan):
            call = Call(group, epoch, step, node, task.name)
            sources = (self._source(a, node, plan, made, before) for a in task.arguments)
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

    def forget(self, blobs: Mapping[str, Collection[str]]) -> None:
        """Note that blobs, by node, were loaded: their values come from no run."""
        for node, names in blobs.items():
            for name in names:
                self.blobs.pop((node, name), None)

    def _source(
        self,
        argument: Argument,
        node: str,
        plan: GroupPlan,
        made: Mapping[tuple[int, int | str], Value],
        before: Mapping[tuple[str, str], Value],
    ) -> Value | None:
        if isinstance(argument, BlobArgument | UpdateArgument):
            return self.blobs.get((node, argument.name))
        if isinstance(argument, ResultArgument):
            return made[argument.task, argument.part]
        assert isinstance(argument, CrossingArgument)
        crossing = plan.crossings[argument.crossing]
        what = crossing.part if crossing.blob is None else crossing.blob
        assert what is not None  # a crossing without a value only orders tasks
        if crossing.source_task is None:
            return before.get((crossing.source, str(what)))
        return made[crossing.source_task, what]

    def unrepeatable(self, one: Trace, other: Trace) -> list[Call]:
        """The calls that made different values from the same inputs in two traces, in order."""
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
        """The calls of which one must be the first to make another value than was recorded.

        `value` differs from what was recorded, as do those in `other`; those in `equal` do not;
        nothing is known about the rest.
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


def _in_order(plan: GroupPlan) -> Iterator[tuple[str, PlannedTask]]:
    """All tasks of a group with their nodes, in order of definition."""
    tasks = [(node, task) for node, part in plan.slices.items() for task in part.tasks]
    return iter(sorted(tasks, key=lambda pair: pair[1].index))


def _is_other(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether two values are known to differ."""
    return len(one) != len(other) or any(
        a != b and a and b for a, b in zip(one, other, strict=True)
    )
