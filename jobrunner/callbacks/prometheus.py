"""Gauges and counters for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobrunner.callbacks.trackers import require
from jobrunner.positions import Position
from jobrunner.run import Callback, JobRunner, SaveReport

GAUGES = {
    "epoch": "The last epoch that has ended",
    "saved_epoch": "The last epoch recorded",
    "running": "1 while the job runs, else 0",
}
COUNTERS = {
    "losses": "Lost workers and transient errors",
    "failed_saves": "Saves that failed",
}


class Prometheus(Callback):
    """Let Prometheus scrape how far the job is, its metrics, its saves and its losses.

    Parameters
    ----------
    registry : prometheus_client.CollectorRegistry, optional
        By default one of its own. Serve it, or write it to a file for the textfile collector of
        node_exporter.

    Attributes
    ----------
    registry : prometheus_client.CollectorRegistry
        Gets the gauges ``jobrunner_epoch``, ``jobrunner_metric`` with the label ``name``,
        ``jobrunner_saved_epoch``, ``jobrunner_running``, and the counters ``jobrunner_losses_total`` and
        ``jobrunner_failed_saves_total``. All have the label ``job``.

    Raises
    ------
    DefinitionError
        prometheus-client is not installed.

    Examples
    --------
    >>> gauges = Prometheus()
    >>> runner = JobRunner(job, manager, callbacks=[gauges])
    """

    is_passive = True

    def __init__(self, registry: Any = None) -> None:
        library = require("prometheus_client", "prometheus", "Prometheus")
        self.registry = library.CollectorRegistry() if registry is None else registry
        self._job = ""
        self._series: dict[str, Any] = {}
        for kind, series in ((library.Gauge, GAUGES), (library.Counter, COUNTERS)):
            for name, text in series.items():
                self._series[name] = kind(
                    f"jobrunner_{name}", text, ["job"], registry=self.registry
                )
        labels, text = ["job", "name"], "What tasks reported last"
        self._metric = library.Gauge("jobrunner_metric", text, labels, registry=self.registry)

    def _of(self, name: str) -> Any:
        return self._series[name].labels(self._job)

    def on_setup(self, runner: JobRunner) -> None:
        """Note whose series they are."""
        self._job = runner.job.name
        self._of("running").set(1)
        for name in COUNTERS:
            self._of(name)  # 0 until something happens

    def on_load(self, epoch: int, step: int, seconds: float) -> None:
        """Note from where the run goes on."""
        self._of("epoch").set(epoch)
        self._of("saved_epoch").set(epoch)

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Set the gauges of epochs."""
        self._of("epoch").set(epoch)
        for name, value in metrics.items():
            if isinstance(value, bool | int | float):
                self._metric.labels(self._job, name).set(value)

    def on_save(self, report: SaveReport) -> None:
        """Set the gauges of saves, or count one that failed."""
        if report.error is not None:
            self._of("failed_saves").inc()
            return
        self._of("saved_epoch").set(Position.of(report.epoch).epoch)

    def on_loss(self, error: Exception) -> None:
        """Count it."""
        self._of("losses").inc()

    def on_finish(self, result: object) -> None:
        """The job does not run any more."""
        self._of("running").set(0)

    def on_error(self, error: BaseException) -> None:
        """The job does not run any more."""
        self.on_finish(None)
