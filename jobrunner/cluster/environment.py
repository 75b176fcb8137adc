"""What a run runs on, as its entry in the log says."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from importlib import metadata
from itertools import islice
from typing import Any

from jobrunner._version import __version__
from jobrunner.texts import without_credentials

COMMAND: ContextVar[str] = ContextVar("jobrunner_command", default="")
"""The command that resumes the run, if one began it."""


MOST_PLACED = 1000
"""Nodes whose worker is recorded."""


def describe_environment(placement: Mapping[str, str]) -> dict[str, Any]:
    """Versions, the machine, the workers, and how to resume.

    `placement` is the worker of each node. Of a script no arguments are told: they may be secrets.
    """
    versions = {"python": platform.python_version(), "jobrunner": __version__}
    for name in ("dask", "distributed", "numpy", "zarr"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    command = COMMAND.get()
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if not command and script is not None:
        command = f"python {shlex.quote(script)}"
    return {
        **versions,
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "directory": os.getcwd(),
        "command": without_credentials(command),
        "placement": dict(islice(placement.items(), MOST_PLACED)),
    }
