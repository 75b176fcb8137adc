"""Many runs: ``ls`` of a directory that has some below it, and ``compare``."""

from __future__ import annotations

import datetime
import functools
import json
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import click

from jobrunner.cli.command import DIFFERENT, Output, main
from jobrunner.cli.formatting import cells, fit_items, format_age, format_table
from jobrunner.cli.options import (
    complete_directories,
    open_manager,
    read_pairs,
    refuse_epoch,
)
from jobrunner.errors import DefinitionError
from jobrunner.json_output import with_json_positions
from jobrunner.positions import Position, PublicPosition
from jobrunner.texts import (
    abbreviate,
    clip,
    counted,
    format_metrics,
    format_value,
    printable,
    show,
    whole_metrics,
)

if TYPE_CHECKING:
    from jobrunner.checkpoint import Directory, Files
    from jobrunner.story import RunSummary

_STATES = ("running", "finished", "stopped", "failed", "lost", "damaged")
_BEST = re.compile(r"(?P<metric>.+?)(?::(?P<mode>min|max))?", re.S)
_LEAST_NAME = 24
_MOST_DIFFERENCES = 10
_MOST_METRICS = 3
_MOST_ROWS = 8

Function = Callable[..., Output]
Row = tuple["RunSummary", tuple[float, PublicPosition] | None]
"""A run, and its best value of a metric with its epoch."""


def runs_options(function: Function) -> Function:
    """Add the options for a directory of runs; pass `choice`: those that were given, by name."""

    @click.option(
        "--best",
        metavar="METRIC[:min|max]",
        help="Of the runs below DIR, show the best value of a metric, and sort by it. "
        "[default: min]",
    )
    @click.option("--state", multiple=True, type=click.Choice(_STATES), help="Only such runs.")
    @click.option("--job", metavar="NAME", help="Only runs of this job.")
    @click.option(
        "--param",
        multiple=True,
        callback=read_pairs,
        metavar="NAME=VALUE",
        help="Only runs whose job got this argument. May be repeated.",
    )
    @click.option(
        "--sort",
        type=click.Choice(["seen", "name", "epoch"]),
        help="What to sort runs by. [default: seen]",
    )
    @click.option(
        "--depth",
        type=click.IntRange(1, 20),
        metavar="N",
        help="Look for runs at most N levels below DIR. [default: 4]",
    )
    @functools.wraps(function)
    def call(
        *, best: Any, state: Any, job: Any, param: Any, sort: Any, depth: Any, **others: Any
    ) -> Output:
        given = {
            "best": best,
            "state": state,
            "job": job,
            "param": param,
            "sort": sort,
            "depth": depth,
        }
        return function(choice={name: it for name, it in given.items() if it}, **others)

    return call


def list_runs(
    directory: Directory, choice: Mapping[str, Any], last: int | None = None
) -> Output | None:
    """List the runs below a directory, or the first `last`; None if it has no run below it."""
    from jobrunner.story import DEPTH, find_runs

    files, path = directory.files, directory.path
    names, is_whole = find_runs(files, path, choice.get("depth", DEPTH))
    if names in ([], ["."]):
        if choice:
            what = "is the checkpoint directory of one run" if names else "has no run below it"
            raise DefinitionError(
                f"{path} {what}. --{next(iter(choice))} is for a directory with runs below it."
            )
        return None
    best = _BEST.fullmatch(choice.get("best", ""))
    rows, metric = _choose(files, path, names, choice, best)
    first = printable(os.path.join(path, names[0]), kept="")
    notes = [f"To list the epochs of one: jobrunner ls {first}"]
    if not is_whole:
        notes.append(f"{path} has too many directories: some were not looked into.")
    if last is not None and last < len(rows):
        notes.append(f"The first {last} of {counted(len(rows), 'run')}.")
    rows = rows[:last]
    data = {
        "path": path,
        "is_done": False,
        "epochs": [],
        "damaged": {},
        "unclaimed": [],  # as of one run
        "runs": [run_to_json(*row) for row in rows],
        "is_whole": is_whole,
    }
    if not rows:
        return Output(data, "\n".join([f"None of the runs below {path} is such a run.", *notes]))
    table = format_runs(rows, terminal_width(), metric)
    return Output(data, "\n".join([table, *notes]))


