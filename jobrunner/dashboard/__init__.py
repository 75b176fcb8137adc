"""Show runs on Dask's own dashboard: ``dask scheduler --preload jobrunner.dashboard``.

Everything here runs in the scheduler's process.
"""

from jobrunner.dashboard.preload import dask_setup
