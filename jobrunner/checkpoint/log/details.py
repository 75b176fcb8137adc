"""What records and runs say beside what the log itself needs. Pure: no I/O.

A `Timing` has all that its run has spent since it began, so that a lost entry makes no hole; losses
are those since the entry before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from jobrunner.define import MOST_DIGITS

MOST_LOSSES = 100
"""In one entry, at most."""
LONGEST_TEXT = 1_000

MOST = 1 << 62
"""No number of an honest log comes near it."""

Natural = Annotated[int, Meta(ge=0, le=MOST)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Unix = Annotated[float, Meta(ge=0, le=1e11)]
Nodes = Annotated[list[str], Meta(min_length=1)]
_Text = Annotated[str, Meta(max_length=LONGEST_TEXT)]
_Step = Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,17})\.s[1-9][0-9]{0,17}\Z")]
_Epoch = Annotated[int, Meta(ge=0, lt=10**18)] | _Step


class LossRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """A loss; times are seconds since the run began."""

    at: Seconds
    text: _Text
    resumed: Seconds | None = None  # the first epoch after it began
    epoch: _Epoch | None = None  # that the run went on from, as JSON; None: from the start


class Timing(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the time of a run went; docs/watching.md defines the parts."""

    start: Seconds = 0
    compute: Seconds = 0
    save_wait: Seconds = 0
    redone: Seconds = 0
    recovery: Seconds = 0
    idle: Seconds = 0
    losses: Annotated[list[LossRecord], Meta(max_length=MOST_LOSSES)] = []


class Partition(msgspec.Struct):
    """How a blob is divided between nodes."""

    axis: Annotated[int, Meta(ge=0, le=63)]
    nodes: Nodes


REPLICATED = "replicated"
"""Field of `Details`: name of a blob -> the nodes that have it. The first node's store has it."""

PARTITIONS = "partitions"
"""Field of `Details`: name of a blob -> its axis, and the nodes that have its parts, in order."""


class Details(msgspec.Struct, omit_defaults=True):
    """What a run says of an epoch that it records."""

    ended: Unix = 0.0  # when the epoch ended; 0: unknown
    metrics: dict[str, bool | int | float | str] = {}
    metadata: dict[str, Any] = {}  # the user's own
    stopped_by: list[str] = []
    steps_per_epoch: Natural | None = None
    replicated: dict[str, Nodes] = {}
    partitions: dict[str, Partition] = {}
    callbacks: dict[str, dict[str, bool | int | float | str | None]] = {}  # their states
    streams: dict[str, str] = {}  # node -> its first name, to which its random stream belongs
    renamed: dict[str, str] = {}
    timing: Timing | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON, which may contain NaN and infinities."""
        tree: dict[str, Any] = msgspec.to_builtins(self)
        return tree


class RecordedPlan(msgspec.Struct):
    """The description of a run's plan, to be compared with that of a later one."""

    job: Any = None
    seed: Any = None
    steps_per_epoch: Any = None
    python: Any = None
    nodes: dict[str, list[str]] = {}
    parameters: dict[str, Any] = {}
    structure: dict[str, str] = {}
    code: dict[str, str] = {}


class RunInfo(msgspec.Struct):
    """What a ``run`` entry says."""

    plan: RecordedPlan | None = None
    command: str = ""  # of the command line, if it is no run of a job
    began: Unix = 0.0  # the call of `JobRunner.run`
    # The last heartbeat of a run that did not end, by its name.
    last_heartbeats: dict[str, Unix] = msgspec.field(name="seen", default_factory=dict)


Kind = TypeVar("Kind", bound=msgspec.Struct)
Tree = TypeVar("Tree", bound=Mapping[str, Any])

# Two threads that use a class first would crash in msgspec, so it learns all fields here.
for _kind in (Details, RunInfo):
    msgspec.json.Decoder(_kind)


def read_details(details: Mapping[str, Any]) -> Details:
    """Read the details of a record, which are strict JSON.

    Raises ValueError, which names the field, if they are invalid, and RecursionError if they are
    nested too deep.
    """
    return _convert(loose_json(details), Details, "details")


def check_info(info: Tree) -> Tree:
    """Return the info of a run; raises ValueError, which names the field, if it is invalid."""
    _convert(info, RunInfo, "info")
    return info


def _convert(tree: Any, kind: type[Kind], name: str) -> Kind:
    try:
        return msgspec.convert(tree, kind)
    except ValueError as error:  # also of a key with a lone surrogate
        raise ValueError(f"`{name}`: {error}") from None


_TAGS = {"$float", "$plain"}
_LARGEST = 10**MOST_DIGITS


def strict_json(value: Any) -> Any:
    """Encode NaN and infinities, which JSON does not have; raises ValueError for very long ints."""
    if isinstance(value, str):
        if value.isascii():
            return value
        # UTF-8 has no lone surrogates, which file names may have.
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return {"$float": repr(value)}
    if isinstance(value, int):
        if abs(value) >= _LARGEST:
            raise ValueError(f"an int has more than {MOST_DIGITS:,} digits")
        return value
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    tree = {strict_json(key): strict_json(item) for key, item in value.items()}
    if len(tree) == 1 and tree.keys() <= _TAGS:
        # It looks like a tag of ours.
        return {"$plain": tree}
    return tree


def loose_json(value: Any) -> Any:
    """Undo `strict_json`; returns a copy."""
    if isinstance(value, list):
        return [loose_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"$float"}:
        return float(str(value["$float"]))
    if value.keys() == {"$plain"}:
        value = value["$plain"]
    return {key: loose_json(item) for key, item in value.items()}
