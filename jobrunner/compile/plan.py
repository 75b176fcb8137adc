"""2 compile: a job's groups become plans of slices and crossings. Pure: no I/O, no Dask.

A *slice* is what one node runs in one run of a group; a *crossing* is a value (or a bare signal)
that one node hands to others in that run. Everything a worker needs to keep the promise "as if
the tasks ran one after another in the order they were defined" is decided here, once: which task
waits for which, where each argument comes from, what must be copied because somebody changes it
later, which blobs are private to the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jobrunner.define import ArrayOptions


class _Record:
    """Pickles as its class and its fields' values: half the time of a dataclass's own way."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple([getattr(self, name) for name in self.__slots__])


@dataclass(frozen=True, slots=True)
class BlobArgument(_Record):
    """The node's own blob `name`, as it is when the task starts (read-only view)."""

    name: str


@dataclass(frozen=True, slots=True)
class UpdateArgument(_Record):
    """The node's own blob `name` itself, for the task to change in place."""

    name: str


@dataclass(frozen=True, slots=True)
class ResultArgument(_Record):
    """Part `part` of what task `task` of this node returned in this run (see `Capture`)."""

    task: int
    part: int


@dataclass(frozen=True, slots=True)
class CrossingArgument(_Record):
    """The value that crossing `crossing` brought to this node."""

    crossing: int


Argument = BlobArgument | UpdateArgument | ResultArgument | CrossingArgument


@dataclass(frozen=True, slots=True)
class Output(_Record):
    """A blob that a task's return value fills.

    `is_kept` False: the value is computed and may be read as a `TaskOutput`, but the blob is left
    alone (an init task run again at a resume, for the sake of its other outputs).
    """

    name: str
    is_global: bool
    is_kept: bool = True


@dataclass(frozen=True, slots=True)
class Capture(_Record):
    """Part `part` of a task's return value, frozen at its end for readers of the `TaskOutput`.

    `copy`: a later task of the group changes the memory in place, so freeze a copy.
    `retain`: keep it for `TaskOutput.fetch()` until the group runs again (else to the run's end).
    """

    part: int
    copy: bool
    retain: bool


@dataclass(frozen=True, slots=True)
class PlannedTask(_Record):
    """One task of a slice.

    Attributes
    ----------
    index : int
        Place in the group's order of definition; unique within the group.
    waits_for : tuple of int
        Indices of tasks *of the same node* that must end first (transitively reduced or not).
    crossings : tuple of int
        Crossings that must have arrived first: those in `arguments` and bare signals.
    hands_over : tuple of int
        Crossings that this task's end makes ready (their `source_task` is this task).
    outputs : tuple of Output
        None: the return value fills no blob. One: the value is the blob's. Several: the return
        value is a sequence of that length.
    captures : tuple of Capture
        For a task without outputs, part 0 is the return value.
    """

    index: int
    name: str
    fn: Callable[..., Any]
    arguments: tuple[Argument, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Output, ...]
    captures: tuple[Capture, ...]
    waits_for: tuple[int, ...]
    crossings: tuple[int, ...]
    hands_over: tuple[int, ...]
    num_instances: int = 1


@dataclass(frozen=True, slots=True)
class Crossing(_Record):
    """A value or signal that `source` hands to `targets` within one run of the group.

    Attributes
    ----------
    source_task : int or None
        The task at whose end it is taken; None: taken when the run starts, before any task.
    blob : str or None
        Take this blob of the source node. None: take part `part` of the task's return value.
    part : int or None
        None together with `blob` None: a bare signal (`after=` across nodes), its value is None.
    copy : bool
        The source changes the memory later in this run, so hand over a copy.
    is_reused : bool
        The group's next run changes the memory in place: where that may begin before all targets
        are done with this one, hand over a copy.
    """

    id: int
    source: str
    source_task: int | None
    blob: str | None
    part: int | None
    targets: tuple[str, ...]
    copy: bool
    is_reused: bool = False


@dataclass(frozen=True, slots=True)
class Report(_Record):
    """`fn()` runs on the node every `interval_ms`, and once more after the node's last task."""

    name: str
    fn: Callable[[], Any]
    interval_ms: int


@dataclass(frozen=True, slots=True)
class Condition(_Record):
    """A stop condition, read on `node` after the group's last run of an epoch.

    `blob` given: that blob's value at the end of the run (before private blobs are released).
    Else: capture `part` of task `task`.
    """

    name: str
    node: str
    blob: str | None
    task: int | None
    part: int | None


@dataclass(frozen=True, slots=True)
class Slice(_Record):
    """What one node does in one run of a group; `tasks` in order of definition."""

    node: str
    tasks: tuple[PlannedTask, ...]
    reports: tuple[Report, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One task group, compiled.

    `slices` has a slice for every node that runs a task, reports, or is the source of a crossing,
    in order of first use. `crossings[i].id == i`.
    """

    name: str
    slices: Mapping[str, Slice]
    crossings: tuple[Crossing, ...]
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """A node and what it asks of its worker, in Dask's words."""

    name: str
    workers: tuple[str, ...] | None = None
    resources: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A compiled job.

    Attributes
    ----------
    groups : mapping
        ``"init"``, ``"resume"`` (the init tasks that must run again after any load: those of nodes
        that are not checkpointed, and makers of transient blobs), ``"epoch"``, ``"download"``,
        ``"exit"``.
    checkpointed : tuple of str
        The nodes whose workspaces are saved.
    globals : mapping
        Node -> names of its global blobs.
    initial : mapping
        Node -> names of those that the init group makes, so that they are there from epoch 0 on.
    lasting : mapping
        Node -> names of those that the init or the epoch group makes: there from epoch 1 on.
    transient : mapping
        Node -> names of its global blobs that are never saved.
    replicated : mapping
        Name of a blob -> the nodes that have it, all with one value.
    partitions : mapping
        Name of a blob -> the axis, and the nodes that hold its parts, in their order.
    array_options : mapping
        Node -> name of a blob -> how its arrays are stored, where somebody chose.
    structure, code : mapping
        ``"group:node/task"`` -> digest of the task's structure, and of its function's code, in
        order of definition; `jobrunner.compile.fingerprint` makes and compares them.
    """

    job: str
    seed: int
    steps_per_epoch: int
    epoch_limit: int | None
    nodes: tuple[PlannedNode, ...]
    groups: Mapping[str, GroupPlan]
    checkpointed: tuple[str, ...]
    globals: Mapping[str, frozenset[str]]
    initial: Mapping[str, frozenset[str]] = field(default_factory=dict)
    lasting: Mapping[str, frozenset[str]] = field(default_factory=dict)
    transient: Mapping[str, frozenset[str]] = field(default_factory=dict)
    replicated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    partitions: Mapping[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    array_options: Mapping[str, Mapping[str, ArrayOptions]] = field(default_factory=dict)
    structure: Mapping[str, str] = field(default_factory=dict)
    code: Mapping[str, str] = field(default_factory=dict)

    def saved_blobs(self, epoch: int) -> dict[str, frozenset[str]]:
        """The blobs of each checkpointed node that a checkpoint of `epoch` must hold."""
        made = self.initial if epoch == 0 else self.lasting
        none: frozenset[str] = frozenset()
        return {
            node: made.get(node, none) - self.transient.get(node, none)
            for node in self.checkpointed
        }
