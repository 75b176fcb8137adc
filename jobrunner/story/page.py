"""Write what the runs of a checkpoint directory did as one HTML page."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from time import time
from typing import Any, Generic, TypeVar

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template
from markupsafe import Markup

from jobrunner._version import __version__
from jobrunner.define import checked
from jobrunner.outputs import check_output, write_output
from jobrunner.story.charts import (
    checkpoint_charts,
    ledger_bar,
    metric_charts,
    run_timeline,
)
from jobrunner.story.log import Told, story_of
from jobrunner.story.model import PARTS, EpochStory, Ledger, LossStory, RunStory, SaveStory, Story
from jobrunner.texts import (
    clip,
    counted,
    format_bytes,
    format_seconds,
    format_time,
    format_value,
    listed,
    printable,
    show,
)

MOST_CHARACTERS = 2000  # of a text: names and values may come from a stranger's files
MOST_ROWS = 50  # of a table
MOST_COLUMNS = 8  # of metrics in a table
MOST_TIMELINES = 5

PART_TITLES = {
    "compute": ("Compute", "epochs that count"),
    "start": ("Start", "until the first epoch began"),
    "save_wait": ("Save wait", "the run waited for a save"),
    "redone": ("Redone", "epochs that were lost, and so ran in vain"),
    "recovery": ("Recovery", "from a loss to the next epoch; moves to other workers"),
    "idle": ("Idle", "all else: callbacks, and the upload, download and exit groups"),
}
assert set(PART_TITLES) == set(PARTS)

TIMELINE_LEGEND = {part: title for part, (title, _) in PART_TITLES.items()} | {
    "recovery": "Recovery",
    "save_wait": "Save",
    "loss": "Loss",
}

_OUTCOMES = {
    "running": "is running, or was a moment before this page was written",
    "finished": "has finished",
    "stopped": "was stopped",
    "failed": "failed",
    "lost": "ended without a word, as after a crash",
}

Row = TypeVar("Row")


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table."""

    title: str
    value: Callable[[Row], object]
    is_text: bool = False  # aligned to the left; numbers to the right


@dataclass(frozen=True)
class Table:
    """What the page shows as a table."""

    label: str
    columns: Sequence[Column[Any]]
    rows: Sequence[Sequence[object]]
    note: str = ""


def tabulate(
    label: str, columns: Sequence[Column[Row]], items: Sequence[Row], what: str = ""
) -> Table:
    """A table of the newest items, the last of them first, which are called `what`."""
    rows = [[column.value(item) for column in columns] for item in reversed(items[-MOST_ROWS:])]
    note = ""
    if len(items) > MOST_ROWS:
        note = f"The newest {MOST_ROWS} of {counted(len(items), what)}."
    return Table(label, columns, rows, note)


RUN_COLUMNS: Sequence[Column[RunStory]] = (
    Column("run", lambda run: run.number),
    Column("state", lambda run: run.state, is_text=True),
    Column("began", lambda run: format_time(run.began), is_text=True),
    Column("lasted", lambda run: format_seconds(max(0.0, run.last_seen - run.began))),
    Column("from", lambda run: _name_start(run.resumed_from), is_text=True),
    Column("epochs", lambda run: len(run.epochs)),
    Column("saves", lambda run: len(run.saves)),
    Column("losses", lambda run: len(run.losses)),
    Column("on", lambda run: _name_process(run), is_text=True),
    Column("parameters", lambda run: _write_parameters(run.parameters), is_text=True),
)

LOSS_COLUMNS: Sequence[Column[tuple[RunStory, LossStory]]] = (
    Column("run", lambda row: row[0].number),
    Column("when", lambda row: format_time(row[1].time), is_text=True),
    Column("what was lost", lambda row: clip(row[1].text, 300), is_text=True),
    Column("went on", lambda row: _write_recovery(row[1]), is_text=True),
    Column("from", lambda row: _name_return(row[1]), is_text=True),
)

