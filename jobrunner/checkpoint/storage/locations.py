"""Paths and URLs of checkpoint directories, and the storage of each."""

from __future__ import annotations

import importlib.util
import os
import re

from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.checkpoint.storage.protocol import Files
from jobrunner.define import instance
from jobrunner.errors import DefinitionError
from jobrunner.texts import without_credentials

FILES = instance("a storage with the methods of `Files`", Files)
_OBJECT_SCHEMES = ("s3", "gs", "az", "memory")

_SAFE_NAME = re.compile(r"[\w.~!$&'()*+,;=:@-]+")


def is_url(path: str) -> bool:
    """Whether `path` is the URL of a directory in an object store."""
    return path.partition("://")[0] in _OBJECT_SCHEMES and "://" in path


def absolute_path(path: str | os.PathLike[str]) -> str:
    """The absolute path of a checkpoint directory, or its URL; raises DefinitionError for others."""
    try:
        text = os.fspath(path)
    except TypeError:
        text = None
    if not isinstance(text, str) or not text:
        raise DefinitionError(f"path must be a directory (a str or os.PathLike); got {path!r}.")
    if "\n" in text:  # messages name it, and a stranger may have chosen it
        raise DefinitionError(f"path must be one line; got {text!r}. Rename the directory.")
    scheme, separator, address = text.partition("://")
    if _may_have_credentials(text) or without_credentials(text) != text:
        raise DefinitionError(
            "path is a URL that may contain credentials, so it is not repeated here: it has '@' or "
            "':' in its first part, or '?' or '#'. Pass credentials in the environment, and a URL "
            "like s3://bucket/name/name."
        )
    if separator and scheme.isalnum():
        if scheme in _OBJECT_SCHEMES:
            return _absolute_url(text, scheme, address)
        raise DefinitionError(
            f"{text}: checkpoints can be in directories, given by their paths, and object stores "
            f"({'://, '.join(_OBJECT_SCHEMES)}://), not in {scheme}://. Use one that the client and "
            f"all workers share."
        )
    return os.path.abspath(text)


def _may_have_credentials(text: str) -> bool:
    """Whether a URL has more than names, or the URL of an object store lacks a slash."""
    scheme, colon, address = text.partition(":")
    if not colon or not scheme.isalnum():
        return False
    if not address.startswith("//"):
        return scheme in _OBJECT_SCHEMES
    authority = address[2:].partition("/")[0]
    return "@" in authority or ":" in authority or "?" in address or "#" in address


def _absolute_url(text: str, scheme: str, address: str) -> str:
    names = address.rstrip("/").split("/")
    if scheme == "memory" and names[0] == "":
        names = names[1:]
    for name in names:
        if not _SAFE_NAME.fullmatch(name) or name in (".", ".."):
            raise DefinitionError(
                f"{text}: expected {scheme}://bucket/name/name, with names of letters, digits and "
                f"-._~!$&'()*+,;=:@; found {name!r}."
            )
    return f"{scheme}://{'/'.join(names)}"


def files_of(path: str, files: Files | None = None) -> Files:
    """The storage of a checkpoint directory: `files`, if given.

    Raises DefinitionError if `files` cannot access the path, or obstore is required and missing.
    """
    if files is None and not is_url(path):
        files = PosixFiles()
    if files is not None:
        if not files.reaches(path):
            raise DefinitionError(f"files={type(files).__name__} cannot access {path}.")
        if isinstance(files, PosixFiles):
            files.bind(path)
        return files
    from jobrunner.checkpoint.storage.object_files import MISSING, ObjectFiles

    if importlib.util.find_spec("obstore") is None:
        raise DefinitionError(f"{path}: {MISSING}.")
    return ObjectFiles(path)


def files_beside(path: str, files: Files | None) -> Files:
    """The storage of another directory: `files` if they can access it."""
    return files if files is not None and files.reaches(path) else files_of(path)
