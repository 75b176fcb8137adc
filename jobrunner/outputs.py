"""Files that users name for jobrunner to write: reports, traces, logs of metrics, drawings."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from typing import IO, Any

from jobrunner.errors import DefinitionError
from jobrunner.names import LOG_DIRECTORY

_ENTRY = re.compile(r"[0-9]{10,}\.json")
_TEMPORARY = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def check_output(path: str | os.PathLike[str]) -> None:
    """Raise `DefinitionError` unless `write_output` may write there, outside of checkpoint directories."""
    _find(path)
    refuse_within_checkpoint(path)
    directory = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(directory):
        raise DefinitionError(
            f"Cannot write {os.fspath(path)}: there is no directory {directory}. Make it first, or name "
            f"another one."
        )


def refuse_within_checkpoint(path: str | os.PathLike[str]) -> None:
    """Raise `DefinitionError` for a file or directory that would be within a checkpoint directory.

    A stranger may have put links there.
    """
    outer = os.path.realpath(os.path.dirname(os.path.abspath(path)))
    while not _has_log(outer):
        inner, outer = outer, os.path.dirname(outer)
        if outer == inner:
            return
    raise DefinitionError(
        f"{os.fspath(path)} would be within the checkpoint directory {outer}, where only jobrunner's "
        f"own files belong. Name another directory."
    )


def _has_log(directory: str) -> bool:
    log = os.path.join(directory, LOG_DIRECTORY)
    try:
        with os.scandir(log) as inside:
            return any(_ENTRY.fullmatch(entry.name) for entry in inside)
    except OSError:
        return os.path.isdir(log)  # of another user


def write_output(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file, and replace it at once if there is one, whose rights stay.

    Raises `DefinitionError` if something is there that is no file, and OSError.
    """
    before = _find(path)
    data = content.encode() if isinstance(content, str) else content
    target = os.path.abspath(path)
    temporary = os.path.join(os.path.dirname(target), f".{secrets.token_hex(8)}.new")
    try:
        with open(os.open(temporary, _TEMPORARY, 0o666), "wb") as file:
            if before is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(before.st_mode) & 0o777)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise OSError(error.errno, os.strerror(error.errno or 0), target) from None
        raise


def open_output(path: str, mode: str, **options: Any) -> IO[Any]:
    """Open a file as `open` does; raises `DefinitionError` for what is no file."""
    _find(path)
    return open(path, mode, opener=_open_unlinked, **options)


def _open_unlinked(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _find(path: str | os.PathLike[str]) -> os.stat_result | None:
    """The file that is there, if any; raises `DefinitionError` if that is something else."""
    if "://" in os.fspath(path):
        raise DefinitionError(f"Cannot write {os.fspath(path)}: it is a URL. Name a file.")
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DefinitionError(
            f"Cannot write {os.fspath(path)}: {os.strerror(error.errno or 0)}. Name another file."
        ) from None
    if not stat.S_ISREG(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "no file"
        raise DefinitionError(
            f"Cannot write {os.fspath(path)}, which is {kind}. Name a file, or one that does not exist yet."
        )
    return status
