"""Commands on single epochs: ``verify``, ``diff``, ``pin``, ``unpin``, ``restore`` and ``copy``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from jobrunner.cli.command import DIFFERENT, CommandOutput, exit_code_of, main
from jobrunner.cli.options import (
    PATH,
    NamedEpoch,
    cluster_options,
    directory_argument,
    epoch_argument,
    nothing_recorded,
    open_directory,
    open_session,
    param_option,
    read_epoch_name,
    resolve,
    take_over_option,
)
from jobrunner.cli.progress import told_while_slow
from jobrunner.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    CommitConflictError,
    DefinitionError,
)
from jobrunner.positions import Position, PublicPosition, describe_position, format_ranges
from jobrunner.signals import terminated_as_interrupt
from jobrunner.texts import counted, format_bytes, format_time

if TYPE_CHECKING:
    from jobrunner.checkpoint import Checkpoint, Directory


@main.command("verify")
@directory_argument
@click.argument("epoch", metavar="[EPOCH]", required=False, type=read_epoch_name)
@click.option(
    "--deep", "is_deep", is_flag=True, help="Also read the whole log, and decode every blob."
)
@click.option(
    "--replay",
    type=read_epoch_name,
    metavar="EPOCH",
    help="Run this epoch again, from the epoch recorded before it, and compare.",
)
@click.option(
    "--job",
    "target",
    type=PATH,
    metavar="FILE_OR_MODULE[:JOB]",
    help="The job for --replay, as for 'jobrunner run'.",
)
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
    epoch: NamedEpoch | None,
    is_deep: bool,
    replay: NamedEpoch | None,
    target: str | None,
    allow_pickle: bool,
    parameters: Mapping[str, str],
    **cluster: Any,
) -> CommandOutput:
    """Compare every byte of an epoch with its record.

    EPOCH is a number, a position such as 4.s200, 'latest', or 'best:METRIC' for the lowest value of a
    metric, 'best:METRIC:max' for the highest. By default, all recorded epochs of
    DIR are verified.

    --replay verifies an epoch, runs it again, and compares the result with the record, bit for bit.
    It writes nothing to DIR.

    For example:
        jobrunner verify runs/kmeans
        jobrunner verify runs/kmeans latest --deep
        jobrunner verify runs/kmeans --replay 7 --job kmeans.py
    """
    if not any((replay, target, allow_pickle, parameters, *cluster.values())):
        opened = open_directory(directory)
        if epoch is None:
            return verify_epochs(opened, opened.snapshot().epochs, is_all=True, is_deep=is_deep)
        return verify_epochs(opened, [resolve(epoch, opened)], is_deep=is_deep)
    if replay is None or target is None or epoch is not None or is_deep:
        raise click.UsageError(
            "A replay needs --replay EPOCH and --job FILE_OR_MODULE[:JOB], because a checkpoint "
            "contains no code. It cannot be combined with another EPOCH or with --deep."
        )
    from jobrunner.cli.script import Script
    from jobrunner.run import Replay

    job = Script(target).job(parameters)
    opened = open_directory(directory, allow_pickle=allow_pickle)
    rerun = Replay(job, opened, resolve(replay, opened))
    rerun.check()  # before a cluster starts
    with terminated_as_interrupt(), open_session(**cluster) as session:
        report = rerun.run(session)
    data = {"job": job.name, "path": opened.path, **report.to_dict()}
    exit_code = 0 if report.is_equal else DIFFERENT
    return CommandOutput(data, str(report).split("\n"), exit_code)


def verify_epochs(
    directory: Directory,
    epochs: Sequence[Position],
    *,
    is_all: bool = False,
    is_deep: bool = False,
) -> CommandOutput:
    """Verify each of these epochs, whatever the state of the others and of the log.

    `is_all`: skip epochs that a run deletes meanwhile.
    """
    from jobrunner.checkpoint import open_record, verify_record

    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    failures: list[CheckpointError] = []
    log: dict[str, Any] | None = None
    if is_deep:
        log = {"is_whole": True, "error": None, "repaired": []}
        lines.append("log: whole")
        try:
            log["repaired"] = directory.verify_log()
        except CheckpointCorruptError as error:
            failures.append(error)
            log |= {"is_whole": False, "error": str(error)}
            lines = [f"log: {error}"]
        if log["repaired"]:
            lines[0] += f", except for the repaired entries {format_ranges(log['repaired'])}"
    snapshot = directory.snapshot()
    whole: list[Position] = []
    deleted: list[Position] = []
    nodes: set[str] = set()
    nbytes = 0

    def describe_progress() -> str:
        return f"checked {len(rows)} of {counted(len(epochs), 'epoch')}"

    with told_while_slow(describe_progress):
        for at in epochs:
            name, place = f"epoch {at}", {"epoch": at.public}
            failure = None
            try:
                record = directory.record(at, snapshot)
                name, place = record.name, describe_position(at, record.details.steps_per_epoch)
                nodes.update(record.stores)
                nbytes += record.nbytes
                verify_record(directory, record)
                if is_deep:
                    _load_all(open_record(directory, record))
                whole.append(at)
            except CheckpointNotFoundError:
                if not is_all:
                    raise
                deleted.append(at)
                continue
            except CheckpointError as error:
                failure = str(error)
                failures.append(error)
                lines.append(f"{name}: {failure}")
            rows.append({**place, "is_whole": failure is None, "error": failure})
    for title, positions in (("whole", whole), ("deleted meanwhile", deleted)):
        if positions:
            lines.append(f"{title}: {format_ranges(positions)}")
    if epochs:
        outcome = "all whole"
        if len(whole) < len(rows):
            outcome = f"{len(rows) - len(whole)} not whole"
        lines.append(
            f"Checked {counted(len(rows), 'epoch')} of {counted(len(nodes), 'node')}, "
            f"{format_bytes(nbytes)}: {outcome}."
        )
    else:
        failures.append(nothing_recorded(directory))
        lines.append(str(failures[-1]))
    data = {"path": directory.path, "log": log, "epochs": rows}
    exit_code = 0
    if failures:
        exit_code = exit_code_of(failures[0])
    return CommandOutput(data, lines, exit_code)


def _load_all(checkpoint: Checkpoint) -> None:
    for node in checkpoint.values():
        for blob in node:
            # Pickled blobs, and those whose codec is not registered here, are not decoded.
            with contextlib.suppress(DefinitionError):
                node.load(blob)


@main.command("diff")
@click.argument("a", metavar="A", type=PATH)
@click.argument("b", metavar="B", type=PATH)
def diff_command(*, a: str, b: str) -> CommandOutput:
    """Show which blobs of two checkpoints differ, and by how much.

    A and B are each DIR@EPOCH, or DIR for its latest epoch. B may be @EPOCH, for A's directory.
    Compares blobs by the digests that were recorded, and values where these differ. Runs no code from
    the directories; pickles are compared byte for byte. It does not look for damage: verify does.

    For example:
        jobrunner diff runs/kmeans@3 @4
        jobrunner diff runs/kmeans runs/other
    """
    from jobrunner.run import compare_checkpoints

    directory, epoch = _split_checkpoint(a)
    other_directory, other_epoch = _split_checkpoint(b)
    with (
        _opened(directory, epoch) as first,
        _opened(other_directory or directory, other_epoch) as second,
    ):
        data, text = compare_checkpoints(first, second)
    exit_code = 0 if data["is_equal"] else DIFFERENT
    return CommandOutput({"a": a, "b": b, **data}, text.split("\n"), exit_code)


def _split_checkpoint(text: str) -> tuple[str, NamedEpoch]:
    """Split ``DIR@EPOCH``; DIR may contain "@", and it is the latest epoch if none is named."""
    directory, at, epoch = text.rpartition("@")
    if at:
        with contextlib.suppress(click.BadParameter):
            return directory, read_epoch_name(epoch)
    return text, "latest"


@contextlib.contextmanager
def _opened(directory: str, name: NamedEpoch) -> Iterator[Checkpoint]:
    from jobrunner.checkpoint import open_record

    opened = open_directory(directory)
    epoch = resolve(name, opened)
    with opened.reading(epoch):
        yield open_record(opened, opened.record(epoch))


@main.command("pin")
@directory_argument
@epoch_argument
@click.option(
    "--label", metavar="TEXT", default="kept", show_default=True, help="Who pins it, or why."
)
def pin_command(*, directory: str, epoch: NamedEpoch, label: str) -> CommandOutput:
    """Protect an epoch from deletion, also during a run.

    For example:
        jobrunner pin runs/kmeans 30 --label paper
    """
    opened = open_directory(directory)
    at = resolve(epoch, opened)
    opened.pin(at, label)
    return _tell_pins(opened, at)


@main.command("unpin")
@directory_argument
@epoch_argument
@click.option("--label", metavar="TEXT", help="Remove only the pin with this label. [default: all]")
def unpin_command(*, directory: str, epoch: NamedEpoch, label: str | None) -> CommandOutput:
    """Remove the pins of an epoch.

    For example:
        jobrunner unpin runs/kmeans 30
    """
    opened = open_directory(directory)
    at = resolve(epoch, opened)
    return _tell_pins(opened, at, was_pinned=opened.unpin(at, label))


def _tell_pins(directory: Directory, at: Position, **outcome: bool) -> CommandOutput:
    labels = list(directory.snapshot().pins.get(at, ()))
    state = "is not pinned"
    if labels:
        state = f"is pinned: {', '.join(labels)}"
    data = {"path": directory.path, "epoch": at.public, **outcome, "pins": labels}
    return CommandOutput(data, [f"Epoch {at} {state}."])


@main.command("restore")
@directory_argument
@epoch_argument
@take_over_option
def restore_command(*, directory: str, epoch: NamedEpoch, take_over: bool) -> CommandOutput:
    """Record again an epoch that '--resume' or damage set aside.

    Verifies every byte first. `jobrunner fsck` lists the epochs that are set aside.

    For example:
        jobrunner restore runs/kmeans 30
    """
    from jobrunner.checkpoint import restore_epoch

    at = Position.of(epoch)  # not "latest" nor "best", which are recorded
    opened = open_directory(directory)
    commit = restore_epoch(opened, at, take_over=take_over)
    stores = {node: store.name for node, store in opened.record(at).stores.items()}
    data = {"path": opened.path, "epoch": at.public, "commit": commit.number, "stores": stores}
    saved = format_time(commit.time)
    return CommandOutput(data, [f"Epoch {at}, first saved {saved}, is recorded again, as of now."])


def read_epoch_or_all(text: str) -> NamedEpoch:
    """Read the name of an epoch, or "all"."""
    if text == "all":
        return text
    return read_epoch_name(text)


@main.command("copy")
@directory_argument
@click.argument("epoch", metavar="EPOCH", type=read_epoch_or_all)
@click.argument("target", metavar="TARGET", type=PATH)
@take_over_option
def copy_command(
    *, directory: str, epoch: NamedEpoch, target: str, take_over: bool
) -> CommandOutput:
    """Copy an epoch to the checkpoint directory TARGET.

    EPOCH is a number, 'latest' or 'all'. Verifies every byte. A job can resume from the copy as from
    the original. With 'all', epochs that are damaged are named and left out; the exit code is 7.

    For example:
        jobrunner copy runs/kmeans latest runs/backup
        jobrunner copy runs/kmeans all s3://bucket/kmeans
    """
    from jobrunner.checkpoint import Directory
    from jobrunner.story import refuse_directory_of_runs

    refuse_directory_of_runs(Directory(target))  # a run around it might delete the copy
    opened = open_directory(directory)
    if epoch == "all":
        epochs = opened.snapshot().epochs
        return copy_epochs(opened, epochs, target, is_all=True, take_over=take_over)
    return copy_epochs(opened, [resolve(epoch, opened)], target, take_over=take_over)


def copy_epochs(
    directory: Directory,
    epochs: Sequence[Position],
    target: str,
    *,
    is_all: bool = False,
    take_over: bool = False,
) -> CommandOutput:
    """Copy epochs to another directory.

    `is_all`: what is there already from an earlier copy is not copied again, epochs that a run
    deletes meanwhile are skipped, and those that cannot be read are named and passed over.
    """
    from jobrunner.checkpoint import absolute_path, copy_epoch, find_copied

    present: set[Position] = set()
    if is_all:
        present = find_copied(directory, epochs, target)
    missing = [epoch for epoch in epochs if epoch not in present]
    copied: list[PublicPosition] = []
    failures: dict[Position, CheckpointError] = {}

    def describe_progress() -> str:
        return f"copied {len(copied)} of {counted(len(missing), 'epoch')}"

    with told_while_slow(describe_progress):
        for epoch in missing:
            try:
                copy_epoch(directory, epoch, target, take_over=take_over)
            except CheckpointNotFoundError:
                if not is_all or epoch in directory.snapshot().recorded:
                    raise
            except (CheckpointWriteError, CommitConflictError):  # the target cannot be used
                raise
            except CheckpointError as error:
                if not is_all:
                    raise
                failures[epoch] = error
            else:
                copied.append(epoch.public)
    if not copied and not present and not failures:  # a backup of nothing is no success
        raise nothing_recorded(directory)
    path = absolute_path(target)
    left_out = {str(epoch): str(error) for epoch, error in failures.items()}
    lines = [f"Epoch {epoch} is not copied: {reason}" for epoch, reason in left_out.items()]
    lines.append(f"Copied to {path}: {format_ranges(copied)}")
    if present:
        lines.append(f"There already: {format_ranges(sorted(present))}")
    data = {"path": directory.path, "target": path, "epochs": copied, "left_out": left_out}
    exit_code = exit_code_of(next(iter(failures.values()), None))
    return CommandOutput(data, lines, exit_code)
