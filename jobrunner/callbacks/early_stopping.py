"""End a job whose metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from jobrunner.checkpoint import best_metrics
from jobrunner.define import Count, Label, checked, number
from jobrunner.run import Callback, JobRunner
from jobrunner.texts import get_logger

logger = get_logger(__name__)

_DELTA = number("a number >= 0", lambda delta: 0 <= delta < math.inf)


class _State(msgspec.Struct):
    best: float | None
    best_epoch: Annotated[int, msgspec.Meta(ge=0)]
    waited: Annotated[int, msgspec.Meta(ge=0)]


@checked
class EarlyStopping(Callback):
    """End the job when a metric has not improved for some epochs in a row.

    The download and exit groups run, and `RunResult.stopped_by` is `ends_by`.

    Parameters
    ----------
    metric : str
        A name that a task reports: "loss" for ``current_task().report(loss=...)``.
    patience : int
        How many epochs in a row may report the metric without an improvement; at least 1.
    min_delta : float
        By how much a value must be better than the best so far; in the unit of the metric.
    mode : "min" or "max"
        Whether smaller or larger values are better.

    Attributes
    ----------
    best : float or None
        The best value so far; None if no epoch has reported one.
    best_epoch : int
        Its epoch.
    waited : int
        How many epochs have reported the metric since.

    Notes
    -----
    NaN is no improvement. An epoch that does not report the metric does not count. The record of
    each saved epoch contains `best`, `best_epoch` and `waited`, so a run that resumes ends after the
    same epoch as one that was never interrupted. Needs the client after every epoch: set
    ``is_passive = True`` if the job may end some short epochs later.

    Examples
    --------
    >>> stopping = EarlyStopping("loss", patience=2)
    >>> for epoch, loss in enumerate([0.9, 0.5, 0.6, 0.5], start=1):
    ...     stopping.on_epoch(epoch, 0.1, {"loss": loss})
    >>> stopping.best_epoch, stopping.ends_job
    (2, True)
    """

    def __init__(
        self,
        metric: Label,
        *,
        patience: Count = 3,
        min_delta: Annotated[float, _DELTA] = 0.0,
        mode: Literal["min", "max"] = "min",
    ) -> None:
        self.metric = metric
        self.patience = patience
        self.min_delta = float(min_delta)
        self.mode = mode
        # A later run with other values has not ended by this.
        self.ends_by = (
            f"EarlyStopping({metric!r}, patience={patience}, min_delta={self.min_delta:g}, "
            f"mode={mode!r})"
        )
        self._begin()

    def _begin(self, best: float | None = None, best_epoch: int = 0, waited: int = 0) -> None:
        self.best, self.best_epoch, self.waited = best, best_epoch, waited
        self.ends_job = waited >= self.patience
        self._is_missed = False

    def on_setup(self, runner: JobRunner) -> None:
        """Say so if the best epochs that the run keeps are the best of other metrics."""
        manager = runner.checkpoint_manager
        if manager is None:
            return
        names = best_metrics(manager.retention.policy)
        if names and self.metric not in names:
            logger.warning(
                "EarlyStopping watches %r, but KeepBest keeps the best epochs by %s: the epoch with "
                "the best %r may be deleted.",
                self.metric,
                ", ".join(names),
                self.metric,
            )

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Compare the metric with the best so far."""
        if self.metric not in metrics:
            if self.best is None and not self._is_missed:
                self._is_missed = True
                names = ", ".join(metrics) or "no metric"
                logger.warning(
                    "EarlyStopping waits for %r; epoch %d reports %s.", self.metric, epoch, names
                )
            return
        value = float(metrics[self.metric])
        if self._is_better(value):
            self._begin(value, epoch)
        else:
            self.waited += 1
            self.ends_job = self.waited >= self.patience

    def _is_better(self, value: float) -> bool:
        if self.best is None or math.isnan(value):
            return not math.isnan(value)
        gain = value - self.best
        if self.mode == "min":
            gain = -gain
        return gain > self.min_delta

    def state_dict(self) -> Mapping[str, float | str | None]:
        """What was compared, and how it stands."""
        return {
            "metric": self.metric,
            "mode": self.mode,
            "best": self.best,
            "best_epoch": self.best_epoch,
            "waited": self.waited,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, if it is of the same metric and mode; raises ValueError if forged."""
        self._begin()
        if (state.get("metric"), state.get("mode")) != (self.metric, self.mode):
            return
        saved = msgspec.convert(state, _State)
        self._begin(saved.best, saved.best_epoch, saved.waited)
