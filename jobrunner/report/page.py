"""Write what the runs of a checkpoint directory did as one HTML page."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from importlib.resources import files
from itertools import islice
from time import time as now
from typing import Any

from jobrunner._version import __version__
from jobrunner.define import checked
from jobrunner.outputs import check_output, write_output
from jobrunner.report.parts import (
    MOST_ROWS,
    first,
    newest,
    note,
    scrolled,
    section,
)
from jobrunner.report.reader import Told, story_of
from jobrunner.report.sections import checkpoints_section, metrics_section, time_section
from jobrunner.report.story import RunStory, Story
from jobrunner.report.timeline import timeline_section
from jobrunner.texts import (
    Html,
    clip,
    format_bytes,
    format_seconds,
    format_time,
    join,
    listed,
    pairs,
    show,
    table,
    tag,
)

_OUTCOMES = {
    "running": "is running, or was a moment before this page was written",
    "finished": "has finished",
    "stopped": "was stopped",
    "failed": "failed",
    "lost": "ended without a word, as after a crash",
}


@checked
def write_report(
    source: Told,
    path: str | os.PathLike[str],
) -> None:
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


def to_page(story: Story) -> Html:
    """The page."""
    last = story.runs[-1] if story.runs else None
    name = last.job if last is not None else ""
    title = name or os.path.basename(story.path)
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"{title}: report"),
        tag("style", Html(files("jobrunner.report").joinpath("page.css").read_text("utf-8"))),
    )
    parts = [] if last is None else _parts(story, last)
    body = tag(
        "body",
        tag(
            "header",
            tag("h1", title),
            tag("div", story.path, class_="quiet path"),
            _tiles(story),
        ),
        tag("main", *(parts or [section("Runs", tag("p", "No run has begun in this directory."))])),
        tag(
            "footer",
            tag("p", f"Written by jobrunner {__version__} at {format_time(now())}, in local time."),
            tag(
                "p",
                "A long curve shows the lowest and the highest value of each stretch. Short blocks of "
                "a timeline that follow each other are drawn as one.",
            ),
        ),
    )
    return join([Html("<!doctype html>\n"), tag("html", head, body, lang="en")])


def _parts(story: Story, last: RunStory) -> list[Html]:
    return [
        _resume_section(story, last),
        time_section(story),
        timeline_section(story),
        metrics_section(story),
        checkpoints_section(story),
        _losses_section(story),
        _runs_section(story),
        _job_section(last),
        _environment_section(last),
    ]


def _tiles(story: Story) -> Html:
    saves = [save for run in story.runs for save in run.saves]
    whole = story.ledger
    about: dict[str, object] = {"state": story.runs[-1].state if story.runs else "no run"}
    if saves:
        about["last epoch"] = str(saves[-1].epoch)
    about["runs"] = len(story.runs)
    about["wall time"] = format_seconds(whole.wall)
    if whole.wall:
        about["goodput"] = f"{whole.goodput:.1%}"
    about["losses"] = sum(len(run.losses) for run in story.runs)
    if saves:
        about["last checkpoint"] = format_bytes(saves[-1].nbytes)
    tiles = [tag("div", tag("dt", name), tag("dd", value)) for name, value in about.items()]
    return tag("dl", *tiles, class_="tiles")


def _resume_section(story: Story, last: RunStory) -> Html:
    epochs = [save.epoch for save in last.saves]
    at = f"epoch {epochs[-1]}" if epochs else "what earlier runs recorded"
    path = shlex.quote(story.path)
    command, directory = (last.environment.get(key) for key in ("command", "directory"))
    if last.state == "finished":
        then = "To continue, raise the limit of epochs and run the same command again"
    elif last.state == "running":
        then = "If it does not run any more, run the same command again to resume it"
    else:
        then = f"Run the same command again to resume it from {at}"
    then += f", in {directory}:" if command else ", such as:"
    seen = format_time(last.last_seen)
    return section(
        "How to resume",
        tag("p", f"Run {last.number} {_OUTCOMES[last.state]}; it was last seen at {seen}. {then}"),
        tag("pre", command or f"jobrunner run FILE_OR_MODULE --checkpoint {path}"),
        tag("p", "What is recorded: ", tag("code", f"jobrunner ls {path}")),
    )


def _losses_section(story: Story) -> Html:
    losses = [(run, loss) for run in story.runs for loss in run.losses]
    if not losses:
        return Html("")
    rows = [
        (
            run.number,
            format_time(loss.time),
            clip(loss.text, 300),
            "not" if loss.resumed is None else f"after {format_seconds(loss.resumed - loss.time)}",
            ""
            if loss.resumed is None
            else "the start"
            if loss.resumed_from is None
            else f"epoch {loss.resumed_from}",
        )
        for run, loss in reversed(losses[-MOST_ROWS:])
    ]
    head = ("run", "when", "what was lost", "went on", "from")
    shown = scrolled("Losses", table(head, rows, left=(1, 2, 3, 4)))
    return section("Losses", shown, newest(losses, MOST_ROWS, "loss"))


def _runs_section(story: Story) -> Html:
    rows = [
        (
            run.number,
            run.state,
            format_time(run.began),
            format_seconds(max(0.0, run.last_seen - run.began)),
            "the start" if run.resumed_from is None else f"epoch {run.resumed_from}",
            len(run.epochs),
            len(run.saves),
            len(run.losses),
            f"{run.host}, process {run.pid}" if run.pid else run.host,
            _write_parameters(run.parameters),
        )
        for run in reversed(story.runs[-MOST_ROWS:])
    ]
    head = ["run", "state", "began", "lasted", "from", "epochs", "saves", "losses", "on"]
    head += ["parameters"]
    shown = scrolled("Runs", table(head, rows, left=(1, 2, 4, 8, 9)))
    return section("Runs", shown, newest(story.runs, MOST_ROWS, "run"))


def _write_parameters(parameters: Mapping[str, Any]) -> str:
    first_ones = islice(parameters.items(), 20)
    return clip(" ".join(f"{name}={clip(show(it), 60)}" for name, it in first_ones), 300)


def _job_section(run: RunStory) -> Html:
    tasks: dict[tuple[str, str], list[str]] = {}
    for name in run.plan.get("structure", {}):
        group, _, path = name.partition(":")
        node, _, task = path.rpartition("/")
        tasks.setdefault((group, node), []).append(task)
    if not tasks:
        return Html("")
    saved = run.plan.get("nodes", {})
    rows = [
        (group, node, listed(names, 12), listed(saved.get(node, ()), 12))
        for (group, node), names in islice(tasks.items(), MOST_ROWS)
    ]
    shown = table(("group", "node", "tasks", "saved blobs"), rows, left=range(4))
    return section("Job", scrolled("Tasks of the job", shown), first(list(tasks), MOST_ROWS, "row"))


def _environment_section(run: RunStory) -> Html:
    about = {"host": run.host, "process": run.pid, **run.environment}
    shown = {
        name: value
        for name, value in list(about.items())[:MOST_ROWS]
        if value and isinstance(value, str | int) and name != "command"
    }
    placement = run.environment.get("placement")
    workers: dict[str, list[str]] = {}
    for node, worker in placement.items() if isinstance(placement, dict) else ():
        workers.setdefault(str(worker), []).append(node)
    rows = [(worker, listed(nodes, 12)) for worker, nodes in list(workers.items())[:MOST_ROWS]]
    placed = scrolled("Workers", table(("worker", "nodes at the start"), rows, left=(0, 1)))
    return section(
        "Environment",
        note(f"Of run {run.number}."),
        pairs(shown),
        placed if rows else "",
        first(list(workers), MOST_ROWS, "worker"),
    )