def _choose(
    files: Files,
    path: str,
    names: Sequence[str],
    choice: Mapping[str, Any],
    best: re.Match[str] | None,
) -> tuple[list[Row], str]:
    """The runs that were chosen, in the order that was, and the metric whose best value each has."""
    from jobrunner.story import best_of, open_run, summarize_run

    mode: Literal["min", "max"] = "max" if best and best["mode"] == "max" else "min"
    found: list[tuple[RunSummary, Directory | None]] = []
    for name in sorted(names):
        directory = open_run(files, path, name)
        run = summarize_run(directory, name)
        if _is_chosen(run, choice):
            found.append((run, directory if (best or run.keeps_best) and not run.error else None))
    metric = best["metric"] if best else ""
    if best is None and len(kept := {run.keeps_best for run, _ in found if not run.error}) == 1:
        metric, mode = kept.pop() or ("", mode)
    is_kept = best is None
    rows: list[Row] = [
        (run, best_of(directory, metric, mode, is_kept=is_kept) if metric and directory else None)
        for run, directory in found
    ]
    match choice.get("sort", "best" if best else "seen"):
        case "seen":
            rows.sort(key=lambda row: row[0].last_seen or 0.0, reverse=True)
        case "epoch":
            rows.sort(key=lambda row: _progress(row[0]), reverse=True)
        case "best":
            sign = 1 if mode == "min" else -1
            rows.sort(key=lambda row: sign * row[1][0] if row[1] else math.inf)
    return rows, metric


def _progress(run: RunSummary) -> tuple[bool, Position]:
    return run.epoch is not None, Position.of(run.epoch or 0)


def _is_chosen(run: RunSummary, choice: Mapping[str, Any]) -> bool:
    wanted: Mapping[str, str] = choice.get("param", {})
    return (
        run.state in choice.get("state", (run.state,))
        and run.job == choice.get("job", run.job)
        and all(
            name in run.parameters
            and text in (str(run.parameters[name]), json.dumps(run.parameters[name]))
            for name, text in wanted.items()
        )
    )


def run_to_json(
    run: RunSummary, best: tuple[float, PublicPosition] | None = None
) -> dict[str, Any]:
    """A run, for ``--json``."""
    hidden = ("num_epochs", "error", "nodes", "keeps_best")
    about = {name: value for name, value in with_json_positions(run).items() if name not in hidden}
    value, epoch = best or (None, None)
    return {
        **about,
        "epochs": None if run.error else run.num_epochs,
        "is_done": None if run.error else run.state == "finished",
        "saved": _iso(run.saved),
        "last_seen": _iso(run.last_seen),
        "best": value,
        "best_epoch": epoch,
        **({"error": run.error} if run.error else {}),
    }


def _iso(seconds: float | None) -> str | None:
    try:
        time = datetime.datetime.fromtimestamp(seconds or 0.0, datetime.UTC)
    except (ValueError, OverflowError):  # a stranger's
        return None
    return None if seconds is None else time.isoformat(timespec="milliseconds")


def format_runs(rows: Sequence[Row], width: int | None = None, best: str = "") -> str:
    """A table of runs, and below it what they have in common.

    If it would be wider than `width`, metrics and parameters have lines of their own.
    """
    runs, now = [run for run, _ in rows], time.time()
    jobs = dict.fromkeys(run.job for run in runs if not run.error)
    shared = {job: _shared_parameters([run for run in runs if run.job == job]) for job in jobs}
    columns = [["RUN", *(clip_name(run.name, width) for run in runs)]]
    if len(jobs) > 1 or len(runs) == 1:
        columns.append(["JOB", *(run.job for run in runs)])
    columns.append(["STATE", *(run.state or "-" for run in runs)])
    columns.append(["EPOCH", *map(format_progress, runs)])
    columns.append(["SEEN", *(format_age(run.last_seen, now) for run in runs)])
    if best:
        columns.append([f"BEST {best}", *(f"{it[0]:.6g}" if it else "-" for _, it in rows)])
        columns.append(["AT", *(str(it[1]) if it else "-" for _, it in rows)])
    metrics = [
        [] if best else format_metrics(whole_metrics(run.metrics, run.nodes)) for run in runs
    ]
    parameters = [
        _name_parameters(run.parameters, shared.get(run.job, {}), run.former_parameters)
        for run in runs
    ]
    items = [
        [title, *map(" ".join, lists)]
        for title, lists in (("METRICS", metrics), ("PARAMETERS", parameters))
        if any(lists)
    ]
    lines = format_table([*zip(*columns, *items, strict=True)]).splitlines()
    if width is not None and max(map(cells, lines)) > width:
        head, *table = format_table([*zip(*columns, strict=True)]).splitlines()
        lines = [head]
        for line, *its in zip(table, metrics, parameters, strict=True):
            text = fit_items([*its[0], *its[1]], width - 2)
            lines += [line, *([f"  {text}"] if text else [])]
    for job, common in shared.items():
        named = " ".join(_name_parameters(common, {}, {}))
        if len(jobs) == 1 and len(runs) > 1:
            lines.append(f"All are runs of {job or 'one job'}{named and f' with {named}'}")
        elif named:
            lines.append(f"All runs of {job or 'the job'} have {named}")
    lines += [f"{run.name} is damaged: {run.error}" for run in runs if run.error]
    return "\n".join(printable(line, kept="") for line in lines)


