"""Tasks in no group and groups in no job: what compiles something that may miss them says so."""

from __future__ import annotations

import gc
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
    from jobrunner.define.group import TaskGroup
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
    what: str
    is_group: bool
    place: str
    thing: weakref.ref[Task | TaskGroup]
    mark: Mark = field(default_factory=Mark)


_orphans: list[_Orphan] = []


def note_orphan(thing: Task | TaskGroup, first: Task) -> None:
    """Note a new task that is in no group, or the first task of a group that is in no job."""
    is_group = thing is not first
    what = f"{'the group of ' if is_group else ''}task {first.full_name!r}"
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("jobrunner."):
        frame = frame.f_back
    thread = threading.current_thread()
    where = "" if thread is threading.main_thread() else f" in thread {thread.name!r}"
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}{where}"
    _orphans.append(_Orphan(what, is_group, place, weakref.ref(thing)))
    del _orphans[:-_MOST]


def forget_orphan(thing: Task | TaskGroup) -> None:
    """Forget a task that has joined a group, or a group that has joined a job or runs."""
    _orphans[:] = [orphan for orphan in _orphans if orphan.thing() is not thing]


def check_orphans(since: Mark, what: str, *, is_job: bool = True) -> None:
    """Refuse what was made `since` then and is gone, so that nothing can run it; warn of the rest.

    `what` is about to be compiled. If it is no job, other groups may well run after it.
    """
    later = [orphan for orphan in _orphans if orphan.mark.number >= since.number]
    if any(orphan.is_group and orphan.thing() is not None for orphan in later):
        gc.collect()  # a group and its tasks refer to each other
    for orphan in later:
        made = f"{orphan.what}, made at {orphan.place},"
        home = "job" if orphan.is_group else "group"
        if orphan.thing() is None:
            raise DefinitionError(
                f"{what}: {made} is in no {home}, so it would never run. Make tasks inside the "
                f"`with` block of their job or of one of its groups, in the same thread; in another "
                f"thread, pass the group, as in group=job.epoch_group."
            )
        if is_job or not orphan.is_group:
            told = (
                f"{what} is compiled, and {made} has joined no {home}. If it belongs to the job, "
                f"make its tasks inside `with job:` or pass a group of the job. If Session.run is to "
                f"run it, ignore this."
            )
            warnings.warn(printable(told, kept=""), stacklevel=2)
