"""System calls of Linux that Python does not have; None, or a slower way, on other systems."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import re
import sys
from typing import Any

_SYNC_FILE_RANGE_WRITE = 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EPERM, errno.EOPNOTSUPP)
_OPENAT2 = 437  # on all processors
_RESOLVE_NO_SYMLINKS = 4
_AT_FDCWD = -100


def _find(name: str, since: tuple[int, int], *arguments: Any) -> Any:
    """A function of Linux's C library, from a version of Linux on, if there is one."""
    if sys.platform != "linux":
        return None
    if tuple(map(int, re.findall(r"\d+", os.uname().release)[:2])) < since:
        return None
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is not None:
        function.argtypes = arguments
    return function


_syncfs = _find("syncfs", (5, 8), ctypes.c_int)  # reports errors from 5.8 on
_sync_file_range = _find(
    "sync_file_range", (2, 6), ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint
)
_syscall = _find(
    *("syscall", (5, 6), ctypes.c_long, ctypes.c_int),
    *(ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t),
)

has_syncfs = _syncfs is not None


def sync_file_system(descriptor: int) -> int:
    """Make a whole file system durable; returns an errno, 0 if it is."""
    return 0 if _syncfs(descriptor) == 0 else ctypes.get_errno()


def start_writing_back(descriptor: int, start: int, nbytes: int, path: str) -> None:
    """Let Linux start writing a part of a file; raises OSError if the disk is full or broken."""
    if _sync_file_range is None:
        return
    if _sync_file_range(descriptor, start, nbytes, _SYNC_FILE_RANGE_WRITE) != 0:
        number = ctypes.get_errno()
        if number not in _UNSUPPORTED:
            raise OSError(number, os.strerror(number), path)


class _How(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("flags", "mode", "resolve")]


_ENCODING, _ERRORS = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
_HOW_BYTES = ctypes.sizeof(_How)


@functools.cache
def _how(flags: int) -> tuple[int, _How]:
    mode = 0o666 if flags & os.O_CREAT else 0
    how = _How(flags, mode, _RESOLVE_NO_SYMLINKS)
    return ctypes.addressof(how), how


def openat2(path: str, flags: int) -> int:
    """Open a file as `os.open` does, but follow no link in any part of its absolute path.

    Raises OSError, with ELOOP for a link. Only where `has_openat2`.
    """
    sys.audit("open", path, None, flags)
    name = path.encode(_ENCODING, _ERRORS)
    if b"\0" in name:
        raise ValueError("embedded null byte")
    while True:
        descriptor: int = _syscall(_OPENAT2, _AT_FDCWD, name, _how(flags)[0], _HOW_BYTES)
        if descriptor >= 0:
            return descriptor
        number = ctypes.get_errno()
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), path)


def _has_openat2() -> bool:
    """Whether this system lets the process call it; some containers do not."""
    if _syscall is None:
        return False
    try:
        os.close(openat2("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


has_openat2 = _has_openat2()
