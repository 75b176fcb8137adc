"""Gauges and counters for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from jobrunner.callbacks.trackers import require
from jobrunner.define import Label, checked, number
from jobrunner.positions import Position
from jobrunner.run import Callback, JobRunner, SaveReport

_PORT = number("a port from 1 to 65535", lambda port: port in range(1, 65_536))

GAUGES = {
    "epoch": "The last epoch that has ended",
    "epoch_seconds": "Seconds of the last epoch",
    "saved_epoch": "The last epoch recorded",
    "saved_bytes": "Bytes written by the last save",
    "running": "1 while the job runs, else 0",
}
COUNTERS = {
    "losses": "Lost workers and transient errors",
    "failed_saves": "Saves that failed",
}


@checked
class Prometheus(Callback):
    """Let Prometheus scrape how far the job is, its metrics, its saves and its losses.

    Parameters
    ----------
    port : int, optional
        The run serves ``http://address:port/metrics`` until it ends. Without it, serve `registry`
        yourself, or write it to a file for the textfile collector of node_exporter.
    address : str
        By default only this machine can connect.

    Attributes
    ----------
    registry : prometheus_client.CollectorRegistry
        Has the gauges ``jobrunner_epoch``, ``jobrunner_epoch_seconds``, ``jobrunner_metric`` with
        the label ``name``, ``jobrunner_saved_epoch``, ``jobrunner_saved_bytes``,
        ``jobrunner_running``, and the counters ``jobrunner_losses_total`` and
        ``jobrunner_failed_saves_total``. All have the label ``job``.

    Raises
    ------
    DefinitionError
        prometheus-client is not installed.

    Examples
    --------
    >>> runner = JobRunner(job, manager, callbacks=[Prometheus(port=9300)])
    """

    is_passive = True

    def __init__(
        self, port: Annotated[int, _PORT] | None = None, *, address: Label = "127.0.0.1"
    ) -> None:
        library = require("prometheus_client", "prometheus", "Prometheus")
        self._serve = library.start_http_server
        self._port, self._address = port, address
        self.registry = library.CollectorRegistry()
        self._job = ""
        self._server: Any = None
        self._series: dict[str, Any] = {}
        for kind, series in ((library.Gauge, GAUGES), (library.Counter, COUNTERS)):
            for name, text in series.items():
                made = kind(f"jobrunner_{name}", text, ["job"], registry=self.registry)
                self._series[name] = made
        labels, text = ["job", "name"], "What tasks reported last"
        self._metric = library.Gauge("jobrunner_metric", text, labels, registry=self.registry)

    def _of(self, name: str) -> Any:
        return self._series[name].labels(self._job)

    def on_setup(self, runner: JobRunner) -> None:
        """Begin to serve."""
        self._job = runner.job.name
        self._of("running").set(1)
        for name in COUNTERS:
            self._of(name)  # 0 until something happens
        if self._port is not None:
            self._server = self._serve(self._port, self._address, self.registry)

    def on_load(self, epoch: int, step: int, seconds: float) -> None:
        """Note from where the run goes on."""
        self._of("epoch").set(epoch)
        self._of("saved_epoch").set(epoch)

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Set the gauges of epochs."""
        self._of("epoch").set(epoch)
        self._of("epoch_seconds").set(seconds)
        for name, value in metrics.items():
            if isinstance(value, bool | int | float):
                self._metric.labels(self._job, name).set(value)

    def on_save(self, report: SaveReport) -> None:
        """Set the gauges of saves, or count one that failed."""
        if report.error is not None:
            self._of("failed_saves").inc()
            return
        self._of("saved_epoch").set(Position.of(report.epoch).epoch)
        self._of("saved_bytes").set(report.nbytes)

    def on_loss(self, error: Exception) -> None:
        """Count it."""
        self._of("losses").inc()

    def on_finish(self, result: object) -> None:
        """Stop serving."""
        self._of("running").set(0)
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join()

    def on_error(self, error: BaseException) -> None:
        """Stop serving."""
        self.on_finish(None)
