"""Commands on single epochs: ``verify``, ``diff``, ``pin``, ``unpin``, ``restore`` and ``copy``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from jobrunner.cli.command import DIFFERENT, WORDS, Output, exit_code_of, main
from jobrunner.cli.options import (
    Cluster,
    allow_pickle_option,
    cluster_options,
    directory_argument,
    epoch_argument,
    nothing_recorded,
    open_manager,
    param_option,
    resolve,
    take_over_option,
)
from jobrunner.cli.parameter_types import (
    ANY_DIRECTORY,
    TARGET,
    EpochName,
    NamedEpoch,
    parse_epoch,
    split_checkpoint,
)
from jobrunner.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    DefinitionError,
)
from jobrunner.positions import Position, PublicPosition, describe_position, format_ranges
from jobrunner.signals import terminated_as_interrupt

if TYPE_CHECKING:
    from jobrunner.checkpoint import Checkpoint, EpochRecord, MultiNodeCheckpointManager

_OF_REPLAYS = ("target", "allow_pickle", "parameters", "workers", "threads", "scheduler")


@main.command(
    "verify",
    examples=[
        "jobrunner verify runs/kmeans",
        "jobrunner verify runs/kmeans latest --deep",
        "jobrunner verify runs/kmeans --replay 7 --job kmeans.py",
    ],
)
@directory_argument
@click.argument("epoch", metavar="[EPOCH]", required=False, type=EpochName())
@click.option(
    "--deep", "is_deep", is_flag=True, help="Also read the whole log, and decode every blob."
)
@click.option(
    "--replay",
    type=EpochName(),
    help="Run this epoch again, from the epoch recorded before it, and compare.",
)
@click.option("--job", "target", type=TARGET, help="The job for --replay, as for 'jobrunner run'.")
@allow_pickle_option(
    "Unpickle blobs for --replay. Only if you trust everyone who can write to DIR."
)
@param_option
@cluster_options
def verify_command(
    *,
    directory: str,
    epoch: NamedEpoch | None,
    is_deep: bool,
    replay: NamedEpoch | None,
    target: str | None,
    allow_pickle: bool,
    parameters: Mapping[str, str],
    cluster: Cluster,
) -> Output:
    """Compare every byte of an epoch with its record.

    EPOCH is a number, a position such as 4.s200, 'latest', or 'best:METRIC' for the lowest value of a
    metric, 'best:METRIC:max' for the highest. By default, all recorded epochs of
    DIR are verified.

    --replay verifies an epoch, runs it again, and compares the result with the record, bit for bit.
    It writes nothing to DIR.
    """
    if replay is None:
        _refuse_options_of_replays()
        manager = open_manager(directory)
        if epoch is None:
            return verify_epochs(manager, manager.positions(), is_all=True, is_deep=is_deep)
        return verify_epochs(manager, [resolve(epoch, manager.directory)], is_deep=is_deep)
    if target is None or epoch is not None or is_deep:
        raise click.UsageError(
            "--replay EPOCH needs --job FILE_OR_MODULE[:JOB], because a checkpoint contains no "
            "code. It cannot be combined with another EPOCH or with --deep."
        )
    from jobrunner.cli.script import Script
    from jobrunner.run import Replay

    job = Script(target).job(parameters)
    manager = open_manager(directory, allow_pickle=allow_pickle)
    again = Replay(job, manager.directory, resolve(replay, manager.directory))
    again.check()  # before a cluster starts
    with terminated_as_interrupt(), cluster.open() as session:
        report = again.run(session)
    data = {"job": job.name, "path": manager.path, **report.to_dict()}
    return Output(data, str(report).split("\n"), 0 if report.is_equal else DIFFERENT)


def _refuse_options_of_replays() -> None:
    ctx = click.get_current_context()
    for param in ctx.command.params:
        if param.name in _OF_REPLAYS and param.name in ctx.meta[WORDS]:
            raise click.UsageError(f"{param.opts[0]} requires --replay EPOCH.")


def verify_epochs(
    manager: MultiNodeCheckpointManager,
    epochs: Sequence[Position],
    *,
    is_all: bool = False,
    is_deep: bool = False,
) -> Output:
    """Verify each of these epochs, whatever the state of the others and of the log.

    `is_all`: skip epochs that a run deletes meanwhile.
    """
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    failures: list[CheckpointError] = []
    log = None
    if is_deep:
        log = _verify_log(manager, lines, failures)
    from jobrunner.checkpoint import open_record, verify_record

    directory = manager.directory
    snapshot = directory.snapshot()
    for epoch in epochs:
        error: CheckpointError | None = None
        record = None
        try:
            record = directory.record(Position.of(epoch), snapshot)
            verify_record(directory, record)
            if is_deep:
                _load_all(open_record(directory, record))
        except CheckpointNotFoundError:
            if not is_all:
                raise
            lines.append(f"epoch {epoch}: deleted meanwhile")
            continue
        except CheckpointError as caught:
            error = caught
            failures.append(caught)
        name, place = _locate(record, epoch)
        rows.append({**place, "is_whole": error is None, "error": error and str(error)})
        lines.append(f"{name}: {'whole' if error is None else error}")
    if not epochs:
        failures.append(nothing_recorded(manager.directory))
        lines.append(str(failures[-1]))
    data = {"path": manager.path, "log": log, "epochs": rows}
    return Output(data, lines, exit_code_of(failures[0] if failures else None))


def _locate(record: EpochRecord | None, epoch: Position) -> tuple[str, dict[str, Any]]:
    """An epoch in words and as JSON, with the step if its checkpoint is mid-epoch."""
    if record is None:  # it cannot be read
        return f"epoch {epoch}", {"epoch": epoch.to_json()}
    return record.name, describe_position(record.at, record.details.steps_per_epoch)


def _verify_log(
    manager: MultiNodeCheckpointManager, lines: list[str], failures: list[CheckpointError]
) -> dict[str, Any]:
    """Verify every entry; adds to what is told."""
    try:
        repaired = manager.directory.verify_log()
    except CheckpointCorruptError as error:
        lines.append(f"log: {error}")
        failures.append(error)
        return {"is_whole": False, "error": str(error), "repaired": []}
    exception = f", except for the repaired entries {format_ranges(repaired)}" if repaired else ""
    lines.append(f"log: whole{exception}")
    return {"is_whole": True, "error": None, "repaired": repaired}


def _load_all(checkpoint: Checkpoint) -> None:
    for node in checkpoint.values():
        for blob in node:
            # Pickled blobs, and those whose codec is not registered here, are not decoded.
            with contextlib.suppress(DefinitionError):
                node.load(blob)


@main.command(
    "diff",
    examples=[
        "jobrunner diff runs/kmeans@3 @4",
        "jobrunner diff runs/kmeans runs/other",
    ],
)
@click.argument("a", metavar="A", type=ANY_DIRECTORY)
@click.argument("b", metavar="B", type=ANY_DIRECTORY)
def diff_command(*, a: str, b: str) -> Output:
    """Show which blobs of two checkpoints differ, and by how much.

    A and B are each DIR@EPOCH, or DIR for its latest epoch. B may be @EPOCH, for A's directory.
    Compares what is stored, and runs no code from it; pickles are compared byte for byte.
    """
    from jobrunner.run import compare_checkpoints

    directory, _ = split_checkpoint(a)
    with (
        _open_checkpoint(a, directory) as one,
        _open_checkpoint(b, directory) as other,
    ):
        data, text, is_equal = compare_checkpoints(one, other)
    return Output({"a": a, "b": b, **data}, text.split("\n"), 0 if is_equal else DIFFERENT)


@contextlib.contextmanager
def _open_checkpoint(text: str, default: str) -> Iterator[Checkpoint]:
    """Open ``DIR@EPOCH``, ``DIR`` or ``@EPOCH``, which is in the directory `default`."""
    directory, name = split_checkpoint(text)
    directory = directory or default
    is_number = name is None and parse_epoch(text) not in (None, text)
    if not directory or (is_number and not os.path.isdir(text)):
        raise DefinitionError(
            f"{text!r} names no directory: expected DIR or DIR@EPOCH, or, as B, @EPOCH in the "
            f"directory of A."
        )
    manager = open_manager(directory)
    epoch = resolve(parse_epoch(name or "latest") or "latest", manager.directory)
    with manager.directory.reading(epoch):
        yield manager.open(epoch)


@main.command(
    "pin",
    examples=[
        "jobrunner pin runs/kmeans 30 --label paper",
    ],
)
@directory_argument
@epoch_argument
@click.option("--label", default="kept", show_default=True, help="Who pins it, or why.")
def pin_command(*, directory: str, epoch: NamedEpoch, label: str) -> Output:
    """Protect an epoch from deletion, also during a run."""
    manager = open_manager(directory)
    at = resolve(epoch, manager.directory)
    manager.pin(at, label)
    labels = manager.pins().get(at.public, [])
    data = {"path": manager.path, "epoch": at.public, "pins": labels}
    return Output(data, [f"{_name(manager, at)} is pinned: {', '.join(labels)}."])


@main.command(
    "unpin",
    examples=[
        "jobrunner unpin runs/kmeans 30",
    ],
)
@directory_argument
@epoch_argument
@click.option("--label", help="Remove only the pin with this label. [default: all]")
def unpin_command(*, directory: str, epoch: NamedEpoch, label: str | None) -> Output:
    """Remove the pins of an epoch."""
    manager = open_manager(directory)
    at = resolve(epoch, manager.directory)
    was_pinned = manager.unpin(at, label)
    labels = manager.pins().get(at.public, [])
    data = {"path": manager.path, "epoch": at.public, "was_pinned": was_pinned, "pins": labels}
    if not was_pinned:
        state = f"was not pinned{f' as {label}' if label else ''}"
    elif labels:
        state = f"is still pinned: {', '.join(labels)}"
    else:
        state = "is no longer pinned"
    return Output(data, [f"{_name(manager, at)} {state}."])


def _name(manager: MultiNodeCheckpointManager, epoch: Position) -> str:
    """An epoch at the beginning of a sentence."""
    record = None
    with contextlib.suppress(CheckpointError):
        record = manager.record(epoch)
    name, _ = _locate(record, epoch)
    return name.capitalize()


@main.command(
    "restore",
    examples=[
        "jobrunner restore runs/kmeans 30",
    ],
)
@directory_argument
@epoch_argument
@click.option(
    "--commit",
    "number",
    type=click.IntRange(min=0),
    metavar="ENTRY",
    help="The log entry that recorded the epoch, if it was set aside more than once.",
)
@take_over_option
def restore_command(
    *, directory: str, epoch: NamedEpoch, number: int | None, take_over: bool
) -> Output:
    """Record again an epoch that '--resume' or damage set aside.

    Verifies every byte first. `jobrunner fsck` lists the epochs that are set aside.
    """
    from jobrunner.checkpoint import restore_epoch

    if isinstance(epoch, str):  # "latest" and "best" are recorded
        raise click.UsageError(f"{epoch!r} is neither the number of an epoch nor a position.")
    manager = open_manager(directory)
    record = restore_epoch(manager.directory, epoch, number, take_over=take_over)
    stores = {node: store.name for node, store in manager.record(epoch).stores.items()}
    data = {
        "path": manager.path,
        "epoch": epoch.public,
        "commit": record.number,
        "stores": stores,
    }
    name = f"{_name(manager, epoch)} of {manager.path}"
    return Output(data, [f"{name} is recorded again, as saved at {record.time}."])


@main.command(
    "copy",
    examples=[
        "jobrunner copy runs/kmeans latest runs/backup",
        "jobrunner copy runs/kmeans all s3://bucket/kmeans",
    ],
)
@directory_argument
@click.argument("epoch", metavar="EPOCH", type=EpochName("all"))
@click.argument("target", metavar="TARGET", type=ANY_DIRECTORY)
@take_over_option
def copy_command(*, directory: str, epoch: NamedEpoch, target: str, take_over: bool) -> Output:
    """Copy an epoch to the checkpoint directory TARGET.

    EPOCH is a number, 'latest' or 'all'. Verifies every byte. A job can resume from the copy as from
    the original.
    """
    manager = open_manager(directory)
    if epoch == "all":
        epochs = manager.positions()
        return copy_epochs(manager, epochs, target, is_all=True, take_over=take_over)
    epochs = [resolve(epoch, manager.directory)]
    return copy_epochs(manager, epochs, target, take_over=take_over)


def copy_epochs(
    manager: MultiNodeCheckpointManager,
    epochs: Sequence[Position],
    target: str,
    *,
    is_all: bool = False,
    take_over: bool = False,
) -> Output:
    """Copy epochs to another directory; `is_all`: skip those that a run deletes meanwhile."""
    from jobrunner.checkpoint import Directory, copy_epoch

    copied: list[PublicPosition] = []
    deleted: list[PublicPosition] = []
    for epoch in epochs:
        try:
            copy_epoch(manager.directory, epoch, target, take_over=take_over)
        except CheckpointNotFoundError:
            if not is_all or epoch in manager.positions():
                raise
            deleted.append(epoch.public)
        else:
            copied.append(epoch.public)
    if not copied:  # a backup of nothing is no success
        raise nothing_recorded(manager.directory)
    path = Directory(target).path
    data = {"path": manager.path, "target": path, "epochs": copied}
    exception = f" (deleted meanwhile: {format_ranges(deleted)})" if deleted else ""
    return Output(data, [f"Copied to {path}: {format_ranges(copied)}{exception}"])
