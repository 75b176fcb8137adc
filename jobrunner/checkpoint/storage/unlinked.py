"""Opens files below checkpoint directories without following a link.

A checkpoint directory may come from a stranger. A link in it could lead a run, or a command such as
`jobrunner rm`, to any file of this user; a pipe would make a reader wait for ever.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass

from jobrunner.errors import CheckpointCorruptError

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
PASSAGE = DIRECTORY | getattr(os, "O_PATH", 0)
"""To reach what is in a directory, which need not be readable."""

GONE = (FileNotFoundError, NotADirectoryError)

_FILE_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
_LEASE_SECONDS = 60.0
_MOST_LEVELS = 100

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


class ForeignFileError(CheckpointCorruptError, OSError):
    """A name in a checkpoint directory is not a file or directory that jobrunner makes."""


def refuse(path: str, finding: str) -> ForeignFileError:
    """The error for something that jobrunner has not made."""
    return ForeignFileError(f"{path} is {finding}. {_ADVICE}", path=path)


def too_long(path: str, nbytes: int, most: int) -> ForeignFileError:
    """The error for a document that is not read."""
    return refuse(path, f"too long: it has {nbytes:,} bytes, expected {most:,} at most")


@dataclass(frozen=True, slots=True)
class Place:
    """A name, and an open directory in which it is; None if the name is a whole path."""

    name: str
    directory: int | None


class Below:
    """Opens names below bound directories, part by part; picklable.

    The path of a bound directory may contain links, since the user has named it; what is below may
    not. Paths that are not below a bound directory are opened as they are.
    """

    def __init__(self) -> None:
        self._roots: tuple[str, ...] = ()

    def bind(self, directory: str) -> None:
        """Follow no link below a directory."""
        root = f"{directory.rstrip('/')}/"
        if root not in self._roots:
            # The longest first: of a directory within another one, its own path may be a link.
            self._roots = tuple(sorted({*self._roots, root}, key=len, reverse=True))

    def open(self, path: str, flags: int) -> int:
        """Open a file or directory; raises `ForeignFileError` for a link."""
        with self.parent(path) as place:
            if place.directory is None:
                return os.open(place.name, flags | os.O_CLOEXEC, 0o666)
            try:
                return _open(place, flags)
            except OSError as error:
                _refuse_foreign(error, place, path)
                raise

    def open_file(self, path: str, flags: int = os.O_RDONLY) -> tuple[int, os.stat_result]:
        """Open a regular file, and return its attributes; raises `ForeignFileError` for others."""
        # Without waiting: a pipe whose other end nobody opens would hold the reader for ever.
        deadline = math.inf
        while True:
            try:
                descriptor = self.open(path, flags | _FILE_FLAGS)
                break
            except BlockingIOError:  # until a file server returns its lease on the file
                deadline = min(deadline, time.monotonic() + _LEASE_SECONDS)
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        attributes = os.fstat(descriptor)
        if stat.S_ISREG(attributes.st_mode):
            return descriptor, attributes
        os.close(descriptor)
        if stat.S_ISDIR(attributes.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise refuse(path, _name_kind(attributes.st_mode))

    @contextlib.contextmanager
    def parent(self, path: str) -> Iterator[Place]:
        """The place of a name, for calls that take one; their errors get the whole path."""
        root, names = self._split(path)
        descriptor: int | None = None
        try:
            if not names:
                yield Place(path, None)
                return
            # Only the last part of a path that `os.open` gets is not followed if it is a link. So
            # each directory is opened from the one before.
            descriptor = os.open(root, PASSAGE)
            reached = root.rstrip("/")
            for name in names[:-1]:
                reached = f"{reached}/{name}"
                place = Place(name, descriptor)
                try:
                    inner = _open(place, PASSAGE)
                except OSError as error:
                    _refuse_foreign(error, place, reached)
                    raise
                os.close(descriptor)
                descriptor = inner
            yield Place(names[-1], descriptor)
        except ForeignFileError:
            raise
        except OSError as error:
            error.filename = path
            del error.filename2  # None would be shown
            raise
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def attributes(self, path: str) -> os.stat_result:
        """The attributes of a name, which may be a link."""
        with self.parent(path) as place:
            if place.directory is None:
                return os.lstat(place.name)
            return os.stat(place.name, dir_fd=place.directory, follow_symlinks=False)

    def _split(self, path: str) -> tuple[str, list[str]]:
        """The bound directory of a path, and the names below it; none if it is below no one."""
        for root in self._roots:
            if path.startswith(root):
                names = path[len(root) :].split("/")
                if ".." in names:
                    raise refuse(path, "outside of its directory")
                return root, names
            if path == root[:-1]:
                break
        return path, []


def _open(place: Place, flags: int) -> int:
    return os.open(place.name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=place.directory)


def _refuse_foreign(error: OSError, place: Place, path: str) -> None:
    """Raise `ForeignFileError` if `error` is due to a link, or a pipe or socket without a reader."""
    if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
        return
    try:
        mode = os.stat(place.name, dir_fd=place.directory, follow_symlinks=False).st_mode
    except OSError:
        return
    if stat.S_ISLNK(mode) or error.errno == errno.ENXIO:
        raise refuse(path, _name_kind(mode)) from None


def _name_kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "no file")


# --- trees


@contextlib.contextmanager
def closing(descriptor: int, path: str) -> Iterator[None]:
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


def scan(descriptor: int, path: str, level: int) -> list[os.DirEntry[str]]:
    """What an open directory contains; ask the entries only while it is open."""
    if level > _MOST_LEVELS:
        raise refuse(path, f"nested in more than {_MOST_LEVELS} directories")
    with os.scandir(descriptor) as entries:
        return list(entries)


def walk(
    descriptor: int, path: str, prefix: str = "", level: int = 0
) -> Iterator[tuple[str, os.stat_result | None]]:
    """What is below an open directory, which is closed, with its attributes; None for directories."""
    with closing(descriptor, path):
        for entry in scan(descriptor, path, level):
            name = f"{prefix}{entry.name}"
            attributes = None
            try:
                if entry.is_dir(follow_symlinks=False):
                    inner = _open(Place(entry.name, descriptor), DIRECTORY)
                    yield from walk(inner, f"{path}/{entry.name}", f"{name}/", level + 1)
                else:
                    attributes = entry.stat(follow_symlinks=False)
            except GONE:  # meanwhile
                continue
            yield name, attributes
