"""Files that users name for jobrunner to write: reports, logs of metrics, drawings."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from pathlib import Path

from jobrunner.errors import DefinitionError
from jobrunner.names import LOG_DIRECTORY


def check_output(path: str | os.PathLike[str]) -> None:
    """Raise `DefinitionError` unless `path` can be a file in a directory that is no checkpoint's."""
    refuse_within_checkpoint(path)
    directory = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(directory):
        raise DefinitionError(
            f"Cannot write {os.fspath(path)}: there is no directory {directory}. Make it first, or name "
            f"another one."
        )
    if os.path.exists(path) and not os.path.isfile(path):
        raise DefinitionError(f"Cannot write {os.fspath(path)}, which is no file. Name a file.")
    check_rights(path)


def check_rights(path: str | os.PathLike[str]) -> None:
    """Raise `DefinitionError` if this user may not write `path`, or make its directory."""
    directory = os.path.dirname(os.path.abspath(path))
    while not os.path.lexists(directory):
        directory = os.path.dirname(directory)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise DefinitionError(
            f"Cannot write {os.fspath(path)}: this user may not make files in {directory}. Name "
            f"another directory."
        )


def refuse_within_checkpoint(path: str | os.PathLike[str]) -> None:
    """Raise `DefinitionError` for a URL, and what would be within a checkpoint directory.

    A stranger may have put links there.
    """
    if "://" in os.fspath(path):
        raise DefinitionError(
            "Cannot write to a URL, which may contain credentials, so it is not repeated here. Name a "
            "file."
        )
    for outer in Path(os.path.realpath(path)).parents:
        if os.path.isdir(outer / LOG_DIRECTORY):
            raise DefinitionError(
                f"{os.fspath(path)} would be within the checkpoint directory {outer}, where only "
                f"jobrunner's own files belong. Name another directory."
            )


def write_output(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file; what was there before is replaced at once, and nothing is left half written.

    A link is replaced, and what it leads to stays.
    """
    data = content.encode() if isinstance(content, str) else content
    target = os.path.abspath(path)
    temporary = f"{target}.{secrets.token_hex(8)}.new"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if os.path.isfile(target) and not os.path.islink(target):
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            error.filename = target  # the user has named this one
        raise
