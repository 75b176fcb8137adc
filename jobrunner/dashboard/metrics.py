"""Series for Prometheus, on the scheduler's ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from distributed import Scheduler
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from jobrunner.dashboard.runs import running, seconds_since
from jobrunner.positions import read_position
from jobrunner.texts import printable


def _saved_epoch(known: Mapping[str, Any]) -> int | None:
    """The whole epochs of the last save."""
    at = read_position((known["saved"] or {}).get("epoch"))
    return None if at is None else at.epoch


_SERIES: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], Any]]] = {
    "epoch": ("Epochs that have ended", lambda known: known["epoch"]),
    "total_epochs": ("Epochs until the limit", lambda known: known["total_epochs"]),
    "epoch_seconds": ("How long an epoch takes", lambda known: known["epoch_seconds"]),
    "save_seconds": ("How long epochs wait for a save", lambda known: known["save_seconds"]),
    "saved_epoch": ("The last recorded epoch", _saved_epoch),
    "saved_bytes": ("Bytes of the last save", lambda known: (known["saved"] or {}).get("nbytes")),
    "failed_saves": ("Saves that failed", lambda known: known["failed_saves"]),
    "losses": ("Losses of workers or the scheduler", lambda known: known["losses"]),
    "recoveries": ("Recoveries from a loss", lambda known: known["recoveries"]),
    "nodes": ("Nodes of the job", lambda known: len(known["nodes"])),
    "silent_seconds": ("Since the client told of the run", seconds_since),
}


class Runs(Collector):
    """What is known of the runs of a scheduler's clients."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def describe(self) -> list[Any]:
        """Nothing in advance: several schedulers of one process have the same series."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield a gauge for each series, and one for the metrics of tasks."""
        found = [
            ((printable(known["job"]), name), known) for name, known in running(self._scheduler)
        ]
        for name, (about, read) in _SERIES.items():
            gauge = GaugeMetricFamily(f"jobrunner_{name}", about, labels=("job", "run"))
            for labels, known in found:
                if isinstance(value := read(known), int | float):
                    gauge.add_metric(labels, float(value))
            yield gauge
        gauge = GaugeMetricFamily(
            "jobrunner_metric", "What tasks report", labels=("job", "run", "name")
        )
        for labels, known in found:
            for name, value in known["metrics"].items():
                if isinstance(value, int | float):
                    gauge.add_metric((*labels, printable(name)), float(value))
        yield gauge
