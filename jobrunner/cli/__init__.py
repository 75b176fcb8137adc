"""The command line, ``jobrunner`` and ``dask jobrunner``: reads arguments and prints."""

from jobrunner.cli import checkpoints, listing, maintenance, run  # these add commands to `main`
from jobrunner.cli.command import main
