"""4 run: an operation that workers are asked for, and the errors that it can end with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobrunner.errors import (
    BlobNotFoundError,
    DefinitionError,
    ExecutionError,
    TaskFailedError,
)
from jobrunner.worker import Failure, Message


@dataclass(slots=True)
class Request:
    """An operation to be started on workers.

    Attributes
    ----------
    call : str
        The host's method.
    details : dict
        What it is told; with `is_separate`, by address.
    is_separate : bool
    channel : str
        Operations of one call on several channels may be under way at the same time; of one
        channel, one after another.
    number : int
    started : float
        Of the operation, and its monotonic time; set when it begins.
    deadline_seconds, task_deadline_seconds : float or None
        For the operation, and for each task that runs in it.
    group : str
    what : str
        What it is for, where it runs no group.
    epoch : int or None
        What to say in errors.
    is_careful : bool
        Workers answer whenever a task is about to begin, and wait for the next message.
    """

    call: str
    details: dict[str, Any] = field(default_factory=dict)
    is_separate: bool = False
    channel: str = ""
    number: int = 0
    started: float = 0.0
    deadline_seconds: float | None = None
    task_deadline_seconds: float | None = None
    group: str = ""
    what: str = ""
    epoch: int | None = None
    is_careful: bool = False

    def check(self, replies: Mapping[str, Message], job: str) -> None:
        """Raise what workers say went wrong."""
        for reply in replies.values():
            if reply["status"] == "failed":
                epoch = reply.get("epoch", self.epoch)
                raise self._failed(Failure(**reply["failure"]), job, epoch)
        for address, reply in replies.items():
            if reply["status"] != "done":
                reason = reply.get("reason") or f"it answered {reply['status']!r}"
                raise ExecutionError(
                    f"Worker {address} did not end its part of {self.call} {self.group}: "
                    f"{reason}. Start the job again."
                )

    def late(self, nodes: Sequence[str], running: Sequence[str]) -> ExecutionError:
        """The error where its deadline passed; `nodes` are those whose workers are late."""
        what = self.what or f"the {self.group} group"
        return ExecutionError(
            f"{what[0].upper()}{what[1:]} did not end within {self.deadline_seconds:g} s"
            f"{_at(self.epoch)}. Late are the workers of {', '.join(map(repr, nodes))}; running "
            f"there: {', '.join(running) or 'nothing'}. Find out what holds these up, or allow "
            f"more time."
        )

    def overlong(self, task: str, worker: str | None) -> ExecutionError:
        """The error where a task's deadline passed."""
        return ExecutionError(
            f"Task {task} of the {self.group} group did not end within "
            f"{self.task_deadline_seconds:g} s{_at(self.epoch)}, on worker {worker}. Find out what "
            f"holds it up, or allow more time."
        )

    def _failed(self, failure: Failure, job: str, epoch: int | None) -> BaseException:
        cause = failure.exception()
        if failure.is_own:
            error = cause
            is_ours = not failure.traceback and isinstance(
                error, DefinitionError | BlobNotFoundError
            )
            if failure.node and is_ours:
                error.args = (f"Job {job!r}, group {self.group!r}{_at(epoch)}: {error}",)
        else:
            where = f"node {failure.node!r}, group {self.group!r}, job {job!r}"
            hint = "The remote traceback says where; mend" if failure.traceback else "Mend"
            error = TaskFailedError(
                f"Task {failure.task!r} ({where}) failed{_at(epoch)}: "
                f"{failure.summary.rstrip('.')}. {hint} the task and start the same command again.",
                job=job,
                node=failure.node,
                task=failure.task,
                group=self.group,
                epoch=epoch,
                remote_traceback=failure.traceback,
            )
            error.__cause__ = cause
        if failure.traceback:
            error.add_note(f"On the worker:\n{failure.traceback}")
        return error


def _at(epoch: int | None) -> str:
    return "" if epoch is None else f" at epoch {epoch}"
