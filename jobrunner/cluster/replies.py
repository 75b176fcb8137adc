"""What workers may answer: data of another machine, checked before anything uses it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nlargest
from operator import itemgetter
from pickle import UnpicklingError
from typing import Annotated, Any, Literal, NamedTuple, Required, TypedDict

from msgspec import Meta

from jobrunner.errors import ExecutionError
from jobrunner.worker import MOST_SPANS, EndedRun, Failure, Frames, TaskSpan
from jobrunner.workspace import from_frames

Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
LONGEST_NAME = 200  # of a task, in a sample
MOST_PRINTED = 1 << 20
"""Characters that a worker may say were printed. It keeps far fewer between two looks of a view."""


class Reply(TypedDict, total=False):
    """A worker's reply to a request."""

    status: Required[Literal["done", "running", "failed", "aborted", "stale", "unknown"]]
    tasks: Sequence[tuple[str, str]]  # those that run, as (node, task)
    runs: Sequence[EndedRun]
    failure: Failure
    epoch: int | None  # in which it failed
    reason: str  # why it was aborted
    suspect: str  # address of a worker that this one could not reach
    frames: Frames
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


def longest_spans(
    by_worker: Mapping[str, Sequence[EndedRun]], placement: Mapping[str, str]
) -> list[TaskSpan]:
    """The longest calls in the workers' first runs, each of a node that is there."""
    spans = [
        (node, task[:LONGEST_NAME], began, seconds)
        for address, runs in by_worker.items()
        for node, task, began, seconds in runs[0].get("spans", ())
        if placement.get(node) == address
    ]
    return nlargest(MOST_SPANS, spans, key=itemgetter(3))


def check_runs(replies: Mapping[str, Reply], most: int, width: int) -> None:
    """Check how many runs workers have ended: at most `most`, and whole epochs of `width` runs."""
    done = {len(reply.get("runs", ())) for reply in replies.values() if reply["status"] == "done"}
    for address, reply in replies.items():
        count = len(reply.get("runs", ()))
        is_done = reply["status"] == "done"
        if count > most or (is_done and (not count or count % width or len(done) > 1)):
            others = f", and as many as others ({sorted(done)})" if len(done) > 1 else ""
            raise malformed(
                address, f"expected up to {most} runs, in steps of {width}{others}; got {count}"
            )


def read_value(address: str, reply: Reply) -> Any:
    """Unpickle the value in a reply into memory of its own."""
    try:
        head, *buffers = [memoryview(frame) for frame in reply.get("frames", ())]
    except (TypeError, ValueError) as error:
        raise malformed(address, f"there is no value in it ({error})") from error
    try:
        return from_frames([head, *(bytearray(buffer.cast("B")) for buffer in buffers)])
    except (EOFError, UnpicklingError) as error:
        raise malformed(address, f"its value cannot be read ({error})") from error
