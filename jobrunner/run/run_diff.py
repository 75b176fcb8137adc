"""Compare two runs: their plans, their metrics, and the first epoch whose blobs differ."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from jobrunner.checkpoint import Directory, EpochRecord, MultiNodeCheckpointManager, open_record
from jobrunner.compile import changes, gc_paused
from jobrunner.errors import CheckpointNotFoundError
from jobrunner.run.diff import compare_checkpoints

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
    whose digests are equal, nothing but the log is read.
    """
    mine, theirs = one.directory.snapshot(), other.directory.snapshot()
    plans = []
    for directory, snapshot in ((one.directory, mine), (other.directory, theirs)):
        latest = snapshot.latest
        run = None if latest is None else directory.record(latest, snapshot).run_number
        plans.append(directory.plan_of(run) or {})
    metrics = []
    their_metrics = _metrics_of(other)
    for number, values in _metrics_of(one).items():
        if number in their_metrics:
            metrics.append({"epoch": number, "a": values, "b": their_metrics[number]})
    parted = (row["epoch"] for row in metrics if not _are_equal(row["a"], row["b"]))
    data: dict[str, Any] = {
        "changes": changes(plans[0], plans[1]) if all(plans) else None,
        "parameters": _differing_parameters(plans[0], plans[1]),
        "parameters_differ_at": None,
        "metrics": metrics,
        "metrics_differ_at": next(parted, None),
        "num_compared": 0,
        "differ_at": None,
        "difference": None,
    }

    @functools.cache  # most epochs were recorded by the same two runs
    def parameters_at(my_run: int | None, their_run: int | None) -> dict[str, list[Any]]:
        plans = one.directory.plan_of(my_run), other.directory.plan_of(their_run)
        return _differing_parameters(plans[0] or {}, plans[1] or {})

    for epoch in mine.epochs:
        if epoch not in theirs.recorded:
            continue
        a, b = one.directory.record(epoch, mine), other.directory.record(epoch, theirs)
        try:
            difference, text = _compare_epoch(one.directory, a, other.directory, b)
        except CheckpointNotFoundError:  # a run has removed it meanwhile
            continue
        data["num_compared"] += 1
        parameters = parameters_at(a.run_number, b.run_number)
        if parameters and data["parameters_differ_at"] is None:
            data["parameters_differ_at"] = {"epoch": epoch.public, "parameters": parameters}
        if difference is not None:
            return {**data, "differ_at": epoch.public, "difference": difference}, text
    return data, ""


def _differing_parameters(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Those that differ, with both values."""
    mine, theirs = one.get("parameters", {}), other.get("parameters", {})
    differing = {}
    for name in dict.fromkeys((*mine, *theirs)):
        if not _are_equal(mine.get(name, _NOT_GIVEN), theirs.get(name, _NOT_GIVEN)):
            differing[name] = [mine.get(name), theirs.get(name)]
    return differing


def _metrics_of(manager: MultiNodeCheckpointManager) -> dict[int, Mapping[str, Any]]:
    return {row["epoch"]: row["metrics"] for row in manager.history() if not row["step"]}


def _are_equal(one: object, other: object) -> bool:
    return one == other or repr(one) == repr(other)  # NaN is equal to NaN


def _compare_epoch(
    one: Directory, a: EpochRecord, other: Directory, b: EpochRecord
) -> tuple[dict[str, Any] | None, str]:
    """What `compare_checkpoints` says of an epoch, and as text; None if its blobs are equal."""
    digests = [{node: store.sha256 for node, store in record.stores.items()} for record in (a, b)]
    if digests[0] == digests[1]:
        return None, ""
    with one.reading(a.at), other.reading(b.at):
        data, text, is_equal = compare_checkpoints(open_record(one, a), open_record(other, b))
    return (None, "") if is_equal else (data, text)
