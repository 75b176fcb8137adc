"""What callbacks are, and how a run calls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jobrunner.define import check_runs
from jobrunner.errors import DefinitionError
from jobrunner.run.result import ResumePlan, RunResult, SaveReport
from jobrunner.texts import get_logger, printable

if TYPE_CHECKING:
    from jobrunner.run.runner import JobRunner

logger = get_logger(__name__)


class Callback:
    """An object that a runner calls during a run; subclass it, or write a class with some methods.

    ``docs/callbacks.md`` says when each method is called, and in which thread.

    Attributes
    ----------
    is_passive : bool
        It only observes: the workers may run short epochs in a batch, and the run calls
        `on_epoch_start` and `on_epoch` for each of them after the batch.
    is_essential : bool
        An exception in one of its methods ends the run. Otherwise it is a warning.
    ends_by : str
        The name under which it ends runs, if it does: what it passes to `JobRunner.finish`.
    """

    is_passive: bool = False
    is_essential: bool = False
    ends_by: str = ""

    def on_setup(self, runner: JobRunner) -> None:
        """Handle the begin of a run, before its nodes are placed."""

    def on_start(self, plan: ResumePlan, total_epochs: int | None) -> None:
        """Handle the decision where the run begins; `total_epochs` is the limit, if there is one."""

    def on_load(self, epoch: int, step: int, seconds: float) -> None:
        """Handle the load of a recorded epoch: all of it, or its first `step` steps if not 0."""

    def on_group(self, group: str, epoch: int, seconds: float) -> None:
        """Handle the end of a group: "init", "resume", "upload", "download" or "exit"."""

    def on_epoch_start(self, epoch: int) -> None:
        """Handle the begin of an epoch, or of the rest of one that was saved after a step."""

    def on_step_start(self, epoch: int, step: int) -> None:
        """Handle the begin of a step; they count from 1."""

    def on_step(self, epoch: int, step: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Handle the end of a step; `metrics` are those that tasks reported in it."""

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Handle the end of an epoch, before its checkpoint is written."""

    def on_save_start(self, epoch: int, step: int) -> None:
        """Handle the begin of a save of an epoch, or of its first `step` steps if not 0."""

    def on_save(self, report: SaveReport) -> None:
        """Handle a save: recorded, or failed with `SaveReport.error`."""

    def on_loss(self, error: Exception) -> None:
        """Handle the loss of a worker or of the scheduler, or a transient error of a task."""

    def on_recovery(self, epoch: int, step: int, seconds: float) -> None:
        """Handle the end of a recovery: the run continues after this epoch, or this step of it.

        `seconds` have passed since the loss.
        """

    def on_warning(self, message: str) -> None:
        """Handle a problem that does not end the run."""

    def on_stop_asked(self, reason: str, at_once: str) -> None:
        """Handle a signal that ends the run after its epoch; `at_once` says what ends it now."""

    def on_finish(self, result: RunResult) -> None:
        """Handle the end of the job, after its exit group."""

    def on_error(self, error: BaseException) -> None:
        """Handle the end of the run by an exception, such as `RunStoppedError`."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))


def check_callbacks(callbacks: object, where: str) -> None:
    """Raise `DefinitionError` unless a runner can call them."""
    if isinstance(callbacks, str) or not isinstance(callbacks, Sequence):
        raise DefinitionError(f"{where}: callbacks must be a list; got {callbacks!r}.")
    for callback in callbacks:
        if isinstance(callback, type):
            raise DefinitionError(
                f"{where}: a callback must be an object; got the class {callback.__name__}. "
                f"Write {callback.__name__}()."
            )
        for event in EVENTS:
            if (handle := getattr(callback, event, None)) is not None:
                check_runs(handle, f"{where}: {event} of {type(callback).__name__}")


class Callbacks:
    """The callbacks of one run."""

    def __init__(self, callbacks: Sequence[object]) -> None:
        self._handlers = {event: _handlers(callbacks, event) for event in EVENTS}
        self._failures: Counter[tuple[int, str, str]] = Counter()
        self.has_steps = bool(self._handlers["on_step_start"] or self._handlers["on_step"])
        """Whether one of them must be called at each step."""
        of_epochs = self._handlers["on_epoch_start"] + self._handlers["on_epoch"]
        self.are_passive = not self.has_steps and all(
            getattr(callback, "is_passive", False) for callback, _ in of_epochs
        )
        """Whether none of them must be called between two epochs."""

    def warn(self, message: str) -> None:
        """Report a problem to the callbacks and the log."""
        message = printable(message)
        logger.warning(message)
        self.notify("on_warning", message)

    def notify(self, event: str, *args: object) -> None:
        """Call the method `event` of each callback that has it.

        An exception is a warning, or passed on if the callback is essential.
        """
        for callback, handle in self._handlers[event]:
            try:
                handle(*args)
            except Exception as error:
                if event != "on_error" and getattr(callback, "is_essential", False):
                    raise
                self._report(callback, event, error)

    def close(self) -> None:
        """Warn of the failures that were only counted."""
        for (_, name, event), count in self._failures.items():
            if count > 1:
                logger.warning("Callback %s: %s failed %d times in all.", name, event, count)

    def _report(self, failed: object, event: str, error: Exception) -> None:
        name = type(failed).__name__
        key = (id(failed), name, event)
        self._failures[key] += 1
        if self._failures[key] > 1:
            return
        message = printable(
            f"Callback {name}: {event} raised {type(error).__name__}: {error}. The run continues, "
            f"and counts further failures of this method. To end the run instead, set "
            f"is_essential = True on the callback."
        )
        logger.warning(message, exc_info=error)
        for callback, handle in self._handlers["on_warning"]:
            if callback is not failed:
                try:
                    handle(message)
                except Exception as another:
                    self._report(callback, "on_warning", another)


def _handlers(
    callbacks: Sequence[object], event: str
) -> list[tuple[object, Callable[..., object]]]:
    """The callbacks that have a method `event` of their own, and that method."""
    empty = getattr(Callback, event)
    found = ((callback, getattr(callback, event, None)) for callback in callbacks)
    return [
        (callback, handle)
        for callback, handle in found
        if handle is not None and getattr(handle, "__func__", None) is not empty
    ]
