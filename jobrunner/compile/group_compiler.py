"""Compile one group: from tasks in order of definition to slices and crossings.

One pass tracks the last writer of each blob and its readers since then; these give the edges. A
value that crosses nodes is taken when the task that wrote it ends, so a later write of the blob does
not wait for readers on other nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from math import gcd
from typing import Any, NamedTuple

from jobrunner.compile.plan import (
    Argument,
    BlobArgument,
    Capture,
    Condition,
    Crossing,
    CrossingArgument,
    GroupPlan,
    Output,
    PlannedTask,
    Report,
    ResultArgument,
    Slice,
    UpdateArgument,
)
from jobrunner.define import (
    Arrives,
    Blob,
    LazyArgument,
    Task,
    TaskGroup,
    TaskOutput,
    is_lazy,
    name_lazy,
    replaced,
)
from jobrunner.errors import DefinitionError
from jobrunner.names import BlobKey
from jobrunner.texts import listed


class CrossingKey(NamedTuple):
    """What crosses from a node: see `Crossing`."""

    source: str
    source_task: int | None
    blob: str | None = None
    part: int | None = None


@dataclass(slots=True)
class _Draft:
    """What is known of a task so far."""

    arguments: list[Argument] = field(default_factory=list)
    waits_for: set[int] = field(default_factory=set)
    crossings: dict[int, None] = field(default_factory=dict)
    hands_over: list[int] = field(default_factory=list)
    read_parts: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Readers:
    """Who reads a crossing."""

    crossing: int  # its id
    nodes: dict[str, None] = field(default_factory=dict)  # in order of first use
    every: int = 0  # in other steps nobody reads it: the greatest common divisor of theirs


@dataclass
class GroupCompiler:
    """Compiles tasks of one group."""

    group: TaskGroup
    tasks: Sequence[Task]  # in order of definition
    globals: Collection[BlobKey]
    available: Collection[BlobKey] | None  # exist when the group starts; None: not known yet
    groups: Collection[TaskGroup] | None = None  # whose outputs may be read; None: any
    loaded: Collection[BlobKey] = ()  # are not written, because a checkpoint has them
    is_seeded: bool = False  # see `PlannedTask`
    has_reports: bool = True  # the group's, besides those of its tasks
    steps: int = 1  # of an epoch, if it is the epoch group

    def __post_init__(self) -> None:
        self._index = {task: i for i, task in enumerate(self.tasks)}
        self._drafts = [_Draft() for _ in self.tasks]
        self._writer: dict[BlobKey, int] = {}  # the last one
        self._readers: dict[BlobKey, list[int]] = {}  # since then
        # The intervals at which tasks make a blob that does not exist when the group starts.
        self._intervals: dict[BlobKey, set[int]] = {}
        self._crossings: dict[CrossingKey, _Readers] = {}
        # Many nodes have blobs of the same names.
        self._arguments: dict[str, BlobArgument] = {}
        self._outputs: dict[tuple[str, bool, bool], Output] = {}
        self._lazy: list[LazyArgument] = []

    def compile(self, conditions: Sequence[TaskOutput | Blob] = ()) -> GroupPlan:
        """Compile the group, and the stop conditions read after it."""
        for i, task in enumerate(self.tasks):
            self._add(i, task)
        for i, task in enumerate(self.tasks):
            for earlier in task.after:
                self._add_after(i, task, earlier)
        self._check_cycles()
        compiled = [self._condition(condition) for condition in conditions]
        slices = self._slices()
        return GroupPlan(
            name=self.group.name,
            slices=slices,
            crossings=tuple(self._crossing(key) for key in self._crossings),
            conditions=tuple(compiled),
            lazy=tuple(self._lazy),
        )

    # ---- one task's reads and writes

    def _add(self, i: int, task: Task) -> None:
        draft = self._drafts[i]
        if task.every > self.steps:
            raise DefinitionError(
                f"Task {task.full_name!r} would never run: it runs every {task.every} steps, and a run "
                f"of the {self.group.name} group has {self.steps}. Choose an every= of at most that; "
                f"only the epoch group of a job with steps_per_epoch= has more than one."
            )
        if task.num_instances > 1 and len(task.output_blobs) > 1:
            raise DefinitionError(
                f"Task {task.full_name!r} of the {self.group.name} group returns the values of "
                f"{task.num_instances} instances as one list, so it can fill at most one blob; got "
                f"{len(task.output_blobs)} outputs."
            )
        for value in task.inputs:
            draft.arguments.append(self._read(i, task, value))
        for blob in task.updates:
            self._check_exists(blob, task)
            draft.arguments.append(UpdateArgument(blob.name))
            self._write(i, blob.key)
        for blob in task.output_blobs:
            if blob.key not in self.loaded:
                self._write(i, blob.key)

    def _read(self, i: int, task: Task, value: Blob | TaskOutput) -> Argument:
        if isinstance(value, TaskOutput):
            source = self._index.get(value.task)
            if source is not None:
                return self._read_result(i, task, source, value.part)
            value = self._blob_of(task, value)
        self._check_exists(value, task)
        blob_key = value.key
        writer = self._writer.get(blob_key)
        if value.node != task.node:
            return CrossingArgument(self._cross(CrossingKey(blob_key[0], writer, value.name), i))
        if writer is not None:
            self._drafts[i].waits_for.add(writer)
        self._readers.setdefault(blob_key, []).append(i)
        return self._arguments.setdefault(value.name, BlobArgument(value.name))

    def _read_result(self, i: int, task: Task, source: int, part: int) -> Argument:
        """Read what a task of this group has returned."""
        interval = self.tasks[source].every
        if task.every % interval:
            raise DefinitionError(
                f"Task {task.full_name!r} reads the output of {self.tasks[source].full_name!r}, which has "
                f"a value only every {interval} steps. Give it an every= that is a multiple of "
                f"{interval}, or read a blob that the init group makes."
            )
        node, draft = self.tasks[source].node, self._drafts[i]
        if node != task.node:
            return CrossingArgument(self._cross(CrossingKey(node.name, source, part=part), i))
        draft.waits_for.add(source)
        self._drafts[source].read_parts.add(part)
        return ResultArgument(source, part)

    def _blob_of(self, task: Task, value: TaskOutput) -> Blob:
        """The blob that the output of another group's task fills."""
        source = value.task
        where = f"Task {task.full_name!r} of the {self.group.name} group reads {value}"
        if source.group is None or (self.groups is not None and source.group not in self.groups):
            raise DefinitionError(f"{where}, but that task is not part of this job.")
        if value.blob is None:
            raise DefinitionError(
                f"{where} of the {source.group.name} group, but that task fills no blob, so the "
                f"value is gone by then. Give it outputs= and workspace_type=WorkspaceType.GLOBAL."
            )
        return value.blob

    def _write(self, i: int, key: BlobKey) -> None:
        waits_for = self._drafts[i].waits_for
        writer = self._writer.get(key)
        if writer is not None and writer != i:
            waits_for.add(writer)
        waits_for.update(reader for reader in self._readers.pop(key, ()) if reader != i)
        self._writer[key] = i
        self._intervals.setdefault(key, set()).add(self.tasks[i].every)

    def _check_exists(self, blob: Blob, task: Task | None = None) -> None:
        """Refuse a blob that `task`, or else a stop condition, reads before it exists."""
        if self.available is None or blob.key in self.available:
            return
        node, intervals = blob.key[0], self._intervals.get(blob.key, ())
        every = 1 if task is None else task.every
        if any(every % interval == 0 for interval in intervals):
            return
        reader = "A stop condition reads"
        if task is not None:
            reader = f"Task {task.full_name!r} of the {self.group.name} group uses"
        where = f"{reader} blob {blob.name!r} of node {node!r}"
        if task is not None and blob.name in task.implied and blob.node == task.node:
            where += f" (for parameter {blob.name!r} of its function, which nothing else gives)"
        if intervals:
            raise DefinitionError(
                f"{where}, which only tasks with every={min(intervals)} make, so it may not exist yet. "
                f"Make it in the init group, or give the reader an every= that is a multiple of that."
            )
        if blob.key in self.globals:
            raise DefinitionError(
                f"{where} before any task makes it. Make it in the init group, or define the task "
                f"that makes it earlier."
            )
        names = sorted(name for of_node, name in self.globals if of_node == node)
        raise DefinitionError(
            f"{where}, which does not exist then. Global blobs of that node: "
            f"{listed(map(repr, names))}. Check the name and the node: write "
            f"node[{blob.name!r}] for a blob of another node. A blob made outside the init group "
            f"lasts longer than its group's run only with workspace_type=WorkspaceType.GLOBAL."
        )

    # ---- edges between nodes

    def _cross(self, key: CrossingKey, reader: int) -> int:
        if key not in self._crossings:
            self._crossings[key] = _Readers(len(self._crossings))
            if key.source_task is not None:
                self._drafts[key.source_task].hands_over.append(self._crossings[key].crossing)
        readers, task = self._crossings[key], self.tasks[reader]
        readers.nodes[task.node.name] = None
        readers.every = gcd(readers.every, task.every)
        self._drafts[reader].crossings[readers.crossing] = None
        return readers.crossing

    def _add_after(self, i: int, task: Task, earlier: Task | str) -> None:
        where = f"Task {task.full_name!r} of the {self.group.name} group: after="
        if isinstance(earlier, str):
            named = self.group.find_named(earlier, task)
            if named is None:
                raise DefinitionError(
                    f"{where}{earlier!r} names no task of this group. Name a task of another node "
                    f"'node/task'; groups always run one after another."
                )
            earlier = named
        source = self._index.get(earlier)
        if source is None:
            if earlier.group is self.group:
                return  # a resume runs only some of the tasks
            raise DefinitionError(
                f"{where}{earlier.full_name!r} is a task of another group. Groups always run one "
                f"after another."
            )
        if source == i:
            raise DefinitionError(f"{where}{earlier.full_name!r} names the task itself.")
        if earlier.node == task.node:
            self._drafts[i].waits_for.add(source)
        else:
            self._cross(CrossingKey(earlier.node.name, source), i)

    def _check_cycles(self) -> None:
        if not any(task.after for task in self.tasks):
            return  # all other edges follow the order of definition
        senders = [key.source_task for key in self._crossings]  # by id
        edges: dict[int, set[int]] = {}
        for i, draft in enumerate(self._drafts):
            edges[i] = set(draft.waits_for)
            for number in draft.crossings:
                sender = senders[number]
                if sender is not None:
                    edges[i].add(sender)
        try:
            tuple(TopologicalSorter(edges).static_order())
        except CycleError as error:
            # The cycle goes from cause to effect; its first task is repeated at the end.
            names = [repr(self.tasks[i].full_name) for i in reversed(error.args[1])]
            raise DefinitionError(
                f"Tasks of the {self.group.name} group wait for each other: "
                f"{' after '.join(names)}. Tasks that use the same blob keep the order of "
                f"definition; remove an after= that contradicts it."
            ) from None

    # ---- the compiled group

    def _condition(self, condition: TaskOutput | Blob) -> Condition:
        if isinstance(condition, TaskOutput):
            task, part = condition.task, condition.part
            source = self._index.get(task)
            if source is not None:
                if task.every > 1:
                    raise DefinitionError(
                        f"The stop condition {condition} is of a task with every={task.every}, and a "
                        f"condition is read at the end of an epoch. Add its task to job.epoch_end_group."
                    )
                self._drafts[source].read_parts.add(part)
                return Condition(task.full_name, task.node.name, task=source, part=part)
            if condition.blob is None or task.group is None:
                raise DefinitionError(
                    f"The stop condition {condition} has no value after an epoch: it is not the "
                    f"output of a task of the epoch group, and fills no blob."
                )
            condition = condition.blob
        self._check_exists(condition)
        return Condition("/".join(condition.key), *condition.key)

    def _crossing(self, key: CrossingKey) -> Crossing:
        readers = self._crossings[key]
        return Crossing(
            id=readers.crossing,
            **key._asdict(),
            targets=tuple(readers.nodes),
            every=readers.every,
        )

    def _slices(self) -> dict[str, Slice]:
        tasks: dict[str, list[PlannedTask]] = {}
        for i, task in enumerate(self.tasks):
            tasks.setdefault(task.node.name, []).append(self._planned(i, task))
        reports = self._reports()
        nodes = dict.fromkeys([*tasks, *reports, *(key.source for key in self._crossings)])
        return {
            node: Slice(node, tuple(tasks.get(node, ())), tuple(reports.get(node, ())))
            for node in nodes
        }

    def _planned(self, i: int, task: Task) -> PlannedTask:
        draft = self._drafts[i]
        outputs = []
        for blob in task.output_blobs:
            output = (blob.name, blob.key in self.globals, blob.key not in self.loaded)
            outputs.append(self._outputs.setdefault(output, Output(*output)))
        parts = sorted(draft.read_parts | task.retained_parts)
        return PlannedTask(
            index=i,
            name=task.name,
            fn=task.fn,
            arguments=tuple(draft.arguments),
            kwargs=self._without_lazy(task),
            outputs=tuple(outputs),
            captures=tuple([Capture(part, part in task.retained_parts) for part in parts]),
            waits_for=tuple(sorted(draft.waits_for)),
            crossings=tuple(draft.crossings),
            hands_over=tuple(draft.hands_over),
            num_instances=task.num_instances,
            every=task.every,
            is_seeded=self.is_seeded,
            places=task.places,
            lazy_parameters=task.lazy_parameters,
            setup=task.setup,
            instance_setup=task.instance_setup,
        )

    def _without_lazy(self, task: Task) -> Mapping[str, Any]:
        """The keyword arguments, with an `Arrives` in place of each collection."""
        kwargs = {**task.kwargs}
        for name in task.lazy_parameters:

            def replace(value: Any, name: str = name) -> Any:
                if not is_lazy(value):
                    return value
                if self.group.name != "init":
                    raise DefinitionError(
                        f"Task {task.full_name!r} of the {self.group.name} group: {name!r} is "
                        f"{name_lazy(value)}; only keyword arguments of init tasks are computed. "
                        f"Compute it, or move the task to the init group."
                    )
                self._lazy.append(LazyArgument(task.node.name, task.name, name, value))
                return Arrives(len(self._lazy) - 1)

            kwargs[name] = replaced(kwargs[name], replace)
        return kwargs

    def _reports(self) -> dict[str, list[Report]]:
        reports: dict[str, list[Report]] = {}
        if self.has_reports:
            for n, (node, fn, interval_seconds) in enumerate(self.group.reports, start=1):
                report = Report(f"report#{n}", fn, interval_seconds)
                reports.setdefault(node.name, []).append(report)
        return reports
