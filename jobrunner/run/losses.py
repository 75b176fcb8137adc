"""Count lost workers, a lost scheduler and transient errors, and find the tasks that cause them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

from jobrunner.define import Job
from jobrunner.errors import NodeLostError, SchedulerLostError, TaskFailedError

Loss = NodeLostError | SchedulerLostError | TaskFailedError


class Lost(NamedTuple):
    """One loss."""

    running: Collection[str]  # the tasks that ran on the lost worker, as ``node/task``, if known
    epochs: range  # the epochs that were under way
    is_careful: bool  # each task was reported before it began, so `running` is certain


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of a run; "in a row" means with no epoch recorded in between."""

    limit: int  # how many in a row a run recovers from
    in_all: int = 0
    in_a_row: tuple[Lost, ...] = ()

    def after_loss(
        self, running: Collection[str] = (), epochs: range = range(0), *, was_careful: bool = False
    ) -> Losses:
        """Add a loss; see `Lost`."""
        lost = Lost(tuple(running), epochs, was_careful)
        return replace(self, in_all=self.in_all + 1, in_a_row=(*self.in_a_row, lost))

    def after_error(self, error: Loss, epochs: range, *, was_careful: bool) -> Losses:
        """Add the loss that an error reports."""
        if isinstance(error, NodeLostError):
            return self.after_loss(error.running, epochs, was_careful=was_careful)
        return self.after_loss()

    def after_record(self) -> Losses:
        """Begin a new row: an epoch was recorded."""
        return Losses(self.limit, self.in_all)

    @property
    def careful_epochs(self) -> range:
        """The epochs to run one task at a time, to find the task that kills workers.

        Empty after a single loss, which usually has another cause.
        """
        epochs = [lost.epochs for lost in self.in_a_row if lost.epochs]
        if len(self.in_a_row) < 2 or not epochs:
            return range(0)
        return range(min(e.start for e in epochs), max(e.stop for e in epochs))

    @property
    def are_too_many(self) -> bool:
        """Whether the run must end."""
        return len(self.in_a_row) > self.limit

    @property
    def suspects(self) -> list[str]:
        """Tasks that ran at each of several losses; careful runs outweigh others."""
        losses = self._careful or (self.in_a_row if len(self.in_a_row) > 1 else ())
        first = losses[0].running if losses else ()
        return [name for name in first if all(name in lost.running for lost in losses)]

    @property
    def _careful(self) -> tuple[Lost, ...]:
        return tuple(lost for lost in self.in_a_row if lost.is_careful)

    def describe(self) -> str:
        """Say how many losses came in a row, and which tasks are suspect."""
        count = (
            f"That was loss {len(self.in_a_row)} in a row with no epoch recorded in between; "
            f"max_restarts is {self.limit}."
        )
        suspects, careful = self.suspects, len(self._careful)
        if not suspects:
            return count
        is_one = len(suspects) == 1
        were, tasks, one = ("was", "task", "it") if is_one else ("were", "tasks", "one of them")
        names = " and ".join(suspects)
        if not careful:
            return f"{count} {names} {were} running each time."
        times = "the last time" if careful == 1 else f"each of the last {careful} times"
        return (
            f"{count} {names} {were} the only {tasks} running {times} a worker died; {one} "
            f"probably kills its worker."
        )


def is_transient(job: Job, error: TaskFailedError) -> bool:
    """Whether the failed task declares its error as transient."""
    group = job.groups.get(error.group)
    task = group.find(error.node, error.task) if group is not None else None
    return task is not None and isinstance(error.__cause__, task.transient_errors)
