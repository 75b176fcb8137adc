"""What a run runs on, as its entry in the log says."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from contextlib import suppress
from contextvars import ContextVar
from importlib import metadata
from typing import Any

from jobrunner._version import __version__
from jobrunner.texts import without_credentials

COMMAND: ContextVar[str] = ContextVar("jobrunner_command", default="")
"""The command that resumes the run, if one began it."""


def describe_environment() -> dict[str, Any]:
    """Versions, the machine, and how to resume; of a script no arguments, which may be secrets."""
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
    }
