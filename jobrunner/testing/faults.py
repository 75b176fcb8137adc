"""Storage that fails when told to."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Literal

from jobrunner.checkpoint import ObjectFiles, PosixFiles

if TYPE_CHECKING:
    from obstore.store import ObjectStore

How = Literal["fail", "die", "kill"]


class PowerCutError(BaseException):
    """Raised by every operation after a `FaultyFiles` has died; no handler of errors sees it."""


class _Faults:
    """Counts operations on storage, and goes wrong at the k-th; see `FaultyFiles`."""

    def __init__(
        self,
        at: int | None = None,
        how: How = "fail",
        *,
        number: int = errno.EIO,
    ) -> None:
        self.at = at
        self.how = how
        self.number = number
        self.count = 0
        self.trace: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def before(self, operation: str, path: str) -> None:
        """Count, and go wrong where it is time to."""
        with self._lock:
            self.count += 1
            count = self.count
            self.trace.append((operation, path))
        if self.at is None or count < self.at:
            return
        if self.how == "die":
            raise PowerCutError(f"{operation} {path}")
        if count == self.at:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(self.number, os.strerror(self.number), path)


class FaultyFiles(_Faults, PosixFiles):
    """A file system whose k-th operation goes wrong.

    Parameters
    ----------
    at : int, optional
        Which operation, counted from 1. None: nothing goes wrong, operations are counted.
    how : {"fail", "die", "kill"}
        ``fail``: that operation raises OSError, later ones work again. ``die``: that one and all
        later ones raise `PowerCutError`, as if the process had ended there. ``kill``: the process
        ends with SIGKILL.
    number : int
        errno of the OSError.
    sync : bool
        False: nothing is made durable, for speed where no power is cut.

    Attributes
    ----------
    count : int
        Operations so far.
    trace : list of (operation, path)

    Notes
    -----
    Counts in one process only: copies on workers count for themselves.
    """

    def __init__(
        self,
        at: int | None = None,
        how: How = "fail",
        *,
        number: int = errno.EIO,
        sync: bool = True,
    ) -> None:
        super().__init__(at, how, number=number)
        self.sync = sync

    def sync_path(self, path: str) -> None:
        """Make what has this name durable, unless `sync` is False."""
        if self.sync:
            super().sync_path(path)
        else:
            self.before("fsync", path)

    @contextmanager
    def durable(
        self, path: str, names: Sequence[str], changed: Collection[str] | None = None
    ) -> Iterator[None]:
        """Make what the block writes durable, unless `sync` is False."""
        if self.sync:
            with super().durable(path, names, changed):
                yield
        else:
            yield
            self.before("syncfs", path)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.at, self.how, self.number, self.sync))


def _rebuild(at: int | None, how: How, number: int, sync: bool) -> FaultyFiles:
    return FaultyFiles(at, how, number=number, sync=sync)


class FaultyObjects(_Faults, ObjectFiles):
    """An object store, kept in a directory, whose k-th request goes wrong.

    Parameters
    ----------
    root : str
        The URL that it stands for, such as ``s3://bucket/run``: the path of a manager.
    directory : str or os.PathLike
        Holds the objects, for all processes of this machine; made if it is not there.
    at, how, number
        As those of `FaultyFiles`.

    Attributes
    ----------
    count : int
        Requests so far.
    trace : list of (operation, path)
    """

    def __init__(
        self,
        root: str,
        directory: str | os.PathLike[str],
        at: int | None = None,
        how: How = "fail",
        *,
        number: int = errno.EIO,
    ) -> None:
        _Faults.__init__(self, at, how, number=number)
        ObjectFiles.__init__(self, root, partial(_open_local, os.fspath(directory)))
        self._directory = os.fspath(directory)

    def __reduce__(self) -> tuple[object, ...]:
        what = (self.root, self._directory, self.at, self.how, self.number)
        return (_rebuild_objects, what)


def _open_local(directory: str, root: str) -> ObjectStore:
    from obstore.store import LocalStore

    return LocalStore(directory, mkdir=True, automatic_cleanup=True)


def _rebuild_objects(
    root: str, directory: str, at: int | None, how: How, number: int
) -> FaultyObjects:
    return FaultyObjects(root, directory, at, how, number=number)
