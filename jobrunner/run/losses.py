"""6 loop: what a run does about losses: it counts them, and waits for a scheduler."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

from jobrunner.cluster import Session
from jobrunner.define import Job
from jobrunner.errors import NodeLostError, SchedulerLostError, TaskFailedError
from jobrunner.run.callbacks import Callbacks
from jobrunner.run.decisions import Losses

logger = logging.getLogger(__name__)

Loss = NodeLostError | SchedulerLostError | TaskFailedError


class Survival:
    """The losses of one run.

    Parameters
    ----------
    job : Job
    max_restarts : int
    callbacks : Callbacks
    where_to_go_on : callable
        Says where the same command would go on from, for errors.

    Attributes
    ----------
    losses : Losses
    is_careful : bool
        What is under way runs one task at a time, each once the client knows of it.
    """

    def __init__(
        self,
        job: Job,
        max_restarts: int,
        callbacks: Callbacks,
        where_to_go_on: Callable[[], str],
    ) -> None:
        self.losses = Losses(max_restarts)
        self.is_careful = False
        self._job = job
        self._callbacks = callbacks
        self._where_to_go_on = where_to_go_on
        self._epochs_under_way = range(0)

    def begin(self, epochs: range) -> None:
        """Take note of the epochs that are run next, in one go; none: nodes are placed."""
        self._epochs_under_way = epochs
        self.is_careful = bool(epochs) and self.losses.call_for_care(epochs.start)

    def is_transient(self, error: TaskFailedError) -> bool:
        """Whether the task that failed had said that such an error passes."""
        group = self._job.groups.get(error.group)
        task = group.find(error.node, error.task) if group is not None else None
        return task is not None and isinstance(error.__cause__, task.transient_errors)

    def count(self, error: Loss) -> None:
        """Take note of a loss; raises it when there are too many."""
        if isinstance(error, NodeLostError):
            self.losses = self.losses.after_loss(
                error.running, self._epochs_under_way, was_careful=self.is_careful
            )
        else:
            self.losses = self.losses.after_loss()
        if self.losses.are_too_many:
            raise _with_message(
                error,
                f"{error} That was loss {self.losses.in_a_row} with no epoch recorded in between, "
                f"and max_restarts is {self.losses.limit}.{self.losses.accusation} Run the same "
                f"command again to go on from {self._where_to_go_on()}.",
            ) from error

    def await_scheduler(self, session: Session, seconds: float, error: Loss) -> None:
        """Where a loss is that of the scheduler, wait until it is back.

        Raises
        ------
        SchedulerLostError
            It is not back in that time.
        """
        if not isinstance(error, SchedulerLostError) and session.is_connected:
            return
        logger.info("The scheduler is lost: %s", error)
        self._callbacks.warn(
            f"The scheduler is lost; waiting, for at most {seconds:g} s, for it to be back at "
            f"its address."
        )
        try:
            session.reconnect(seconds)
        except SchedulerLostError as lost:
            raise SchedulerLostError(
                f"{lost} Run the same command again to go on from {self._where_to_go_on()}."
            ) from error

    def record(self) -> None:
        """An epoch was recorded: losses count from here."""
        self.losses = self.losses.after_record()


def _with_message(error: Loss, message: str) -> Loss:
    told = copy.copy(error)
    told.args = (message,)
    return told
