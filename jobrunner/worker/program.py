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
class Place:
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
class Step:
    """A task, or the last run of a report, with everything needed to run it."""

    position: int
    index: int
    workspace: Workspace
    name: str
    fn: Callable[..., Any]
    arguments: tuple[Place, ...] = ()
    updates: tuple[Place, ...] = ()  # those of `arguments` that the task updates
    outputs: tuple[Place | None, ...] = ()  # None for an output that no blob takes
    output_names: tuple[str, ...] = ()
    sole: Place | None = None  # set if the return value goes into one blob and nowhere else
    captures: tuple[tuple[int, bool], ...] = ()  # parts of the return value; is it retained?
    handovers: tuple[Handover, ...] = ()
    puts_rows: bool = False  # it may set or update a history, in an epoch
    num_instances: int = 1
    every: int = 1  # see `PlannedTask`
    setup: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    instance_setup: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    is_plain: bool = False  # a task that always runs: one call, and nothing to set up
    report: Report | None = None
    needs: int = 0  # how many steps and arrivals it waits for
    successors: list[int] = field(default_factory=list)  # positions of the steps that wait for it
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
        slices, crossings = plan.slices, plan.crossings
        self.key = key
        self.name = plan.name
        self.peers = tuple(set(elsewhere.values()))  # addresses of the other workers that take part
        self.routes = {  # crossing -> addresses of the other workers that need it
            crossing.id: tuple({elsewhere[node] for node in crossing.targets if node in elsewhere})
            for crossing in crossings
            if crossing.source in slices
        }
        self.workspaces = {node: workspaces[node] for node in slices}
        self.arrived: dict[int, Any] = {}
        self.results: dict[tuple[int | None, int | None], Any] = {}
        self.steps: list[Step] = []
        self.reports: list[int] = []  # positions of the last runs of reports
        self.number = 0  # of the current step of an epoch
        self.waiters: dict[int, list[int]] = {}
        self.conditions = [c for c in plan.conditions if c.node in slices]
        self._slices = slices
        self._crossings = crossings
        self._private = {
            node: {o.name for task in part.tasks for o in task.outputs if not o.is_global}
            for node, part in slices.items()
        }
        # Parts of return values that tasks or conditions read.
        self.read_parts = {(c.task, c.part) for c in self.conditions}
        planned = sorted(
            ((task, workspaces[node]) for node, part in slices.items() for task in part.tasks),
            key=lambda pair: pair[0].index,
        )
        for task, _ in planned:
            self.read_parts.update(
                (a.task, a.part) for a in task.arguments if isinstance(a, ResultArgument)
            )
        self._positions = {task.index: i for i, (task, _) in enumerate(planned)}
        for task, workspace in planned:
            self._add_task(task, workspace)
        self._add_reports()
        self.openings = [
            self._handover(c) for c in crossings if c.source in slices and c.source_task is None
        ]
        self.needs = [step.needs for step in self.steps]
        self.first = [step.position for step in self.steps if step.needs == 0]

    def blobs(self, node: str, name: str) -> dict[str, Any]:
        """The dictionary of a blob: its node's private or global blobs."""
        workspace = self.workspaces[node]
        return workspace.private if name in self._private[node] else workspace.globals

    def read(self, condition: Condition) -> Any:
        """Return a stop condition's value after the last step; may raise `InputMissing`."""
        if condition.blob is None:
            return view(self.results[condition.task, condition.part])
        try:
            return self.workspaces[condition.node].lookup(condition.blob)
        except BlobNotFoundError as error:
            raise InputMissing(condition.node, error) from None

    def _add_task(self, task: PlannedTask, workspace: Workspace) -> None:
        node = workspace.node
        if task.is_seeded:
            setup, own = (
                {name: seeded(make) for name, make in functions.items()}
                for functions in (task.setup, task.instance_setup)
            )
            task = replace(task, fn=seed_calls(task.fn), setup=setup, instance_setup=own)
        fn = task.callee()
        if task.kwargs and all(type(value) in IMMUTABLE for value in task.kwargs.values()):
            fn = partial(fn, **task.kwargs)
        elif task.kwargs:
            fn = _WithValues(fn, task, workspace.set_aside)
        step = Step(
            len(self.steps),
            task.index,
            workspace,
            task.name,
            fn,
            arguments=tuple(self._source(node, argument) for argument in task.arguments),
            outputs=tuple(self._place(node, o.name) if o.is_kept else None for o in task.outputs),
            output_names=tuple(o.name for o in task.outputs),
            captures=tuple((capture.part, capture.retain) for capture in task.captures),
            handovers=tuple(self._handover(self._crossings[c]) for c in task.hands_over),
            num_instances=task.num_instances,
            every=task.every,
            setup=task.setup,
            instance_setup=task.instance_setup,
        )
        has_instances = step.num_instances > 1 or step.setup or step.instance_setup
        step.is_plain = step.every == 1 and not has_instances
        step.updates = tuple(place for place in step.arguments if place.is_updated)
        places = (*step.outputs, *step.updates)
        written = {place.key for place in places if place is not None}
        in_epoch = self.name in ("epoch", "epoch_end")
        step.puts_rows = in_epoch and not written.isdisjoint(workspace.histories)
        goes_elsewhere = step.captures or step.handovers or step.updates or step.puts_rows
        if len(step.outputs) == 1 and not goes_elsewhere:
            step.sole = step.outputs[0]
        self.steps.append(step)
        self._connect(step, task)

    def _place(self, node: str, name: str, *, is_updated: bool = False) -> Place:
        workspace, versions = self.workspaces[node], dict[Any, int]()
        if name not in self._private[node]:
            versions = workspace.versions
        versions.setdefault(name, 0)
        return Place(self.blobs(node, name), name, versions, is_updated)

    def _connect(self, step: Step, task: PlannedTask) -> None:
        sources = {self._positions[index] for index in task.waits_for}
        for crossing in (self._crossings[c] for c in task.crossings):
            if crossing.source not in self._slices:
                self.waiters.setdefault(crossing.id, []).append(step.position)
                step.needs += 1
            elif crossing.source_task is not None:
                sources.add(self._positions[crossing.source_task])
        self._wait_for(step, sources)

    def _wait_for(self, step: Step, sources: Collection[int]) -> None:
        step.needs += len(sources)
        for source in sources:
            self.steps[source].successors.append(step.position)

    def _add_reports(self) -> None:
        """Add each report's last run: after its node's tasks, or all if there are none."""
        num_tasks = len(self.steps)
        for node, part in self._slices.items():
            own = [self._positions[task.index] for task in part.tasks]
            for report in part.reports:
                position, workspace = len(self.steps), self.workspaces[node]
                step = Step(position, REPORT_INDEX + position, workspace, report.name, report.fn)
                step.report = report
                self.steps.append(step)
                self.reports.append(position)
                self._wait_for(step, own or range(num_tasks))

    def _source(self, node: str, argument: Argument) -> Place:
        match argument:
            case BlobArgument(name):
                return Place(self.blobs(node, name), name)
            case UpdateArgument(name):
                return self._place(node, name, is_updated=True)
            case ResultArgument(task, part):
                return Place(self.results, (task, part))
            case CrossingArgument(crossing):
                return Place(self.arrived, crossing)

    def _handover(self, crossing: Crossing) -> Handover:
        return Handover(
            crossing,
            {} if crossing.blob is None else self.blobs(crossing.source, crossing.blob),
            is_local=any(node in self._slices for node in crossing.targets),
        )


def arrived_name(number: int) -> str:
    """Under what a workspace sets aside the value of the `LazyArgument` with a number."""
    return f"arrived {number}"


class _WithValues:
    """Calls a function with the keyword arguments of a task, which it gets as it gets inputs."""

    def __init__(
        self, fn: Callable[..., Any], task: PlannedTask, set_aside: dict[str, Any]
    ) -> None:
        self._fn = fn
        self._stored = {name: settle([value]) for name, value in task.kwargs.items()}
        self._lazy_parameters = task.lazy_parameters
        self._set_aside = set_aside
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
            return unshared(self._set_aside.pop(name))
        return view(self._set_aside[name])
