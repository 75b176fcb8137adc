"""The commands on a checkpoint directory: ``ls``, ``info``, ``verify``, ``diff``, ``prune`` and more.

None but ``verify --replay`` needs a cluster, the job or the job's code. Heavy imports wait until one
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import click

from jobrunner.cli.options import check_cluster, cluster_options, open_session
from jobrunner.cli.output import DIFFERENT, EPILOG, Answer, answers, exit_code_of
from jobrunner.errors import DefinitionError
from jobrunner.signals import terminated_as_interrupt

if TYPE_CHECKING:
    from jobrunner.checkpoint import Checkpoint
    from jobrunner.cluster import Session

_directory = click.argument("directory", metavar="DIR")
_epoch = click.argument("epoch", metavar="EPOCH")
_take_over = click.option(
    "--take-over", is_flag=True, help="Take the directory over from a run that may still be alive."
)


@click.command("ls", epilog=EPILOG)
@_directory
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="List only the newest N.")
@answers
def list_command(*, directory: str, last: int | None) -> Answer:
    """List the recorded epochs of DIR."""
    from jobrunner.cli.listing import list_epochs, open_directory

    return Answer(*list_epochs(open_directory(directory), last))


@click.command("info", epilog=EPILOG)
@_directory
@_epoch
@answers
def info_command(*, directory: str, epoch: str) -> Answer:
    """Show an epoch of DIR and the blobs of its nodes.

    EPOCH is a number, or 'latest'.
    """
    from jobrunner.cli.listing import describe_checkpoint, open_directory, read_epoch

    manager = open_directory(directory)
    return Answer(*describe_checkpoint(manager, read_epoch(epoch, manager)))


@click.command("verify", epilog=EPILOG)
@_directory
@click.argument("epoch", metavar="[EPOCH]", required=False)
@click.option(
    "--deep",
    "is_deep",
    is_flag=True,
    help="Read the whole log as well, and make every blob again from what was read.",
)
@click.option(
    "--replay",
    metavar="EPOCH",
    help="Run that epoch of the job again from what is recorded before it, and compare.",
)
@click.option(
    "--job",
    "target",
    metavar="FILE_OR_MODULE[:JOB]",
    help="The job that --replay runs, as 'jobrunner run' takes it.",
)
@click.option(
    "--allow-pickle",
    is_flag=True,
    help="With --replay: unpickle blobs, if you trust whoever can write to DIR.",
)
@cluster_options
@answers
def verify_command(
    *,
    directory: str,
    epoch: str | None,
    is_deep: bool,
    replay: str | None,
    target: str | None,
    allow_pickle: bool,
    workers: int | None,
    threads: int | None,
    scheduler: str | None,
) -> Answer:
    """Compare every byte of an epoch of DIR with its record.

    EPOCH is a number, or 'latest'; without it all recorded epochs are verified. With --replay the
    epoch is verified, run again, and compared with its record bit for bit; nothing is written to
    DIR.
    """
    from jobrunner.cli.listing import open_directory, read_epoch, verify_epochs

    if replay is not None:
        if target is None or epoch is not None or is_deep:
            raise click.UsageError(
                "--replay EPOCH needs --job FILE_OR_MODULE[:JOB], for a checkpoint holds no code; "
                "it goes with no other EPOCH and not with --deep."
            )
        check_cluster(scheduler, workers, threads)
        cluster = partial(open_session, scheduler, workers, threads)
        return _replay(directory, replay, target, cluster, allow_pickle=allow_pickle)
    for option, value in (
        ("--job", target),
        ("--allow-pickle", allow_pickle or None),
        ("--workers", workers),
        ("--threads", threads),
        ("--scheduler", scheduler),
    ):
        if value is not None:
            raise click.UsageError(f"{option} goes with --replay EPOCH; nothing else runs a job.")
    manager = open_directory(directory)
    epochs = manager.epochs() if epoch is None else [read_epoch(epoch, manager)]
    data, text, error = verify_epochs(manager, epochs, is_all=epoch is None, is_deep=is_deep)
    return Answer(data, text, 0 if error is None else exit_code_of(error))


def _replay(
    directory: str,
    epoch: str,
    target: str,
    cluster: Callable[[], Session],
    *,
    allow_pickle: bool,
) -> Answer:
    from jobrunner.cli.listing import open_directory, read_epoch
    from jobrunner.cli.script import load_job
    from jobrunner.run import Replay

    job = load_job(target)
    manager = open_directory(directory, allow_pickle=allow_pickle)
    replay = Replay(job, manager, read_epoch(epoch, manager))
    replay.check()  # before a cluster starts for it
    with terminated_as_interrupt(), cluster() as session:
        report = replay.run(session)
    data = {"job": job.name, "path": manager.path, **report.to_dict()}
    return Answer(data, str(report), 0 if report.is_equal else DIFFERENT)


@click.command("diff", epilog=EPILOG)
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option("--deep", "is_deep", is_flag=True, help="Read blobs whose digests are equal, too.")
@answers
def diff_command(*, a: str, b: str, is_deep: bool) -> Answer:
    """Say which blobs of which nodes differ between two checkpoints, and by how much.

    A and B are each DIR@EPOCH, or DIR for its latest epoch; B may be @EPOCH, of A's directory.
    """
    from jobrunner.run import compare_checkpoints

    directory_a, epoch_a = _read_place(a)
    directory_b, epoch_b = _read_place(b)
    with (
        _open_checkpoint(a, directory_a, epoch_a) as one,
        _open_checkpoint(b, directory_b or directory_a, epoch_b) as other,
    ):
        data, text, is_equal = compare_checkpoints(one, other, is_deep=is_deep)
    return Answer({"a": a, "b": b, **data}, text, 0 if is_equal else DIFFERENT)


def _read_place(text: str) -> tuple[str, str]:
    """The directory and the epoch of ``DIR@EPOCH``, ``@EPOCH`` or ``DIR``, which may hold a '@'."""
    directory, at, epoch = text.rpartition("@")
    return (
        (directory, epoch) if at and (epoch == "latest" or epoch.isdecimal()) else (text, "latest")
    )


@contextmanager
def _open_checkpoint(text: str, directory: str, epoch: str) -> Iterator[Checkpoint]:
    """A checkpoint to be read; that it was given up meanwhile is told."""
    from jobrunner.cli.listing import open_directory, read_epoch

    if not directory:
        raise DefinitionError(f"{text!r} names no directory: expected DIR or DIR@EPOCH.")
    manager = open_directory(directory)
    number = read_epoch(epoch, manager)
    with manager.reading(number):
        yield manager.open(number)


@click.command("prune", epilog=EPILOG)
@_directory
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="Keep the newest N.")
@click.option(
    "--keep-every", type=click.IntRange(min=1), metavar="N", help="Keep the multiples of N."
)
@click.option(
    "--keep-best",
    multiple=True,
    metavar="METRIC[:min|max][:N]",
    help="Keep the N (1) epochs with the least (or most) of a metric.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be given up; change nothing.")
@_take_over
@answers
def prune_command(
    *,
    directory: str,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: tuple[str, ...],
    dry_run: bool,
    take_over: bool,
) -> Answer:
    """Delete the epochs of DIR that no option keeps.

    The newest epoch and those that are pinned are always kept.
    """
    from jobrunner.cli.listing import open_directory
    from jobrunner.cli.maintenance import prune, read_policy

    policy = read_policy(keep_last, keep_every, keep_best)
    path = open_directory(directory).path
    return Answer(*prune(path, policy, dry_run=dry_run, take_over=take_over))


@click.command("pin", epilog=EPILOG)
@_directory
@_epoch
@click.option("--label", default="kept", show_default=True, help="Whose pin, or what for.")
@answers
def pin_command(*, directory: str, epoch: str, label: str) -> Answer:
    """Keep an epoch of DIR whatever is pruned or retired; also while a run goes on."""
    from jobrunner.cli.listing import open_directory, read_epoch
    from jobrunner.cli.maintenance import pin

    manager = open_directory(directory)
    return Answer(*pin(manager, read_epoch(epoch, manager), label))


@click.command("unpin", epilog=EPILOG)
@_directory
@_epoch
@click.option("--label", help="Take only this pin away. Without it: all of the epoch's.")
@answers
def unpin_command(*, directory: str, epoch: str, label: str | None) -> Answer:
    """Take the pins of an epoch of DIR away."""
    from jobrunner.cli.listing import open_directory, read_epoch
    from jobrunner.cli.maintenance import unpin

    manager = open_directory(directory)
    return Answer(*unpin(manager, read_epoch(epoch, manager), label))


@click.command("restore", epilog=EPILOG)
@_directory
@click.argument("epoch", metavar="EPOCH", type=click.IntRange(min=0))
@click.option(
    "--commit",
    "number",
    type=click.IntRange(min=0),
    metavar="ENTRY",
    help="Number of the epoch's commit in the log, where it was set aside more than once.",
)
@_take_over
@answers
def restore_command(*, directory: str, epoch: int, number: int | None, take_over: bool) -> Answer:
    """Record an epoch of DIR again that was set aside, by '--resume' or for damage.

    Every byte is verified first. `jobrunner fsck` lists what is set aside.
    """
    from jobrunner.cli.listing import open_directory
    from jobrunner.cli.maintenance import restore

    return Answer(*restore(open_directory(directory), epoch, number, take_over=take_over))


@click.command("copy", epilog=EPILOG)
@_directory
@_epoch
@click.argument("target", metavar="TARGET")
@_take_over
@answers
def copy_command(*, directory: str, epoch: str, target: str, take_over: bool) -> Answer:
    """Record an epoch of DIR in the directory TARGET as well.

    EPOCH is a number, 'latest' or 'all'. Every byte is verified. A job goes on from the copy as
    from the original.
    """
    from jobrunner.cli.listing import open_directory, read_epoch
    from jobrunner.cli.maintenance import copy

    manager = open_directory(directory)
    is_all = epoch == "all"
    epochs = manager.epochs() if is_all else [read_epoch(epoch, manager)]
    return Answer(*copy(manager, epochs, target, is_all=is_all, take_over=take_over))


@click.command("fsck", epilog=EPILOG)
@_directory
@click.option("--brief", "is_brief", is_flag=True, help="Show only what is stray or damaged.")
@click.option(
    "--repair",
    "is_repair",
    is_flag=True,
    help="Where entries of the log are lost: append one that says what can be proven without them.",
)
@answers
def fsck_command(*, directory: str, is_brief: bool, is_repair: bool) -> Answer:
    """Explain everything that lies in DIR and is not part of a checkpoint.

    Changes nothing, but for --repair, which appends to the log. It needs a directory that no run
    holds; what it would do is told without it.
    """
    from jobrunner.cli.listing import open_directory
    from jobrunner.cli.maintenance import fsck, repair

    if is_repair:
        return Answer(*repair(open_directory(directory)))
    data, text, error = fsck(open_directory(directory), is_brief=is_brief)
    return Answer(data, text, 0 if error is None else exit_code_of(error))


COMMANDS = (
    list_command,
    info_command,
    verify_command,
    diff_command,
    prune_command,
    pin_command,
    unpin_command,
    restore_command,
    copy_command,
    fsck_command,
)
