"""Arguments and options that several commands share, and functions that read them."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from jobrunner import errors
from jobrunner.cli.command import AT_EPOCH, Output
from jobrunner.outputs import check_output
from jobrunner.positions import BEST, Position, parse_position
from jobrunner.texts import listed, without_credentials

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from jobrunner.checkpoint import Directory, MultiNodeCheckpointManager
    from jobrunner.cluster import Session
    from jobrunner.compile import Plan

_MOST_DIGITS = 18  # Python refuses to read numbers of thousands of digits
Function = Callable[..., Output]


def complete_directories(
    ctx: click.Context, option: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Let the shell complete the name of a directory."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="dir")]


def complete_files(
    ctx: click.Context, option: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Let the shell complete the name of a file."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def complete_epochs(
    ctx: click.Context, option: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """The epochs whose stores are in the directory; reads nothing else, so that it is quick."""
    directory = ctx.params.get("directory") or ctx.params.get("checkpoint")
    others = ["none"] if option.name == "resume_from_epoch" else []
    # Before an option without its value, click leaves the arguments in `args`.
    return _epochs_of(directory or "".join(ctx.args[:1]), others, incomplete)


def _epochs_of(directory: str, others: Sequence[str], incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from jobrunner.names import parse_store_name

    try:
        names = os.listdir(directory)
    except OSError:  # none, or a URL
        return []
    stores = map(parse_store_name, names)
    epochs = {store.epoch for store in stores if store is not None}
    texts = ["latest", *others, *map(str, sorted(epochs))]
    return [CompletionItem(text) for text in texts if text.startswith(incomplete)]


def refuse_epoch(ctx: click.Context, param: click.Parameter, directory: str | None) -> str | None:
    """Raise UsageError for ``DIR@EPOCH``, unless a directory has that name; say how to name EPOCH."""
    match = AT_EPOCH.search(directory or "")
    if directory is None or match is None or without_credentials(directory) != directory:
        return directory  # URLs with credentials are refused without their text
    from jobrunner.checkpoint import Directory

    with contextlib.suppress(OSError, errors.JobRunnerError):  # the command reports it
        place = Directory(directory)
        if not place.files.is_taken(place.path):
            raise click.UsageError(
                f"There is no directory {directory!r}. Only `jobrunner diff` takes DIR@EPOCH. "
                f"{_name_epoch(ctx, directory[: match.start()] or 'DIR', match[1])}",
                ctx,
            )
    return directory


def _name_epoch(ctx: click.Context, directory: str, epoch: str) -> str:
    """Say how to name an epoch for the command."""
    given = {"directory": shlex.quote(directory), "epoch": epoch}
    names = [param.name for param in ctx.command.params]
    if "epoch" not in names:
        return f"`{ctx.command_path}` takes no epoch: give DIR alone."
    words = [
        given.get(param.name or "", param.human_readable_name)
        for param in ctx.command.params
        if isinstance(param, click.Argument)
    ]
    return f"Name the epoch by itself: {ctx.command_path} {' '.join(words)}"


directory_argument = click.argument(
    "directory", metavar="DIR", callback=refuse_epoch, shell_complete=complete_directories
)
epoch_argument = click.argument("epoch", metavar="EPOCH", shell_complete=complete_epochs)
take_over_option = click.option(
    "--take-over", is_flag=True, help="Take over the directory from a run that may still be alive."
)


def count_option(*names: str, help: str) -> Callable[[Function], Function]:
    """Make an option that takes an integer >= 1."""
    return click.option(*names, type=click.IntRange(min=1), metavar="N", help=help)


def cluster_options(function: Function) -> Function:
    """Add ``--workers``, ``--threads`` and ``--scheduler``; pass `cluster`, which opens a session."""

    @count_option("--workers", help="Start N worker processes on this machine.")
    @count_option("--threads", help="Threads per worker process.")
    @click.option(
        "--scheduler", metavar="ADDR", help="Run on the Dask cluster with the scheduler at ADDR."
    )
    @functools.wraps(function)
    def call(
        *, workers: int | None, threads: int | None, scheduler: str | None, **others: Any
    ) -> Output:
        if scheduler is not None and (workers is not None or threads is not None):
            raise click.UsageError(
                "--workers and --threads start workers on this machine, but --scheduler uses the "
                "workers of that cluster. Give one or the other."
            )
        return function(cluster=ChosenCluster(workers, threads, scheduler), **others)

    return call


class ChosenCluster(NamedTuple):
    """The cluster that the options of a command choose; call it to open a session there."""

    workers: int | None
    threads: int | None
    scheduler: str | None

    def __call__(self) -> Session:
        """Start the cluster, or connect to it."""
        from jobrunner.cluster import Session

        if self.scheduler is None:
            _start_resource_tracker()
            return Session.local(workers=self.workers, threads_per_worker=self.threads)
        try:
            return Session.connect(self.scheduler)
        except errors.ExecutionError as error:  # for the exit code
            raise errors.PlacementError(str(error)) from error

    def preview(self, plan: Plan) -> dict[str, list[str]]:
        """The nodes of each worker, if they were placed now; starts no cluster."""
        from jobrunner.cluster import preview_local

        if self.scheduler is None:
            placement = preview_local(plan.nodes, self.workers, self.threads)
        else:
            with self() as session:
                placement = session.preview(plan.nodes)
        nodes: dict[str, list[str]] = {}
        for node, worker in placement.items():
            nodes.setdefault(worker, []).append(node)
        return nodes


def _start_resource_tracker() -> None:
    """Start Python's process that frees the semaphores of processes, so that it does so in silence.

    If this process is killed, those of Dask's nannies are left, and it would warn of a leak.
    """
    from multiprocessing import resource_tracker

    quiet = "ignore:resource_tracker:UserWarning"
    sys.warnoptions.append(quiet)
    try:
        resource_tracker.ensure_running()
    finally:
        sys.warnoptions.remove(quiet)


def open_directory(path: str) -> Directory:
    """Open a directory that exists; a typo must not pass for an empty directory."""
    from jobrunner.checkpoint import Directory

    if not path:
        raise errors.DefinitionError("The name of the directory is empty. Is a variable not set?")
    directory = Directory(path)
    try:
        files = directory.files
        if files.is_directory(directory.path):
            return directory
        obstacle = ", but a file of that name" if files.is_taken(directory.path) else ""
    except OSError as error:
        raise errors.CheckpointError(
            f"Cannot read {directory.path}: {type(error).__name__}: {error}."
        ) from error
    raise errors.CheckpointNotFoundError(
        f"There is no directory {directory.path!r}{obstacle}. Give the --checkpoint directory of "
        f"`jobrunner run`."
    )


def open_manager(path: str, **options: Any) -> MultiNodeCheckpointManager:
    """Make a manager for a directory that exists."""
    from jobrunner.checkpoint import MultiNodeCheckpointManager

    directory = open_directory(path)
    return MultiNodeCheckpointManager(path, files=directory.files, **options)


def check_file(ctx: click.Context, option: click.Parameter, path: str | None) -> str | None:
    """Refuse now what could not be written in the end."""
    try:
        if path is not None:
            check_output(path)
    except (errors.DefinitionError, OSError) as error:
        raise click.BadParameter(str(error), ctx, option) from None
    return path


def read_pairs(
    ctx: click.Context, option: click.Parameter, texts: tuple[str, ...]
) -> dict[str, str]:
    """Read an option that may be repeated, each time as ``NAME=VALUE`` with another name."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or name in found:
            raise click.BadParameter(
                f"{text!r} is not {option.metavar}, with each name once.", ctx, option
            )
        found[name] = value
    return found


