"""What a run concludes from lost workers, a lost scheduler and errors that pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from jobrunner.cluster import Session
from jobrunner.define import Job
from jobrunner.errors import NodeLostError, SchedulerLostError, TaskFailedError

logger = logging.getLogger(__name__)

Loss = NodeLostError | SchedulerLostError | TaskFailedError


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses with no epoch recorded in between."""

    limit: int  # the most in a row that a run recovers from
    in_a_row: int = 0
    in_all: int = 0
    running: Mapping[str, int] | None = None  # node/task -> losses at which it was heard running
    careful: int = 0  # losses in a row while each task was reported before it began
    surely: Mapping[str, int] | None = None  # node/task -> the careful ones at which it ran
    epochs: range = range(0)  # in which those in a row came
    careful_epochs: range = range(0)
    """The epochs to run carefully, to find the task that causes the losses: none after a single
    loss, which has other causes as a rule."""

    def after_loss(
        self,
        running: Collection[str] = (),
        epochs: range = range(0),
        *,
        was_careful: bool = False,
    ) -> Losses:
        """Count a loss: `running` ran on the lost worker, `epochs` were under way."""
        epochs = _span(self.epochs, epochs)
        return replace(
            self,
            in_a_row=self.in_a_row + 1,
            in_all=self.in_all + 1,
            running=_count(self.running, running),
            careful=self.careful + was_careful,
            surely=_count(self.surely, running if was_careful else ()),
            epochs=epochs,
            careful_epochs=epochs if self.in_a_row else range(0),
        )

    def after_error(self, error: Loss, epochs: range, *, was_careful: bool) -> Losses:
        """Count an error; `epochs` were under way."""
        if isinstance(error, NodeLostError):
            return self.after_loss(error.running, epochs, was_careful=was_careful)
        return self.after_loss()

    def after_record(self) -> Losses:
        """Begin a new row: an epoch was recorded."""
        return Losses(self.limit, in_all=self.in_all)

    @property
    def are_too_many(self) -> bool:
        """Whether the run must end."""
        return self.in_a_row > self.limit

    @property
    def suspects(self) -> list[str]:
        """Tasks that were running at every one of several losses."""
        if self.careful:
            return [name for name, count in (self.surely or {}).items() if count == self.careful]
        if self.in_a_row < 2:
            return []
        return [name for name, count in (self.running or {}).items() if count == self.in_a_row]

    def describe(self) -> str:
        """Say how many there were and which tasks are suspect, in one sentence or two."""
        told = (
            f"That was loss {self.in_a_row} with no epoch recorded in between, and max_restarts "
            f"is {self.limit}."
        )
        names = " and ".join(self.suspects)
        if not names:
            return told
        is_one = len(self.suspects) == 1
        if not self.careful:
            return f"{told} {names} {'was' if is_one else 'were'} running each time."
        were = "was the only task" if is_one else "were the only tasks"
        times = "the last time" if self.careful == 1 else f"each of the last {self.careful} times"
        kills = (
            "it probably kills its worker" if is_one else "one of them probably kills its worker"
        )
        return f"{told} {names} {were} running {times} a worker died; {kills}."


def is_transient(job: Job, error: TaskFailedError) -> bool:
    """Whether the failed task declares its error as one that passes."""
    group = job.groups.get(error.group)
    task = group.find(error.node, error.task) if group is not None else None
    return task is not None and isinstance(error.__cause__, task.transient_errors)


def await_scheduler(
    session: Session, seconds: float, loss: Loss, warn: Callable[[str], None]
) -> None:
    """Wait for a lost scheduler; raise `SchedulerLostError` if it is not back in time."""
    if isinstance(loss, SchedulerLostError) or not session.is_connected:
        logger.info("The scheduler is lost: %s", loss)
        warn(f"The scheduler is lost. Waiting up to {seconds:g} s for it to return at its address.")
        session.reconnect(seconds)


def _count(counts: Mapping[str, int] | None, names: Collection[str]) -> dict[str, int]:
    new = dict(counts or {})
    for name in names:
        new[name] = new.get(name, 0) + 1
    return new


def _span(one: range, other: range) -> range:
    """The shortest range that holds both."""
    if not one or not other:
        return one or other
    return range(min(one.start, other.start), max(one.stop, other.stop))