SAVE_COLUMNS: Sequence[Column[tuple[RunStory, SaveStory]]] = (
    Column("epoch", lambda row: str(row[1].epoch)),
    Column("saved", lambda row: format_time(row[1].ended), is_text=True),
    Column("size", lambda row: format_bytes(row[1].nbytes)),
    Column("took", lambda row: format_seconds(row[1].seconds)),
    Column("epochs waited", lambda row: _write_wait(*row)),
    Column("nodes", lambda row: len(row[1].nodes)),
    Column("slowest node", lambda row: _name_slowest(row[1]), is_text=True),
)

LEDGER_COLUMNS: Sequence[Column[RunStory]] = (
    Column("run", lambda run: run.number),
    Column("wall time", lambda run: format_seconds(run.ledger.wall)),
    Column("goodput", lambda run: f"{run.ledger.goodput:.1%}"),
    Column("where it went", lambda run: draw_ledger(run.ledger, f"run {run.number}"), is_text=True),
)


@checked
def write_report(source: Told, path: str | os.PathLike[str]) -> None:
    """Write what the runs of a checkpoint directory did as one HTML page.

    Parameters
    ----------
    source : MultiNodeCheckpointManager, str, os.PathLike or Story
        The directory, its manager, or what `read_story` returned for it.
    path : str or os.PathLike
        The file to write; it is replaced. It cannot be in a checkpoint directory.

    Raises
    ------
    CheckpointError
        The log cannot be read.
    DefinitionError
        `path` is in a checkpoint directory or in none that exists, or is something else than a file.
    OSError
        The file cannot be written.

    Notes
    -----
    Runs on any machine that can read the directory, also during a run and after a crash. The page
    needs no network and no JavaScript. *Safe to retry*: yes.
    """
    check_output(path)
    write_output(path, to_page(story_of(source)))


def to_page(story: Story) -> str:
    """The page."""
    last = story.runs[-1] if story.runs else None
    name = "" if last is None else last.job
    context: dict[str, Any] = {
        "title": name or os.path.basename(story.path),
        "story": story,
        "last": last,
        "version": __version__,
        "now": format_time(time()),
        "style": Markup(files("jobrunner.story").joinpath("page.css").read_text("utf-8")),
    }
    if last is not None:
        context |= _runs_context(story)
        context |= _last_run_context(story, last)
        context |= {"metrics": metric_charts(story), "values": _values_table(story)}
    return _template("report").render(context)


def _runs_context(story: Story) -> dict[str, Any]:
    saves = [(run, save) for run in story.runs for save in run.saves]
    losses = [(run, loss) for run in story.runs for loss in run.losses]
    ran = [run for run in story.runs if run.last_seen > run.began]
    return {
        "tiles": _tiles(story, saves, losses),
        "ledger_bar": draw_ledger(story.ledger, "all runs"),
        "ledger_rows": _ledger_rows(story.ledger),
        "wall": format_seconds(story.ledger.wall),
        "gap": format_seconds(story.gap_seconds),
        "ledgers": tabulate("Where the time of each run went", LEDGER_COLUMNS, story.runs, "run"),
        "timelines": [
            (_name_run(run), run_timeline(run, is_newest=run is ran[-1]))
            for run in reversed(ran[-MOST_TIMELINES:])
        ],
        "num_timelines": len(ran),
        "timeline_legend": TIMELINE_LEGEND,
        "checkpoints": checkpoint_charts(story),
        "saves": tabulate("Checkpoints", SAVE_COLUMNS, saves, "save"),
        "losses": tabulate("Losses", LOSS_COLUMNS, losses, "loss"),
        "runs": tabulate("Runs", RUN_COLUMNS, story.runs, "run"),
    }


