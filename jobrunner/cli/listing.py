"""``ls`` and ``info``: show what a checkpoint directory contains."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from jobrunner.cli.command import Output, main
from jobrunner.cli.disk import measure
from jobrunner.cli.options import (
    count_option,
    directory_argument,
    epoch_argument,
    open_directory,
    open_manager,
    resolve,
)
from jobrunner.cli.parameter_types import NamedEpoch
from jobrunner.cli.runs import RunFilter, filter_options, list_runs
from jobrunner.cli.tables import Column, draw_rows, draw_table
from jobrunner.errors import CheckpointCorruptError, DefinitionError
from jobrunner.positions import Position, describe_position, format_ranges, name_step
from jobrunner.texts import (
    clip,
    format_bytes,
    format_metrics,
    format_seconds,
    format_time,
    show,
    whole_metrics,
)

if TYPE_CHECKING:
    from jobrunner.checkpoint import (
        Directory,
        EpochRecord,
        MultiNodeCheckpointManager,
        NodeCheckpoint,
        Unmade,
    )

_SHOWN_VALUE_LENGTH = 48
_MOST_MEASURED = 1000  # stores of which `ls` looks at every file

EpochRow = Mapping[str, Any]
"""An epoch as ``--json`` has it."""

EPOCH_COLUMNS: Sequence[Column[EpochRow]] = (
    Column("EPOCH", lambda row: row["epoch"], is_number=True),
    Column("STEP", lambda row: _name_step(row).removeprefix("step ")),
    Column("SAVED", lambda row: format_time(row["time"])),
    Column("NODES", lambda row: len(row["nodes"]), is_number=True),
    Column("SIZE", lambda row: format_bytes(row["nbytes"]), is_number=True),
    Column("TIME", lambda row: format_seconds(row["seconds"]), is_number=True),
    Column("METRICS", lambda row: " ".join(format_metrics(_metrics_of_job(row)))),
)


def _metrics_of_job(row: EpochRow) -> Mapping[str, Any]:
    return whole_metrics(row["metrics"], row["nodes"])


def _name_step(row: EpochRow) -> str:
    return name_step(row["step"], row["steps_per_epoch"]) if row["step"] else ""


@main.command(
    "ls",
    examples=[
        "jobrunner ls runs/kmeans --last 5",
        "jobrunner ls runs",
        "jobrunner ls runs --best accuracy:max --state finished",
    ],
)
@directory_argument
@count_option("--last", help="List only the newest N epochs, or the first N runs.")
@filter_options
def list_command(*, directory: str, last: int | None, run_filter: RunFilter) -> Output:
    """List the recorded epochs of DIR, or the runs below it."""
    opened = open_directory(directory)
    return list_runs(opened, run_filter, last) or list_epochs(opened, last)


def list_epochs(directory: Directory, last: int | None = None) -> Output:
    """List the recorded epochs, or only the newest `last`."""
    snapshot = directory.snapshot()
    recorded = snapshot.epochs
    listed = recorded if last is None else recorded[-last:]
    rows: list[dict[str, Any]] = []
    stores: list[str] = []
    damaged: dict[Any, str] = {}
    pins = {at.public: list(labels) for at, labels in snapshot.pins.items()}
    parameters_of = functools.cache(lambda number: _parameters_of(directory, number))
    for epoch, record in directory.records(listed, snapshot):
        if isinstance(record, CheckpointCorruptError):
            damaged[epoch] = str(record)
            continue
        row = _describe_epoch(record)
        row["parameters"] = parameters_of(record.run_number)
        row["pins"] = pins.get(row["epoch"], [])
        rows.append(row)
        stores += [store.name for store in record.stores.values()]
    unclaimed = [at.public for at in directory.unclaimed()]
    space = measure(directory, stores) if len(stores) <= _MOST_MEASURED else None
    data = {
        "path": directory.path,
        "is_done": snapshot.is_done,
        "epochs": rows,
        "damaged": {str(epoch): reason for epoch, reason in damaged.items()},
        "unclaimed": unclaimed,
        "disk_nbytes": None if space is None else space.taken,
        "runs": [],  # below it
    }
    notes = []
    if len(listed) < len(recorded):
        notes.append(f"The newest {len(listed)} of {len(recorded)} epochs.")
    notes += [f"Epoch {epoch} is damaged: {reason}" for epoch, reason in damaged.items()]
    if unclaimed:
        notes.append(
            f"The log does not mention stores of epochs {format_ranges(unclaimed)}. "
            f"`jobrunner fsck {directory.path}` explains them."
        )
    if not rows:
        return Output(data, [*notes, f"No epoch is recorded in {directory.path}."])
    lines = draw_table(EPOCH_COLUMNS, rows)
    if space is None:
        lines.append("Sizes are logical: what epochs share counts in each of them.")
    else:
        lines.append(f"On the disk: {space}, with what epochs share counted once.")
    for row in rows:
        if row["step"]:  # says what the names and steps of all mean
            following = row["whole_epochs"] + 1
            lines.append(
                f"Checkpoint {row['epoch']} was saved after {_name_step(row)} of epoch {following}."
            )
            break
    lines += [f"Epoch {epoch} is pinned: {', '.join(labels)}." for epoch, labels in pins.items()]
    lines += _tell_parameters(rows)
    state = "The job has finished." if snapshot.is_done else "The job has not finished."
    return Output(data, [*lines, *notes, state])


@main.command(
    "info",
    examples=[
        "jobrunner info runs/kmeans latest",
        "jobrunner info runs/kmeans 4.s200",
    ],
)
@directory_argument
@epoch_argument
def info_command(*, directory: str, epoch: NamedEpoch) -> Output:
    """Show an epoch and the blobs of its nodes.

    EPOCH is a number, a position such as 4.s200, 'latest', or 'best:METRIC' for the lowest value of a
    metric, 'best:METRIC:max' for the highest.
    """
    manager = open_manager(directory)
    return describe_checkpoint(manager, resolve(epoch, manager.directory))


def describe_checkpoint(manager: MultiNodeCheckpointManager, epoch: Position) -> Output:
    """Describe an epoch: its record, and the blobs of each node."""
    with manager.directory.reading(epoch):
        checkpoint = manager.open(epoch)
        checkpoint.read_ahead(checkpoint.nodes)
        record = checkpoint.record
        nodes: dict[str, dict[str, Any]] = {}
        for node, blobs in checkpoint.items():
            store = record.stores[node]
            nodes[node] = {
                "store": store.name,
                "nbytes": store.nbytes,
                "blobs": {name: _describe_blob(blobs, name) for name in blobs},
            }
    row = _describe_epoch(record)
    row["parameters"] = _parameters_of(manager.directory, record.run_number)
    data = {"path": manager.path, **row, "run": record.run, "nodes": nodes}
    size, duration = format_bytes(record.nbytes), format_seconds(record.seconds)
    lines = [
        f"{record.name} of {manager.path}",
        f"saved {format_time(row['time'])}, {size} in {duration}",
    ]
    if row["parameters"]:
        lines.append(f"parameters {_name_parameters(row['parameters'])}")
    if row["metrics"]:
        lines.append("metrics " + " ".join(f"{k}={v}" for k, v in row["metrics"].items()))
    lines += [f"metadata {name}={show(value)}" for name, value in row["metadata"].items()]
    if row["stopped_by"]:
        lines.append(f"stopped by {', '.join(row['stopped_by'])}")
    for node, content in nodes.items():
        lines += ["", f"{node}  ({content['store']}, {format_bytes(content['nbytes'])})"]
        blobs_shown = [(f"  {name}", *_show_blob(b)) for name, b in content["blobs"].items()]
        lines += draw_rows(blobs_shown) or ["  no blobs"]
    return Output(data, lines)


def _describe_epoch(record: EpochRecord) -> dict[str, Any]:
    details = record.details
    return {
        **describe_position(record.at, details.steps_per_epoch),
        "time": record.time,
        "nodes": list(record.stores),
        "nbytes": record.nbytes,
        "seconds": record.seconds,
        "metrics": details.metrics,
        "metadata": details.metadata,
        "stopped_by": details.stopped_by,
    }


def _parameters_of(directory: Directory, run_number: int | None) -> dict[str, Any]:
    """What the function that made a run's job was called with."""
    plan = directory.plan_of(run_number) or {}
    parameters: dict[str, Any] = plan.get("parameters", {})
    return parameters


