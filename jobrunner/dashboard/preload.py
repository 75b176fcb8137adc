"""Add the pages and series to a scheduler that preloads `jobrunner.dashboard`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from distributed import Scheduler

from jobrunner.dashboard.runs import Forgets
from jobrunner.dask_internals import add_dashboard_pages
from jobrunner.texts import get_logger

logger = get_logger(__name__)

try:
    from jobrunner.dashboard.page import page, panel
except ImportError as error:
    logger.warning("Dask's dashboard shows no runs: %s. Install bokeh for it.", error)
else:
    # A scheduler imports what it preloads before it makes its dashboard.
    add_dashboard_pages({"/jobrunner": page, "/individual-jobrunner": panel})

_collectors: dict[int, Any] = {}  # by scheduler


def dask_setup(scheduler: Scheduler) -> None:
    """Begin to take in what clients tell of their runs."""
    scheduler.add_plugin(Forgets(scheduler))
    with suppress(ImportError):
        from prometheus_client import REGISTRY

        from jobrunner.dashboard.metrics import Runs

        _collectors[id(scheduler)] = runs = Runs(scheduler)
        REGISTRY.register(runs)


def dask_teardown(scheduler: Scheduler) -> None:
    """Leave nothing in the process."""
    if (runs := _collectors.pop(id(scheduler), None)) is not None:
        from prometheus_client import REGISTRY

        REGISTRY.unregister(runs)
