"""The command line. No logic of its own."""

from __future__ import annotations

from jobrunner.cli.command import main

__all__ = ["main"]
