"""4 run: slices made ready to run again and again on one worker.

A plan speaks of names; a `Program` holds the very dictionaries, so that running a task looks
nothing up but its values. It is made once for a group, on each worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobrunner.compile import (
    Argument,
    BlobArgument,
    Capture,
    Condition,
    Crossing,
    CrossingArgument,
    PlannedTask,
    Report,
    ResultArgument,
    Slice,
    UpdateArgument,
)
from jobrunner.workspace import IMMUTABLE, Workspace, view

REPORT_INDEX = 1 << 31
"""Reports come after all tasks in the order of definition; this is the first one's index."""

Source = tuple[dict[Any, Any], Any, bool]
"""Where an argument is: a dictionary, its key, and whether the value itself is passed."""


@dataclass(slots=True)
class Handover:
    """A crossing, as the worker of its source sees it.

    `blobs` is where the crossing's blob is, if it takes one.
    """

    crossing: Crossing
    blobs: dict[str, Any]
    is_local: bool
    is_remote: bool


@dataclass(slots=True)
class Keep:
    """Part of a return value to be frozen under `key`; `is_read` within the run.

    `is_moved`: the reader is one task, and nothing else keeps the value.
    """

    part: int
    key: tuple[int, int]
    copy: bool
    retain: bool
    is_read: bool
    is_moved: bool


