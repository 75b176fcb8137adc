"""Slices of a group, prepared once to run many times on one worker.

A plan names blobs. A `Program` refers to their dictionaries, so that a task's call looks up nothing
but values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from jobrunner.compile import (
    Argument,
    BlobArgument,
    Capture,
    Condition,
    Crossing,
    CrossingArgument,
    GroupPlan,
    PlannedTask,
    Report,
    ResultArgument,
    UpdateArgument,
)
from jobrunner.define import Arrives, replaced
from jobrunner.errors import BlobNotFoundError
from jobrunner.worker.task_context import seed_calls, seeded
from jobrunner.workspace import IMMUTABLE, Workspace, settle, unshared, view

REPORT_INDEX = 1 << 31
"""Reports' indices begin here: in order of definition, they come after all tasks."""


class InputMissing(Exception):  # noqa: N818  (only wraps `reason`, to tell it from a task's error)
    """A blob is missing that a task, a stop condition or another node reads."""

    def __init__(self, node: str, reason: BlobNotFoundError) -> None:
        super().__init__(reason)
        self.node = node
        self.reason = reason


@dataclass(slots=True)
class Handover:
    """A crossing, on the worker of its source."""

    crossing: Crossing
    blobs: dict[str, Any]  # where its blob is, if it has one
    is_local: bool  # a target is on this worker


@dataclass(slots=True)
class Slot:
    """Where a value is that a task reads, sets or updates."""

    values: dict[Any, Any]
    key: Any
    versions: dict[Any, int] = field(default_factory=dict)  # of blobs; those of private ones too
    is_updated: bool = False  # by the task whose argument it is

    def put(self, stored: Any) -> None:
        """Set a blob to a settled value."""
        self.versions[self.key] += 1
        self.values[self.key] = stored


@dataclass(slots=True, eq=False)
class PreparedTask:
    """A task, or the last run of a report, with everything needed to run it."""

    position: int  # in the program
    index: int
    workspace: Workspace
    name: str
    fn: Callable[..., Any]
    arguments: tuple[Slot, ...] = ()
    updates: tuple[Slot, ...] = ()  # those of `arguments` that the task updates
    outputs: tuple[Slot | None, ...] = ()  # None for an output that no blob takes
    output_names: tuple[str, ...] = ()
    sole: Slot | None = None  # set if the return value goes into one blob and nowhere else
    captures: tuple[Capture, ...] = ()  # of parts of the return value
    handovers: tuple[Handover, ...] = ()
    puts_rows: bool = False  # it may set or update a history, in an epoch
    num_instances: int = 1
    every: int = 1  # see `PlannedTask`
    setup: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    instance_setup: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    is_plain: bool = False  # a task that always runs: one call, and nothing to set up
    report: Report | None = None
    needs: int = 0  # how many tasks and arrivals it waits for
    successors: list[int] = field(default_factory=list)  # positions of the tasks that wait for it
    is_long: bool = False  # its function took long, in this or an earlier run


