"""Opens files below checkpoint directories without following a link.

A checkpoint directory may come from a stranger. A link in it could lead a run, or a command such as
`jobrunner rm`, to any file of this user; a pipe would make a reader wait for ever.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Self

from jobrunner.errors import CheckpointCorruptError

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
PASSAGE = DIRECTORY | getattr(os, "O_PATH", 0)
"""To reach what is in a directory, which need not be readable."""

GONE = (FileNotFoundError, NotADirectoryError)

_NEW_FILE_RIGHTS = 0o666  # less the umask

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


class Place:
    """A name, and the open directory that it is in: for calls that take both.

    Use it in a ``with`` block, which closes the directory; errors get the whole path there.
    If `directory` is None, the name is a path; only if it `may_be_link` is a link followed.
    """

    __slots__ = ("directory", "may_be_link", "name", "path")

    def __init__(
        self, path: str, name: str, directory: int | None, *, may_be_link: bool = False
    ) -> None:
        self.path = path
        self.name = name
        self.directory = directory
        self.may_be_link = may_be_link

    def open(self, flags: int) -> int:
        """Open the name; raises `ForeignFileError` for a link."""
        flags |= os.O_CLOEXEC
        if not self.may_be_link:
            flags |= os.O_NOFOLLOW
        try:
            return os.open(self.name, flags, _NEW_FILE_RIGHTS, dir_fd=self.directory)
        except OSError as error:
            self._refuse_foreign(error)
            name_path(error, self.path)
            raise

    def _refuse_foreign(self, error: OSError) -> None:
        """Refuse the name if `error` is due to a link, or to a pipe or socket without a reader."""
        if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO) or self.may_be_link:
            return
        try:
            mode = self.attributes().st_mode
        except OSError:
            return
        if stat.S_ISLNK(mode) or error.errno == errno.ENXIO:
            raise refuse(self.path, _name_kind(mode)) from None

    def attributes(self) -> os.stat_result:
        """The attributes of the name, which may be a link."""
        return os.stat(self.name, dir_fd=self.directory, follow_symlinks=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.directory is not None:
            os.close(self.directory)
        if isinstance(error, OSError):
            name_path(error, self.path)


def name_path(error: OSError, path: str) -> None:
    """Let an error of a call that got a name in an open directory name the whole path."""
    if not isinstance(error, ForeignFileError):
        error.filename = path
        del error.filename2  # None would be shown


class Below:
    """Opens names below bound directories, part by part; picklable.

    The path of a bound directory may contain links, since the user has named it; what is below may
    not. Paths that are not below a bound directory are opened as they are.
    """

    def __init__(self) -> None:
        self._roots: tuple[str, ...] = ()
        self.made: set[str] = set()
        """Directories that were made below, so that no link leads to them: for the save under way."""

    def bind(self, directory: str) -> None:
        """Follow no link below a directory."""
        root = f"{directory.rstrip('/')}/"
        if root not in self._roots:
            # The longest first: of a directory within another one, its own path may be a link.
            self._roots = tuple(sorted({*self._roots, root}, key=len, reverse=True))

    def parent(self, path: str) -> Place:
        """The place of a name; raises `ForeignFileError` for a link on the way to it."""
        root = self._root_of(path)
        if root is None:
            return Place(path, path, None, may_be_link=True)
        names = path[len(root) :].split("/")
        if ".." in names:
            raise refuse(path, "outside of its directory")
        if os.path.dirname(path) in self.made:
            return Place(path, path, None)
        # Of a path that `os.open` gets, only the last part is not followed if it is a link. So each
        # directory is opened from the one before.
        try:
            place = Place(root[:-1], names[0], os.open(root, PASSAGE | os.O_CLOEXEC))
            for name in names[1:]:
                place.path = f"{place.path}/{place.name}"
                with place:
                    inner = place.open(PASSAGE)
                place = Place(place.path, name, inner)
        except OSError as error:
            name_path(error, path)
            raise
        place.path = path
        return place

    def open(self, path: str, flags: int) -> int:
        """Open a file or directory; raises `ForeignFileError` for a link."""
        with self.parent(path) as place:
            return place.open(flags)

    def open_file(self, path: str) -> tuple[int, int]:
        """Open a regular file, and return its size, too; raises `ForeignFileError` for others."""
        # Without waiting: a pipe whose other end nobody opens would hold the reader for ever.
        descriptor = self.open(path, os.O_RDONLY | os.O_NONBLOCK)
        attributes = os.fstat(descriptor)
        if stat.S_ISREG(attributes.st_mode):
            return descriptor, attributes.st_size
        os.close(descriptor)
        if stat.S_ISDIR(attributes.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise refuse(path, _name_kind(attributes.st_mode))

    def attributes(self, path: str) -> os.stat_result:
        """The attributes of a name, which may be a link."""
        with self.parent(path) as place:
            return place.attributes()

    def _root_of(self, path: str) -> str | None:
        """The innermost bound directory that contains a path, with a slash at its end."""
        for root in self._roots:
            if path.startswith(root):
                return root
            if path == root[:-1]:
                return None
        return None


@contextlib.contextmanager
def opened(descriptor: int, path: str) -> Iterator[int]:
    """Close a directory's descriptor at the end; errors of calls that got it get its path."""
    try:
        yield descriptor
    except OSError as error:
        if isinstance(error.filename, int):
            error.filename = path
        raise
    finally:
        os.close(descriptor)


def _name_kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "no file")
