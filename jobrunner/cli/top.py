"""``top``: follow the runs that are alive."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from jobrunner.cli.command import AS_JSON, Output, main
from jobrunner.cli.formatting import fit_items, format_age, format_table
from jobrunner.cli.options import complete_directories, open_directory, refuse_epoch
from jobrunner.cli.runs import clip_name, format_progress, run_to_json, terminal_width
from jobrunner.texts import counted, format_metrics, format_seconds, printable, whole_metrics

if TYPE_CHECKING:
    from jobrunner.story import LiveRun, LiveRuns, RunSummary

_MOST_METRICS = 20


@main.command("top", examples=["jobrunner top runs", "jobrunner top --once"])
@click.argument(
    "root",
    metavar="[ROOT]",
    default=".",
    callback=refuse_epoch,
    shell_complete=complete_directories,
)
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
    runs = LiveRuns(directory.files, directory.path)
    as_json = click.get_current_context().meta[AS_JSON]
    found: Sequence[LiveRun]
    if once or as_json or not sys.stdout.isatty():
        found = runs.look()
    else:
        found = _follow(runs, directory.path, interval)
    data = {"path": directory.path, "runs": [_to_json(live) for live in found]}
    return Output(data, format_live(found, directory.path, terminal_width()))


def _follow(runs: LiveRuns, path: str, interval: float) -> Sequence[LiveRun]:
    """Draw on the whole screen; returns what was drawn last."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(markup=False, emoji=False, highlight=False)
    found: Sequence[LiveRun] = []
    try:
        with Live(console=console, screen=True, auto_refresh=False) as screen:
            while True:
                found = runs.look()
                text = format_live(found, path, *console.size, runs.ended)
                screen.update(Text(text, no_wrap=True, overflow="crop"), refresh=True)
                threading.Event().wait(interval)
    except KeyboardInterrupt:
        return found


def _to_json(live: LiveRun) -> dict[str, Any]:
    about = {"pace_seconds": live.pace_seconds, "eta_seconds": live.eta_seconds}
    return {**run_to_json(live.run), **about, "beat_seconds": live.beat_seconds}


def format_live(
    found: Sequence[LiveRun],
    path: str,
    width: int | None = None,
    height: int | None = None,
    ended: Sequence[RunSummary] = (),
) -> str:
    """Two lines for each run, as many as there is room for; one for each of the last that ended."""
    clock = time.strftime("%H:%M:%S")
    gone = [
        f"{time.strftime('%H:%M:%S', time.localtime(run.last_seen))}  {clip_name(run.name, width)}: "
        f"{run.state} at epoch {format_progress(run)}"
        for run in ended
    ]
    if not found:
        none = [f"{clock}  No run is alive below {path}", f"To list all: jobrunner ls {path}"]
        return "\n".join(printable(line, kept="") for line in [*none, *gone])
    shown = found if height is None else found[: max(1, (height - 3 - len(gone)) // 2)]
    rows = [("RUN", "EPOCH", "PACE", "LEFT", "SAVED", "BEAT")]
    for live in shown:
        run, now = live.run, time.time()
        saved = "-" if run.latest is None else f"{run.latest}, {format_age(run.saved, now)}"
        rows.append(
            (
                clip_name(run.name, width),
                format_progress(run),
                "-" if live.pace_seconds is None else format_seconds(live.pace_seconds),
                "-" if live.eta_seconds is None else format_seconds(live.eta_seconds),
                saved,
                f"{live.beat_seconds:.0f} s ago",
            )
        )
    head, *lines = format_table(rows).splitlines()
    text = [f"{clock}  {counted(len(found), 'run')} alive below {path}", head]
    for live, line in zip(shown, lines, strict=True):
        where = f"{live.run.job or 'a job'} on {live.run.host or 'a host'}, pid {live.run.pid}:"
        items = [
            where,
            *format_metrics(whole_metrics(live.run.metrics, live.run.nodes), _MOST_METRICS),
        ]
        text += [line, f"  {fit_items(items, width - 2) if width else ' '.join(items)}"]
    if len(shown) < len(found):
        text.append(f"and {len(found) - len(shown)} more")
    return "\n".join(printable(line, kept="") for line in [*text, *gone])
