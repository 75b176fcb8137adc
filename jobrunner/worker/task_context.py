"""What `current_task` tells a task's function about itself, and its random numbers."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from types import GeneratorType
from typing import Any, ParamSpec, TypeVar

import numpy as np

from jobrunner.define import (
    MOST_DIGITS,
    Metric,
    MetricEntry,
    Total,
    check_seedable,
    checked,
    seeded_generators,
    without_partials,
)
from jobrunner.errors import DefinitionError, ExecutionError
from jobrunner.workspace import WorkspaceView

_P = ParamSpec("_P")
_R = TypeVar("_R")


_SHORT = (bool, float, str)
_PLAIN = (bool, int, float, str)
_LARGEST = 10**MOST_DIGITS
_TAKEN = ("", "epoch", "seconds")  # as names of metrics: by results and logs


@dataclass(repr=False, eq=False)
class CurrentTask:
    """The task that runs in this thread: see `current_task`.

    `epoch` is None outside a runner. `step` counts the epoch group's runs within the epoch, from 0;
    `attempt` how often the run has bound its nodes anew, after a loss or to move them. `instance` goes
    from 0 to `num_instances` - 1; in a pipe, it is the number of the item. In `setup` and `into`
    functions it is negative.
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
    _record: Callable[[dict[str, Any]], None]
    _is_over: Callable[[], bool] = lambda: False
    _num_seeded: int = 0  # calls of `seeded` functions that have begun

    @cached_property
    def rng(self) -> np.random.Generator:
        """The task's own random numbers.

        They depend on job seed, group, node (its first name), task, epoch, step and
        instance alone: they are the same after a restart and on any number of workers.
        """
        key = int.from_bytes(self._digest(), "little")
        return np.random.Generator(np.random.PCG64(key))

    def _global_generators(self) -> AbstractContextManager[None]:
        """Seed the global generators for one call; afterwards they are as they were before it."""
        self._num_seeded += 1
        return seeded_generators(self._digest("global", self._num_seeded))

    def _digest(self, *more: object) -> bytes:
        """What random numbers depend on, the same on every machine and in every release."""
        task = (self._seed, self.group, self.workspace.identity, self.name)
        digest = hashlib.blake2b(digest_size=32)
        for part in (*task, self.epoch, self.step, self.instance, *more):
            text = repr(part).encode("utf-8", "surrogatepass")
            digest.update(len(text).to_bytes(8, "little") + text)
        return digest.digest()

    @property
    def is_cancelled(self) -> bool:
        """Whether another task has failed or a worker was lost, so that nobody takes the results.

        Nothing stops a running function: one that takes minutes may look and return early.
        """
        return self._is_over()

    def report(self, **metrics: Metric | Total | np.ndarray) -> None:
        """Add to the epoch's metrics. Of several values, the last in order of definition counts.

        Parameters
        ----------
        **metrics
            A number, bool or str, also as a NumPy scalar or array without axes. `Mean`, `Sum`,
            `Min` or `Max` of a number combines it with what other tasks report under the name. The
            names ``epoch`` and ``seconds`` are taken.

        Raises
        ------
        TypeError
            A metric is of another type.
        ValueError
            A name is empty or taken, or an int has more than 1,000 digits.
        """
        self._record({key: self._plain(key, value) for key, value in metrics.items()})

    def _plain(self, key: str, value: object) -> object:
        if key in _TAKEN:
            raise ValueError(
                f"Task {self.node}/{self.name} reports a metric as {key!r}; a name must not be empty, "
                f"and each epoch has a metric 'epoch' and 'seconds' of its own. Give it another name."
            )
        if type(value) in _SHORT:
            return value
        plain = value
        if isinstance(value, np.generic | np.ndarray) and not value.shape:
            plain = value.item()
        for kind in _PLAIN:
            if isinstance(plain, kind):
                if kind is int and not -_LARGEST < plain < _LARGEST:
                    raise ValueError(
                        f"Task {self.node}/{self.name} reports {key!r} as an int of more than "
                        f"{MOST_DIGITS:,} digits. Report its logarithm, or a str."
                    )
                return kind(plain)
        if isinstance(value, Total):
            return value
        raise TypeError(
            f"Task {self.node}/{self.name} reports {key!r} as {type(value).__qualname__}; a metric "
            f"must be a number, a bool, a str or a NumPy scalar, or Mean, Sum, Min or Max of a "
            f"number. Convert it, as in report({key}=float(x))."
        )

    def __repr__(self) -> str:
        where = f"{self.node}/{self.name}"
        return f"<CurrentTask {where!r} of {self.group!r}, epoch {self.epoch}, step {self.step}>"


