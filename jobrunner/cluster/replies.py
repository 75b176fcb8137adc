"""What workers may answer: data of another machine, checked before anything uses it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple, Required, TypedDict

from msgspec import Meta

from jobrunner.errors import ExecutionError
from jobrunner.worker import EndedRun, Failure, Frames

Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
MOST_PRINTED = 1 << 20
"""Characters that a worker may say were printed. It keeps far fewer between two looks of a view."""


class Reply(TypedDict, total=False):
    """A worker's reply to a request."""

    status: Required[Literal["done", "running", "failed", "aborted", "stale", "unknown"]]
    tasks: Sequence[tuple[str, str]]  # those that run, as (node, task)
    runs: Sequence[EndedRun]
    failure: Failure
    epoch: int | None  # in which it failed
    step: Count  # of it, from 0
    reason: str  # why it was aborted
    suspect: str  # address of a worker that this one could not reach
    frames: Frames
    room: tuple[Count, Count]  # bytes of a capture, bytes free: see `Keeper.room`
    names: Mapping[str, Sequence[str]]  # of blobs, by node
    # What a view is told: see `HostedNodes.look`.
    progress: Mapping[str, tuple[Count, Count, str]]
    lines: Sequence[tuple[str, str, str]]
    left_out: Count
    number: Count
    seconds: Annotated[float, Meta(ge=0, le=3600)]


class Counted(NamedTuple):
    """How many of a node's tasks had ended when a view asked for it."""

    at: float  # by the monotonic clock
    group: str  # that ran then
    ended: int
    tasks: int  # of so many
    task: str  # one that ran, if any


def malformed(address: str, problem: str) -> ExecutionError:
    """The error for an answer that no worker of this version gives."""
    return ExecutionError(
        f"Worker {address} gave an answer that does not fit what it was asked: {problem}. Check that "
        f"the same version of jobrunner runs there, and who can reach the cluster."
    )