def _name_parameters(parameters: Mapping[str, Any]) -> str:
    words = []
    for name, value in parameters.items():
        words.append(f"{name}={clip(show(value), _SHOWN_VALUE_LENGTH)}")
    return clip(" ".join(words), 1000)


def _tell_parameters(rows: Sequence[EpochRow]) -> list[str]:
    """A line for each series of epochs that were saved with the same parameters."""
    lines = []
    for parameters, series in groupby(rows, lambda row: _name_parameters(row["parameters"])):
        epochs = [row["epoch"] for row in series]
        if parameters:
            span = f"epoch {epochs[0]}"
            if len(epochs) > 1:
                span = f"epochs {epochs[0]} to {epochs[-1]}"
            lines.append(f"Parameters of {span}: {parameters}")
    return lines


def _describe_blob(node: NodeCheckpoint, name: str) -> dict[str, Any]:
    from jobrunner.checkpoint import ArrayOutline, Unmade

    try:
        outline = node.outline(name)
    except DefinitionError as error:  # saved by a later version
        return {"type": "unreadable", "value": str(error)}
    if isinstance(outline, Unmade):
        return _describe_unmade(outline)
    if isinstance(outline, ArrayOutline):
        blob = {"type": "array", "shape": list(outline.shape), "dtype": outline.dtype}
        if not outline.shape:
            blob["value"] = show(node.load(name).item())
        return blob
    return {"type": type(outline).__name__, "value": show(outline)}


def _describe_unmade(outline: Unmade) -> dict[str, Any]:
    from jobrunner.checkpoint import ArrayOutline

    parts = outline.parts
    if outline.kind == "torch.Tensor" and isinstance(parts["data"], ArrayOutline):
        return {"type": "tensor", "shape": list(parts["data"].shape), "dtype": parts["dtype"]}
    if outline.kind == "pickle":
        return {"type": "pickle", **parts}
    if outline.kind.startswith("codec "):
        name = outline.kind.removeprefix("codec ")
        return {"type": "codec", "codec": name, "value": show(parts)}
    return {"type": outline.kind, "value": show(parts)}


def _show_blob(blob: Mapping[str, Any]) -> tuple[str, str]:
    kind = blob["type"]
    if kind == "array":
        shape = " x ".join(map(str, blob["shape"]))
        return str(blob["dtype"]), shape or f"no axes: {blob['value']}"
    if kind == "tensor":
        return f"{blob['dtype']} tensor", " x ".join(map(str, blob["shape"])) or "no axes"
    if kind == "pickle":
        return kind, f"{blob['nbytes']} bytes"
    value = str(blob["value"])
    if kind == "codec":
        value = f"{blob['codec']}({value})"
    return str(kind), clip(value, _SHOWN_VALUE_LENGTH)
