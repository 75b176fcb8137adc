"""6 loop: what a run is told: its options at the start, and requests while it runs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import get_args

from jobrunner.checkpoint import MultiNodeCheckpointManager
from jobrunner.define import Job
from jobrunner.errors import DefinitionError
from jobrunner.run.resume import Policy
from jobrunner.run.saver import SaveErrorPolicy
from jobrunner.run.upload import CopyTo, UploadTaskGroupBuilder


@dataclass(frozen=True, slots=True)
class Options:
    """What a `JobRunner` was made with; its parameters say what each is."""

    job: Job
    manager: MultiNodeCheckpointManager | None
    policy: Policy
    upload_task_group_builder: UploadTaskGroupBuilder | None
    max_restarts: int
    on_save_error: SaveErrorPolicy
    worker_wait_seconds: float
    scheduler_wait_seconds: float
    epoch_deadline_seconds: float | None
    task_deadline_seconds: float | None
    grace_seconds: float | None
    callbacks: Sequence[object]

    def check(self) -> None:
        """Refuse what cannot be.

        Raises
        ------
        DefinitionError
            An option cannot be what it says.
        """
        if not isinstance(self.job, Job):
            raise DefinitionError(f"JobRunner runs a Job; got {type(self.job).__name__}.")
        where = f"JobRunner of job {self.job.name!r}"
        if self.on_save_error not in get_args(SaveErrorPolicy):
            raise DefinitionError(
                f"{where}: on_save_error is 'warn', 'refuse' or 'raise'; got "
                f"{self.on_save_error!r}."
            )
        resume_from, num_epochs = self.policy.resume_from, self.policy.num_epochs
        if resume_from not in ("latest", None):
            _check_int(where, "resume_from_epoch, unless 'latest' or None,", resume_from, 0)
        _check_int(where, "max_restarts", self.max_restarts, 0)
        if num_epochs is not None:
            _check_int(where, "num_epochs", num_epochs, 1)
        for what in (
            "worker_wait_seconds",
            "scheduler_wait_seconds",
            "epoch_deadline_seconds",
            "task_deadline_seconds",
            "grace_seconds",
        ):
            seconds = getattr(self, what)
            is_left_out = seconds is None and not what.endswith("wait_seconds")
            if not is_left_out and not _is_duration(seconds):
                raise DefinitionError(f"{where}: {what} is a number of seconds; got {seconds!r}.")
        if not isinstance(self.manager, MultiNodeCheckpointManager | None):
            raise DefinitionError(
                f"{where}: checkpoint_manager is a MultiNodeCheckpointManager or a "
                f"CheckpointManager; got {self.manager!r}. For a directory, write "
                f"MultiNodeCheckpointManager(path)."
            )
        if isinstance(self.callbacks, str) or not isinstance(self.callbacks, Sequence):
            raise DefinitionError(f"{where}: callbacks is a list of them; got {self.callbacks!r}.")
        for callback in self.callbacks:
            if isinstance(callback, type):
                raise DefinitionError(
                    f"{where}: a callback is an object; got the class {callback.__name__}. Write "
                    f"{callback.__name__}()."
                )
        if self.manager is None:
            for what, is_given in (
                ("resume_from_epoch", isinstance(resume_from, int)),
                ("upload_task_group_builder", self.upload_task_group_builder is not None),
            ):
                if is_given:
                    raise DefinitionError(f"{where}: {what} needs a checkpoint_manager.")
        elif self.upload_task_group_builder is not None:
            self._check_upload(where, self.upload_task_group_builder, self.manager)

    def _check_upload(
        self, where: str, builder: UploadTaskGroupBuilder, manager: MultiNodeCheckpointManager
    ) -> None:
        if isinstance(builder, type) or not callable(getattr(builder, "build", None)):
            raise DefinitionError(
                f"{where}: upload_task_group_builder is an object with a method "
                f"build(epoch, manager), such as CopyTo(path); got {builder!r}."
            )
        if isinstance(builder, CopyTo):
            builder.check(manager)


@dataclass(slots=True)
class Requests:
    """What the user may ask of a run while it runs.

    Attributes
    ----------
    stop : str
        Who asked it to stop once its epoch has ended; empty: nobody.
    save : threading.Event
        Set: save when the step that is under way ends.
    """

    stop: str = ""
    save: threading.Event = field(default_factory=threading.Event)


def _check_int(where: str, what: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DefinitionError(f"{where}: {what} is an int from {least} on; got {value!r}.")


def _is_duration(value: object) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and 0 <= float(value) < float("inf")  # type: ignore[arg-type]
