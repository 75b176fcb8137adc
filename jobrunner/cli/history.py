"""``stats``, ``report`` and ``compare``: tell what runs did."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from jobrunner.cli.command import DIFFERENT, Output, main
from jobrunner.cli.options import (
    count_option,
    directory_argument,
    nothing_recorded,
    open_directory,
    open_manager,
)
from jobrunner.cli.parameter_types import DIRECTORY, OUTPUT
from jobrunner.cli.tables import Column, draw_table, format_briefly
from jobrunner.texts import counted, format_value

if TYPE_CHECKING:
    from jobrunner.story import Ledger, Story

_MOST_DIFFERENCES = 10
_MOST_METRICS = 3
_MOST_ROWS = 8


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
@click.option(
    "-o",
    "--output",
    default="report.html",
    show_default=True,
    type=OUTPUT,
    help="The file to write, outside of checkpoint directories; it is replaced.",
)
def report_command(*, directory: str, output: str) -> Output:
    """Write what the runs of DIR did as one HTML page.

    It shows how to resume, where time went, metrics, checkpoints, losses and runs. It is
    made from the records alone, so also during a run and after a crash. The page needs no network.
    """
    from jobrunner.story import write_report

    story = _read(directory)
    write_report(story, output)
    path = os.path.abspath(output)
    return Output({"path": story.path, "report": path}, [f"Wrote {path}"])


class LedgerRow(NamedTuple):
    """A line of ``stats``."""

    number: int | None  # None: of all runs
    state: str
    ledger: Ledger


LEDGER_COLUMNS: Sequence[Column[LedgerRow]] = (
    Column("RUN", lambda row: "all" if row.number is None else row.number, is_number=True),
    Column("STATE", lambda row: row.state),
    Column("WALL", lambda row: format_briefly(row.ledger.wall), is_number=True),
    Column("COMPUTE", lambda row: format_briefly(row.ledger.compute), is_number=True),
    Column("START", lambda row: format_briefly(row.ledger.start), is_number=True),
    Column("SAVES", lambda row: format_briefly(row.ledger.save_wait), is_number=True),
    Column("REDONE", lambda row: format_briefly(row.ledger.redone), is_number=True),
    Column("RECOVERY", lambda row: format_briefly(row.ledger.recovery), is_number=True),
    Column("IDLE", lambda row: format_briefly(row.ledger.idle), is_number=True),
    Column("GOODPUT", lambda row: f"{row.ledger.goodput:.1%}", is_number=True),
)


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
    data = {
        "path": story.path,
        "ledger": _ledger_to_json(story.ledger),
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
                "ledger": _ledger_to_json(run.ledger),
            }
            for run in runs
        ],
    }
    rows = [LedgerRow(run.number, run.state, run.ledger) for run in runs]
    if len(story.runs) > 1:
        rows.append(LedgerRow(None, "", story.ledger))
    lines = draw_table(LEDGER_COLUMNS, rows)
    if story.gap_seconds:
        gap = format_briefly(story.gap_seconds)
        lines.append(f"Between the runs: {gap}, which is in no line.")
    num_losses = sum(len(run.losses) for run in story.runs)
    if num_losses:
        lines.append(f"{counted(num_losses, 'loss')}; `jobrunner report` lists them.")
    return Output(data, lines)


def _ledger_to_json(ledger: Ledger) -> dict[str, float]:
    return {"wall": ledger.wall, **asdict(ledger), "goodput": ledger.goodput}


@main.command(
    "compare",
    examples=[
        "jobrunner compare runs/seed-0 runs/seed-1",
    ],
)
@click.argument("a", metavar="A", type=DIRECTORY)
@click.argument("b", metavar="B", type=DIRECTORY)
def compare_command(*, a: str, b: str) -> Output:
    """Tell where two runs part.

    A and B are checkpoint directories. It shows how their jobs and metrics differ, and the first
    epoch whose blobs differ. Epochs that only one of them has are not compared.
    """
    from jobrunner.run import compare_runs

    managers = [open_manager(path) for path in (a, b)]
    data, difference = compare_runs(*managers)
    is_equal = bool(data["num_compared"]) and data["differ_at"] is None
    paths = [manager.path for manager in managers]
    lines = describe_comparison(paths[0], paths[1], data, difference)
    data = {"a": paths[0], "b": paths[1], "is_equal": is_equal, **data}
    return Output(data, lines, 0 if is_equal else DIFFERENT)


def describe_comparison(a: str, b: str, data: Mapping[str, Any], difference: str) -> list[str]:
    """Say in lines how two runs differ; see `compare_runs`."""
    lines = [f"A: {a}", f"B: {b}", *_describe_jobs(data), *_describe_metrics(data)]
    count, epoch = data["num_compared"], data["differ_at"]
    if not count:
        return [*lines, "No epoch is recorded in both now, so no blobs are compared."]
    if epoch is None:
        return [*lines, f"The blobs of {counted(count, 'common epoch')} are equal."]
    equal = f"The blobs of {counted(count - 1, 'common epoch')} are equal. " if count > 1 else ""
    lines.append(f"{equal}The first blobs that differ are those of epoch {epoch}:")
    *differences, summary = difference.splitlines()
    lines += differences[:_MOST_DIFFERENCES]
    if len(differences) > _MOST_DIFFERENCES:
        num_left = len(differences) - _MOST_DIFFERENCES
        lines.append(f"... and {num_left} more: jobrunner diff {a}@{epoch} {b}@{epoch}")
    return [*lines, summary]


def _describe_jobs(data: Mapping[str, Any]) -> list[str]:
    if data["changes"] is None:
        return ["What their jobs were is not recorded."]
    if not data["changes"]:
        return ["They are of the same job, with the same parameters."]
    return [f"From A to B, {change}" for change in data["changes"]]


def _describe_metrics(data: Mapping[str, Any]) -> list[str]:
    rows = data["metrics"]
    if not rows:
        return []
    metrics = f"The metrics of {counted(len(rows), 'common epoch')}"
    parted_at = data["metrics_differ_at"]
    if parted_at is None:
        return [f"{metrics} are equal."]
    return [
        "",
        *_tabulate_metrics(rows, parted_at),
        f"{metrics} first differ at epoch {parted_at}.",
        "",
    ]


def _tabulate_metrics(rows: Sequence[Mapping[str, Any]], parted_at: int) -> list[str]:
    """Some epochs, among them the last and the first that differs, with both values of metrics."""
    last = rows[-1]
    names = []
    for name, value in last["a"].items():
        if isinstance(value, int | float) and name in last["b"]:
            names.append(name)
    names = names[:_MOST_METRICS]
    if not names:
        return []
    step = math.ceil(len(rows) / _MOST_ROWS)
    shown = []
    for i, row in enumerate(rows):
        if i % step == 0 or row["epoch"] == parted_at or row is last:
            shown.append(row)
    columns: list[Column[Mapping[str, Any]]] = []
    columns.append(Column("EPOCH", lambda row: row["epoch"], is_number=True))
    columns += [_metric_column(name, which) for name in names for which in "ab"]
    return draw_table(columns, shown)


def _metric_column(name: str, which: str) -> Column[Mapping[str, Any]]:
    return Column(
        f"{name} {which.upper()}",
        lambda row: format_value(row[which].get(name)) or "-",
        is_number=True,
    )
