"""The pages, which Bokeh serves and keeps up to date."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bokeh.document import Document
from bokeh.models import Div
from distributed import Scheduler

from jobrunner.dashboard.runs import running, seconds_since
from jobrunner.texts import Html, join, tag
from jobrunner.view import age, draw_html

INTERVAL_MS = 500
ENDED = {"finished", "stopped", "failed"}
NOBODY = "No job runs on this cluster now."

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


def page(scheduler: Scheduler, extra: Mapping[str, Any], document: Document) -> None:
    """The page ``/jobrunner``: all runs, below Dask's own navigation."""
    from distributed.dashboard.components.scheduler import env

    panel(scheduler, extra, document)
    document.template = env.get_template("simple.html")
    document.template_variables.update(extra)


def panel(scheduler: Scheduler, extra: Mapping[str, Any], document: Document) -> None:
    """The page ``/individual-jobrunner``, a panel of JupyterLab's Dask extension."""
    div = Div(text=draw(scheduler), stylesheets=[STYLE], sizing_mode="stretch_width")

    def update() -> None:
        if (text := draw(scheduler)) != div.text:
            div.text = text

    document.title, document.template = "jobrunner", HEAD
    document.add_root(div)
    document.add_periodic_callback(update, INTERVAL_MS)


def draw(scheduler: Scheduler) -> Html:
    """Draw all runs."""
    shown = []
    for _, known in running(scheduler):
        ago = age(seconds_since(known)) if known["phase"] not in ENDED else ""
        shown.append(join((draw_html(known), tag("div", ago) if ago else "")))
    return tag("main", tag("h1", "Jobs"), *(shown or [tag("p", NOBODY)]))
