"""``report``: tell what runs did."""

from __future__ import annotations

import os

import click

from jobrunner.cli.command import Output, main
from jobrunner.cli.options import directory_argument, open_directory


@main.command("report")
@directory_argument
@click.option(
    "-o",
    "--output",
    default="report.html",
    show_default=True,
    metavar="FILE",
    help="The file to write; it is replaced.",
)
def report_command(*, directory: str, output: str) -> Output:
    """Write what the runs of DIR did as one HTML page.

    It shows what ran where, metrics, checkpoints, losses, where time went, and how to resume. It is
    made from the records alone, so also during a run and after a crash. The page needs no network.
    """
    from jobrunner.report import write_report

    manager = open_directory(directory)
    write_report(manager, output)
    path = os.path.abspath(output)
    return Output({"path": manager.path, "report": path}, f"Wrote {path}")
