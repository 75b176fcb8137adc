"""What runs of a group have given on all workers, for the client."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from jobrunner.cluster.exchange import Reply, malformed
from jobrunner.compile import Condition
from jobrunner.define import Metric, MetricEntry, merge_reports
from jobrunner.errors import ExecutionError
from jobrunner.worker import RunOrder


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


def read_runs(
    replies: Mapping[str, Reply], order: RunOrder, conditions: Sequence[Condition]
) -> list[GroupResult]:
    """The epochs that have ended on all workers; `conditions` are all the group's.

    A worker must have ended no more runs than it was asked for, and those that are done the same
    number of whole epochs.
    """
    width, most = order.steps_per_epoch, order.epochs * order.steps_per_epoch
    ended, done = most, None
    for address, reply in replies.items():
        count = len(reply.runs)
        is_wrong = count > most
        if reply.status == "done":
            is_wrong |= not count or count % width > 0 or done not in (None, count)
            done = count
        if is_wrong:
            expected = f"up to {most} runs, in steps of {width}, and as many as other workers"
            raise malformed(address, f"expected {expected}; got {count}")
        ended = min(ended, count)
    results = []
    for start in range(0, ended // width * width, width):
        results.append(_merge(replies, slice(start, start + width), conditions))
    return results


def _merge(
    replies: Mapping[str, Reply], runs: slice, conditions: Sequence[Condition]
) -> GroupResult:
    slowest, fired = 0.0, set[str]()
    entries: dict[int, list[MetricEntry]] = {}  # by step
    for address, reply in replies.items():
        seconds = 0.0
        for step, run in enumerate(reply.runs[runs]):
            seconds += run["seconds"]
            if run["metrics"]:
                entries.setdefault(step, []).extend(_read_metrics(address, run["metrics"]))
        fired.update(reply.runs[runs][-1]["stopped"])
        slowest = max(slowest, seconds)
    metrics: dict[str, Metric] = {}
    for step in sorted(entries):
        metrics |= merge_reports(entries[step])
    stopped = []
    for condition in conditions:
        if condition.name in fired:
            stopped.append(condition.name)
    return GroupResult(slowest, tuple(stopped), metrics)


def _read_metrics(address: str, text: str) -> list[MetricEntry]:
    try:
        return msgspec.convert(json.loads(text), list[MetricEntry])
    except (ValueError, RecursionError) as error:
        raise ExecutionError(
            f"Worker {address} reported metrics that cannot be read: {error}. Check that the same "
            f"version of jobrunner runs there."
        ) from error