def job_option(help: str) -> Callable[[Function], Function]:
    """Make the option ``--job``, which names a job as for ``run``; passes `target`."""
    return click.option(
        "--job",
        "target",
        metavar="FILE_OR_MODULE[:JOB]",
        shell_complete=complete_files,
        help=help,
    )


param_option = click.option(
    "--param",
    "parameters",
    multiple=True,
    callback=read_pairs,
    metavar="NAME=VALUE",
    help="Give the function that makes the job, which has the decorator @job, an argument. "
    "May be repeated.",
)


def read_number(text: str) -> Position | None:
    """Parse the number of an epoch, or a position such as ``4.s200``; None for another text."""
    if text.isdecimal() and len(text) <= _MOST_DIGITS:
        return Position(int(text))
    return parse_position(text)


def is_epoch(text: str) -> bool:
    """Whether it names an epoch as `read_epoch` reads it."""
    return text == "latest" or bool(BEST.fullmatch(text)) or read_number(text) is not None


def read_epoch(text: str, directory: Directory) -> Position:
    """Parse the number of an epoch, a position, ``latest`` or ``best:METRIC``."""
    number = read_number(text)
    if number is not None:
        return number
    if not is_epoch(text):
        raise errors.DefinitionError(
            f"{text!r} is neither 'latest' nor 'best:METRIC' nor the number of an epoch, nor a position "
            f"such as 4.s200."
        )
    if directory.snapshot().latest is None:
        raise nothing_recorded(directory)
    return directory.resolve(text)


def nothing_recorded(
    directory: Directory, what: str = "No epoch is recorded"
) -> errors.CheckpointNotFoundError:
    """The error for a directory without epochs, or without something else."""
    from jobrunner.story import find_runs

    names, _ = find_runs(directory.files, directory.path)
    hint = f" It contains checkpoint directories: {listed(names)}. Name one of them."
    return errors.CheckpointNotFoundError(
        f"{what} in {directory.path}.{hint if names not in ([], ['.']) else ''}"
    )