def _tiles(story: Story, saves: Sequence[Any], losses: Sequence[Any]) -> dict[str, object]:
    whole = story.ledger
    tiles: dict[str, object] = {"state": story.runs[-1].state}
    if saves:
        tiles["last epoch"] = str(saves[-1][1].epoch)
    tiles["runs"] = len(story.runs)
    tiles["wall time"] = format_seconds(whole.wall)
    if whole.wall:
        tiles["goodput"] = f"{whole.goodput:.1%}"
    tiles["losses"] = len(losses)
    broken_off = sum(run.state == "lost" for run in story.runs)
    if broken_off:
        tiles["runs that broke off"] = broken_off
    if saves:
        tiles["last checkpoint"] = format_bytes(saves[-1][1].nbytes)
    return tiles


def _ledger_rows(ledger: Ledger) -> list[tuple[str, str, str, str, str]]:
    rows = []
    for part, (title, meaning) in PART_TITLES.items():
        seconds = getattr(ledger, part)
        rows.append((part, title, format_seconds(seconds), _share(seconds, ledger.wall), meaning))
    return rows


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole > 0 else ""


def draw_ledger(ledger: Ledger, of: str) -> Markup:
    """A bar of a ledger's parts."""
    texts = {}
    for part, (title, _) in PART_TITLES.items():
        seconds = getattr(ledger, part)
        if seconds > 0:
            share = _share(seconds, ledger.wall)
            texts[part] = f"{title}: {format_seconds(seconds)}, {share}"
    label = f"Where the time of {of} went: {'; '.join(texts.values())}"
    macros: Any = _template("figures").module
    return Markup(macros.bar(ledger_bar(ledger, texts), label))


def _last_run_context(story: Story, last: RunStory) -> dict[str, Any]:
    path = shlex.quote(story.path)
    command = last.environment.get("command")
    return {
        "advice": _advise(last),
        "command": command or f"jobrunner run FILE_OR_MODULE --checkpoint {path}",
        "listing": f"jobrunner ls {path}",
        "tasks": Table("Tasks of the job", _TASK_COLUMNS, *_task_rows(last)),
        "environment": _environment(last),
        "workers": Table("Workers", _WORKER_COLUMNS, *_worker_rows(last)),
    }


def _advise(last: RunStory) -> str:
    """What to do next, before the command that does it."""
    command, directory = (last.environment.get(key) for key in ("command", "directory"))
    if last.state == "finished":
        by = f", ended by {listed(last.stopped_by, 3)}" if last.stopped_by else ""
        limits = {"epoch_limiter", "num_epochs", "the limit of epochs"}
        if last.stopped_by and not limits.intersection(last.stopped_by):
            then = f"To continue{by and ' all the same'}, change what ended it, and run"
        else:
            then = "To continue, raise the limit of epochs, and run"
        then += " the same command again"
        outcome = f"{_OUTCOMES[last.state]}{by}"
    else:
        outcome = _OUTCOMES[last.state]
        at = f"epoch {last.saves[-1].epoch}" if last.saves else "what earlier runs recorded"
        then = f"Run the same command again to resume it from {at}"
        if last.state == "running":
            then = "If it does not run any more, run the same command again to resume it"
    then += f", in {directory}:" if command and directory else ", such as:"
    return f"Run {last.number} {outcome}; it was last seen at {format_time(last.last_seen)}. {then}"


_TASK_COLUMNS = tuple(
    Column[Any](title, str, is_text=True) for title in ("group", "node", "tasks", "saved blobs")
)
_WORKER_COLUMNS = tuple(
    Column[Any](title, str, is_text=True) for title in ("worker", "nodes at the start")
)


def _task_rows(run: RunStory) -> tuple[list[tuple[str, str, str, str]], str]:
    tasks: dict[tuple[str, str], list[str]] = {}
    for name in run.plan.get("structure", {}):
        group, _, path = name.partition(":")
        node, _, task = path.rpartition("/")
        tasks.setdefault((group, node), []).append(task)
    blobs = run.plan.get("nodes", {})
    rows = []
    for (group, node), names in list(tasks.items())[:MOST_ROWS]:
        rows.append((group, node, listed(names, 12), listed(blobs.get(node, ()), 12)))
    return rows, _first(len(tasks), "row")


