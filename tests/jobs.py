"""The job that most tests of runs use, callbacks that keep what they are told, and failing storage."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from distributed import Client

from jobrunner import Job, JobRunner, Node, Session, Task, current_task, epoch_limiter
from jobrunner.checkpoint.storage.posix import PosixFiles


def count(n: int) -> int:
    """One more, which is reported."""
    current_task().report(n=n + 1)
    return n + 1


def count_until(failure: int) -> Callable[[int], int]:
    """A function that counts, and fails instead of making one of the numbers."""

    def count_or_fail(n: int) -> int:
        if n + 1 == failure:
            raise ZeroDivisionError("by hand")
        return count(n)

    return count_or_fail


def counter(
    limit: int | None = None,
    fn: Callable[[Any], Any] = count,
    *,
    nodes: Sequence[str] = "a",
    start: Any = 0,
    transient_errors: Any = (),
    **options: Any,
) -> Job:
    """A job with a blob ``n`` on each node, which each step counts up from `start`."""
    with Job("counter", **options) as job:
        for node in nodes:
            with Node(node):
                with job.init_group:
                    Task(lambda: start, outputs="n", name="zero")
                Task(fn, inputs="n", outputs="n", name="count", transient_errors=transient_errors)
    if limit is not None:
        epoch_limiter(job, limit)
    return job


def walking(nodes: Sequence[str], epochs: int, interrupt: Callable[[Any], object]) -> Job:
    """Each node adds up random numbers; its task first calls ``interrupt(current_task())``."""

    def walk(x: Any) -> Any:
        interrupt(current_task())
        return x + current_task().rng.standard_normal(x.size)

    with Job("walk", seed=3) as job:
        for node in nodes:
            with Node(node):
                with job.init_group:
                    Task(np.zeros, outputs="x", kwargs={"shape": 100})
                Task(walk, inputs="x", outputs="x", name="walk")
    epoch_limiter(job, epochs)
    return job


def walked(session: Session, nodes: Sequence[str]) -> list[bytes]:
    """How far the nodes have come."""
    return [session.fetch(Node(node)["x"]).tobytes() for node in nodes]


def walk_undisturbed(client: Client, nodes: Sequence[str], epochs: int) -> list[bytes]:
    """How far they come if nothing happens."""
    with Session(client) as session:
        JobRunner(walking(nodes, epochs, bool)).run(session)
        return walked(session, nodes)


class Listener:
    """A callback that keeps warnings, placements and the epochs that were saved."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.placements: list[Mapping[str, str]] = []
        self.saved: list[Any] = []

    def on_warning(self, message: str) -> None:
        self.warnings.append(message)

    def on_placement(self, placement: Mapping[str, str]) -> None:
        self.placements.append(placement)

    def on_save(self, report: Any) -> None:
        self.saved.append(report.epoch)


class At:
    """A callback that does something once an epoch has ended."""

    def __init__(self, epoch: int, action: Callable[[], object]) -> None:
        self.epoch, self.action = epoch, action

    def on_epoch(self, epoch: int, seconds: float, metrics: Any) -> None:
        if epoch == self.epoch:
            self.action()


class RefusingFiles(PosixFiles):
    """Storage that refuses to write where a path contains one of some texts, but reads all."""

    def __init__(self, parts: Sequence[str], number: int = errno.ENOSPC) -> None:
        super().__init__()
        self.parts, self.number = parts, number

    def before(self, operation: str, path: str) -> None:
        is_write = operation in ("mkdir", "create", "write")
        if is_write and any(part in path for part in self.parts):
            raise OSError(self.number, os.strerror(self.number), path)
