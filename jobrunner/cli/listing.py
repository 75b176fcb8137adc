"""``ls`` and ``info``: show what a checkpoint directory contains."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from jobrunner.cli.command import Output, main
from jobrunner.cli.formatting import format_table
from jobrunner.cli.options import (
    count_option,
    directory_argument,
    epoch_argument,
    open_directory,
    open_manager,
    read_epoch,
)
from jobrunner.cli.runs import list_runs, runs_options
from jobrunner.errors import CheckpointCorruptError, DefinitionError
from jobrunner.positions import Position, describe_position, format_ranges, name_step
from jobrunner.texts import (
    clip,
    format_bytes,
    format_metrics,
    format_seconds,
    format_time,
    printable,
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
@runs_options
def list_command(*, directory: str, last: int | None, choice: Mapping[str, Any]) -> Output:
    """List the recorded epochs of DIR, or the runs below it."""
    opened = open_directory(directory)
    return list_runs(opened, choice, last) or list_epochs(opened, last)


def list_epochs(directory: Directory, last: int | None = None) -> Output:
    """List the recorded epochs, or only the newest `last`."""
    snapshot = directory.snapshot()
    recorded = snapshot.epochs
    shown = recorded if last is None else recorded[-last:]
    epochs, damaged = [], {}
    parameters_of = functools.cache(lambda number: _parameters_of(directory, number))
    for epoch, record in directory.records(shown, snapshot):
        if isinstance(record, CheckpointCorruptError):
            damaged[epoch] = str(record)
        else:
            parameters = parameters_of(record.run_number)
            epochs.append({**_describe_epoch(record), "parameters": parameters})
    pins = {at.public: list(labels) for at, labels in snapshot.pins.items()}
    for found in epochs:
        found["pins"] = pins.get(found["epoch"], [])
    unclaimed = [at.public for at in directory.unclaimed()]
    data: dict[str, Any] = {
        "path": directory.path,
        "is_done": snapshot.is_done,
        "epochs": epochs,
        "damaged": {str(epoch): why for epoch, why in damaged.items()},
        "unclaimed": unclaimed,
        "runs": [],  # below it
    }
    notes = [f"Epoch {epoch} is damaged: {why}" for epoch, why in damaged.items()]
    if len(shown) < len(recorded):
        notes.insert(0, f"The newest {len(shown)} of {len(recorded)} epochs.")
    if unclaimed:
        notes.append(
            f"The log does not mention stores of epochs {format_ranges(unclaimed)}. "
            f"`jobrunner fsck {directory.path}` explains them."
        )
    if not epochs:
        return Output(data, "\n".join((*notes, f"No epoch is recorded in {directory.path}.")))
    partial = [found for found in epochs if found["step"]]
    rows = [("EPOCH", *(["STEP"] if partial else ()), "SAVED", "NODES", "SIZE", "TIME", "METRICS")]
    rows += [
        (
            str(found["epoch"]),
            *(
                [_name_step_of(found).removeprefix("step ") if found["step"] else ""]
                if partial
                else ()
            ),
            format_time(found["time"]),
            str(len(found["nodes"])),
            format_bytes(found["nbytes"]),
            format_seconds(found["seconds"]),
            " ".join(format_metrics(whole_metrics(found["metrics"], found["nodes"]))),
        )
        for found in epochs
    ]
    right = (0, 3, 4, 5) if partial else (0, 2, 3, 4)
    lines = [format_table(rows, right)]
    lines += [
        f"Checkpoint {found['epoch']} was saved after {_name_step_of(found)} of epoch "
        f"{found['whole_epochs'] + 1}."
        for found in partial[:1]  # says what the names and steps of all mean
    ]
    lines += [
        printable(f"Epoch {epoch} is pinned: {', '.join(labels)}.", kept="")
        for epoch, labels in pins.items()
    ]
    lines += _format_parameters(epochs)
    state = "The job has finished." if snapshot.is_done else "The job has not finished."
    return Output(data, "\n".join((*lines, *notes, state)))


@main.command(
    "info",
    examples=[
        "jobrunner info runs/kmeans latest",
        "jobrunner info runs/kmeans 4.s200",
    ],
)
@directory_argument
@epoch_argument
def info_command(*, directory: str, epoch: str) -> Output:
    """Show an epoch and the blobs of its nodes.

    EPOCH is a number, a position such as 4.s200, 'latest', or 'best:METRIC' for the lowest value of a
    metric, 'best:METRIC:max' for the highest.
    """
    manager = open_manager(directory)
    return describe_checkpoint(manager, read_epoch(epoch, manager.directory))


def describe_checkpoint(manager: MultiNodeCheckpointManager, epoch: Position) -> Output:
    """Describe an epoch: its record, and the blobs of each node."""
    with manager.directory.reading(epoch):
        checkpoint = manager.open(epoch)
        checkpoint.read_ahead(checkpoint.nodes)
        about = _describe_epoch(checkpoint.record)
        nodes: dict[str, dict[str, Any]] = {
            node: {
                "store": checkpoint.record.stores[node].name,
                "nbytes": checkpoint.record.stores[node].nbytes,
                "blobs": {
                    name: _describe_blob(checkpoint[node], name) for name in checkpoint[node]
                },
            }
            for node in checkpoint.nodes
        }
    about["parameters"] = _parameters_of(manager.directory, checkpoint.record.run_number)
    data = {"path": manager.path, **about, "run": checkpoint.record.run, "nodes": nodes}
    size, time = format_bytes(checkpoint.record.nbytes), format_seconds(checkpoint.record.seconds)
    lines = [
        f"{checkpoint.record.name} of {manager.path}",
        f"saved {format_time(about['time'])}, {size} in {time}",
    ]
    if about["parameters"]:
        lines.append(f"parameters {_name_parameters(about['parameters'])}")
    if about["metrics"]:
        lines.append("metrics " + " ".join(f"{k}={v}" for k, v in about["metrics"].items()))
    lines += [f"metadata {name}={show(it)}" for name, it in about["metadata"].items()]
    if about["stopped_by"]:
        lines.append(f"stopped by {', '.join(about['stopped_by'])}")
    lines = [printable(line, kept="") for line in lines]
    for node, found in nodes.items():
        head = f"{node}  ({found['store']}, {format_bytes(found['nbytes'])})"
        lines += ["", printable(head, kept="")]
        rows = [(f"  {name}", *_format_blob(blob)) for name, blob in found["blobs"].items()]
        lines.append(format_table(rows) if rows else "  no blobs")
    return Output(data, "\n".join(lines))


def _name_step_of(found: Mapping[str, Any]) -> str:
    return name_step(found["step"], found["steps_per_epoch"])


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
    named = (
        f"{name}={clip(show(value), _SHOWN_VALUE_LENGTH)}" for name, value in parameters.items()
    )
    return clip(" ".join(named), 1000)


def _format_parameters(epochs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each row of epochs that were saved with the same parameters."""
    lines = []
    for named, group in groupby(epochs, lambda found: _name_parameters(found["parameters"])):
        if named:
            first, *_, last = [found["epoch"] for found in group] * 2
            of = f"epoch {first}" if first == last else f"epochs {first} to {last}"
            lines.append(printable(f"Parameters of {of}: {named}", kept=""))
    return lines


