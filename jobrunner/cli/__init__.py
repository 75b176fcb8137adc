"""The command line, ``jobrunner`` and ``dask jobrunner``: reads arguments and prints."""

from jobrunner.cli.command import main
