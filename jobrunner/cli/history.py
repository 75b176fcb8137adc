"""``report`` and ``stats``: tell what runs did."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from jobrunner.cli.command import Output, main
from jobrunner.cli.formatting import format_briefly, format_table
from jobrunner.cli.options import (
    Function,
    check_file,
    complete_files,
    count_option,
    directory_argument,
    nothing_recorded,
    open_directory,
)
from jobrunner.texts import counted

if TYPE_CHECKING:
    from jobrunner.story import Ledger, Story


def _output_option(default: str) -> Callable[[Function], Function]:
    return click.option(
        "-o",
        "--output",
        default=default,
        show_default=True,
        metavar="FILE",
        callback=check_file,
        shell_complete=complete_files,
        help="The file to write, outside of checkpoint directories; it is replaced.",
    )


def _read(directory: str) -> Story:
    """What the runs of a directory did; an error if there is none."""
    from jobrunner.story import read_story

    opened = open_directory(directory)
    story = read_story(opened)
    if not story.runs:
        raise nothing_recorded(opened, "No run has begun")
    return story


@main.command(
    "report",
    examples=[
        "jobrunner report runs/kmeans -o report.html",
    ],
)
@directory_argument
@_output_option("report.html")
def report_command(*, directory: str, output: str) -> Output:
    """Write what the runs of DIR did as one HTML page.

    It shows what ran where, metrics, checkpoints, losses, where time went, and how to resume. It is
    made from the records alone, so also during a run and after a crash. The page needs no network.
    """
    from jobrunner.story import write_report

    story = _read(directory)
    write_report(story, output)
    path = os.path.abspath(output)
    return Output({"path": story.path, "report": path}, f"Wrote {path}")


@main.command("stats", examples=["jobrunner stats runs/kmeans"])
@directory_argument
@count_option("--last", help="List only the newest N runs; the last line is of all.")
def stats_command(*, directory: str, last: int | None) -> Output:
    """Show where the time of the runs of DIR went.

    GOODPUT is the share of the time in which epochs ran that count: no later run or recovery went
    back to before them.
    """
    story = _read(directory)
    runs = story.runs[-last:] if last else story.runs
    data: dict[str, Any] = {
        "path": story.path,
        "ledger": _ledger(story.ledger),
        "gap_seconds": story.gap_seconds,
        "runs": [
            {
                "number": run.number,
                "name": run.name,
                "job": run.job,
                "state": run.state,
                "began": run.began,
                "last_seen": run.last_seen,
                "resumed_from": run.resumed_from,
                "losses": len(run.losses),
                "ledger": _ledger(run.ledger),
            }
            for run in runs
        ],
    }
    parts = ("wall", "compute", "start", "save_wait", "redone", "recovery", "idle")
    rows = [
        ("RUN", "STATE", "WALL", "COMPUTE", "START", "SAVES", *map(str.upper, parts[4:]), "GOODPUT")
    ]
    for number, state, ledger in (
        *((str(run.number), run.state, run.ledger) for run in runs),
        *([("all", "", story.ledger)] if len(story.runs) > 1 else []),
    ):
        times = (format_briefly(getattr(ledger, part)) for part in parts)
        rows.append((number, state, *times, f"{ledger.goodput:.1%}"))
    lines = [format_table(rows, right=(0, *range(2, 10)))]
    if gap := story.gap_seconds:
        lines.append(f"Between the runs: {format_briefly(gap)}, which is in no line.")
    if losses := sum(len(run.losses) for run in story.runs):
        lines.append(f"{counted(losses, 'loss')}; `jobrunner report` lists them.")
    return Output(data, "\n".join(lines))


def _ledger(ledger: Ledger) -> dict[str, float]:
    return {**asdict(ledger), "goodput": ledger.goodput}
