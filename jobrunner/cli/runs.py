"""Many runs: ``ls`` of a directory that has some below it, and ``top`` of those that are alive."""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from jobrunner.cli.command import AS_JSON, Output, main
from jobrunner.cli.options import grouped, open_directory, read_pairs
from jobrunner.cli.parameter_types import DIRECTORY
from jobrunner.cli.tables import (
    Column,
    count_cells,
    draw_table,
    draw_with_items,
    format_age,
    terminal_width,
)
from jobrunner.errors import DefinitionError
from jobrunner.json_output import with_json_positions
from jobrunner.positions import PublicPosition
from jobrunner.texts import (
    abbreviate,
    clip,
    counted,
    format_metrics,
    format_seconds,
    show,
    whole_metrics,
)

if TYPE_CHECKING:
    from jobrunner.checkpoint import Directory
    from jobrunner.story import LiveRuns, RunSummary

_STATES = ("running", "finished", "stopped", "failed", "lost", "damaged")
_BEST = re.compile(r"(?P<metric>.+?)(?::(?P<mode>min|max))?", re.S)
_LEAST_NAME = 24
_MOST_METRICS = 20  # of a run that `top` shows
Best = tuple[float, PublicPosition]
"""The best value of a metric, and its epoch."""


@dataclass(frozen=True)
class RunFilter:
    """Which runs ``ls`` lists, and in which order; None or empty: not given."""

    best: str | None = None
    state: Sequence[str] = ()
    job: str | None = None
    param: Mapping[str, str] | None = None
    depth: int | None = None

    def given(self) -> list[str]:
        """The options that were given."""
        return [name for name, value in asdict(self).items() if value]

    def accepts(self, run: RunSummary) -> bool:
        """Whether a run is one of those that were asked for."""
        if self.state and run.state not in self.state:
            return False
        if self.job is not None and run.job != self.job:
            return False
        for name, text in (self.param or {}).items():
            if name not in run.parameters:
                return False
            value = run.parameters[name]
            if text not in (str(value), json.dumps(value)):
                return False
        return True


filter_options = grouped(
    "run_filter",
    RunFilter,
    click.option(
        "--best",
        metavar="METRIC[:min|max]",
        help="Of the runs below DIR, show the best value of a metric, and sort by it. "
        "[default: min]",
    ),
    click.option("--state", multiple=True, type=click.Choice(_STATES), help="Only such runs."),
    click.option("--job", metavar="NAME", help="Only runs of this job."),
    click.option(
        "--param",
        multiple=True,
        callback=read_pairs,
        metavar="NAME=VALUE",
        help="Only runs whose job got this argument. May be repeated.",
    ),
    click.option(
        "--depth",
        type=click.IntRange(1, 20),
        metavar="N",
        help="Look for runs at most N levels below DIR. [default: 4]",
    ),
)


class RunRow(NamedTuple):
    """A run, and its best value of the metric that is listed."""

    run: RunSummary
    best: Best | None = None


def list_runs(
    directory: Directory, run_filter: RunFilter, last: int | None = None
) -> Output | None:
    """List the runs below a directory, or the first `last`; None if it has no run below it."""
    from jobrunner.story import DEPTH, find_runs

    path = directory.path
    names, is_whole = find_runs(directory.files, path, run_filter.depth or DEPTH)
    if names in ([], ["."]):
        if run_filter.given():
            place = "is the checkpoint directory of one run" if names else "has no run below it"
            raise DefinitionError(
                f"{path} {place}. --{run_filter.given()[0]} is for a directory with runs below it."
            )
        return None
    rows, metric = _choose(directory, names, run_filter)
    notes = [f"To list the epochs of one: jobrunner ls {os.path.join(path, names[0])}"]
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
        "runs": [run_to_json(row.run, row.best) for row in rows],
        "is_whole": is_whole,
    }
    if not rows:
        return Output(data, [f"None of the runs below {path} is such a run.", *notes])
    return Output(data, [*format_runs(rows, terminal_width(), metric), *notes])


