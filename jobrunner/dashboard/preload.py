"""Add the pages to a scheduler that preloads `jobrunner.dashboard`."""

from __future__ import annotations

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


def dask_setup(scheduler: Scheduler) -> None:
    """Begin to take in what clients tell of their runs."""
    scheduler.add_plugin(Forgets(scheduler))
