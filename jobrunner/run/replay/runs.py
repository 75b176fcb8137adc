"""Compare two runs: their plans, their metrics, and the first epoch whose blobs differ."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jobrunner.checkpoint import EpochRecord, MultiNodeCheckpointManager
from jobrunner.compile import changes, gc_paused
from jobrunner.errors import CheckpointNotFoundError
from jobrunner.positions import Position
from jobrunner.run.replay.compare import compare_checkpoints

_NOT_GIVEN = object()


@gc_paused()  # none of 100,000 records is garbage
def compare_runs(
    one: MultiNodeCheckpointManager, other: MultiNodeCheckpointManager
) -> tuple[dict[str, Any], str]:
    """Tell where two runs part; returns data for JSON, and how the blobs differ, as text.

    Of the data, ``changes`` says how the job of `other` differs from that of `one`, or is None if
    their logs do not say what they were; ``parameters``
    are those that differ, with both values; ``parameters_differ_at`` is the first compared epoch that
    runs with other parameters recorded, with these, or None; ``metrics`` are of each epoch that both have recorded,
    as ``epoch``, ``a`` and ``b``; ``metrics_differ_at`` and ``differ_at`` are the first epochs whose
    metrics, or blobs, differ. ``num_compared`` is the number of epochs whose blobs were compared,
    up to there; ``difference`` is what `compare_checkpoints` says of it.

    Runs may part and meet again, so epochs are compared one after another, from the first. Of those
    whose digests are equal, nothing but the log and the manifests is read.
    """
    plans = [_plan_of(manager) for manager in (one, other)]
    mine, theirs = (_metrics_of(manager) for manager in (one, other))
    metrics = [
        {"epoch": epoch, "a": mine[epoch], "b": theirs[epoch]} for epoch in mine if epoch in theirs
    ]
    parted = next((row["epoch"] for row in metrics if not _are_equal(row["a"], row["b"])), None)
    data: dict[str, Any] = {
        "changes": changes(plans[0], plans[1]) if all(plans) else None,
        "parameters": _differing_parameters(plans),
        "parameters_differ_at": None,
        "metrics": metrics,
        "metrics_differ_at": parted,
        "num_compared": 0,
        "differ_at": None,
        "difference": None,
    }
    here, there = (manager.directory.numbers() for manager in (one, other))
    text = ""

    @functools.cache  # most epochs were recorded by the same two runs
    def parameters_at(*runs: int | None) -> dict[str, list[Any]]:
        plans = [it.directory.plan_of(run) for it, run in zip((one, other), runs, strict=True)]
        return _differing_parameters([plan or {} for plan in plans])

    for epoch in here:
        if epoch not in there:
            continue
        records = [
            one.directory.read_record(epoch, here[epoch]),
            other.directory.read_record(epoch, there[epoch]),
        ]
        try:
            difference, text = _compare_epoch(one, other, epoch, records)
        except CheckpointNotFoundError:  # a run has removed it meanwhile
            continue
        data["num_compared"] += 1
        found = parameters_at(*(record.run_number for record in records))
        if found and data["parameters_differ_at"] is None:
            data["parameters_differ_at"] = {"epoch": epoch.public, "parameters": found}
        if difference is not None:
            data |= {"differ_at": epoch.public, "difference": difference}
            break
    return data, text


def _differing_parameters(plans: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Those that differ, with both values."""
    parameters = [plan.get("parameters", {}) for plan in plans]
    return {
        name: [its.get(name) for its in parameters]
        for name in dict.fromkeys((*parameters[0], *parameters[1]))
        if not _are_equal(*(its.get(name, _NOT_GIVEN) for its in parameters))
    }


def _plan_of(manager: MultiNodeCheckpointManager) -> Mapping[str, Any]:
    latest = manager.directory.latest()
    return (None if latest is None else manager.directory.run_plan(latest)) or {}


def _metrics_of(manager: MultiNodeCheckpointManager) -> dict[int, Mapping[str, Any]]:
    return {row["epoch"]: row["metrics"] for row in manager.history() if not row["step"]}


def _are_equal(one: object, other: object) -> bool:
    return one == other or repr(one) == repr(other)  # NaN is equal to NaN


def _compare_epoch(
    one: MultiNodeCheckpointManager,
    other: MultiNodeCheckpointManager,
    epoch: Position,
    records: Sequence[EpochRecord],
) -> tuple[dict[str, Any] | None, str]:
    """What `compare_checkpoints` says of an epoch, and as text; None if its blobs are equal."""
    digests = [{node: store.sha256 for node, store in record.stores.items()} for record in records]
    if digests[0] == digests[1]:
        return None, ""
    with (
        one.directory.reading(epoch),
        other.directory.reading(epoch),
        one.open(epoch) as a,
        other.open(epoch) as b,
    ):
        data, text, is_equal = compare_checkpoints(a, b)
    return (None, "") if is_equal else (data, text)
