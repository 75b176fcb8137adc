"""Count lost workers, a lost scheduler and transient errors, and find the tasks that cause them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from jobrunner.define import Job
from jobrunner.errors import NodeLostError, SchedulerLostError, TaskFailedError

Loss = NodeLostError | SchedulerLostError | TaskFailedError


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of a run; "in a row" means with no epoch recorded in between."""

    limit: int  # how many in a row a run recovers from
    in_all: int = 0
    in_a_row: tuple[tuple[str, ...], ...] = ()
    """The tasks that ran at each loss on the lost worker, as ``node/task``, if known."""

    def after_loss(self, running: Collection[str] = ()) -> Losses:
        """Add a loss, at which these tasks ran on the lost worker."""
        in_a_row = (*self.in_a_row, tuple(running))
        return replace(self, in_all=self.in_all + 1, in_a_row=in_a_row)

    def after_error(self, error: Loss) -> Losses:
        """Add the loss that an error reports."""
        if isinstance(error, NodeLostError):
            return self.after_loss(error.running)
        return self.after_loss()

    def after_record(self) -> Losses:
        """Begin a new row: an epoch was recorded."""
        return Losses(self.limit, self.in_all)

    @property
    def are_too_many(self) -> bool:
        """Whether the run must end."""
        return len(self.in_a_row) > self.limit

    @property
    def suspects(self) -> list[str]:
        """Tasks that ran at each of several losses."""
        if len(self.in_a_row) < 2:
            return []
        first = self.in_a_row[0]
        return [name for name in first if all(name in running for running in self.in_a_row)]

    def describe(self) -> str:
        """Say how many losses came in a row, and which tasks are suspect."""
        count = (
            f"That was loss {len(self.in_a_row)} in a row with no epoch recorded in between; "
            f"max_restarts is {self.limit}."
        )
        suspects = self.suspects
        if not suspects:
            return count
        verb = "was" if len(suspects) == 1 else "were"
        return f"{count} {' and '.join(suspects)} {verb} running each time."


def is_transient(job: Job, error: TaskFailedError) -> bool:
    """Whether the failed task declares its error as transient."""
    group = job.groups.get(error.group)
    task = group.find(error.node, error.task) if group is not None else None
    return task is not None and isinstance(error.__cause__, task.transient_errors)