class Program:
    """One worker's part of a group."""

    def __init__(
        self,
        key: str,  # unique among the groups of the binding
        plan: GroupPlan,  # with the slices of this worker's nodes only
        workspaces: Mapping[str, Workspace],
        elsewhere: Mapping[str, str],  # the group's nodes on other workers, and their addresses
    ) -> None:
        self.key = key
        self.name = plan.name
        self.peers = tuple(set(elsewhere.values()))  # addresses of the other workers that take part
        self.workspaces = {node: workspaces[node] for node in plan.slices}
        self.arrived: dict[int, Any] = {}
        self.results: dict[tuple[int | None, int | None], Any] = {}
        self.tasks: list[PreparedTask] = []
        self.reports: list[PreparedTask] = []  # those of `tasks` that are last runs of reports
        self.step = 0  # of the epoch, in the current run
        self.waiters: dict[int, list[int]] = {}  # crossing -> positions of the tasks that read it
        self.conditions = [c for c in plan.conditions if c.node in plan.slices]
        self._slices = plan.slices
        self._crossings = plan.crossings
        self._private: dict[str, set[str]] = {}  # node -> names of blobs
        planned: list[tuple[PlannedTask, Workspace]] = []
        # Parts of return values that tasks or conditions read.
        self.read_parts = {(c.task, c.part) for c in self.conditions}
        for node, part in plan.slices.items():
            self._private[node] = set()
            for task in part.tasks:
                planned.append((task, workspaces[node]))
                self._private[node].update(o.name for o in task.outputs if not o.is_global)
                for argument in task.arguments:
                    if isinstance(argument, ResultArgument):
                        self.read_parts.add((argument.task, argument.part))
        planned.sort(key=lambda pair: pair[0].index)
        self._positions = {task.index: i for i, (task, _) in enumerate(planned)}
        for task, workspace in planned:
            self._add_task(task, workspace)
        self._add_reports()
        self.routes: dict[int, tuple[str, ...]] = {}  # crossing -> other workers that need it
        self.openings: list[Handover] = []  # of blobs as they are when the run begins
        for crossing in plan.crossings:
            if crossing.source in plan.slices:
                targets = {elsewhere[node] for node in crossing.targets if node in elsewhere}
                self.routes[crossing.id] = tuple(targets)
                if crossing.source_task is None:
                    self.openings.append(self._handover(crossing))
        self.needs = [task.needs for task in self.tasks]
        self.first = [task.position for task in self.tasks if task.needs == 0]

    def blobs(self, node: str, name: str) -> dict[str, Any]:
        """The dictionary of a blob: its node's private or global blobs."""
        workspace = self.workspaces[node]
        if name in self._private[node]:
            return workspace.private
        return workspace.globals

    def read(self, condition: Condition) -> Any:
        """Return a stop condition's value after the last task; may raise `InputMissing`."""
        if condition.blob is None:
            return view(self.results[condition.task, condition.part])
        try:
            return self.workspaces[condition.node].lookup(condition.blob)
        except BlobNotFoundError as error:
            raise InputMissing(condition.node, error) from None

    def _add_task(self, planned: PlannedTask, workspace: Workspace) -> None:
        node = workspace.node
        if planned.is_seeded:
            planned = _seeded(planned)
        fn = planned.callee()
        if planned.kwargs and all(type(value) in IMMUTABLE for value in planned.kwargs.values()):
            fn = partial(fn, **planned.kwargs)
        elif planned.kwargs:
            fn = _WithValues(fn, planned, workspace.parked)
        outputs: list[Slot | None] = []
        for output in planned.outputs:
            if output.is_kept:
                outputs.append(self._slot(node, output.name))
            else:
                outputs.append(None)
        task = PreparedTask(
            len(self.tasks),
            planned.index,
            workspace,
            planned.name,
            fn,
            arguments=tuple(self._source(node, argument) for argument in planned.arguments),
            outputs=tuple(outputs),
            output_names=tuple(o.name for o in planned.outputs),
            captures=planned.captures,
            handovers=tuple(self._handover(self._crossings[c]) for c in planned.hands_over),
            num_instances=planned.num_instances,
            every=planned.every,
            setup=planned.setup,
            instance_setup=planned.instance_setup,
        )
        is_single = not (task.num_instances > 1 or task.setup or task.instance_setup)
        task.is_plain = task.every == 1 and is_single
        task.updates = tuple(slot for slot in task.arguments if slot.is_updated)
        written = {slot.key for slot in (*task.outputs, *task.updates) if slot is not None}
        in_epoch = self.name in ("epoch", "epoch_end")
        task.puts_rows = in_epoch and not written.isdisjoint(workspace.histories)
        goes_elsewhere = task.captures or task.handovers or task.updates or task.puts_rows
        if len(task.outputs) == 1 and task.num_instances == 1 and not goes_elsewhere:
            task.sole = task.outputs[0]
        self.tasks.append(task)
        self._connect(task, planned)

    def _slot(self, node: str, name: str, *, is_updated: bool = False) -> Slot:
        versions: dict[Any, int] = {}
        if name not in self._private[node]:
            versions = self.workspaces[node].versions
        versions.setdefault(name, 0)
        return Slot(self.blobs(node, name), name, versions, is_updated)

    def _connect(self, task: PreparedTask, planned: PlannedTask) -> None:
        """Let a task wait for earlier ones, and for values from other workers."""
        sources = {self._positions[index] for index in planned.waits_for}
        for number in planned.crossings:
            crossing = self._crossings[number]
            if crossing.source not in self._slices:
                self.waiters.setdefault(number, []).append(task.position)
                task.needs += 1
            elif crossing.source_task is not None:
                sources.add(self._positions[crossing.source_task])
        self._wait_for(task, sources)

    def _wait_for(self, task: PreparedTask, sources: Collection[int]) -> None:
        task.needs += len(sources)
        for source in sources:
            self.tasks[source].successors.append(task.position)

    def _add_reports(self) -> None:
        """Add each report's last run: after its node's tasks, or all if there are none."""
        num_tasks = len(self.tasks)
        for node, part in self._slices.items():
            own = [self._positions[task.index] for task in part.tasks]
            for report in part.reports:
                position, workspace = len(self.tasks), self.workspaces[node]
                index = REPORT_INDEX + position
                task = PreparedTask(position, index, workspace, report.name, report.fn)
                task.report = report
                self.tasks.append(task)
                self.reports.append(task)
                self._wait_for(task, own or range(num_tasks))

    def _source(self, node: str, argument: Argument) -> Slot:
        match argument:
            case BlobArgument(name):
                return Slot(self.blobs(node, name), name)
            case UpdateArgument(name):
                return self._slot(node, name, is_updated=True)
            case ResultArgument(task, part):
                return Slot(self.results, (task, part))
            case CrossingArgument(crossing):
                return Slot(self.arrived, crossing)

    def _handover(self, crossing: Crossing) -> Handover:
        blobs: dict[str, Any] = {}
        if crossing.blob is not None:
            blobs = self.blobs(crossing.source, crossing.blob)
        is_local = any(node in self._slices for node in crossing.targets)
        return Handover(crossing, blobs, is_local)


