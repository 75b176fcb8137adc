"""How the system opens and syncs files: follows no link, opens no pipe, device or socket."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import grp
import math
import os
import pwd
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from itertools import accumulate
from typing import Any, TypeVar

from jobrunner.checkpoint.storage.protocol import Rights
from jobrunner.errors import CheckpointCorruptError

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
PASSAGE = DIRECTORY | getattr(os, "O_PATH", 0)
"""To reach what is in a directory, which need not be readable."""

_AT_ONCE = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_LEASE_SECONDS = 60.0
_DEEPEST = 100
_GONE = (FileNotFoundError, NotADirectoryError)

_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}
_ADVICE = (
    "jobrunner makes no such thing, and uses only what it makes, because a checkpoint directory may "
    "come from a stranger. Put the file or directory itself there, or remove it."
)


_binding = threading.Lock()  # threads that lose a root would follow links below it

_Result = TypeVar("_Result")


class ForeignFileError(CheckpointCorruptError, OSError):
    """A name in a checkpoint directory is not a file or directory that jobrunner makes."""


# --- system calls of Linux that Python does not have


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

    Raises OSError, with ELOOP for a link. Not on every system.
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


# --- opening


def open_by_parts(path: str, flags: int) -> int:
    """See `open_unlinked`, on any system."""
    *parents, name = path.strip("/").split("/")
    descriptor = os.open("/", PASSAGE)
    try:
        for parent in parents:
            below = os.open(parent, PASSAGE, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = below
        return os.open(name or ".", flags | os.O_NOFOLLOW, 0o666, dir_fd=descriptor)
    finally:
        os.close(descriptor)


open_unlinked: Callable[[str, int], int] = openat2 if _has_openat2() else open_by_parts
"""Opens a file of an absolute path; raises OSError, with ELOOP or ENOTDIR if it contains a link."""


def _open_regular(path: str, flags: int) -> int:
    """Open a regular file, and wait for nobody to open the other end of a pipe."""
    deadline = math.inf
    while True:
        try:
            return open_unlinked(path, flags | _AT_ONCE)
        except BlockingIOError:  # until a file server returns its lease on the file
            deadline = min(deadline, time.monotonic() + _LEASE_SECONDS)
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _stat(name: str, at: int | None) -> os.stat_result:
    return os.lstat(name) if at is None else os.stat(name, dir_fd=at, follow_symlinks=False)


class Opener:
    """Opens files below directories of checkpoints, whose own paths may contain links; picklable."""

    def __init__(self) -> None:
        # The directories, and their paths without links once this process knows them; all with "/".
        self._roots: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_roots": dict.fromkeys(self._roots, "")}

    def bind(self, directory: str) -> None:
        """Follow no link below a directory."""
        prefix = f"{directory}/"
        with _binding:
            if prefix not in self._roots:
                roots = {**self._roots, prefix: ""}
                self._roots = {root: roots[root] for root in sorted(roots, key=len, reverse=True)}

    def _real(self, path: str) -> str:
        """The path without the links of its root; those below it stay."""
        for root, real in self._roots.items():
            if path.startswith(root):
                if ".." in path and ".." in path.split("/"):
                    raise refuse(path, "outside of its directory")
                return path if real == root else (real or self._resolve(root)) + path[len(root) :]
            if path == root[:-1]:
                return (real or self._resolve(root))[:-1]
        return os.path.realpath(path)

    def _resolve(self, root: str) -> str:
        real = os.path.realpath(root)
        if os.path.isdir(real):
            self._roots[root] = f"{real}/"  # in place: another thread may bind meanwhile
        return f"{real}/"

    def open(self, path: str, flags: int, opens: Callable[[str, int], int] | None = None) -> int:
        """Open a file or directory; raises `ForeignFileError` for a link."""
        real = self._real(path)
        try:
            return (opens or open_unlinked)(real, flags)
        except OSError as error:
            raise _explain(error, path, real, self._roots) from None

    def open_file(self, path: str, flags: int = os.O_RDONLY) -> tuple[int, os.stat_result]:
        """Open a regular file, and return its attributes; raises `ForeignFileError` for others."""
        descriptor = self.open(path, flags, _open_regular)
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode):
            return descriptor, found
        os.close(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise _foreign(found.st_mode, path)

    def at(self, path: str, call: Callable[[str, int | None], _Result]) -> _Result:
        """The result of `call` for a name and a descriptor of its directory.

        The name may be a whole path, without a descriptor, if no part of it can be a link.
        """
        start = path.rfind("/") + 1
        try:
            if real := self._roots.get(path[:start]):
                return call(real + path[start:], None)
            if path[:start] in self._roots or f"{path}/" in self._roots:
                return call(self._real(path), None)
            descriptor = self.open(path[: start - 1] or "/", PASSAGE)
            try:
                return call(path[start:], descriptor)
            finally:
                os.close(descriptor)
        except ForeignFileError:
            raise
        except OSError as error:
            error.filename = path
            del error.filename2  # None would be shown
            raise

    def stat(self, path: str) -> os.stat_result:
        """The attributes of a name, which may be a link."""
        return self.at(path, _stat)

    def rights(self, path: str) -> Rights | None:
        """Who may use a directory; None if there is none."""
        try:
            descriptor = self.open(path, PASSAGE)
        except FileNotFoundError:
            return None
        try:
            about = os.fstat(descriptor)
            wanted = os.W_OK | os.X_OK
            may_write = os.access(".", wanted, dir_fd=descriptor, effective_ids=True)
        finally:
            os.close(descriptor)
        owner, group = str(about.st_uid), str(about.st_gid)
        with contextlib.suppress(KeyError):
            owner = pwd.getpwuid(about.st_uid).pw_name
        with contextlib.suppress(KeyError):
            group = grp.getgrgid(about.st_gid).gr_name
        text = f"owner {owner}, group {group}, rights {stat.filemode(about.st_mode)}"
        return Rights(
            text,
            may_write=may_write,
            is_public=bool(about.st_mode & stat.S_IWOTH),
            is_foreign=about.st_uid not in (0, os.geteuid()),
        )

    def walk(self, path: str) -> Iterator[tuple[str, os.stat_result | None]]:
        """What is below a directory, with its attributes; None for directories."""
        try:
            descriptor = self.open(path, DIRECTORY)
        except _GONE:
            return
        yield from _walk(descriptor, path, "", 0)


def _explain(error: OSError, path: str, real: str, roots: Collection[str]) -> OSError:
    """The error to raise for one about `path`, which its root makes `real`."""
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
        for at in accumulate(real.split("/"), "{}/{}".format):
            name = path[: len(path) - len(real) + len(at)]
            with contextlib.suppress(OSError):
                kind = stat.S_IFMT(os.lstat(at or "/").st_mode)
                is_link = kind == stat.S_IFLNK and f"{name}/" not in roots
                if is_link or (error.errno == errno.ENXIO and at == real):
                    return _foreign(kind, name)
    error.filename = path
    return error


def refuse(path: str, found: str) -> ForeignFileError:
    """The error for something that jobrunner has not made."""
    return ForeignFileError(f"{path} is {found}. {_ADVICE}", path=path)


def too_long(path: str, nbytes: int, most: int) -> ForeignFileError:
    """The error for a document that is not read."""
    return refuse(path, f"too long: it has {nbytes:,} bytes, expected {most:,} at most")


def _foreign(mode: int, path: str) -> ForeignFileError:
    return refuse(path, _KINDS.get(stat.S_IFMT(mode), "no file"))


def real_path(path: str) -> str:
    """The path with its links resolved, as far as it exists."""
    return os.path.realpath(path)


def explain_link(error: OSError, path: str) -> OSError:
    """The error to raise if an entry of the log cannot be linked."""
    if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
        return OSError(
            error.errno,
            "this file system has no hard links, which the log needs to create its entries "
            "atomically; use a directory on another file system",
            path,
        )
    return error


def directories_in(descriptor: int) -> list[str]:
    """Names of the directories in a directory."""
    with os.scandir(descriptor) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]


def read_bytes(descriptor: int, nbytes: int) -> bytes:
    """Up to so many bytes, fewer only at the end of the file."""
    data = os.read(descriptor, nbytes)
    while len(data) < nbytes and (more := os.read(descriptor, nbytes - len(data))):
        data += more
    return data


@contextlib.contextmanager
def within(descriptor: int, path: str) -> Iterator[None]:
    """Close a directory's descriptor at the end; errors that name it or a name in it get the path."""
    try:
        yield
    except OSError as error:
        if isinstance(error.filename, int):
            error.filename = path
        elif error.filename is not None and "/" not in error.filename:
            error.filename = f"{path}/{error.filename}"
        raise
    finally:
        os.close(descriptor)


def scan(descriptor: int, path: str, depth: int) -> list[os.DirEntry[str]]:
    """What an open directory contains; ask the entries only while it is open."""
    if depth > _DEEPEST:
        raise refuse(path, f"nested in more than {_DEEPEST} directories")
    with os.scandir(descriptor) as found:
        return list(found)


def _walk(
    descriptor: int, path: str, below: str, depth: int
) -> Iterator[tuple[str, os.stat_result | None]]:
    with within(descriptor, path):
        for entry in scan(descriptor, path, depth):
            name, found = f"{below}{entry.name}", None
            with contextlib.suppress(*_GONE):  # it may have gone meanwhile
                if entry.is_dir(follow_symlinks=False):
                    inside = os.open(entry.name, DIRECTORY, dir_fd=descriptor)
                    yield from _walk(inside, f"{path}/{entry.name}", f"{name}/", depth + 1)
                else:
                    found = entry.stat(follow_symlinks=False)
                yield name, found
