"""``jobrunner``: the group of all commands. They import heavy modules when they run."""

from __future__ import annotations

import click

from jobrunner._version import __version__
from jobrunner.cli import checkpoints, listing, maintenance
from jobrunner.cli.output import EPILOG, Commands
from jobrunner.cli.run import run


@click.group(
    "jobrunner",
    cls=Commands,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="jobrunner")
def main() -> None:
    """Run stateful jobs on Dask, epoch by epoch, and resume them."""


for _command in (run, *listing.COMMANDS, *checkpoints.COMMANDS, *maintenance.COMMANDS):
    main.add_command(_command)
