"""Gauges and counters for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from jobrunner.callbacks.trackers import require
from jobrunner.define import Label, checked, number
from jobrunner.positions import Position
from jobrunner.run import Callback, JobRunner, SaveReport

_PORT = number("a port from 1 to 65535", lambda port: port in range(1, 65_536))


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
        ``jobrunner_save_seconds``, ``jobrunner_running``, and the counters
        ``jobrunner_losses_total``, ``jobrunner_failed_saves_total``, ``jobrunner_warnings_total``.
        All have the label ``job``.

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
        self._library = require("prometheus_client", "prometheus", "Prometheus")
        self._port, self._address = port, address
        self.registry = self._library.CollectorRegistry()
        self._job = ""
        self._server: Any = None
        gauge, counter = self._library.Gauge, self._library.Counter
        self._epoch = self._make(gauge, "epoch", "The last epoch that has ended")
        self._seconds = self._make(gauge, "epoch_seconds", "Seconds of the last epoch")
        self._metric = self._make(gauge, "metric", "What tasks reported last", "name")
        self._saved_epoch = self._make(gauge, "saved_epoch", "The last epoch recorded")
        self._saved_bytes = self._make(gauge, "saved_bytes", "Bytes written by the last save")
        self._save_seconds = self._make(gauge, "save_seconds", "Seconds of the last save")
        self._running = self._make(gauge, "running", "1 while the job runs, else 0")
        self._losses = self._make(counter, "losses", "Lost workers and transient errors")
        self._failed_saves = self._make(counter, "failed_saves", "Saves that failed")
        self._warnings = self._make(counter, "warnings", "Warnings of the run")

    def _make(self, kind: Any, name: str, about: str, *labels: str) -> Any:
        return kind(f"jobrunner_{name}", about, ["job", *labels], registry=self.registry)

    def on_setup(self, runner: JobRunner) -> None:
        """Begin to serve."""
        self._job = runner.job.name
        self._running.labels(self._job).set(1)
        for counter in (self._losses, self._failed_saves, self._warnings):
            counter.labels(self._job)  # 0 until something happens
        if self._port is not None:
            self._server = self._library.start_http_server(self._port, self._address, self.registry)

    def on_load(self, epoch: int, step: int, seconds: float) -> None:
        """Note from where the run goes on."""
        self._epoch.labels(self._job).set(epoch)
        self._saved_epoch.labels(self._job).set(epoch)

    def on_epoch(self, epoch: int, seconds: float, metrics: Mapping[str, Any]) -> None:
        """Set the gauges of epochs."""
        self._epoch.labels(self._job).set(epoch)
        self._seconds.labels(self._job).set(seconds)
        for name, value in metrics.items():
            if isinstance(value, bool | int | float):
                self._metric.labels(self._job, name).set(value)

    def on_save(self, report: SaveReport) -> None:
        """Set the gauges of saves, or count one that failed."""
        if report.error is not None:
            self._failed_saves.labels(self._job).inc()
            return
        self._saved_epoch.labels(self._job).set(Position.of(report.epoch).epoch)
        self._saved_bytes.labels(self._job).set(report.nbytes)
        self._save_seconds.labels(self._job).set(report.seconds)

    def on_loss(self, error: Exception) -> None:
        """Count it."""
        self._losses.labels(self._job).inc()

    def on_warning(self, message: str) -> None:
        """Count it."""
        self._warnings.labels(self._job).inc()

    def on_finish(self, result: object) -> None:
        """Stop serving."""
        self._running.labels(self._job).set(0)
        if self._server is not None:
            server, thread = self._server
            self._server = None
            server.shutdown()
            server.server_close()
            thread.join()

    def on_error(self, error: BaseException) -> None:
        """Stop serving."""
        self.on_finish(None)