class Step:
    """A task, or the last run of a report, with all that running it needs."""

    __slots__ = (
        "arguments",
        "fn",
        "handovers",
        "index",
        "is_long",
        "is_plain",
        "keeps",
        "kwargs",
        "name",
        "needs",
        "num_instances",
        "output_names",
        "outputs",
        "position",
        "report",
        "sole",
        "successors",
        "workspace",
    )

    def __init__(self, position: int, index: int, workspace: Workspace, name: str) -> None:
        self.position = position
        self.index = index
        self.workspace = workspace
        self.name = name
        self.fn: Callable[..., Any] = _nothing
        self.arguments: tuple[Source, ...] = ()
        self.kwargs: Mapping[str, Any] = {}
        self.is_plain = True
        self.outputs: tuple[tuple[dict[str, Any], str] | None, ...] = ()
        self.output_names: tuple[str, ...] = ()
        # Where its one output goes, if nothing else takes what it returns.
        self.sole: tuple[dict[str, Any], str] | None = None
        self.keeps: tuple[Keep, ...] = ()
        self.handovers: tuple[Handover, ...] = ()
        self.num_instances = 1
        self.report: Report | None = None
        # How many ends and arrivals it waits for, and which steps wait for its end.
        self.needs = 0
        self.successors: list[int] = []
        self.is_long = False  # by what earlier runs took

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments for one call."""
        return {name: view(value) for name, value in self.kwargs.items()}


class Program:
    """What one worker runs of a group.

    Parameters
    ----------
    key : str
        Tells the group from all others of the binding.
    name : str
        The group's name.
    slices : mapping of str to Slice
        Of the nodes that this worker holds; in whatever order.
    crossings : sequence of Crossing
        All of the group.
    conditions : sequence of Condition
        All of the group; those of other nodes are left to their workers.
    workspaces : mapping of str to Workspace
        Of the nodes that this worker holds.
    """

    def __init__(
        self,
        key: str,
        name: str,
        slices: Mapping[str, Slice],
        crossings: Sequence[Crossing],
        conditions: Sequence[Condition],
        workspaces: Mapping[str, Workspace],
    ) -> None:
        self.key = key
        self.name = name
        self.workspaces = {node: workspaces[node] for node in slices}
        self.arrived: dict[int, Any] = {}
        self.results: dict[tuple[int | None, int | None], Any] = {}
        self.steps: list[Step] = []
        self.waiters: dict[int, list[int]] = {}
        self.conditions = [c for c in conditions if c.node in slices]
        self.keeps_running = False  # the next run may begin before other workers end this one
        self.has_updates = dict.fromkeys(slices, False)
        self.changes: dict[str, set[str]] = {node: set() for node in slices}  # global blobs
        self._slices = slices
        self._crossings = crossings
        self._private = {
            node: {o.name for task in part.tasks for o in task.outputs if not o.is_global}
            for node, part in slices.items()
        }
        # How often each part of a return value is read; a condition counts as many readers.
        self._readers = Counter({(c.task, c.part): 2 for c in self.conditions})

        planned = sorted(
            ((task, workspaces[node]) for node, part in slices.items() for task in part.tasks),
            key=lambda pair: pair[0].index,
        )
        for task, _ in planned:
            self._readers.update(
                (a.task, a.part) for a in task.arguments if isinstance(a, ResultArgument)
            )
        self._positions = {task.index: i for i, (task, _) in enumerate(planned)}
        for task, workspace in planned:
            self._add_task(task, workspace)
        for task, _ in planned:
            self._connect(task)
        self._add_reports()
        self.openings = [
            self._handover(c) for c in crossings if c.source in slices and c.source_task is None
        ]
        self.needs = [step.needs for step in self.steps]
        self.first = [step.position for step in self.steps if step.needs == 0]

    def blobs(self, node: str, name: str) -> dict[str, Any]:
        """The dictionary that has that blob of that node, in this group."""
        workspace = self.workspaces[node]
        return workspace.private if name in self._private[node] else workspace.globals

    def forget_values(self) -> None:
        """Let go of what a run left on its way between tasks."""
        self.arrived.clear()
        self.results.clear()

    def _add_task(self, task: PlannedTask, workspace: Workspace) -> None:
        step = Step(len(self.steps), task.index, workspace, task.name)
        step.fn = task.fn
        step.num_instances = task.num_instances
        step.arguments = tuple(self._source(workspace.node, a) for a in task.arguments)
        step.kwargs = task.kwargs
        step.outputs = tuple(
            (workspace.globals if o.is_global else workspace.private, o.name) if o.is_kept else None
            for o in task.outputs
        )
        step.output_names = tuple(o.name for o in task.outputs)
        step.keeps = tuple(self._keep(task, capture) for capture in task.captures)
        step.handovers = tuple(self._handover(self._crossings[c]) for c in task.hands_over)
        if len(step.outputs) == 1 and not step.keeps and not step.handovers:
            step.sole = step.outputs[0]
        step.is_plain = all(type(value) in IMMUTABLE for value in task.kwargs.values())
        updated = {a.name for a in task.arguments if isinstance(a, UpdateArgument)}
        self.has_updates[workspace.node] |= bool(updated)
        self.changes[workspace.node] |= updated | {o.name for o in task.outputs if o.is_kept}
        self.steps.append(step)

    def _keep(self, task: PlannedTask, capture: Capture) -> Keep:
        key = (task.index, capture.part)
        is_handed_over = any(self._crossings[c].part is not None for c in task.hands_over)
        return Keep(
            capture.part,
            key,
            capture.copy,
            capture.retain,
            is_read=key in self._readers,
            is_moved=self._readers[key] == 1
            and not (task.outputs or capture.retain or is_handed_over),
        )

    def tell_of_crossings(self, crossings: Collection[int]) -> str:
        """What crosses, for the end of a message; numbers below 0 are no values."""
        names: dict[str, None] = {}
        for crossing in (self._crossings[c] for c in crossings if c >= 0):
            name = f"blob {crossing.source}/{crossing.blob}"
            for task in self._slices[crossing.source].tasks if crossing.blob is None else ():
                if task.index == crossing.source_task:
                    name = f"what {crossing.source}/{task.name} returned"
            names[name] = None
        told = ", ".join([*list(names)[:3], *(["…"] if len(names) > 3 else [])])
        return f" (under way: {told})" if names else ""

    def _connect(self, task: PlannedTask) -> None:
        position = self._positions[task.index]
        sources = {self._positions[index] for index in task.waits_for}
        arrivals = 0
        for crossing in (self._crossings[c] for c in task.crossings):
            if crossing.source not in self._slices:
                self.waiters.setdefault(crossing.id, []).append(position)
                arrivals += 1
            elif crossing.source_task is not None:
                sources.add(self._positions[crossing.source_task])
        self._wait_for(position, sources, arrivals)

    def _wait_for(self, position: int, sources: Collection[int], arrivals: int = 0) -> None:
        self.steps[position].needs = len(sources) + arrivals
        for source in sources:
            self.steps[source].successors.append(position)

    def _add_reports(self) -> None:
        """A report's last run waits for its node's tasks; without tasks there, for all."""
        num_tasks = len(self.steps)
        index = REPORT_INDEX
        for node, part in self._slices.items():
            own = [self._positions[task.index] for task in part.tasks]
            for report in part.reports:
                step = Step(len(self.steps), index, self.workspaces[node], report.name)
                step.fn, step.report = report.fn, report
                self.steps.append(step)
                self._wait_for(step.position, own or range(num_tasks))
                index += 1

    def _source(self, node: str, argument: Argument) -> Source:
        if isinstance(argument, BlobArgument):
            return (self.blobs(node, argument.name), argument.name, False)
        if isinstance(argument, UpdateArgument):
            return (self.blobs(node, argument.name), argument.name, True)
        if isinstance(argument, ResultArgument):
            return (self.results, (argument.task, argument.part), False)
        assert isinstance(argument, CrossingArgument)
        return (self.arrived, argument.crossing, False)

    def _handover(self, crossing: Crossing) -> Handover:
        return Handover(
            crossing,
            {} if crossing.blob is None else self.blobs(crossing.source, crossing.blob),
            is_local=any(node in self._slices for node in crossing.targets),
            is_remote=any(node not in self._slices for node in crossing.targets),
        )


def _nothing() -> None:
    return None
