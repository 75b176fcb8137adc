"""The command line, ``jobrunner`` and ``dask jobrunner``. No logic of its own."""

from __future__ import annotations

from jobrunner.cli.command import main

__all__ = ["main"]
