"""``jobrunner``: the group that all commands join. They import heavy modules when they run."""

from __future__ import annotations

import click

from jobrunner._version import __version__
from jobrunner.cli.output import EPILOG, Commands


@click.group(
    "jobrunner",
    cls=Commands,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="jobrunner")
def main() -> None:
    """Run stateful jobs on Dask, epoch by epoch, and resume them."""