def _worker_rows(run: RunStory) -> tuple[list[tuple[str, str]], str]:
    placement = run.environment.get("placement")
    workers: dict[str, list[str]] = {}
    if isinstance(placement, dict):
        for node, worker in placement.items():
            workers.setdefault(str(worker), []).append(node)
    rows = [(worker, listed(nodes, 12)) for worker, nodes in list(workers.items())[:MOST_ROWS]]
    return rows, _first(len(workers), "worker")


def _environment(run: RunStory) -> dict[str, object]:
    facts = {"host": run.host, "process": run.pid, **run.environment}
    shown: dict[str, object] = {}
    for name, value in list(facts.items())[:MOST_ROWS]:
        if value and isinstance(value, str | int) and name != "command":
            shown[name] = value
    return shown


def _values_table(story: Story) -> Table:
    """The metrics of the newest epochs."""
    kept = [epoch for run in story.runs for epoch in run.epochs if not epoch.is_set_aside]
    kept.sort(key=lambda epoch: epoch.number)
    names = dict.fromkeys(name for epoch in kept[-MOST_ROWS:] for name in epoch.metrics)

    def column(name: str) -> Column[EpochStory]:
        return Column(name, lambda epoch: format_value(epoch.metrics.get(name)))

    columns = [Column[EpochStory]("epoch", lambda epoch: epoch.number)]
    columns += [column(name) for name in list(names)[:MOST_COLUMNS]]
    return tabulate("Values of metrics", columns, kept, "epoch")


def _first(count: int, what: str) -> str:
    return f"The first {MOST_ROWS} of {counted(count, what)}." if count > MOST_ROWS else ""


def _name_run(run: RunStory) -> str:
    since = f"resumed from epoch {run.resumed_from}"
    if run.resumed_from is None:
        since = "from the start"
    length = format_seconds(max(0.0, run.last_seen - run.began))
    return f"Run {run.number}: {run.state}, {since}, {length}, began {format_time(run.began)}"


def _name_start(epoch: object) -> str:
    return "the start" if epoch is None else f"epoch {epoch}"


def _name_process(run: RunStory) -> str:
    return f"{run.host}, process {run.pid}" if run.pid else run.host


def _write_parameters(parameters: Mapping[str, Any]) -> str:
    texts = [f"{name}={clip(show(value), 60)}" for name, value in list(parameters.items())[:20]]
    return clip(" ".join(texts), 300)


def _write_recovery(loss: LossStory) -> str:
    return "not" if loss.resumed is None else f"after {format_seconds(loss.resumed - loss.time)}"


def _name_return(loss: LossStory) -> str:
    return "" if loss.resumed is None else _name_start(loss.resumed_from)


def _write_wait(run: RunStory, save: SaveStory) -> str:
    # How long epochs waited for a save is recorded with what comes after it.
    if run.ended is None and save is run.saves[-1]:
        return "unknown"
    return format_seconds(save.wait_seconds)


def _name_slowest(save: SaveStory) -> str:
    return f"{save.slowest}, {format_seconds(save.nodes[save.slowest])}" if save.nodes else ""


@cache
def _template(name: str) -> Template:
    environment = Environment(
        autoescape=True,
        finalize=_plain,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        loader=FunctionLoader(_read_template),
    )
    return environment.get_template(name)


def _read_template(name: str) -> str:
    return files("jobrunner.story").joinpath(f"{name}.html.j2").read_text("utf-8")


def _plain(value: object) -> object:
    """What is shown of a text, which may be a stranger's; Jinja escapes it afterwards."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(clip(value, MOST_CHARACTERS))
    return value
