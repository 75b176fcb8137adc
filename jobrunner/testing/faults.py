"""Storage that fails when told to."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from jobrunner.checkpoint.files import PosixFiles


class PowerCutError(BaseException):
    """Raised by every operation after a `FaultyFiles` has died; no handler of errors sees it."""


class FaultyFiles(PosixFiles):
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
        how: Literal["fail", "die", "kill"] = "fail",
        *,
        number: int = errno.EIO,
        sync: bool = True,
    ) -> None:
        self.at = at
        self.how = how
        self.number = number
        self.sync = sync
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

    def _sync_path(self, path: str) -> None:
        if self.sync:
            super()._sync_path(path)
        else:
            self.before("fsync", path)

    @contextmanager
    def durable(self, path: str, names: Sequence[str]) -> Iterator[None]:
        """See `PosixFiles.durable`."""
        if self.sync:
            with super().durable(path, names):
                yield
        else:
            yield
            self.before("syncfs", path)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.at, self.how, self.number, self.sync))


def _rebuild(
    at: int | None, how: Literal["fail", "die", "kill"], number: int, sync: bool
) -> FaultyFiles:
    return FaultyFiles(at, how, number=number, sync=sync)
