"""What records and runs say beside what the log itself needs, as it is read. Pure: no I/O."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jobrunner.checkpoint.encoding import described
from jobrunner.checkpoint.log.entries import Natural
from jobrunner.checkpoint.log.timing import Timing

Nodes = Annotated[list[str], Meta(min_length=1)]


class Partition(msgspec.Struct):
    """How a blob is divided between nodes."""

    axis: Annotated[int, Meta(ge=0, le=63)]
    nodes: Nodes


Combined = tuple[Literal["mean", "sum", "min", "max"], int | float, int | float]
"""How values of a metric become one, their value so far, and its weight."""


class Details(msgspec.Struct):
    """The details of a record that jobrunner reads; others are for people."""

    metrics: dict[str, bool | int | float | str | None] = {}
    totals: dict[str, dict[str, Combined]] = {}  # of a mid-epoch checkpoint; by name and node
    metadata: dict[str, Any] = {}  # the user's own
    stopped_by: list[str] = []
    step: Natural = 0
    steps_per_epoch: Natural | None = None
    replicated: dict[str, Nodes] = {}
    partitions: dict[str, Partition] = {}
    callbacks: dict[str, dict[str, bool | int | float | str | None]] = {}  # their states
    uids: dict[str, str] = {}
    renamed: dict[str, str] = {}
    migrated: list[str] = []
    timing: Timing | None = None


Unix = Annotated[float, Meta(ge=0, le=1e11)]


class RunInfo(msgspec.Struct):
    """What a ``run`` entry says beside its plan."""

    command: str = ""  # of the command line, if it is no run of a job
    began: Unix = 0.0  # the call of `JobRunner.run`
    keeps_best: tuple[str, Literal["min", "max"]] | None = None  # the metric of its `KeepBest`
    seen: dict[str, Unix] = {}  # the last heartbeat of a run that did not end, by its name


class Plan(msgspec.Struct):
    """The description of a run's plan, to be compared with that of a later one."""

    job: Any = None
    seed: Any = None
    steps_per_epoch: Any = None
    python: Any = None
    nodes: dict[str, list[str]] = {}
    parameters: dict[str, Any] = {}
    structure: dict[str, str] = {}
    code: dict[str, str] = {}


def check_details(details: dict[str, Any]) -> dict[str, Any]:
    """Return the details of a record; raises ValueError, which names the field, if they are invalid."""
    return _check(details, Details, "details")


def check_plan(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the plan of a run; raises ValueError, which names the field, if it is invalid."""
    return _check(plan, Plan, "plan")


def check_info(info: dict[str, Any]) -> dict[str, Any]:
    """Return the info of a run; raises ValueError, which names the field, if it is invalid."""
    return _check(info, RunInfo, "info")


def _check(tree: dict[str, Any], kind: type[msgspec.Struct], name: str) -> dict[str, Any]:
    try:
        msgspec.convert(tree, described(kind))
    except ValueError as error:  # also of a key with a lone surrogate
        raise ValueError(f"`{name}`: {error}") from None
    return tree
