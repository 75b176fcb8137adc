"""Write what the runs of a checkpoint directory did as one HTML page: `report.html.j2`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from time import time
from typing import Annotated, Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from jobrunner._version import __version__
from jobrunner.define import Rule, checked
from jobrunner.outputs import check_output, write_output
from jobrunner.positions import Position
from jobrunner.story.charts import metric_charts
from jobrunner.story.log import SOURCE, Source, read_story
from jobrunner.story.model import OUTCOMES, EpochStory, LossStory, RunStory, Story
from jobrunner.texts import (
    clip,
    format_bytes,
    format_metrics,
    format_seconds,
    format_time,
    printable,
    show,
    whole_metrics,
)

MOST_CHARACTERS = 2000  # of a text: names and values may come from a stranger's files
MOST_ROWS = 20  # of a table

_TOLD = Rule(
    "a checkpoint directory, its manager or its Story",
    lambda source: isinstance(source, Story) or SOURCE.fits(source),
)


@checked
def write_report(source: Annotated[Source | Story, _TOLD], path: str | os.PathLike[str]) -> None:
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
    if not isinstance(source, Story):
        source = read_story(source)
    write_output(path, to_page(source))


def to_page(story: Story) -> str:
    """The page."""
    title, last = os.path.basename(story.path), None
    environment: dict[str, object] = {}
    if story.runs:
        last = story.runs[-1]
        title = last.job or title
        environment = _environment(last)
    losses: list[tuple[RunStory, LossStory]] = []
    newest = None
    kept: list[EpochStory] = []
    for run in story.runs:
        losses += [(run, loss) for loss in run.losses]
        for epoch in run.epochs:
            newest = epoch
            if epoch.is_kept:
                kept.append(epoch)
    kept.sort(key=lambda epoch: Position.of(epoch.epoch), reverse=True)
    return _template().render(
        title=title,
        story=story,
        last=last,
        outcomes=OUTCOMES,
        path=shlex.quote(story.path),
        metrics=metric_charts(story),
        newest=newest,
        kept=kept,
        losses=losses[::-1],
        environment=environment,
        most=MOST_ROWS,
        version=__version__,
        now=time(),
        style=Markup(_read("page.css")),
    )


def _environment(run: RunStory) -> dict[str, object]:
    facts = {"host": run.host, "process": run.pid, **run.environment}
    shown: dict[str, object] = {}
    for name, value in list(facts.items())[:MOST_ROWS]:
        if value and isinstance(value, str | int) and name != "command":
            shown[name] = value
    return shown


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True,
        finalize=_plain,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "bytes": format_bytes,
        "duration": lambda seconds: format_seconds(max(0.0, seconds)),
        "moment": format_time,
        "metrics": lambda metrics, nodes: ", ".join(format_metrics(whole_metrics(metrics, nodes))),
        "pairs": _join_pairs,
    }
    return environment.from_string(_read("report.html.j2"))


def _join_pairs(values: Mapping[str, object]) -> str:
    return " ".join([f"{name}={clip(show(value), 60)}" for name, value in values.items()])


def _read(name: str) -> str:
    return files("jobrunner.story").joinpath(name).read_text("utf-8")


def _plain(value: Any) -> object:
    """What is shown of a text, which may be a stranger's; Jinja escapes it afterwards."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(clip(value, MOST_CHARACTERS))
    return value
