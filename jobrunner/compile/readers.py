"""The blobs from which pipes read items."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import GeneratorType
from typing import Any

from jobrunner.compile.blobs import Key
from jobrunner.define import Task, without_partials
from jobrunner.errors import DefinitionError

_LAZY = (GeneratorType, map, filter)  # what no task may return
_PLAIN: tuple[Any, ...] = (object.__new__, list.__new__)  # of classes that return what they are


def find_readers(tasks: Sequence[Task]) -> dict[Key, str]:
    """The blobs that one task makes and from which pipes read, each with the name of a pipe.

    Raises `DefinitionError` if what the task makes is known to be no reader.
    """
    makers = Counter(blob.key for task in tasks for blob in task.output_blobs)
    found = {
        task.drains.key: task.full_name
        for task in tasks
        if task.drains is not None and makers[task.drains.key] == 1
    }
    for task in tasks if found else ():
        cls: Any = list if task.num_instances > 1 else without_partials(task.fn)
        is_known = isinstance(cls, type) and cls.__new__ in _PLAIN
        for blob in task.output_blobs if is_known else ():
            if blob.key in found:
                check_reader(cls, f"Task {task.full_name!r} makes", blob.name, found[blob.key])
    return found


def check_reader(cls: Any, maker: str, blob: str, pipe: str) -> None:
    """Raise `DefinitionError` if `maker` makes an object of a class from which no pipe reads."""
    if fault := reader_fault(cls):
        raise DefinitionError(f"{maker} blob {blob!r}, from which pipe {pipe!r} reads, as {fault}")


def reader_fault(cls: Any) -> str:
    """The end of a message about an object of a class from which no pipe reads; else ""."""
    if hasattr(cls, "__iter__") and hasattr(cls, "__next__") and cls not in _LAZY:
        return ""
    return (
        f"{cls.__qualname__}. Expected a reader of jobrunner.data or another iterator that can be "
        f"saved: without a position, each run would read all of it again. Make from_records(x) of a "
        f"list or an array x, from_iterable(f) of a function f that returns a generator."
    )
