"""Tasks that die, hang or fail when told to."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from jobrunner.worker import current_task


class Struck:
    """A task's function that in one epoch, once, kills or stops its worker's process, or raises.

    Parameters
    ----------
    fn : callable
        What it does otherwise, and when the epoch runs again.
    epoch : int
    flag : str or os.PathLike
        A file that all workers see; made when it strikes, and while it is there it does not.
    how : {"kill", "stop", "raise"}
        SIGKILL; SIGSTOP, which nobody continues for you; or raise `error`.
    error : Exception, optional
        By default an OSError.

    Notes
    -----
    Runs on workers; picklable where `fn` is. "kill" and "stop" hit the whole process: give them
    to workers that are processes of their own.

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
            raise ValueError(f"how is 'kill', 'stop' or 'raise'; got {how!r}.")
        functools.update_wrapper(self, fn)  # its name, and its signature for `Task` to check
        self._fn = fn
        self._epoch = epoch
        self._flag = os.fspath(flag)
        self._how = how
        self._error = error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Strike, or do what the function does."""
        if current_task().epoch == self._epoch and self._is_first():
            if self._how == "raise":
                raise self._error or OSError(f"struck in epoch {self._epoch}")
            os.kill(os.getpid(), signal.SIGKILL if self._how == "kill" else signal.SIGSTOP)
        return self._fn(*args, **kwargs)

    def _is_first(self) -> bool:
        try:
            Path(self._flag).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