def _choose(
    directory: Directory, names: Sequence[str], run_filter: RunFilter
) -> tuple[list[RunRow], str]:
    """The runs that were asked for, in order, and the metric whose best value each has."""
    from jobrunner.story import best_of, open_run, summarize_run

    directories: dict[str, Directory] = {}
    runs = []
    for name in sorted(names):
        directories[name] = open_run(directory.files, directory.path, name)
        run = summarize_run(directories[name], name)
        if run_filter.accepts(run):
            runs.append(run)
    asked = _BEST.fullmatch(run_filter.best or "")
    metric = asked["metric"] if asked else ""
    mode: Literal["min", "max"] = "max" if asked and asked["mode"] == "max" else "min"
    rows = []
    for run in runs:
        best = best_of(directories[run.name], metric, mode) if metric and not run.error else None
        rows.append(RunRow(run, best))
    if run_filter.best:
        sign = 1 if mode == "min" else -1
        rows.sort(key=lambda row: sign * row.best[0] if row.best else math.inf)
    else:
        rows.sort(key=lambda row: row.run.last_seen or 0.0, reverse=True)
    return rows, metric


def run_to_json(run: RunSummary, best: Best | None = None) -> dict[str, Any]:
    """A run, for ``--json``."""
    data: dict[str, Any] = with_json_positions(run)
    for name in ("num_epochs", "error", "nodes"):
        del data[name]
    value, epoch = best or (None, None)
    data["epochs"] = None if run.error else run.num_epochs
    data["is_done"] = None if run.error else run.state == "finished"
    data["saved"] = _to_iso(run.saved)
    data["last_seen"] = _to_iso(run.last_seen)
    data["best"] = value
    data["best_epoch"] = epoch
    if run.error:
        data["error"] = run.error
    return data


