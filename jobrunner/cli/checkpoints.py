"""Commands on single epochs: ``verify``, ``diff``, ``pin``, ``unpin``, ``restore`` and ``copy``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from jobrunner.cli.command import DIFFERENT, Output, exit_code_of, main
from jobrunner.cli.options import (
    cluster_options,
    complete_directories,
    complete_epochs,
    directory_argument,
    epoch_argument,
    is_epoch,
    job_option,
    nothing_recorded,
    open_manager,
    param_option,
    read_epoch,
    read_number,
    take_over_option,
)
from jobrunner.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    DefinitionError,
)
from jobrunner.positions import (
    Position,
    PublicPosition,
    describe_position,
    format_ranges,
)
from jobrunner.signals import terminated_as_interrupt
from jobrunner.texts import printable

if TYPE_CHECKING:
    from jobrunner.checkpoint import Checkpoint, EpochRecord, MultiNodeCheckpointManager
    from jobrunner.cluster import Session

_REPLAY_OPTIONS = ("target", "allow_pickle", "parameters", "workers", "threads", "scheduler")


@main.command(
    "verify",
    examples=[
        "jobrunner verify runs/kmeans",
        "jobrunner verify runs/kmeans latest --deep",
        "jobrunner verify runs/kmeans --replay 7 --job kmeans.py",
    ],
)
@directory_argument
@click.argument("epoch", metavar="[EPOCH]", required=False, shell_complete=complete_epochs)
@click.option(
    "--deep", "is_deep", is_flag=True, help="Also read the whole log, and decode every blob."
)
@click.option(
    "--replay",
    shell_complete=complete_epochs,
    metavar="EPOCH",
    help="Run this epoch again, from the epoch recorded before it, and compare.",
)
@job_option("The job for --replay, as for 'jobrunner run'.")
@click.option(
    "--allow-pickle",
    is_flag=True,
    help="Unpickle blobs for --replay. Only if you trust everyone who can write to DIR.",
)
@param_option
@cluster_options
def verify_command(
    *,
    directory: str,
    epoch: str | None,
    is_deep: bool,
    replay: str | None,
    target: str | None,
    allow_pickle: bool,
    parameters: Mapping[str, str],
    cluster: Callable[[], Session],
) -> Output:
    """Compare every byte of an epoch with its record.

    EPOCH is a number, a position such as 4.s200, 'latest', or 'best:METRIC' for the lowest value of a
    metric, 'best:METRIC:max' for the highest. By default, all recorded epochs of
    DIR are verified.

    --replay verifies an epoch, runs it again, and compares the result with the record, bit for bit.
    It writes nothing to DIR.
    """
    if replay is None:
        ctx = click.get_current_context()
        for param in ctx.command.params:
            if param.name in _REPLAY_OPTIONS and ctx.params[param.name]:
                raise click.UsageError(f"{param.opts[0]} requires --replay EPOCH.")
        manager = open_manager(directory)
        epochs = manager.positions() if epoch is None else [read_epoch(epoch, manager.directory)]
        return verify_epochs(manager, epochs, is_all=epoch is None, is_deep=is_deep)
    if target is None or epoch is not None or is_deep:
        raise click.UsageError(
            "--replay EPOCH needs --job FILE_OR_MODULE[:JOB], because a checkpoint contains no "
            "code. It cannot be combined with another EPOCH or with --deep."
        )
    from jobrunner.cli.script import Script
    from jobrunner.run import Replay

    job = Script(target).job(parameters)
    manager = open_manager(directory, allow_pickle=allow_pickle)
    again = Replay(job, manager.directory, read_epoch(replay, manager.directory))
    again.check()  # before a cluster starts
    with terminated_as_interrupt(), cluster() as session:
        report = again.run(session)
    data = {"job": job.name, "path": manager.path, **report.to_dict()}
    return Output(data, str(report), 0 if report.is_equal else DIFFERENT)


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
    found, lines = [], []
    failure: CheckpointError | None = None  # the first
    log = None
    if is_deep:
        log, line, failure = _verify_log(manager)
        lines.append(f"log: {line}")
    from jobrunner.checkpoint import open_record, verify_record

    directory = manager.directory
    snapshot = directory.snapshot() if is_all else None
    for epoch in epochs:
        error: CheckpointError | None = None
        record = None
        try:
            snapshot = snapshot or directory.snapshot()
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
            failure = failure or caught
        what, at = _locate(record, epoch)
        found.append({**at, "is_whole": error is None, "error": error and str(error)})
        lines.append(f"{what}: {'whole' if error is None else error}")
    if not epochs:
        none = nothing_recorded(manager.directory)
        failure = failure or none
        lines.append(str(none))
    data = {"path": manager.path, "log": log, "epochs": found}
    return Output(data, "\n".join(lines), exit_code_of(failure))


def _locate(record: EpochRecord | None, epoch: Position) -> tuple[str, dict[str, object]]:
    """An epoch in words and as JSON, with the step if its checkpoint is mid-epoch."""
    if record is None:  # it cannot be read
        return f"epoch {epoch}", {"epoch": epoch.to_json()}
    return record.name, describe_position(record.at, record.details.steps_per_epoch)


def _name(manager: MultiNodeCheckpointManager, epoch: Position) -> str:
    record = None
    with contextlib.suppress(CheckpointError):
        record = manager.record(epoch)
    return _locate(record, epoch)[0].capitalize()


def _verify_log(
    manager: MultiNodeCheckpointManager,
) -> tuple[dict[str, object], str, CheckpointError | None]:
    try:
        repaired = manager.directory.verify_log()
    except CheckpointCorruptError as error:
        return {"is_whole": False, "error": str(error), "repaired": []}, str(error), error
    but = f", except for the repaired entries {format_ranges(repaired)}" if repaired else ""
    return {"is_whole": True, "error": None, "repaired": repaired}, f"whole{but}", None


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
@click.argument("a", metavar="A", shell_complete=complete_directories)
@click.argument("b", metavar="B", shell_complete=complete_directories)
@click.option("--deep", "is_deep", is_flag=True, help="Also read blobs whose digests are equal.")
def diff_command(*, a: str, b: str, is_deep: bool) -> Output:
    """Show which blobs of two checkpoints differ, and by how much.

    A and B are each DIR@EPOCH, or DIR for its latest epoch. B may be @EPOCH, for A's directory.
    Compares what is stored, and runs no code from it; pickles are compared byte for byte.
    """
    from jobrunner.run import compare_checkpoints

    directory_a, epoch_a = _split_checkpoint(a)
    directory_b, epoch_b = _split_checkpoint(b)
    with (
        _open_checkpoint(a, directory_a, epoch_a) as one,
        _open_checkpoint(b, directory_b or directory_a, epoch_b) as other,
    ):
        data, text, is_equal = compare_checkpoints(one, other, is_deep=is_deep)
    return Output({"a": a, "b": b, **data}, text, 0 if is_equal else DIFFERENT)


def _split_checkpoint(text: str) -> tuple[str, str]:
    """Split ``DIR@EPOCH``, ``@EPOCH`` or ``DIR``; DIR may contain '@'."""
    directory, at, epoch = text.rpartition("@")
    if at and is_epoch(epoch):
        return directory, epoch
    return text, "latest"


@contextlib.contextmanager
def _open_checkpoint(text: str, directory: str, epoch: str) -> Iterator[Checkpoint]:
    is_number = directory == text and read_number(text) is not None
    if not directory or (is_number and not os.path.isdir(text)):
        raise DefinitionError(
            f"{text!r} names no directory: expected DIR or DIR@EPOCH, or, as B, @EPOCH in the "
            f"directory of A."
        )
    manager = open_manager(directory)
    number = read_epoch(epoch, manager.directory)
    with manager.directory.reading(number):
        yield manager.open(number)


@main.command(
    "pin",
    examples=[
        "jobrunner pin runs/kmeans 30 --label paper",
    ],
)
@directory_argument
@epoch_argument
@click.option("--label", default="kept", show_default=True, help="Who pins it, or why.")
def pin_command(*, directory: str, epoch: str, label: str) -> Output:
    """Protect an epoch from deletion, also during a run."""
    manager = open_manager(directory)
    number = read_epoch(epoch, manager.directory)
    manager.pin(number, label)
    labels = manager.pins().get(number.public, [])
    data = {"path": manager.path, "epoch": number.public, "pins": labels}
    text = f"{_name(manager, number)} is pinned: {', '.join(labels)}."
    return Output(data, printable(text, kept=""))


@main.command(
    "unpin",
    examples=[
        "jobrunner unpin runs/kmeans 30",
    ],
)
@directory_argument
@epoch_argument
@click.option("--label", help="Remove only the pin with this label. [default: all]")
def unpin_command(*, directory: str, epoch: str, label: str | None) -> Output:
    """Remove the pins of an epoch."""
    manager = open_manager(directory)
    number = read_epoch(epoch, manager.directory)
    was_pinned = manager.unpin(number, label)
    labels = manager.pins().get(number.public, [])
    data = {"path": manager.path, "epoch": number.public, "was_pinned": was_pinned, "pins": labels}
    state = f"still pinned: {', '.join(labels)}" if labels else "no longer pinned"
    if not was_pinned:
        was = f"was not pinned{f' as {label}' if label else ''}"
        return Output(data, printable(f"{_name(manager, number)} {was}.", kept=""))
    return Output(data, printable(f"{_name(manager, number)} is {state}.", kept=""))


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
def restore_command(*, directory: str, epoch: str, number: int | None, take_over: bool) -> Output:
    """Record again an epoch that '--resume' or damage set aside.

    Verifies every byte first. `jobrunner fsck` lists the epochs that are set aside.
    """
    from jobrunner.checkpoint import restore_epoch

    at = read_number(epoch)
    if at is None:
        raise click.UsageError(f"{epoch!r} is neither the number of an epoch nor a position.")
    manager = open_manager(directory)
    record = restore_epoch(manager.directory, at, number, take_over=take_over)
    stores = {node: store.name for node, store in manager.record(at).stores.items()}
    data = {"path": manager.path, "epoch": at.public, "commit": record.number, "stores": stores}
    what = f"{_name(manager, at)} of {manager.path}"
    text = f"{what} is recorded again, as saved at {record.time}."
    return Output(data, printable(text, kept=""))


@main.command(
    "copy",
    examples=[
        "jobrunner copy runs/kmeans latest runs/backup",
        "jobrunner copy runs/kmeans all s3://bucket/kmeans",
    ],
)
@directory_argument
@epoch_argument
@click.argument("target", metavar="TARGET", shell_complete=complete_directories)
@take_over_option
def copy_command(*, directory: str, epoch: str, target: str, take_over: bool) -> Output:
    """Copy an epoch to the checkpoint directory TARGET.

    EPOCH is a number, 'latest' or 'all'. Verifies every byte. A job can resume from the copy as from
    the original.
    """
    manager = open_manager(directory)
    is_all = epoch == "all"
    epochs = manager.positions() if is_all else [read_epoch(epoch, manager.directory)]
    return copy_epochs(manager, epochs, target, is_all=is_all, take_over=take_over)


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
    but = f" (deleted meanwhile: {format_ranges(deleted)})" if deleted else ""
    return Output(data, f"Copied to {path}: {format_ranges(copied)}{but}")
