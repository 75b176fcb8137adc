"""The plan of a job: for each group, slices and crossings.

A *slice* is what one node does in one run of a group. A *crossing* is a value, or a bare signal, that
one node sends to others in that run. The plan says which task waits for which, and where each
argument comes from. A run that follows the plan
gives the same result as the tasks run one after another in order of definition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from msgspec import Struct

from jobrunner.define import ArrayOptions, LazyArgument, ParameterPlace
from jobrunner.positions import Position
from jobrunner.texts import counted, printable


def is_due(every: int, step: int) -> bool:
    """Whether what happens every so many steps happens in a step of an epoch, counted from 0."""
    return (step + 1) % every == 0


class BlobArgument(Struct, frozen=True):
    """Blob `name` of the same node, as a read-only view."""

    name: str


class UpdateArgument(Struct, frozen=True):
    """Blob `name` of the same node, for the task to change in place."""

    name: str


class ResultArgument(Struct, frozen=True):
    """Part `part` of what task `task` of the same node returned in this run; see `Capture`."""

    task: int
    part: int


class CrossingArgument(Struct, frozen=True):
    """The value of crossing `crossing`."""

    crossing: int


Argument = BlobArgument | UpdateArgument | ResultArgument | CrossingArgument


class Output(Struct, frozen=True):
    """A blob that a task's return value fills."""

    name: str
    is_global: bool
    is_kept: bool = True
    """False: do not write the blob; an init task runs again at a resume for its other outputs."""


class Capture(Struct, frozen=True):
    """Part `part` of a task's return value, as it was then, for readers of the `TaskOutput`."""

    part: int
    retain: bool  # for `TaskOutput.fetch`, until the group runs again; else for this run


class ByName(Struct, frozen=True):
    """Passes arguments to parameters of `fn`: those of `places`, in order."""

    fn: Callable[..., Any]
    places: tuple[ParameterPlace, ...]

    def __call__(self, *arguments: Any, **kwargs: Any) -> Any:
        """Call `fn`."""
        remaining = iter(arguments)
        for name, count in self.places:
            kwargs[name] = next(remaining) if count is None else list(islice(remaining, count))
        return self.fn(**kwargs)


class PlannedTask(Struct, frozen=True):
    """One task of a slice."""

    index: int  # in the group's order of definition
    name: str
    fn: Callable[..., Any]
    arguments: tuple[Argument, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Output, ...]  # one takes the return value; several take the items of a sequence
    captures: tuple[Capture, ...]  # without outputs, part 0 is the return value
    waits_for: tuple[int, ...]  # indices of tasks of the same node
    crossings: tuple[int, ...]  # that must arrive first: those in `arguments`, and bare signals
    hands_over: tuple[int, ...]  # crossings that are ready when this task ends
    num_instances: int = 1
    setup: Mapping[str, Callable[[], Any]] = {}  # makes keyword arguments, once for all instances
    instance_setup: Mapping[str, Callable[[], Any]] = {}
    is_seeded: bool = False  # see `Job(seed_global_rng=)`
    every: int = 1  # it runs only in steps of an epoch that are due; see `is_due`
    places: tuple[ParameterPlace, ...] = ()  # of the arguments; (): they are passed in order
    lazy_parameters: tuple[str, ...] = ()  # those in whose `kwargs` is an `Arrives`

    def callee(self) -> Callable[..., Any]:
        """What to call with the arguments."""
        return ByName(self.fn, self.places) if self.places else self.fn


class Crossing(Struct, frozen=True):
    """A value that the node `source` sends to `targets` within one run of the group.

    The value is a blob, or else part `part` of the source task's return value. If `blob` and `part`
    are None, it is a bare signal, for `after=` across nodes; its value is None.
    """

    id: int
    source: str
    source_task: int | None  # the value is taken when this task ends; None: when the run starts
    blob: str | None
    part: int | None
    targets: tuple[str, ...]
    every: int = 1  # nobody reads the value in steps that are not due; then None is sent


class Report(Struct, frozen=True):
    """`fn()` runs on the node every `interval_seconds`, and once more after the node's last task."""

    name: str
    fn: Callable[[], Any]
    interval_seconds: float


class Condition(Struct, frozen=True):
    """A stop condition, read on `node` after the group's last run of an epoch.

    Its value is `blob`, read before private blobs are released, or else capture `part` of `task`.
    """

    name: str
    node: str
    blob: str | None = None
    task: int | None = None
    part: int | None = None


