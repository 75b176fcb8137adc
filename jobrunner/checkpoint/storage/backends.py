"""Choose the storage of a checkpoint directory by its path."""

from __future__ import annotations

import importlib.util

from jobrunner.checkpoint.storage.object_store import MISSING, ObjectFiles
from jobrunner.checkpoint.storage.paths import is_url
from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.checkpoint.storage.protocol import Files
from jobrunner.errors import DefinitionError


def files_of(path: str, files: Files | None = None) -> Files:
    """The storage of a checkpoint directory: `files`, if given.

    Raises DefinitionError if `files` cannot access the path, or obstore is required and missing.
    """
    if files is not None:
        if not files.reaches(path):
            raise DefinitionError(f"files={type(files).__name__} cannot access {path}.")
        return files
    if not is_url(path):
        return PosixFiles()
    if importlib.util.find_spec("obstore") is None:
        raise DefinitionError(f"{path}: {MISSING}.")
    return ObjectFiles(path)


def files_beside(path: str, files: Files | None) -> Files:
    """The storage of another directory: `files` if they can access it."""
    return files if files is not None and files.reaches(path) else files_of(path)
