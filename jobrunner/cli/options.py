"""7 show: where the commands that run something run it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from jobrunner.errors import ExecutionError, PlacementError

if TYPE_CHECKING:
    from jobrunner.cluster import Session


def cluster_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add `workers`, `threads` and `scheduler`, for `check_cluster` and `open_session`."""
    for option in (
        click.option(
            "--scheduler",
            metavar="ADDR",
            help="Run on the Dask cluster whose scheduler is at ADDR.",
        ),
        click.option(
            "--threads",
            type=click.IntRange(min=1),
            metavar="N",
            help="Threads of each such worker.",
        ),
        click.option(
            "--workers",
            type=click.IntRange(min=1),
            metavar="N",
            help="Worker processes to start on this machine.",
        ),
    ):
        command = option(command)
    return command


def check_cluster(scheduler: str | None, workers: int | None, threads: int | None) -> None:
    """Refuse options that contradict each other.

    Raises
    ------
    click.UsageError
    """
    if scheduler is not None and (workers is not None or threads is not None):
        raise click.UsageError(
            "--workers and --threads start workers on this machine; the cluster at --scheduler "
            "has its own. Give either."
        )


def open_session(scheduler: str | None, workers: int | None, threads: int | None) -> Session:
    """Connect to a cluster, or start one on this machine.

    Raises
    ------
    PlacementError
        No scheduler answers at the address.
    """
    from jobrunner.cluster import Session

    if scheduler is None:
        return Session.local(workers=workers, threads_per_worker=threads)
    try:
        return Session.connect(scheduler)
    except ExecutionError as error:
        raise PlacementError(str(error)) from error
