"""What `current_task` tells a task's function about itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from jobrunner.errors import ExecutionError
from jobrunner.workspace import WorkspaceView

Metric = bool | int | float | str


class MetricEntry(NamedTuple):
    """A reported metric."""

    name: str
    node: str
    order: int  # the task's place in the order of definition
    instance: int
    value: Metric


@dataclass(repr=False, eq=False)
class CurrentTask:
    """The task that runs in this thread: see `current_task`.

    `epoch` is None outside a runner. `step` counts the epoch group's runs within the epoch, from 0;
    `attempt` how many times the runner has recovered. `instance` goes from 0 to `num_instances` - 1;
    in a pipe, it is the number of the item. In `setup` and `into` functions it is negative.
    `workspace` has the node's blobs, private ones of this run included, read-only.
    """

    job: str
    group: str
    _seed: int  # the job's
    epoch: int | None
    step: int
    attempt: int
    node: str
    name: str
    instance: int
    workspace: WorkspaceView
    _record: Callable[[dict[str, Metric]], None]
    _is_over: Callable[[], bool] = lambda: False

    @cached_property
    def rng(self) -> np.random.Generator:
        """The task's own random numbers.

        They depend on job seed, group, node, task, epoch, step and instance alone: they are the same
        after a restart and on any number of workers.
        """
        task = (self.group, self.node, self.name)
        return make_rng(self._seed, *task, self.epoch, self.step, self.instance)

    @property
    def is_cancelled(self) -> bool:
        """Whether another task has failed or a worker was lost, so that nobody takes the results.

        Nothing stops a running function: one that takes minutes may look and return early.
        """
        return self._is_over()

    def report(self, **metrics: Metric) -> None:
        """Add to the epoch's metrics. Of several values, the last in order of definition counts.

        Parameters
        ----------
        **metrics : bool, int, float, str, or NumPy scalars of these

        Raises
        ------
        TypeError
            A metric is of another type.
        """
        self._record({key: self._plain(key, value) for key, value in metrics.items()})

    def _plain(self, key: str, value: object) -> Metric:
        plain = value.item() if isinstance(value, np.generic) else value
        for kind in (bool, int, float, str):
            if isinstance(plain, kind):
                return kind(plain)
        shape = f" of shape {value.shape}" if isinstance(value, np.ndarray) else ""
        raise TypeError(
            f"Task {self.node}/{self.name} reports {key!r} as {type(value).__qualname__}{shape}; "
            f"a metric must be a number, a bool, a str or a NumPy scalar. Convert it, as in "
            f"report({key}=float(x))."
        )

    def __repr__(self) -> str:
        where = f"{self.node}/{self.name}"
        return f"<CurrentTask {where!r} of {self.group!r}, epoch {self.epoch}, step {self.step}>"


# Set at each call of a task's function, so it is cheap: a list `[make, step, instance, None]`.
# `current_task` replaces the None by `make(step, instance)`.
FRAME: ContextVar[list[Any] | None] = ContextVar("jobrunner_task", default=None)


def current_task() -> CurrentTask:
    """Return the task whose function calls this.

    Returns
    -------
    CurrentTask
        With `job`, `node`, `group`, `epoch`, `step`, `attempt`, `instance`, `name`, `workspace`,
        `rng`, `is_cancelled` and `report(**metrics)`.

    Raises
    ------
    ExecutionError
        No task is running in this thread.

    Notes
    -----
    Runs on the worker, inside a task's function or a report step.
    """
    frame = FRAME.get()
    if frame is None:
        raise ExecutionError(
            "current_task() was called outside a task. Call it in the thread that runs a task's "
            "function, and pass other threads what they need as arguments."
        )
    if frame[3] is None:
        make, step, instance, _ = frame
        frame[3] = make(step, instance)
    task: CurrentTask = frame[3]
    return task


def renumber(instance: int) -> None:
    """Make this thread's task another instance of itself, which draws its own random numbers."""
    if (frame := FRAME.get()) is not None:
        FRAME.set([frame[0], frame[1], instance, None])


def cancellation() -> Callable[[], bool]:
    """A function that tells whether the task of this thread `is_cancelled`; no task never is."""
    if FRAME.get() is None:
        return lambda: False
    task = current_task()
    return lambda: task.is_cancelled


def make_rng(
    seed: int, group: str, node: str, task: str, epoch: int | None, step: int, instance: int
) -> np.random.Generator:
    """Make a generator that depends on the arguments alone, on every machine."""
    digest = hashlib.blake2b(digest_size=32)
    for part in (seed, group, node, task, epoch, step, instance):
        text = repr(part).encode("utf-8", "surrogatepass")
        digest.update(len(text).to_bytes(8, "little") + text)
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest.digest(), "little")))