class Slice(Struct, frozen=True):
    """What one node does in one run of a group; `tasks` in order of definition."""

    node: str
    tasks: tuple[PlannedTask, ...]
    reports: tuple[Report, ...] = ()


class GroupPlan(Struct, frozen=True):
    """A compiled task group."""

    name: str
    slices: Mapping[str, Slice]  # of each node that runs a task, reports, or sends a crossing
    crossings: tuple[Crossing, ...]  # by id
    conditions: tuple[Condition, ...] = ()
    lazy: tuple[LazyArgument, ...] = ()
    """What Dask computes before the group runs. In the tasks, `Arrives` stands for each."""


class PlannedNode(Struct, frozen=True):
    """A node, and what it requires of its worker in Dask's terms."""

    name: str
    workers: tuple[str, ...] | None = None
    resources: Mapping[str, float] | None = None
    stream: str = ""
    """The first name of a renamed node: its tasks draw random numbers as under that name."""
    kind: str = ""  # nodes of a job with the same tasks in each epoch are of the same kind


class Plan(Struct, frozen=True):
    """A compiled job. Mappings go from node to names of blobs, unless they say otherwise."""

    job: str
    seed: int
    steps_per_epoch: int
    epoch_limit: int | None
    nodes: tuple[PlannedNode, ...]
    groups: Mapping[str, GroupPlan]
    """"init", "epoch", "download", "exit", and "resume": the init tasks that run again after every
    load, on nodes that are not checkpointed and for transient blobs. "epoch_end", if the job has
    one."""
    checkpointed: tuple[str, ...]  # the nodes whose workspaces are saved
    globals: Mapping[str, frozenset[str]]
    initial: Mapping[str, frozenset[str]] = {}
    """The global blobs that the init group makes; they exist from epoch 0 on."""
    early: Mapping[str, frozenset[str]] = {}
    """Those that the init group or every step makes; they exist from the first step on."""
    lasting: Mapping[str, frozenset[str]] = {}
    """Those that an epoch makes, too; they exist from epoch 1 on."""
    transient: Mapping[str, frozenset[str]] = {}
    replicated: Mapping[str, tuple[str, ...]] = {}  # blob -> its nodes
    partitions: Mapping[str, tuple[int, tuple[str, ...]]] = {}
    """Blob -> its axis, and the nodes of its parts, in order."""
    array_options: Mapping[str, Mapping[str, ArrayOptions]] = {}
    histories: Mapping[str, Mapping[str, bool]] = {}
    """Node -> the blobs that are histories -> whether a value is rows, not one row."""
    seed_global_rng: bool = False
    parameters: Mapping[str, Any] = {}
    """What the function that made the job was called with; see `job`."""
    structure: Mapping[str, str] = {}
    """``"group:node/task"`` -> digest, in order of definition; see `compile.fingerprint`."""
    code: Mapping[str, str] = {}
    can_batch: bool = True
    """Whether workers can run several epochs by themselves: they know when an epoch ends."""
    enders: frozenset[str] = frozenset()
    """The names of what may end the job beside its conditions and its limit."""

    @property
    def stops(self) -> tuple[str, ...]:
        """The names of the stop conditions."""
        plans = [plan for plan in self.groups.values() if plan.name in ("epoch", "epoch_end")]
        names = (condition.name for plan in plans for condition in plan.conditions)
        return tuple(dict.fromkeys(names))

    def __repr__(self) -> str:
        sizes = ", ".join(f"{key} {_count(group)}" for key, group in self.groups.items())
        return printable(
            f"<Plan of {self.job!r}: {counted(len(self.nodes), 'node')}, tasks {sizes}>"
        )

    def saved_blobs(self, at: Position) -> dict[str, frozenset[str]]:
        """The blobs of each checkpointed node that a checkpoint contains."""
        blobs = self.lasting
        if at == Position(0):
            blobs = self.initial
        elif at < Position(1):
            blobs = self.early
        none: frozenset[str] = frozenset()
        return {
            node: blobs.get(node, none) - self.transient.get(node, none)
            for node in self.checkpointed
        }


def _count(group: GroupPlan) -> int:
    return sum(len(part.tasks) for part in group.slices.values())