class Reports:
    """What the tasks of one worker report in one run of a group. Not safe in several threads."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], MetricEntry] = {}
        self._combined: dict[tuple[str, str, int, int], Total] = {}

    def add(
        self, values: Mapping[str, Any], node: str, task: str, order: int, instance: int
    ) -> None:
        """Add what `CurrentTask.report` got, checked; see `MetricEntry` for `order`."""
        for name, value in values.items():
            if isinstance(value, Total):
                self._combine(value, name, node, task, order, instance)
                continue
            previous = self._last.get((name, node))
            if previous is not None and (previous.order, previous.instance) > (order, instance):
                continue
            self._last[name, node] = MetricEntry(name, node, order, instance, value)

    def entries(self) -> list[MetricEntry]:
        """All of it."""
        combined = [MetricEntry(*key, total) for key, total in self._combined.items()]
        return [*self._last.values(), *combined]

    def _combine(
        self, value: Total, name: str, node: str, task: str, order: int, instance: int
    ) -> None:
        key = (name, node, order, instance)
        before = self._combined.get(key)
        if before is not None:
            if before.how != value.how:
                raise DefinitionError(
                    f"Task {node}/{task} reports {name!r} in different ways. Report it in one way."
                )
            value = before & value
        self._combined[key] = value


# Set at each call of a task's function, so it is cheap: a list `[make, task, instance, None]`.
# `current_task` replaces the None by `make(task, instance)`.
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
        make, task, instance, _ = frame
        frame[3] = make(task, instance)
    current: CurrentTask = frame[3]
    return current


def renumber(instance: int) -> None:
    """Make this thread's task another instance of itself, which draws its own random numbers."""
    frame = FRAME.get()
    if frame is not None:
        FRAME.set([frame[0], frame[1], instance, None])


def cancellation() -> Callable[[], bool]:
    """A function that tells whether the task of this thread `is_cancelled`; no task never is."""
    if FRAME.get() is None:
        return lambda: False
    task = current_task()
    return lambda: task.is_cancelled


# ---- global generators


@checked
def seeded(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make a function of a task draw the same numbers from global generators in every run.

    While it runs, the global generators of Python (`random`), NumPy (`numpy.random`) and PyTorch, if
    that is installed, also on CUDA, are seeded as ``current_task().rng`` is: by the job's seed, the
    group, node, task, epoch, step and instance, and by how many such calls the task has begun. Then
    they continue as before. So nothing needs to be saved, and a resumed run draws what an
    uninterrupted one does, on any number of workers.

    Parameters
    ----------
    function : callable
        A task's function, the `processor` of a `pipe`, a function of `setup`, or what these call.
        Of a generator function, only what runs before its first ``yield`` is covered.

    Returns
    -------
    callable
        Takes and returns the same. Outside a task, it only calls `function`.

    Raises
    ------
    DefinitionError
        `function` is none, or a method of a generator, such as ``random.random``.

    Notes
    -----
    A process has one set of global generators, so such calls take turns in each worker process, and
    instances must not wait for each other in them. Another task that draws from global generators
    at the same time without `seeded` disturbs them, and so do threads that the function starts.

    Examples
    --------
    >>> @seeded
    ... def shuffle(rows):
    ...     return list(np.random.permutation(rows))
    """
    check_seedable(function, "seeded")

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        return _call_seeded(function, args, kwargs)

    return call


def _call_seeded(
    function: Callable[..., _R], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _R:  # not within `call`, which may be pickled by value
    if FRAME.get() is None:
        return function(*args, **kwargs)
    with current_task()._global_generators():
        value = function(*args, **kwargs)
        if not isinstance(value, GeneratorType):
            return value
        first = next(value)
    return _go_on(first, value)  # type: ignore[return-value]


def seed_calls(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a task's function `seeded`, or what a function with `seeded_within` calls."""
    within = getattr(without_partials(function), "seeded_within", seeded)
    wrapped: Callable[..., Any] = within(function)
    return wrapped


def _go_on(first: Any, generator: Generator[Any, Any, Any]) -> Iterator[Any]:
    yield first
    yield from generator
