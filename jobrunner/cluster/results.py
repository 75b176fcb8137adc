"""What runs of a group have given on all workers, for the client."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from jobrunner.define import Metric, MetricEntry, merge_reports
from jobrunner.errors import ExecutionError
from jobrunner.worker import EndedRun


class UnderWay(NamedTuple):
    """A run of a group that has not ended."""

    group: str
    epoch: int | None
    seconds: float  # since the client asked for it
    tasks: tuple[str, ...]  # running ones at their workers' last reply, as "node/task"
    step: int = 0  # of the epoch, from 0


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The result of a group's run on all workers."""

    seconds: float  # that the client waited; for an epoch of a batch, those of the slowest worker
    stopped: tuple[str, ...]  # names of the true stop conditions, in order of definition
    metrics: dict[str, Metric] = field(default_factory=dict)  # that tasks reported


def merge_runs(
    by_worker: Mapping[str, Sequence[EndedRun]], conditions: Sequence[str]
) -> GroupResult:
    """Merge one epoch's runs, in order by worker; `conditions` are all the group's."""
    metrics: dict[str, Metric] = {}
    for runs in zip(*by_worker.values(), strict=True):
        entries: list[MetricEntry] = []
        for address, run in zip(by_worker, runs, strict=True):
            if run["metrics"]:
                entries += _read_metrics(address, run["metrics"])
        metrics |= merge_reports(entries)
    fired = {name for runs in by_worker.values() for name in runs[-1]["stopped"]}
    return GroupResult(
        seconds=max(sum(run["seconds"] for run in runs) for runs in by_worker.values()),
        stopped=tuple(name for name in conditions if name in fired),
        metrics=metrics,
    )


def _read_metrics(address: str, text: str) -> list[MetricEntry]:
    try:
        return msgspec.convert(json.loads(text), list[MetricEntry])
    except (ValueError, RecursionError) as error:
        raise ExecutionError(
            f"Worker {address} reported metrics that cannot be read: {error}. Check that the same "
            f"version of jobrunner runs there."
        ) from error
