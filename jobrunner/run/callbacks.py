"""What callbacks are, and how a run calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jobrunner.run.result import ResumePlan, RunResult, SaveReport
from jobrunner.texts import get_logger, printable

logger = get_logger(__name__)


class Callback:
    """An object that a runner calls during a run; subclass it, or write a class with some methods.

    They run on the client, between epochs; an exception in one ends the run. Set
    ``is_passive = True`` on a callback that only observes. If all are passive and nothing else
    needs the client, the workers run short epochs in a batch of `jobrunner.stint-seconds`, and
    `on_epoch` is called for each of them after the batch.
    """

    is_passive: bool = False

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
        return all(getattr(it, "is_passive", False) for it, _ in self._handlers("on_epoch"))

    def warn(self, message: str) -> None:
        """Report a problem to the callbacks and the log."""
        message = printable(message)
        logger.warning(message)
        self.notify("on_warning", message)

    def notify(self, event: str, *args: object) -> None:
        """Call the method `event` of each callback that has it."""
        for _, handle in self._handlers(event):
            handle(*args)

    def _handlers(self, event: str) -> Iterator[tuple[object, Callable[..., object]]]:
        """The callbacks that have a method `event` of their own, and that method."""
        empty = getattr(Callback, event)
        for callback in self._callbacks:
            handle = getattr(callback, event, None)
            if handle is not None and getattr(handle, "__func__", None) is not empty:
                yield callback, handle
