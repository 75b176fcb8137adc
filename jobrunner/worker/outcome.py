"""4 run: what a run of a group comes to, on one worker and in all. Plain data."""

from __future__ import annotations

import json
import logging
import pickle
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple

import cloudpickle
import numpy as np

from jobrunner.errors import CheckpointError, DefinitionError, ExecutionError, JobRunnerError
from jobrunner.worker.task_context import Metric
from jobrunner.workspace import NotPicklableError

logger = logging.getLogger(__name__)


class MetricEntry(NamedTuple):
    """What a task reported under a name; `order` and `instance` say when, by definition."""

    name: str
    node: str
    order: int
    instance: int
    value: Metric


@dataclass(frozen=True, slots=True)
class Failure:
    """A function that raised, in a form that can travel.

    Attributes
    ----------
    node, task : str
        Where; empty where it was no task's function.
    summary : str
        Type and message.
    traceback : str
        As formatted where it was raised; empty where it would hold nothing of the user's.
    error : bytes or None
        The pickled exception, if it can be pickled.
    is_own : bool
        Of the error tree and to be raised as it is, not as the cause of a `TaskFailedError`.
    """

    node: str
    task: str
    summary: str
    traceback: str
    error: bytes | None
    is_own: bool

    def exception(self) -> BaseException:
        """The exception itself, or an `ExecutionError` that says what it was."""
        if self.error is not None:
            try:
                error = pickle.loads(self.error)
            except Exception:  # its class or its arguments may not be there on the client
                logger.info("Could not unpickle %s", self.summary, exc_info=True)
            else:
                if isinstance(error, BaseException):
                    return error
        return ExecutionError(self.summary)

    def to_message(self) -> dict[str, Any]:
        """For `Failure(**message)` at the other end."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class Outcome:
    """What one worker's part of a run came to.

    Attributes
    ----------
    status : {"done", "failed", "aborted"}
    failure : Failure or None
    reason : str
        Why it was aborted.
    stopped : list of str
        Names of the stop conditions that are true.
    metrics : list of MetricEntry
    """

    status: Literal["done", "failed", "aborted"]
    failure: Failure | None = None
    reason: str = ""
    stopped: list[str] = field(default_factory=list)
    metrics: list[MetricEntry] = field(default_factory=list)


class UnderWay(NamedTuple):
    """A run of a group that has not ended.

    Attributes
    ----------
    group : str
    epoch : int or None
    seconds : float
        Since the client asked for it.
    tasks : tuple of str
        Those that ran when their workers were last heard, as ``node/task``.
    """

    group: str
    epoch: int | None
    seconds: float
    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What a run of a group came to, on all workers.

    Attributes
    ----------
    seconds : float
        That the client waited for it; of an epoch in a batch, that the slowest worker took.
    stopped : tuple of str
        Names of the stop conditions that are true, in order of definition.
    metrics : dict of str to bool, int, float or str
        For each name the value reported last in order of definition; where several nodes report
        a name, each one's as ``"node/name"`` too.
    """

    seconds: float
    stopped: tuple[str, ...]
    metrics: dict[str, Metric]


def describe_failure(
    node: str, task: str, error: BaseException, *, is_own: bool = False
) -> Failure:
    """Make a `Failure` of an exception that was just caught.

    Checkpoint and definition errors are raised as they are wherever they come from.
    """
    trace = error.__traceback__
    while trace is not None and _is_own(trace):
        trace = trace.tb_next  # our frames tell the user nothing
    # Nor does a traceback of these alone, where the message was written for people.
    is_told = trace is None and isinstance(error, JobRunnerError | NotPicklableError)
    lines = (
        []
        if is_told and error.__cause__ is None
        else traceback.format_exception(type(error), error, trace or error.__traceback__)
    )
    return Failure(
        node=node,
        task=task,
        summary="".join(traceback.format_exception_only(error)).strip(),
        traceback="".join(lines),
        error=_pickled(error),
        is_own=is_own or isinstance(error, CheckpointError | DefinitionError),
    )


def merge_metrics(entries: Iterable[Sequence[Any]]) -> dict[str, Metric]:
    """One value for each name, of what all workers sent; see `GroupResult`."""
    by_name: dict[str, list[MetricEntry]] = {}
    for entry in entries:
        by_name.setdefault(entry[0], []).append(MetricEntry(*entry))
    merged: dict[str, Metric] = {}
    for name, found in by_name.items():
        found.sort(key=lambda entry: (entry.order, entry.instance, entry.node))
        merged[name] = found[-1].value
    for name, found in by_name.items():
        if len(found) > 1:
            merged.update({f"{entry.node}/{name}": entry.value for entry in found})
    return merged


def merge_runs(
    by_worker: Sequence[Sequence[Mapping[str, Any]]], conditions: Sequence[str]
) -> GroupResult:
    """What the runs of one epoch came to on all workers.

    Parameters
    ----------
    by_worker : sequence
        For each worker the runs in order, each with ``"stopped"``, ``"metrics"`` (JSON text) and
        ``"seconds"``.
    conditions : sequence of str
        Names of all stop conditions, in their order.
    """
    metrics: dict[str, Metric] = {}
    for runs in zip(*by_worker, strict=True):
        texts = [run["metrics"] for run in runs if run["metrics"]]
        metrics.update(merge_metrics(entry for text in texts for entry in json.loads(text)))
    fired = {name for runs in by_worker for name in runs[-1]["stopped"]}
    return GroupResult(
        seconds=max(sum(run["seconds"] for run in runs) for runs in by_worker),
        stopped=tuple(name for name in conditions if name in fired),
        metrics=metrics,
    )


def is_true(name: str, value: Any) -> bool:
    """Read a stop condition.

    Raises
    ------
    DefinitionError
        The value is an array of none or several elements, or has no truth.
    """
    if isinstance(value, np.ndarray) and value.size != 1:
        raise DefinitionError(
            f"The stop condition {name!r} is an array of shape {value.shape}, and only one "
            f"element has a truth. Reduce it in its task, as in bool(x.all())."
        )
    try:
        return bool(value)
    except Exception as error:
        raise DefinitionError(
            f"The stop condition {name!r} is a {type(value).__qualname__}, of which bool() fails: "
            f"{error}. Return a bool from its task."
        ) from error


def _pickled(error: BaseException) -> bytes | None:
    """The exception as a pickle that opens again; without its history if that cannot travel."""
    for is_whole in (True, False):
        if not is_whole:
            # Dask pickles what an exception was raised from and during, tracebacks and all.
            error.__cause__ = error.__context__ = error.__traceback__ = None
        for dumps in (pickle.dumps, cloudpickle.dumps):
            try:
                data = bytes(dumps(error))
                pickle.loads(data)
            except Exception:
                logger.debug("%s cannot pickle %r", dumps.__module__, type(error), exc_info=True)
            else:
                return data
    return None


def _is_own(trace: TracebackType) -> bool:
    """Whether a frame is of this package; `jobrunner.testing` wraps users' functions."""
    package = trace.tb_frame.f_globals.get("__package__") or ""
    return package.partition(".")[0] == "jobrunner" and package != "jobrunner.testing"
