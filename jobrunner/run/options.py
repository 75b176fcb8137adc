"""The options of a run, its callbacks, and requests while it runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol, get_args

from jobrunner.checkpoint import MultiNodeCheckpointManager
from jobrunner.define import Job, check_int
from jobrunner.errors import DefinitionError
from jobrunner.run.result import ResumePlan, RunResult, SaveReport
from jobrunner.run.resume import ResumeFrom
from jobrunner.run.saver import SaveErrorPolicy
from jobrunner.run.upload import CopyTo, UploadTaskGroupBuilder

logger = logging.getLogger(__name__)


class Callback(Protocol):
    """An object that a runner calls during a run; it may have any of these methods.

    They run on the client, between epochs; an exception in one ends the run. Set
    ``is_passive = True`` on a callback that only observes. If all are passive and nothing else
    needs the client, the workers run short epochs in a batch of `jobrunner.stint-seconds`, and
    `on_epoch` is called for each of them after the batch.
    """

    def on_start(self, plan: ResumePlan, total_epochs: int | None) -> None:
        """Handle the begin of the run; `total_epochs` is the limit, if there is one."""

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Handle the end of an epoch, before its checkpoint is written."""

    def on_save(self, report: SaveReport) -> None:
        """Handle a save: recorded, or failed with `SaveReport.error`."""

    def on_warning(self, message: str) -> None:
        """Handle a problem that does not end the run."""

    def on_stop_asked(self, reason: str, at_once: str) -> None:
        """Handle a signal that ends the run after its epoch; `at_once` says what ends it now."""

    def on_finish(self, result: RunResult) -> None:
        """Handle the end of the run, after its exit group."""


class Callbacks:
    """The callbacks of one run."""

    def __init__(self, callbacks: Sequence[object]) -> None:
        self._callbacks = callbacks

    @property
    def are_passive(self) -> bool:
        """Whether none of them must be called between two epochs."""
        return all(
            getattr(callback, "is_passive", False) or not hasattr(callback, "on_epoch")
            for callback in self._callbacks
        )

    def warn(self, message: str) -> None:
        """Report a problem to the callbacks and the log."""
        logger.warning(message)
        self.notify("on_warning", message)

    def notify(self, event: str, *args: object) -> None:
        """Call the method `event` of each callback that has it."""
        for callback in self._callbacks:
            handle = getattr(callback, event, None)
            if handle is not None:
                handle(*args)


@dataclass(slots=True)
class Requests:
    """What the user asked of a run that is under way."""

    stop: str = ""  # why to stop after the epoch; empty: not asked
    save: threading.Event = field(default_factory=threading.Event)  # save after the current step


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of a `JobRunner`, which documents them."""

    job: Job
    checkpoint_manager: MultiNodeCheckpointManager | None
    resume_from_epoch: ResumeFrom
    upload_task_group_builder: UploadTaskGroupBuilder | None
    max_restarts: int
    on_save_error: SaveErrorPolicy
    worker_wait_seconds: float
    scheduler_wait_seconds: float
    epoch_deadline_seconds: float | None
    task_deadline_seconds: float | None
    grace_seconds: float | None
    num_epochs: int | None
    callbacks: Sequence[object]

    def check(self) -> None:
        """Raise `DefinitionError` for an invalid value."""
        if not isinstance(self.job, Job):
            raise DefinitionError(f"JobRunner runs a Job; got {type(self.job).__name__}.")
        where = f"JobRunner of job {self.job.name!r}"
        if self.on_save_error not in get_args(SaveErrorPolicy):
            raise DefinitionError(
                f"{where}: on_save_error must be 'warn', 'refuse' or 'raise'; got "
                f"{self.on_save_error!r}."
            )
        if self.resume_from_epoch not in ("latest", None):
            what = f"{where}: resume_from_epoch, unless 'latest' or None,"
            check_int(self.resume_from_epoch, 0, what)
        check_int(self.max_restarts, 0, f"{where}: max_restarts")
        if self.num_epochs is not None:
            check_int(self.num_epochs, 1, f"{where}: num_epochs")
        for name in self.__slots__:
            if name.endswith("_seconds"):
                seconds = getattr(self, name)
                is_optional = not name.endswith("wait_seconds")
                if not (is_optional and seconds is None) and not _is_duration(seconds):
                    raise DefinitionError(
                        f"{where}: {name} must be a number of seconds >= 0; got {seconds!r}."
                    )
        manager, builder = self.checkpoint_manager, self.upload_task_group_builder
        if not isinstance(manager, MultiNodeCheckpointManager | None):
            raise DefinitionError(
                f"{where}: checkpoint_manager must be a MultiNodeCheckpointManager or a "
                f"CheckpointManager; got {manager!r}. For a directory, write "
                f"MultiNodeCheckpointManager(path)."
            )
        if isinstance(self.callbacks, str) or not isinstance(self.callbacks, Sequence):
            raise DefinitionError(f"{where}: callbacks must be a list; got {self.callbacks!r}.")
        for callback in self.callbacks:
            if isinstance(callback, type):
                raise DefinitionError(
                    f"{where}: a callback must be an object; got the class {callback.__name__}. "
                    f"Write {callback.__name__}()."
                )
        if manager is None:
            for name, is_given in (
                ("resume_from_epoch", isinstance(self.resume_from_epoch, int)),
                ("upload_task_group_builder", builder is not None),
            ):
                if is_given:
                    raise DefinitionError(f"{where}: {name} requires a checkpoint_manager.")
        elif builder is not None:
            if isinstance(builder, type) or not callable(getattr(builder, "build", None)):
                raise DefinitionError(
                    f"{where}: upload_task_group_builder must be an object with a method "
                    f"build(epoch, manager), such as CopyTo(path); got {builder!r}."
                )
            if isinstance(builder, CopyTo):
                builder.check(manager)


def _is_duration(value: object) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and 0 <= float(value) < float("inf")  # type: ignore[arg-type]