def _seeded(planned: PlannedTask) -> PlannedTask:
    """A task all of whose functions draw their own numbers from global generators."""
    setup = {name: seeded(fn) for name, fn in planned.setup.items()}
    instance_setup = {name: seeded(fn) for name, fn in planned.instance_setup.items()}
    fn = seed_calls(planned.fn)
    return replace(planned, fn=fn, setup=setup, instance_setup=instance_setup)


def arrived_name(number: int) -> str:
    """Under what a workspace parks the value of the `LazyArgument` with a number."""
    return f"arrived {number}"


class _WithValues:
    """Calls a function with the keyword arguments of a task, which it gets as it gets inputs."""

    def __init__(self, fn: Callable[..., Any], task: PlannedTask, parked: dict[str, Any]) -> None:
        self._fn = fn
        self._stored = {name: settle([value]) for name, value in task.kwargs.items()}
        self._lazy_parameters = task.lazy_parameters
        self._parked = parked
        self._is_alone = task.num_instances == 1

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        kwargs = {name: view(value) for name, value in self._stored.items()}
        for name in self._lazy_parameters:
            kwargs[name] = replaced(kwargs[name], self._find_arrived)
        return self._fn(*arguments, **kwargs, **more)

    def _find_arrived(self, value: Any) -> Any:
        if type(value) is not Arrives:
            return value
        name = arrived_name(value.number)
        if self._is_alone:  # then it belongs to the call, which may return it without a copy
            return unshared(self._parked.pop(name))
        return view(self._parked[name])