def _describe_blob(node: NodeCheckpoint, name: str) -> dict[str, Any]:
    from jobrunner.checkpoint import ArrayOutline, Unmade

    try:
        value = node.outline(name)
    except DefinitionError as error:  # saved by a later version
        return {"type": "unreadable", "value": str(error)}
    if isinstance(value, Unmade):
        return _describe_unmade(value)
    if isinstance(value, ArrayOutline):
        about = {"type": "array", "shape": list(value.shape), "dtype": value.dtype}
        return about if value.shape else {**about, "value": show(node.load(name).item())}
    return {"type": type(value).__name__, "value": show(value)}


def _describe_unmade(value: Unmade) -> dict[str, Any]:
    from jobrunner.checkpoint import ArrayOutline

    parts = value.parts
    if value.kind == "torch.Tensor" and isinstance(parts["data"], ArrayOutline):
        return {"type": "tensor", "shape": list(parts["data"].shape), "dtype": parts["dtype"]}
    if value.kind == "pickle":
        return {"type": "pickle", **parts}
    if value.kind.startswith("codec "):
        name = value.kind.removeprefix("codec ")
        return {"type": "codec", "codec": name, "value": show(parts)}
    return {"type": value.kind, "value": show(parts)}


def _format_blob(blob: Mapping[str, Any]) -> tuple[str, str]:
    if blob["type"] == "array":
        shape = " x ".join(map(str, blob["shape"]))
        return str(blob["dtype"]), shape or f"no axes: {blob['value']}"
    if blob["type"] == "tensor":
        return f"{blob['dtype']} tensor", " x ".join(map(str, blob["shape"])) or "no axes"
    if blob["type"] == "pickle":
        return "pickle", f"{blob['nbytes']} bytes"
    value = f"{blob['codec']}({blob['value']})" if blob["type"] == "codec" else str(blob["value"])
    return str(blob["type"]), clip(value, _SHOWN_VALUE_LENGTH)
