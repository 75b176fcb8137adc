"""The plan of a job: for each group, slices and crossings.

A *slice* is what one node runs in one run of a group. A *crossing* is a value, or a bare signal, that
one node sends to others in that run. The plan settles everything that a worker needs to give the
same result as running the tasks one after another in order of definition: which task waits for
which, where each argument comes from, and what must be copied because a task changes it later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jobrunner.define import ArrayOptions


class _Record:
    """Pickles as class and field values, in half the time of a dataclass's own pickling."""

    __slots__: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple([getattr(self, name) for name in self.__slots__])


@dataclass(frozen=True, slots=True)
class BlobArgument(_Record):
    """The node's own blob `name` as a read-only view."""

    name: str


@dataclass(frozen=True, slots=True)
class UpdateArgument(_Record):
    """The node's own blob `name`, for the task to change in place."""

    name: str


@dataclass(frozen=True, slots=True)
class ResultArgument(_Record):
    """Part `part` of what task `task` of this node returned in this run; see `Capture`."""

    task: int
    part: int


@dataclass(frozen=True, slots=True)
class CrossingArgument(_Record):
    """The value of crossing `crossing`."""

    crossing: int


Argument = BlobArgument | UpdateArgument | ResultArgument | CrossingArgument


@dataclass(frozen=True, slots=True)
class Output(_Record):
    """A blob that a task's return value fills.

    `is_kept` False: the value may be read as a `TaskOutput`, but the blob stays as it is. So it is
    if an init task runs again at a resume because of its other outputs.
    """

    name: str
    is_global: bool
    is_kept: bool = True


@dataclass(frozen=True, slots=True)
class Capture(_Record):
    """Part `part` of a task's return value, frozen for readers of the `TaskOutput`.

    `copy`: freeze a copy, because a later task of the group changes the memory in place.
    `retain`: keep it for `TaskOutput.fetch()` until the group runs again, not just for this run.
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
        Position in the group's order of definition.
    waits_for : tuple of int
        Indices of tasks of the same node that must end first.
    crossings : tuple of int
        Crossings that must arrive first: those in `arguments`, and bare signals.
    hands_over : tuple of int
        Crossings that are ready when this task ends.
    outputs : tuple of Output
        One output takes the return value; several take the items of a sequence of that length.
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
    """A value or signal that `source` sends to `targets` within one run of the group.

    Attributes
    ----------
    source_task : int or None
        The value is taken when this task ends; None: when the run starts.
    blob : str or None
        Send this blob of the source node. None: send part `part` of the task's return value.
    part : int or None
        None, if `blob` is None too: a bare signal, for `after=` across nodes. Its value is None.
    copy : bool
        Send a copy, because the source changes the memory later in this run.
    is_reused : bool
        The group's next run changes the memory in place: send a copy if that run may begin before
        all targets have ended this one.
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

    Its value is that of `blob` before private blobs are released, or else capture `part` of task
    `task`.
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
    """A compiled task group.

    `slices` has every node that runs a task, reports, or is the source of a crossing, in order of
    first use. `crossings[i].id == i`.
    """

    name: str
    slices: Mapping[str, Slice]
    crossings: tuple[Crossing, ...]
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """A node and what it requires of its worker, in Dask's terms."""

    name: str
    workers: tuple[str, ...] | None = None
    resources: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A compiled job.

    Attributes
    ----------
    groups : mapping
        ``"init"``, ``"resume"`` (the init tasks that run again after every load: those of nodes
        that are not checkpointed, and makers of transient blobs), ``"epoch"``, ``"download"``,
        ``"exit"``.
    checkpointed : tuple of str
        The nodes whose workspaces are saved.
    globals : mapping
        Node -> names of its global blobs.
    initial : mapping
        Node -> names of the global blobs that the init group makes; they exist from epoch 0 on.
    lasting : mapping
        Node -> names of those that the init or the epoch group makes; they exist from epoch 1 on.
    transient : mapping
        Node -> names of its global blobs that are never saved.
    replicated : mapping
        Name of a blob -> the nodes that all have the same value of it.
    partitions : mapping
        Name of a blob -> its axis, and the nodes that hold its parts, in order.
    array_options : mapping
        Node -> name of a blob -> the options that the user chose.
    structure, code : mapping
        ``"group:node/task"`` -> digest of the task's structure, and of its function's code, in
        order of definition. See `jobrunner.compile.fingerprint`.
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
