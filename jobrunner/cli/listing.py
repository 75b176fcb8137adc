"""What ``ls``, ``info`` and ``verify`` tell of a checkpoint directory: as data, and as text."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from jobrunner.checkpoint import (
    ArrayOutline,
    Checkpoint,
    MultiNodeCheckpointManager,
    NodeCheckpoint,
)
from jobrunner.cli.progress import format_bytes, format_metrics, format_seconds
from jobrunner.compile import collector_paused
from jobrunner.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    DefinitionError,
)
from jobrunner.run import format_ranges

_SHOWN_VALUE_LENGTH = 48


def open_directory(directory: str, *, allow_pickle: bool = False) -> MultiNodeCheckpointManager:
    """Make a manager for a directory that must be there.

    Raises
    ------
    CheckpointNotFoundError
        No directory is at the path: most likely a mistyped one.
    """
    manager = MultiNodeCheckpointManager(directory, allow_pickle=allow_pickle)
    try:
        is_there = manager.files.is_directory(manager.path)
        found = ", but a file" if not is_there and manager.files.is_taken(manager.path) else ""
    except OSError as error:
        raise CheckpointError(
            f"{manager.path} cannot be read: {type(error).__name__}: {error}."
        ) from error
    if not is_there:
        raise CheckpointNotFoundError(
            f"There is no directory {manager.path!r}{found}. Name the one that the job was run "
            f"with, as --checkpoint."
        )
    return manager


def read_epoch(text: str, manager: MultiNodeCheckpointManager) -> int:
    """Read the number of an epoch, or ``latest``.

    Raises
    ------
    DefinitionError
        It is neither.
    CheckpointNotFoundError
        No epoch is recorded.
    """
    if text.isdecimal():
        return int(text)
    if text != "latest":
        raise DefinitionError(f"{text!r} is not 'latest' or the number of an epoch.")
    epoch = manager.latest()
    if epoch is None:
        raise CheckpointNotFoundError(f"No epoch is recorded in {manager.path}.")
    return epoch


@collector_paused()  # of 100,000 records none is garbage
def list_epochs(
    manager: MultiNodeCheckpointManager, last: int | None = None
) -> tuple[dict[str, Any], str]:
    """Describe recorded epochs.

    Parameters
    ----------
    manager : MultiNodeCheckpointManager
    last : int, optional
        How many, the newest; by default all.

    Returns
    -------
    data : dict
        ``path``, ``is_done`` and ``epochs``, each of those with ``epoch``, ``time``, ``nodes``,
        ``nbytes``, ``seconds``, ``metrics`` and ``pins``; ``damaged``, epochs whose record cannot
        be read, and why; ``unclaimed``, epochs of stores that the log does not speak of.
    text : str
        A table.
    """
    recorded = manager.epochs()
    shown = recorded if last is None else recorded[-last:]
    epochs, damaged = [], {}
    for epoch, record in manager.records(shown):
        if isinstance(record, CheckpointCorruptError):
            damaged[epoch] = str(record)
        else:
            epochs.append(_describe_epoch(record))
    is_done = manager.is_done()
    pins = manager.pins()
    for found in epochs:
        found["pins"] = pins.get(found["epoch"], [])
    lost = manager.unclaimed()
    data = {
        "path": manager.path,
        "is_done": is_done,
        "epochs": epochs,
        "damaged": {str(epoch): why for epoch, why in damaged.items()},
        "unclaimed": lost,
    }
    notes = [f"Epoch {epoch} is damaged: {why}" for epoch, why in damaged.items()]
    if len(shown) < len(recorded):
        notes.insert(0, f"The newest {len(shown)} of {len(recorded)} epochs.")
    if lost:
        notes.append(
            f"Stores of epochs {format_ranges(lost)} lie here, and no entry of the log claims "
            f"them: `jobrunner fsck {manager.path}` tells more."
        )
    if not epochs:
        return data, "\n".join((*notes, f"No epoch is recorded in {manager.path}."))
    rows = [("EPOCH", "SAVED", "NODES", "SIZE", "TIME", "METRICS")]
    rows += [
        (
            str(found["epoch"]),
            _format_time(found["time"]),
            str(len(found["nodes"])),
            format_bytes(found["nbytes"]),
            format_seconds(found["seconds"]),
            " ".join(format_metrics(found["metrics"])),
        )
        for found in epochs
    ]
    state = "The job has finished." if is_done else "The job has not finished."
    lines = [format_table(rows, right=(0, 2, 3, 4))]
    lines += [f"Epoch {epoch} is pinned: {', '.join(labels)}." for epoch, labels in pins.items()]
    return data, "\n".join((*lines, *notes, state))


def _describe_epoch(record: Mapping[str, Any]) -> dict[str, Any]:
    stores = record["stores"].values()
    details = record["details"]
    return {
        "epoch": record["epoch"],
        "time": record["time"],
        "nodes": list(record["stores"]),
        "nbytes": sum(store["nbytes"] for store in stores),
        # Nodes save at the same time, so the slowest one tells.
        "seconds": max((store["seconds"] for store in stores), default=0.0),
        "metrics": details.get("metrics", {}),
        "stopped_by": details.get("stopped_by", []),
    }


def describe_checkpoint(
    manager: MultiNodeCheckpointManager, epoch: int
) -> tuple[dict[str, Any], str]:
    """Describe an epoch: its record, and the blobs of each node.

    Returns
    -------
    data : dict
        What `list_epochs` tells of the epoch, ``path``, ``run``, and ``nodes``: each with
        ``store``, ``nbytes`` and ``blobs``, each of those with ``type``, and ``shape`` and
        ``dtype`` for an array, else ``value`` as text (of an array without axes, both).
    text : str
    """
    with manager.reading(epoch):
        checkpoint = manager.open(epoch)
        checkpoint.read_ahead(checkpoint.nodes)
        about = _describe_epoch(checkpoint.record)
        nodes = {
            node: {
                "store": checkpoint.record["stores"][node]["store"],
                "nbytes": checkpoint.record["stores"][node]["nbytes"],
                "blobs": {
                    name: _describe_blob(checkpoint[node], name) for name in checkpoint[node]
                },
            }
            for node in checkpoint.nodes
        }
    data = {"path": manager.path, **about, "run": checkpoint.record["run"], "nodes": nodes}
    pace = f"{format_bytes(about['nbytes'])} in {format_seconds(about['seconds'])}"
    lines = [
        f"epoch {epoch} of {manager.path}",
        f"saved {_format_time(about['time'])}, {pace}",
    ]
    if about["metrics"]:
        lines.append("metrics " + " ".join(f"{k}={v}" for k, v in about["metrics"].items()))
    if about["stopped_by"]:
        lines.append(f"stopped by {', '.join(about['stopped_by'])}")
    for node, found in nodes.items():
        lines += ["", f"{node}  ({found['store']}, {format_bytes(found['nbytes'])})"]
        rows = [(f"  {name}", *_format_blob(blob)) for name, blob in found["blobs"].items()]
        lines.append(format_table(rows) if rows else "  no blobs")
    return data, "\n".join(lines)


def _describe_blob(node: NodeCheckpoint, name: str) -> dict[str, Any]:
    try:
        value = node.outline(name)
    except DefinitionError as error:
        # Pickled, or made by a codec that is not registered here: there, but not for us to read.
        return {"type": "unreadable", "value": str(error)}
    if isinstance(value, ArrayOutline):
        about = {"type": "array", "shape": list(value.shape), "dtype": value.dtype}
        return about if value.shape else {**about, "value": repr(node.load(name).item())}
    return {"type": type(value).__name__, "value": repr(value)}


def _format_blob(blob: Mapping[str, Any]) -> tuple[str, str]:
    if blob["type"] == "array":
        shape = " x ".join(map(str, blob["shape"]))
        return str(blob["dtype"]), shape or f"no axes: {blob['value']}"
    value = str(blob["value"])
    if len(value) > _SHOWN_VALUE_LENGTH:
        value = f"{value[: _SHOWN_VALUE_LENGTH - 3]}..."
    return str(blob["type"]), value


def verify_epochs(
    manager: MultiNodeCheckpointManager,
    epochs: Sequence[int],
    *,
    is_all: bool = False,
    is_deep: bool = False,
) -> tuple[dict[str, Any], str, CheckpointError | None]:
    """Verify epochs, each of them whatever the others and the log are like.

    Parameters
    ----------
    manager : MultiNodeCheckpointManager
    epochs : sequence of int
    is_all : bool
        They are all that are recorded: one that a run gives up meanwhile is left out.
    is_deep : bool
        Read the log from its first entry on, and decode every blob that can be decoded here.

    Returns
    -------
    data : dict
        ``path``; ``log``, None unless `is_deep`: ``is_whole``, ``error`` and ``repaired``, lost
        entries that a repair makes up for; ``epochs``, each of those with ``epoch``, ``is_whole``
        and ``error``.
    text : str
    error : CheckpointError or None
        The first one that was found.

    Raises
    ------
    CheckpointNotFoundError
        An epoch is not recorded, and was asked for.
    """
    found, lines = [], []
    first: CheckpointError | None = None
    log = None
    if is_deep:
        repaired: list[int] = []
        told = "whole"
        try:
            repaired = manager.verify_log()
        except CheckpointCorruptError as caught:
            first, told = caught, str(caught)
        if repaired:
            told = f"whole, but for entries {format_ranges(repaired)}, which were repaired"
        log = {"is_whole": first is None, "error": first and str(first), "repaired": repaired}
        lines.append(f"log: {told}")
    for epoch in epochs:
        try:
            manager.verify(epoch)
            if is_deep:
                _load_all(manager.open(epoch))
            error = None
        except CheckpointNotFoundError:
            if not is_all:
                raise
            lines.append(f"epoch {epoch}: given up meanwhile")
            continue
        except CheckpointError as caught:
            error = caught
            first = first or caught
        found.append({"epoch": epoch, "is_whole": error is None, "error": error and str(error)})
        lines.append(f"epoch {epoch}: {'whole' if error is None else error}")
    data = {"path": manager.path, "log": log, "epochs": found}
    if not epochs:
        # Whoever asks whether all is well must not take nothing at all for a yes.
        nothing = CheckpointNotFoundError(f"No epoch is recorded in {manager.path}.")
        first = first or nothing
        lines.append(str(nothing))
    return data, "\n".join(lines), first


def _load_all(checkpoint: Checkpoint) -> None:
    for node in checkpoint.values():
        for blob in node:
            # Pickled, or made by a codec that is not registered here: verified, not decoded.
            with contextlib.suppress(DefinitionError):
                node.load(blob)


def _format_time(text: str) -> str:
    """Write an ISO time, which records keep in UTC, as local time."""
    return datetime.datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def format_table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Align columns, those of `right` at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
