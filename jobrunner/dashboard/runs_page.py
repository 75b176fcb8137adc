"""The pages of a scheduler that preloads this package; Bokeh serves them and keeps them up to date."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import islice
from typing import Any

import msgspec
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from jobrunner.dask_internals import add_dashboard_pages, dashboard_template
from jobrunner.story import ENDS, IS_SHOWN, RUNS, ToldRun, draw_html
from jobrunner.texts import Html, format_seconds, get_logger, tag

logger = get_logger(__name__)

INTERVAL_MS = 500
SILENT_SECONDS = 5.0
"""After so long it is said when a run was last heard of."""
MOST_METRICS = 1000
"""Of a run, which are drawn."""

STYLE = """
:host { width: 100%; font: 15px/1.5 system-ui, sans-serif; color: CanvasText; }
:host, .bk-clearfix, .jobrunner-run { box-sizing: border-box; max-width: calc(100vw - 20px); }
.jobrunner-run { border: 1px solid #8888; border-radius: 6px; padding: .8em 1em; margin: 0 0 1em; }
.jobrunner-run { overflow-wrap: anywhere; }
.jobrunner-run table { border-collapse: collapse; margin: .6em 0; }
.jobrunner-run th, .jobrunner-run td { padding: .15em 1em .15em 0; }
h1 { font-size: 1.3em; margin: 0 0 .5em; }
"""

HEAD = """{% block preamble %}
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>html { color-scheme: light dark; background: Canvas; }</style>
{% endblock %}"""
"""What the panel adds to Bokeh's page; Dask's own pages are light only."""


def dask_setup(scheduler: Scheduler) -> None:
    """Begin to take in what clients tell of their runs."""
    scheduler.add_plugin(Forgets(scheduler))


class Forgets(SchedulerPlugin):
    """Forgets the runs of clients that are gone."""

    name = "jobrunner-dashboard"

    def __init__(self, scheduler: Scheduler) -> None:
        scheduler.set_metadata([IS_SHOWN], value=True)

    def remove_client(self, scheduler: Scheduler, client: str) -> None:
        """Forget those of one client."""
        scheduler.get_metadata([RUNS], default={}).pop(client, None)


def told_runs(scheduler: Scheduler) -> Iterator[ToldRun]:
    """The last state of each run, in the order in which they began.

    Any client may write what it likes there: what has another form is left out.
    """
    for runs in _values(scheduler.get_metadata([RUNS], default={})):
        for value in _values(runs):
            try:
                entry = msgspec.convert(value, ToldRun)
            except (msgspec.ValidationError, UnicodeError):
                continue
            entry.run.metrics = dict(islice(entry.run.metrics.items(), MOST_METRICS))
            yield entry


def _values(mapping: object) -> list[Any]:
    if not isinstance(mapping, Mapping):
        return []
    return list(mapping.values())


def draw(scheduler: Scheduler) -> Html:
    """Draw all runs."""
    parts: list[Html] = []
    for entry in told_runs(scheduler):
        parts.append(draw_html(entry.run))
        seconds = time.time() - entry.time
        if seconds > SILENT_SECONDS and entry.run.phase not in ENDS:
            parts.append(tag("div", f"last heard of {format_seconds(seconds)} ago"))
    if not parts:
        parts.append(tag("p", "No job runs on this cluster now."))
    return tag("main", tag("h1", "Jobs"), *parts)


def page(scheduler: Scheduler, extra: Mapping[str, Any], document: Any) -> None:
    """The page ``/jobrunner``: all runs, below Dask's own navigation."""
    panel(scheduler, extra, document)
    document.template = dashboard_template()
    document.template_variables.update(extra)


def panel(scheduler: Scheduler, extra: Mapping[str, Any], document: Any) -> None:
    """The page ``/individual-jobrunner``, a panel of JupyterLab's Dask extension."""
    from bokeh.models.widgets import Div

    div = Div(text=draw(scheduler), stylesheets=[STYLE], sizing_mode="stretch_width")

    def update() -> None:
        div.text = draw(scheduler)  # Bokeh sends it only if it is another

    document.title, document.template = "jobrunner", HEAD
    document.add_root(div)
    document.add_periodic_callback(update, INTERVAL_MS)


if find_spec("bokeh") is None:
    logger.warning("Dask's dashboard shows no runs. Install bokeh for it.")
else:
    # A scheduler imports what it preloads before it makes its dashboard.
    add_dashboard_pages({"/jobrunner": page, "/individual-jobrunner": panel})
