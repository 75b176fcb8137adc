"""Tasks in no group: what compiles a group that may miss them says so."""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from jobrunner.errors import DefinitionError
from jobrunner.texts import printable

if TYPE_CHECKING:
    from jobrunner.define.task import Task

_MOST = 100

_numbers = itertools.count()


class Mark:
    """The moment at which it is made; a copy or pickle of it is made anew."""

    def __init__(self) -> None:
        self.number = next(_numbers)

    def __reduce__(self) -> tuple[type[Mark], tuple[()]]:
        return Mark, ()


@dataclass(frozen=True)
class _Orphan:
    name: str
    place: str
    task: weakref.ref[Task]
    mark: Mark = field(default_factory=Mark)


_orphans: list[_Orphan] = []


def note_orphan(task: Task) -> None:
    """Note a new task that is in no group."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("jobrunner."):
        frame = frame.f_back
    thread = threading.current_thread()
    where = "" if thread is threading.main_thread() else f" in thread {thread.name!r}"
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}{where}"
    _orphans.append(_Orphan(task.full_name, place, weakref.ref(task)))
    del _orphans[:-_MOST]


def forget_orphan(task: Task) -> None:
    """Forget a task: it has joined a group."""
    _orphans[:] = [orphan for orphan in _orphans if orphan.task() is not task]


def check_orphans(since: Mark, what: str) -> None:
    """Refuse tasks made `since` then that are gone, so that nothing can run them; warn of others.

    `what` is about to be compiled.
    """
    for orphan in tuple(_orphans):
        if orphan.mark.number < since.number:
            continue
        made = f"task {orphan.name!r}, made at {orphan.place},"
        if orphan.task() is None:
            raise DefinitionError(
                f"{what}: {made} is in no group, so it would never run. Make it inside the `with` "
                f"block of its job or group, in the same thread; in another thread, pass its "
                f"group, as in group=job.epoch_group."
            )
        told = (
            f"{what} is compiled, and {made} has joined no group. If it belongs to the job, make "
            f"it inside `with job:` or pass its group. If Session.run is to run it, ignore this."
        )
        warnings.warn(printable(told, kept=""), stacklevel=2)
