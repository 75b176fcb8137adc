"""6 loop: what is told of a run while it runs, and to whom."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jobrunner.run.result import ResumePlan, RunResult, SaveReport

logger = logging.getLogger(__name__)


class Callback(Protocol):
    """What a runner tells while it runs; an object may have any of these methods.

    They run on the client, between epochs; what one raises ends the run. One that only looks on
    says so with an attribute ``is_passive = True``: where nothing else needs the client either,
    the workers then run short epochs on their own for `jobrunner.stint-seconds`, and `on_epoch`
    comes for all of these together, after the last.
    """

    def on_start(self, plan: ResumePlan, total_epochs: int | None) -> None:
        """The run begins; `total_epochs` is the limit, if there is one."""

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """An epoch has ended; its checkpoint has not been written yet."""

    def on_save(self, report: SaveReport) -> None:
        """A checkpoint is recorded, or could not be (`SaveReport.error`)."""

    def on_warning(self, message: str) -> None:
        """Something went wrong that does not end the run."""

    def on_stop_asked(self, reason: str, at_once: str) -> None:
        """A signal asked the run to end with its epoch; `at_once` says what ends it now."""

    def on_finish(self, result: RunResult) -> None:
        """The exit group has ended."""


class Callbacks:
    """The callbacks of one run."""

    def __init__(self, callbacks: Sequence[object]) -> None:
        self._callbacks = callbacks

    @property
    def are_passive(self) -> bool:
        """Whether none of them needs the client between epochs."""
        return all(
            getattr(callback, "is_passive", False) or not hasattr(callback, "on_epoch")
            for callback in self._callbacks
        )

    def warn(self, message: str) -> None:
        """Tell of what went wrong, in the log as well."""
        logger.warning(message)
        self.notify("on_warning", message)

    def notify(self, event: str, *args: object) -> None:
        """Tell of an event, a method of `Callback`."""
        for callback in self._callbacks:
            handle = getattr(callback, event, None)
            if handle is not None:
                handle(*args)
