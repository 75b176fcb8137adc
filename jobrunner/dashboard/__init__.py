"""Show runs on Dask's own dashboard: ``dask scheduler --preload jobrunner.dashboard``.

Everything here runs in the scheduler's process.
"""

from jobrunner.dashboard.runs_page import dask_setup