def _to_iso(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    try:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (ValueError, OverflowError):  # a stranger's
        return None
    return moment.isoformat(timespec="milliseconds")


def format_runs(rows: Sequence[RunRow], width: int | None = None, metric: str = "") -> list[str]:
    """A table of runs, and below it what they have in common.

    If it would be wider than `width`, metrics and parameters have lines of their own.
    """
    now = time.time()
    runs = [row.run for row in rows]
    jobs = list(dict.fromkeys(run.job for run in runs if not run.error))
    shared = {job: _shared_parameters([run for run in runs if run.job == job]) for job in jobs}

    def metrics_of(row: RunRow) -> list[str]:
        return [] if metric else _name_metrics(row.run)

    def parameters_of(row: RunRow) -> list[str]:
        common = shared.get(row.run.job, {})
        return _name_parameters(row.run.parameters, common)

    columns: list[Column[RunRow]] = [Column("RUN", lambda row: clip_name(row.run.name, width))]
    if len(jobs) > 1 or len(runs) == 1:
        columns.append(Column("JOB", lambda row: row.run.job))
    columns += [
        Column("STATE", lambda row: row.run.state or "-"),
        Column("EPOCH", lambda row: format_progress(row.run)),
        Column("SEEN", lambda row: format_age(row.run.last_seen, now)),
    ]
    if metric:
        columns += [
            Column(f"BEST {metric}", lambda row: f"{row.best[0]:.6g}" if row.best else "-"),
            Column("AT", lambda row: row.best[1] if row.best else "-"),
        ]
    item_columns: list[Column[RunRow]] = [
        Column("METRICS", lambda row: " ".join(metrics_of(row))),
        Column("PARAMETERS", lambda row: " ".join(parameters_of(row))),
    ]
    lines = draw_table([*columns, *item_columns], rows)
    if width is not None and max(map(count_cells, lines)) > width:
        items = [[*metrics_of(row), *parameters_of(row)] for row in rows]
        lines = draw_with_items(columns, rows, items, width)
    for job, common in shared.items():
        words = " ".join(_name_parameters(common))
        if len(jobs) == 1 and len(runs) > 1:
            lines.append(f"All are runs of {job or 'one job'}{words and f' with {words}'}")
        elif words:
            lines.append(f"All runs of {job or 'the job'} have {words}")
    lines += [f"{run.name} is damaged: {run.error}" for run in runs if run.error]
    return lines


def _name_metrics(run: RunSummary, most: int = 4) -> list[str]:
    return format_metrics(whole_metrics(run.metrics, run.nodes), most)


def _shared_parameters(runs: Sequence[RunSummary]) -> Mapping[str, Any]:
    """The parameters that all runs have, if there are several."""
    first, *others = [run.parameters for run in runs if not run.error]
    if not others:
        return {}
    shared = {}
    for name, value in first.items():
        if all(name in other and other[name] == value for other in others):
            shared[name] = value
    return shared


def _name_parameters(parameters: Mapping[str, Any], shared: Mapping[str, Any] = {}) -> list[str]:
    words = []
    for name, value in parameters.items():
        if name not in shared:
            words.append(f"{name}={clip(show(value), 30)}")
    return words


def clip_name(name: str, width: int | None) -> str:
    """A name, without its middle if it is long for a terminal."""
    if width is None:
        return name
    return abbreviate(name, max(_LEAST_NAME, width // 3), count_cells)


def format_progress(run: RunSummary) -> str:
    """``7/100``; the total only if it is known."""
    if run.epoch is None:
        return "-"
    return f"{run.epoch}" if run.total_epochs is None else f"{run.epoch}/{run.total_epochs}"


@main.command("top", examples=["jobrunner top runs", "jobrunner top --once"])
@click.argument("root", metavar="[ROOT]", default=".", type=DIRECTORY)
@click.option("--once", is_flag=True, help="Show them once. [default: if stdout is no terminal]")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look.",
)
def top_command(*, root: str, once: bool, interval: float) -> Output:
    """Follow the runs below ROOT that are alive, until Ctrl-C.

    A run is alive while its heartbeat changes. ROOT is a directory, the current one by default, or a URL.
    """
    from jobrunner.story import LiveRuns

    directory = open_directory(root)
    live_runs = LiveRuns(directory.files, directory.path)
    as_json = click.get_current_context().meta[AS_JSON]
    if once or as_json or not sys.stdout.isatty():
        alive: Sequence[RunSummary] = live_runs.look()
    else:
        alive = follow(live_runs, directory.path, interval)
    data = {"path": directory.path, "runs": [_live_to_json(live) for live in alive]}
    return Output(data, format_live(alive, directory.path, terminal_width()))


def follow(live_runs: LiveRuns, path: str, interval: float) -> Sequence[RunSummary]:
    """Draw on the whole screen; returns what was drawn last."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(markup=False, emoji=False, highlight=False)
    alive: Sequence[RunSummary] = []
    try:
        with Live(console=console, screen=True, auto_refresh=False) as screen:
            while True:
                alive = live_runs.look()
                lines = format_live(alive, path, *console.size)
                text = Output({}, lines).text
                screen.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)
                threading.Event().wait(interval)
    except KeyboardInterrupt:
        return alive


def _live_to_json(run: RunSummary) -> dict[str, Any]:
    times = {"eta_seconds": run.eta_seconds, "beat_seconds": _beat_seconds(run)}
    return {**run_to_json(run), **times}


def _beat_seconds(run: RunSummary) -> float:
    """Since its last heartbeat."""
    return max(0.0, time.time() - (run.last_seen or 0.0))


def format_live(
    alive: Sequence[RunSummary], path: str, width: int | None = None, height: int | None = None
) -> list[str]:
    """Two lines for each run, as many as there is room for."""
    clock = time.strftime("%H:%M:%S")
    if not alive:
        return [f"{clock}  No run is alive below {path}", f"To list all: jobrunner ls {path}"]
    shown = alive
    if height is not None:
        shown = alive[: max(1, (height - 3) // 2)]
    columns: list[Column[RunSummary]] = [
        Column("RUN", lambda run: clip_name(run.name, width)),
        Column("EPOCH", format_progress),
        Column("PACE", lambda run: _format_duration(run.pace_seconds)),
        Column("LEFT", lambda run: _format_duration(run.eta_seconds)),
        Column("SAVED", _format_save),
        Column("BEAT", lambda run: f"{_beat_seconds(run):.0f} s ago"),
    ]
    items = []
    for run in shown:
        process = f"{run.job or 'a job'} on {run.host or 'a host'}, pid {run.pid}:"
        items.append([process, *_name_metrics(run, _MOST_METRICS)])
    lines = [f"{clock}  {counted(len(alive), 'run')} alive below {path}"]
    lines += draw_with_items(columns, shown, items, width)
    if len(shown) < len(alive):
        lines.append(f"and {len(alive) - len(shown)} more")
    return lines


def _format_duration(seconds: float | None) -> str:
    return "-" if seconds is None else format_seconds(seconds)


def _format_save(run: RunSummary) -> str:
    return "-" if run.latest is None else f"{run.latest}, {format_age(run.saved, time.time())}"
