"""What callbacks are, and how a run calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jobrunner.define import check_call
from jobrunner.errors import DefinitionError
from jobrunner.run.result import ResumePlan, RunResult, SaveReport
from jobrunner.texts import get_logger, printable, shorten

if TYPE_CHECKING:
    from jobrunner.run.runner import JobRunner

logger = get_logger(__name__)

Plain = bool | int | float | str | None


class Callback:
    """An object that a runner calls during a run; subclass it, or write a class with some methods.

    ``docs/callbacks.md`` says in which order and thread its methods are called.

    Attributes
    ----------
    is_passive : bool
        It only observes: the workers may run short epochs in a batch, and the run calls
        `on_epoch_start` and `on_epoch` for each of them after the batch.
    is_essential : bool
        An exception in one of its methods ends the run. Otherwise it is a warning.
    ends_job : bool
        The job ends after this epoch, as if a stop condition were true. Read when an epoch has
        ended or was loaded.
    ends_by : str
        What `RunResult.stopped_by` says then. A job that ended so has ended for later runs too, if
        one of their callbacks has that name. Empty: this callback never ends a job.
    """

    is_passive: bool = False
    is_essential: bool = False
    ends_job: bool = False
    ends_by: str = ""

    def state_dict(self) -> Mapping[str, Plain]:
        """What the record of each saved epoch keeps for this callback: names and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Plain]) -> None:
        """Take back the state from the record of the epoch that was loaded.

        `state` is empty if that has none, and when the init group has run.
        """

    def on_setup(self, runner: JobRunner) -> None:
        """Handle the begin of a run, before its nodes are placed."""

    def on_placement(self, placement: Mapping[str, str]) -> None:
        """Handle a placement of all nodes: `placement` has the address of each one's worker."""

    def on_start(self, plan: ResumePlan, total_epochs: int | None) -> None:
        """Handle the decision where the run begins; `total_epochs` is the limit, if there is one."""

    def on_load(self, epoch: int, step: int, seconds: float) -> None:
        """Handle a load: of `epoch` whole epochs, and `step` steps of the next one."""

    def on_group(self, group: str, epoch: int, seconds: float) -> None:
        """Handle the end of a group: init, resume, epoch_end, upload, download or exit."""

    def on_epoch_start(self, epoch: int) -> None:
        """Handle the begin of an epoch, or of the rest of one that was saved after a step."""

    def on_step_start(self, epoch: int, step: int) -> None:
        """Handle the begin of a step; they count from 1."""

    def on_step(self, epoch: int, step: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Handle the end of a step; `metrics` are those that tasks reported in it."""

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Handle the end of an epoch, before its checkpoint is written."""

    def on_save_start(self, epoch: int, step: int) -> None:
        """Handle the begin of a save of `epoch` whole epochs, and `step` steps of the next one."""

    def on_save(self, report: SaveReport) -> None:
        """Handle a save: recorded, or failed with `SaveReport.error`."""

    def on_loss(self, error: Exception) -> None:
        """Handle the loss of a worker or of the scheduler, or a transient error of a task."""

    def on_recovery(self, epoch: int, step: int, seconds: float) -> None:
        """Handle the end of a recovery: the run continues after `epoch` epochs and `step` steps.

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
_METHODS = (*EVENTS, "state_dict", "load_state_dict")


def check_callbacks(callbacks: Sequence[object], where: str) -> None:
    """Raise `DefinitionError` unless a runner can call them."""
    for callback in callbacks:
        if isinstance(callback, type):
            raise DefinitionError(
                f"{where}: a callback must be an object; got the class {callback.__name__}. "
                f"Write {callback.__name__}()."
            )
        if not any(hasattr(callback, name) for name in ("ends_by", *_METHODS)):
            raise DefinitionError(
                f"{where}: a callback must have a method of Callback, such as on_epoch; got "
                f"{callback!r:.200}."
            )
        of = f"of {type(callback).__name__}"
        for name in _METHODS:
            method, own = getattr(callback, name, None), getattr(Callback, name)
            if method is not None and getattr(method, "__func__", None) is not own:
                count = len(inspect.signature(own).parameters) - 1  # without self
                check_call(method, count, (), f"{where}: {name} {of}")
        if isinstance(callback, Callback):
            for name in dir(callback):
                if (
                    name.startswith("on_")
                    and name not in EVENTS
                    and callable(getattr(callback, name))
                ):
                    raise DefinitionError(
                        f"{where}: a run never calls {name} {of}. Names that begin with on_ are for "
                        f"the methods of Callback: {', '.join(EVENTS)}."
                    )


def enders(callbacks: Sequence[object]) -> frozenset[str]:
    """The names under which callbacks may end a job."""
    names = (getattr(callback, "ends_by", "") for callback in callbacks)
    return frozenset(name for name in names if isinstance(name, str) and name)


class Callbacks:
    """The callbacks of one run."""

    def __init__(self, callbacks: Sequence[object]) -> None:
        self._enders: list[Any] = [ender for ender in callbacks if getattr(ender, "ends_by", "")]
        self._handlers = {name: _handlers(callbacks, name) for name in _METHODS}
        self._failed: set[tuple[int, str]] = set()  # callbacks and methods
        of_epochs = self._handlers["on_epoch_start"] + self._handlers["on_epoch"]
        self.are_passive = all(getattr(callback, "is_passive", False) for callback, _ in of_epochs)
        """Whether none of them must be called between two epochs."""
        self.hear_steps = bool(self._handlers["on_step_start"] or self._handlers["on_step"])

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
            self._call(callback, event, handle, *args)

    def ended_by(self) -> list[str]:
        """The names of the callbacks that end the job now."""
        names = []
        for callback in self._enders:
            if self._call(callback, "ends_job", _ends_job, callback):
                names.append(callback.ends_by)
        return names

    def states(self) -> dict[str, dict[str, Plain]]:
        """What the callbacks have to be recorded, by name."""
        states = {}
        for name, callback, state_dict in self._named("state_dict"):
            state = self._call(callback, "state_dict", _plain, state_dict)
            if state:
                states[name] = state
        return states

    def load_states(self, states: Mapping[str, Mapping[str, Plain]]) -> None:
        """Give each callback its state from a record."""
        for name, callback, load_state_dict in self._named("load_state_dict"):
            self._call(callback, "load_state_dict", load_state_dict, states.get(name, {}))

    def _named(self, method: str) -> Iterator[tuple[str, object, Callable[..., Any]]]:
        """The callbacks with that method, each with a name: of its class, and which of these."""
        names: list[str] = []
        for callback, handle in self._handlers[method]:
            name = type(callback).__name__
            names.append(name)
            count = names.count(name)
            yield name if count == 1 else f"{name} {count}", callback, handle

    def _call(self, callback: object, name: str, method: Callable[..., Any], *args: object) -> Any:
        try:
            return method(*args)
        except Exception as error:
            if name != "on_error" and getattr(callback, "is_essential", False):
                raise
            self._report(callback, name, error)
            return None

    def _report(self, failed: object, event: str, error: Exception) -> None:
        """Warn of the first failure of a method."""
        if (id(failed), event) in self._failed:
            return
        self._failed.add((id(failed), event))
        message = printable(
            f"Callback {type(failed).__name__}: {event} raised {type(error).__name__}: "
            f"{shorten(str(error)).rstrip('.')}. The run continues, and tells of no further failure of "
            f"this method. To end the run instead, set is_essential = True on the callback."
        )
        logger.warning(message, exc_info=error)
        for callback, handle in self._handlers["on_warning"]:
            if callback is not failed:
                self._call(callback, "on_warning", handle, message)


def _handlers(
    callbacks: Sequence[object], event: str
) -> list[tuple[object, Callable[..., object]]]:
    """The callbacks that have a method `event` of their own, and that method."""
    empty = getattr(Callback, event)
    handlers = []
    for callback in callbacks:
        handle = getattr(callback, event, None)
        if handle is not None and getattr(handle, "__func__", None) is not empty:
            handlers.append((callback, handle))
    return handlers


def _ends_job(callback: Any) -> bool:
    return bool(callback.ends_job)


def _plain(state_dict: Callable[[], Mapping[str, Plain]]) -> dict[str, Plain]:
    state = dict(state_dict())
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Plain):
            raise TypeError(
                f"state_dict()[{name!r}] must be a bool, an int, a float, a str or None under the "
                f"name of a str; got {value!r:.200}"
            )
    return state
