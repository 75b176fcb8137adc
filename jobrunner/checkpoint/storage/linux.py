"""What Linux can do for a save, and Python's `os` has no name for."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from typing import Any

_SYNC_FILE_RANGE_WRITE = 2
_NOT_HERE = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EPERM, errno.EOPNOTSUPP)


def sync_file_system(descriptor: int) -> int:
    """Make all that was written to a file system durable; 0, or the errno of what failed."""
    return 0 if _syncfs(descriptor) == 0 else ctypes.get_errno()


def start_writing_back(descriptor: int, start: int, nbytes: int) -> None:
    """Let the disk begin with a part of a file that was written; a no-op where that is not known.

    Raises
    ------
    OSError
        What was written cannot be kept: the disk is full, or broken.
    """
    if _sync_file_range is None:
        return
    if _sync_file_range(descriptor, start, nbytes, _SYNC_FILE_RANGE_WRITE) != 0:
        number = ctypes.get_errno()
        if number not in _NOT_HERE:
            raise OSError(number, os.strerror(number))


def _find(name: str, *arguments: Any) -> Any:
    """A function of the C library; None where there is none."""
    if sys.platform != "linux":
        return None
    try:
        function = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = arguments
    return function


def _find_syncfs() -> Any:
    """The C library's syncfs; None where it keeps errors to itself, as before Linux 5.8."""
    if sys.platform != "linux":
        return None
    release = os.uname().release.split(".")
    try:
        is_new = (int(release[0]), int(release[1])) >= (5, 8)
    except (IndexError, ValueError):
        return None
    return _find("syncfs", ctypes.c_int) if is_new else None


_syncfs = _find_syncfs()
_sync_file_range = _find(
    "sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
)

HAS_SYNCFS = _syncfs is not None
"""Whether one call makes a whole file system durable, and tells what failed."""
