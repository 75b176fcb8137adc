"""Arguments and options that several commands share, and what opens what they name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from jobrunner import errors
from jobrunner.positions import BEST, Position, parse_position
from jobrunner.texts import listed

if TYPE_CHECKING:
    from jobrunner.checkpoint import Directory
    from jobrunner.cluster import Session

Function = TypeVar("Function", bound=Callable[..., Any])
NamedEpoch = Position | str
"""An epoch as a command names it: a position, "latest" or "best:METRIC"."""

PATH = click.Path(readable=False)  # whose completion is that of files
COUNT = click.IntRange(min=1)


def read_epoch_name(text: str) -> NamedEpoch:
    """Read the name of an epoch."""
    if text == "latest" or BEST.fullmatch(text):
        return text
    position = parse_position(text)
    if position is None:
        raise click.BadParameter(
            f"{text!r} is neither 'latest' nor 'best:METRIC' nor the number of an epoch, nor a "
            f"position such as 4.s200."
        )
    return position


def read_pairs(ctx: click.Context, option: click.Parameter, texts: Sequence[str]) -> dict[str, str]:
    """Read an option that may be repeated, each time as ``NAME=VALUE`` with another name."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or name in pairs:
            raise click.BadParameter(f"{text!r} is not {option.metavar}, with each name once.")
        pairs[name] = value
    return pairs


directory_argument = click.argument("directory", metavar="DIR", type=PATH)
epoch_argument = click.argument("epoch", metavar="EPOCH", type=read_epoch_name)
take_over_option = click.option(
    "--take-over", is_flag=True, help="Take over the directory from a run that may still be alive."
)
param_option = click.option(
    "--param",
    "parameters",
    multiple=True,
    callback=read_pairs,
    metavar="NAME=VALUE",
    help="An argument of the function that makes the job. May be repeated.",
)


def cluster_options(function: Function) -> Function:
    """Add the options of `open_session`."""
    for option in (
        click.option(
            "--scheduler", metavar="ADDR", help="Run on the Dask cluster of this scheduler."
        ),
        click.option("--threads", type=COUNT, metavar="N", help="Threads per worker process."),
        click.option(
            "--workers", type=COUNT, metavar="N", help="Start N worker processes on this machine."
        ),
    ):
        function = option(function)
    return function


def open_session(workers: int | None, threads: int | None, scheduler: str | None) -> Session:
    """Start workers on this machine, or connect to the scheduler."""
    from jobrunner.cluster import Session

    if scheduler is None:
        _start_resource_tracker()
        return Session.local(workers=workers, threads_per_worker=threads)
    if workers is not None or threads is not None:
        raise click.UsageError(
            "--workers and --threads start workers on this machine, but --scheduler uses the "
            "workers of that cluster. Give one or the other."
        )
    try:
        return Session.connect(scheduler)
    except errors.ExecutionError as error:  # for the exit code
        raise errors.PlacementError(str(error)) from error


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


def open_directory(path: str, *, allow_pickle: bool = False) -> Directory:
    """Open a directory that exists; a typo must not pass for an empty directory."""
    from jobrunner.checkpoint import Directory

    directory = Directory(path, allow_pickle=allow_pickle)
    try:
        if directory.files.is_directory(directory.path):
            return directory
        is_file = directory.files.is_taken(directory.path)
    except OSError as error:
        raise errors.CheckpointError(
            f"Cannot read {directory.path}: {type(error).__name__}: {error}. Get the right to read it, "
            f"or name another directory."
        ) from error
    obstacle = ""
    if is_file:
        obstacle = ", but a file of that name"
    raise errors.CheckpointNotFoundError(
        f"There is no directory {directory.path!r}{obstacle}. Give the --checkpoint directory of "
        f"`jobrunner run`."
    )


def resolve(epoch: NamedEpoch, directory: Directory) -> Position:
    """The position that a command names."""
    if isinstance(epoch, str) and directory.snapshot().latest is None:
        raise nothing_recorded(directory)
    return directory.resolve(epoch)


def nothing_recorded(
    directory: Directory, problem: str = "No epoch is recorded"
) -> errors.CheckpointNotFoundError:
    """The error for a directory without epochs, or without something else."""
    from jobrunner.story import find_runs

    hint = ""
    names = find_runs(directory.files, directory.path).names
    if names not in ([], ["."]):
        hint = f" It contains checkpoint directories: {listed(names)}. Name one of them."
    return errors.CheckpointNotFoundError(f"{problem} in {directory.path}.{hint}")
