"""What workers may answer: data of another machine, checked before anything uses it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pickle import UnpicklingError
from typing import Any, Literal, Required, TypedDict

import msgspec

from jobrunner.errors import ExecutionError
from jobrunner.worker import EndedRun, Failure, Frames
from jobrunner.workspace import from_frames


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


def read_reply(address: str, answer: object, placement: Mapping[str, str]) -> Reply:
    """Check a worker's answer, for what is common to all requests.

    `placement` says where each node is: a worker speaks only of its own nodes, and suspects only
    workers in use. Raises an `ExecutionError` that names the worker.
    """
    try:
        reply = msgspec.convert(answer, Reply)
    except msgspec.ValidationError as error:
        raise malformed(address, str(error)) from error
    nodes = [node for node, _ in reply.get("tasks", ())]
    if "failure" in reply and reply["failure"].node:
        nodes.append(reply["failure"].node)
    for node in nodes:
        if placement.get(node) != address:
            raise malformed(address, f"node {node!r:.80} is not on that worker")
    if "suspect" in reply and reply["suspect"] not in placement.values():
        raise malformed(address, f"suspect {reply['suspect']!r:.80} is no worker in use")
    return reply


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


def malformed(address: str, problem: str) -> ExecutionError:
    """The error for an answer that no worker of this version gives."""
    return ExecutionError(
        f"Worker {address} gave an answer that does not fit what it was asked: {problem}. Check that "
        f"the same version of jobrunner runs there, and who can reach the cluster."
    )
