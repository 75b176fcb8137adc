"""The outcome of one worker's part of a run, and failures in a form that can be sent."""

from __future__ import annotations

import pickle
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import cloudpickle
import numpy as np

from jobrunner.define import MetricEntry
from jobrunner.errors import (
    CheckpointError,
    DefinitionError,
    ExecutionError,
    JobRunnerError,
)
from jobrunner.texts import get_logger, shorten
from jobrunner.workspace import NotPicklableError

logger = get_logger(__name__)

_SUMMARY_LENGTH = 4_000
_CALLERS = ("jobrunner.worker", "jobrunner.compile", "jobrunner.pipes")
"""Packages that call users' functions in tasks."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception in a form that can be sent."""

    node: str
    task: str  # empty if no task raised it
    summary: str  # type and message
    traceback: str  # formatted; empty if it shows nothing of the user's code
    error: bytes | None  # the pickled exception, if it can be pickled
    is_own: bool  # the client raises it itself, and not as the cause of a `TaskFailedError`

    def exception(self) -> BaseException:
        """The exception itself, or an `ExecutionError` with its summary."""
        if self.error is not None:
            try:
                error = pickle.loads(self.error)
            except Exception:  # the client may lack a module that it needs
                logger.info("Could not unpickle %s", self.summary, exc_info=True)
            else:
                if isinstance(error, BaseException):
                    return error
        return ExecutionError(self.summary)


@dataclass(slots=True)
class Outcome:
    """The outcome of one worker's part of a run."""

    status: Literal["done", "failed", "aborted"]
    failure: Failure | None = None
    reason: str = ""  # why it was aborted
    stopped: list[str] = field(default_factory=list)  # the stop conditions that are true
    metrics: list[MetricEntry] = field(default_factory=list)


def describe_failure(
    node: str, task: str, error: BaseException, *, is_own: bool = False
) -> Failure:
    """Make a `Failure` of an exception that was just caught.

    Checkpoint and definition errors are `is_own` too, unless a user's function raised them.
    """
    trace = error.__traceback__
    while trace is not None and _package_of(trace) in _CALLERS:
        trace = trace.tb_next
    is_users = trace is not None and not _is_own_frame(trace)  # the function that was called
    while trace is not None and _is_own_frame(trace):
        trace = trace.tb_next  # frames of this package do not help the user
    if trace is None and isinstance(error, RecursionError):
        subject = "A value"
        if task:
            subject = f"A value that task {node}/{task} reads, returns or updates"
        error = DefinitionError(
            f"{subject} is nested too deeply to be copied, sent or saved. Use a flat list or dict in "
            f"which items name each other by index or key."
        )
    # The message of an error that this package raised says everything without a traceback.
    is_plain = not is_users and isinstance(error, JobRunnerError | NotPicklableError)
    lines: list[str] = []
    if not is_plain or error.__cause__ is not None:
        lines = traceback.format_exception(type(error), error, trace or error.__traceback__)
    is_ours = isinstance(error, CheckpointError | DefinitionError) and not is_users
    summary = "".join(traceback.format_exception_only(error)).strip()
    return Failure(
        node=node,
        task=task,
        summary=shorten(summary, _SUMMARY_LENGTH),
        traceback=shorten("".join(lines)),
        error=_pickled(error),
        is_own=is_own or is_ours,
    )


def is_true(name: str, value: Any) -> bool:
    """Whether a stop condition's value is true; `DefinitionError` if that cannot be said."""
    if isinstance(value, np.ndarray) and value.size != 1:
        raise DefinitionError(
            f"The stop condition {name!r} is an array of shape {value.shape}; only an array of "
            f"one element is true or false. Return a bool from its task, as in bool(x.all())."
        )
    try:
        return bool(value)
    except Exception as error:
        raise DefinitionError(
            f"The stop condition {name!r} is of type {type(value).__qualname__}, and bool() of it "
            f"fails: {error}. Return a bool from its task."
        ) from error


def _pickled(error: BaseException) -> bytes | None:
    """Pickle an exception so that it can be unpickled: without its causes, which the traceback has."""
    with suppress(Exception):  # a class may forbid it
        error.args = tuple(map(_shortened, error.args))
        if hasattr(error, "__notes__"):
            error.__notes__ = [shorten(note) for note in error.__notes__]
    # Dask's exception reducer also pickles these.
    error.__cause__ = error.__context__ = error.__traceback__ = None
    try:
        data = bytes(cloudpickle.dumps(error))
        pickle.loads(data)
    except Exception:
        logger.debug("Cannot pickle %r", type(error), exc_info=True)
        return None
    return data


def _shortened(argument: object) -> object:
    if isinstance(argument, str):
        return shorten(argument)
    return argument


def _is_own_frame(trace: TracebackType) -> bool:
    # `jobrunner.testing` wraps users' functions, so its frames are shown.
    package = _package_of(trace)
    return package.partition(".")[0] == "jobrunner" and package != "jobrunner.testing"


def _package_of(trace: TracebackType) -> str:
    return trace.tb_frame.f_globals.get("__package__") or ""