def _shared_parameters(runs: Sequence[RunSummary]) -> Mapping[str, Any]:
    """The parameters that all runs have, and always had, if there are several."""
    first, *others = (run.parameters for run in runs if not run.error)
    changed = {name for run in runs for name in run.former_parameters}
    return {
        name: value
        for name, value in first.items()
        if others
        and name not in changed
        and all(name in other and other[name] == value for other in others)
    }


def _name_parameters(
    parameters: Mapping[str, Any], shared: Mapping[str, Any], former: Mapping[str, Any]
) -> list[str]:
    def word(name: str) -> str:
        values = [it[name] for it in (former, parameters) if name in it]
        return f"{name}={' -> '.join(clip(show(value), 30) for value in values)}"

    return [word(name) for name in parameters if name not in shared]


def terminal_width() -> int | None:
    """The width of the terminal; None if stdout is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def clip_name(name: str, width: int | None) -> str:
    """A name, without its middle if it is long for a terminal."""
    return name if width is None else abbreviate(name, max(_LEAST_NAME, width // 3), cells)


def format_progress(run: RunSummary) -> str:
    """``7/100``; the total only if it is known."""
    if run.epoch is None:
        return "-"
    return f"{run.epoch}" if run.total_epochs is None else f"{run.epoch}/{run.total_epochs}"


@main.command(
    "compare",
    examples=[
        "jobrunner compare runs/seed-0 runs/seed-1",
    ],
)
@click.argument("a", metavar="A", callback=refuse_epoch, shell_complete=complete_directories)
@click.argument("b", metavar="B", callback=refuse_epoch, shell_complete=complete_directories)
def compare_command(*, a: str, b: str) -> Output:
    """Tell where two runs part.

    A and B are checkpoint directories. It shows how their jobs and metrics differ, and the first
    epoch whose blobs differ. Epochs that only one of them has are not compared.
    """
    from jobrunner.run import compare_runs

    one, other = open_manager(a), open_manager(b)
    data, difference = compare_runs(one, other)
    is_equal = bool(data["num_compared"]) and data["differ_at"] is None
    lines = _word_comparison(one.path, other.path, data, difference)
    text = "\n".join(printable(line, kept="") for line in lines)
    about = {"a": one.path, "b": other.path, "is_equal": is_equal}
    return Output({**about, **data}, text, 0 if is_equal else DIFFERENT)


def _word_comparison(a: str, b: str, data: Mapping[str, Any], difference: str) -> list[str]:
    lines = [f"A: {a}", f"B: {b}"]
    if data["changes"] is None:
        lines.append("What their jobs were is not recorded.")
    else:
        changes = [f"From A to B, {change}" for change in data["changes"]]
        before = data["parameters_differ_at"]
        same = "the same parameters" if before is None else "the same parameters at last"
        lines += changes or [f"They are of the same job, with {same}."]
        if before is not None and before["parameters"] != data["parameters"]:
            its = (
                f"{name}={show(a)} and {show(b)}" for name, (a, b) in before["parameters"].items()
            )
            lines.append(f"Epoch {before['epoch']} was recorded with {', '.join(its)} (A and B).")
    if rows := data["metrics"]:
        of = f"The metrics of {counted(len(rows), 'common epoch')}"
        if (parted := data["metrics_differ_at"]) is None:
            lines.append(f"{of} are equal.")
        else:
            lines += ["", *_tabulate_metrics(rows, parted)]
            lines += [f"{of} first differ at epoch {parted}.", ""]
    count, at = data["num_compared"], data["differ_at"]
    if not count:
        return [*lines, "No epoch is recorded in both now, so no blobs are compared."]
    if at is None:
        return [*lines, f"The blobs of {counted(count, 'common epoch')} are equal."]
    equal = f"The blobs of {counted(count - 1, 'common epoch')} are equal. " if count > 1 else ""
    *found, summary = difference.splitlines()
    lines += [f"{equal}The first blobs that differ are those of epoch {at}:"]
    lines += found[:_MOST_DIFFERENCES]
    if (left := len(found) - _MOST_DIFFERENCES) > 0:
        lines.append(f"... and {left} more: jobrunner diff {a}@{at} {b}@{at}")
    return [*lines, summary]


def _tabulate_metrics(rows: Sequence[Mapping[str, Any]], parted: int) -> list[str]:
    """Some epochs, among them the last and the first that differs, with both values of metrics."""
    names = [
        name
        for name, value in rows[-1]["a"].items()
        if isinstance(value, int | float) and name in rows[-1]["b"]
    ][:_MOST_METRICS]
    step = math.ceil(len(rows) / _MOST_ROWS)
    shown = [
        row
        for i, row in enumerate(rows)
        if i % step == 0 or row["epoch"] == parted or row is rows[-1]
    ]
    head = ["EPOCH", *(f"{name} {which}" for name in names for which in "AB")]
    cells = [
        [
            str(row["epoch"]),
            *(format_value(row[which].get(name)) or "-" for name in names for which in "ab"),
        ]
        for row in shown
    ]
    return format_table([head, *cells], range(len(head))).splitlines() if names else []
