"""Injected faults: storage whose k-th operation fails, and tasks that fail in a given epoch."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from functools import partial, update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jobrunner.checkpoint import ObjectFiles, PosixFiles
from jobrunner.worker import current_task

if TYPE_CHECKING:
    from obstore.store import ObjectStore

How = Literal["fail", "die", "kill"]


class PowerCutError(BaseException):
    """Every operation raises this after `FaultyFiles` died. Not an `Exception`: nothing catches it."""


class _Faults:
    """Counts operations on storage and fails at the k-th; see `FaultyFiles`."""

    def __init__(self, at: int | None, how: How, *, number: int) -> None:
        self.at = at
        self.how = how
        self.number = number
        self.count = 0
        self.trace: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def before(self, operation: str, path: str) -> None:
        """Count an operation, and fail if it is the k-th."""
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
    """A file system whose k-th operation fails.

    Parameters
    ----------
    at : int, optional
        Number of that operation, from 1. By default, operations are only counted.
    how : {"fail", "die", "kill"}
        ``fail``: the operation raises OSError, and later ones work. ``die``: it and all later ones
        raise `PowerCutError`, as if the process had ended. ``kill``: SIGKILL ends the process.
    number : int
        The errno of the OSError.
    sync : bool
        False: do not sync to disk, for speed.

    Attributes
    ----------
    count : int
        Number of operations so far.
    trace : list of (operation, path)

    Notes
    -----
    Each process counts its own operations; a copy on a worker starts from 0.
    """

    def __init__(
        self,
        at: int | None = None,
        how: How = "fail",
        *,
        number: int = errno.EIO,
        sync: bool = True,
    ) -> None:
        _Faults.__init__(self, at, how, number=number)
        PosixFiles.__init__(self)
        self.sync = sync

    def sync_path(self, path: str) -> None:
        """Sync a path, unless `sync` is False."""
        if self.sync:
            super().sync_path(path)
        else:
            self.before("fsync", path)

    @property
    def has_syncfs(self) -> bool:
        """Whether one call makes a whole file system durable; without `sync`, it does nothing."""
        return super().has_syncfs or not self.sync

    def _sync_file_system(self, descriptor: int) -> int:
        if not self.sync:
            return 0
        return super()._sync_file_system(descriptor)

    def __reduce__(self) -> tuple[object, ...]:
        make = partial(FaultyFiles, self.at, self.how, number=self.number, sync=self.sync)
        return make, (), {"_roots": self._roots}


class FaultyObjects(_Faults, ObjectFiles):
    """An object store in a directory, whose k-th request fails.

    Parameters
    ----------
    root : str
        Its URL, the path for a manager: ``s3://bucket/run``.
    directory : str or os.PathLike
        Where the objects are stored, for all processes of this machine; created if needed.
    at, how, number
        See `FaultyFiles`.

    Attributes
    ----------
    count : int
        Number of requests so far.
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
        where = (self.root, self._directory, self.at, self.how)
        return partial(FaultyObjects, *where, number=self.number), ()


def _open_local(directory: str, root: str) -> ObjectStore:
    from obstore.exceptions import PreconditionError
    from obstore.store import LocalStore

    class ReplacingStore(LocalStore):
        """Replaces objects conditionally, as remote stores do; each has one writer at a time."""

        def put(self, path: str, file: Any, *, mode: Any = "overwrite", **options: Any) -> Any:
            if isinstance(mode, dict):
                if self.head(path)["e_tag"] != mode["e_tag"]:
                    raise PreconditionError(path)
                mode = "overwrite"
            return super().put(path, file, mode=mode, **options)

    return ReplacingStore(directory, mkdir=True, automatic_cleanup=True)


class Struck:
    """A task function that once, in a given epoch, kills or stops its worker's process or raises.

    Parameters
    ----------
    fn : callable
        Called at all other times, also when that epoch runs again.
    epoch : int
    flag : str or os.PathLike
        A file that all workers see. It is created with the fault, and prevents a second one.
    how : {"kill", "stop", "raise"}
        Send SIGKILL; send SIGSTOP (you send SIGCONT); or raise `error`.
    error : Exception, optional
        By default an OSError.

    Notes
    -----
    Runs on workers; picklable if `fn` is. "kill" and "stop" affect the whole process: use workers in
    processes of their own.

    Examples
    --------
    >>> from jobrunner import Node, Task
    >>> task = Task(Struck(len, epoch=3, flag="/tmp/struck"), inputs="w", node=Node("a"))
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        epoch: int,
        flag: str | os.PathLike[str],
        how: Literal["kill", "stop", "raise"] = "kill",
        error: Exception | None = None,
    ) -> None:
        if how not in ("kill", "stop", "raise"):
            raise ValueError(f"how must be 'kill', 'stop' or 'raise'; got {how!r}.")
        update_wrapper(self, fn)  # `Task` reads its name and signature
        self._fn = fn
        self._epoch = epoch
        self._flag = os.fspath(flag)
        self._how = how
        self._error = error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Inject the fault, or call the function."""
        if current_task().epoch == self._epoch and self._is_first():
            if self._how == "raise":
                raise self._error or OSError(f"struck in epoch {self._epoch}")
            number = signal.SIGKILL if self._how == "kill" else signal.SIGSTOP
            os.kill(os.getpid(), number)
        return self._fn(*args, **kwargs)

    def _is_first(self) -> bool:
        try:
            Path(self._flag).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
