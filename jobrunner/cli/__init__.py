"""The command line, ``jobrunner`` and ``dask jobrunner``: reads arguments and prints."""

from __future__ import annotations

from jobrunner.cli.command import main

__all__ = ["main"]
