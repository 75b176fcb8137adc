"""The command line, ``jobrunner`` and ``dask jobrunner``: reads arguments and prints."""

from jobrunner.cli import (  # these add commands to `main`
    checkpoints,
    maintenance,
    run,
    shell,
    show,
)
from jobrunner.cli.command import main
