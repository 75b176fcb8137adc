"""Dask's collections, `Delayed` and futures among the arguments of tasks. Does not import Dask."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

WHERE_COMPUTED = "a task of the init group in kwargs=, which gets its value"
"""The only place where collections may be."""


@dataclass(frozen=True, slots=True, eq=False)
class LazyArgument:
    """A collection that is, or is within, the keyword argument `parameter` of a task."""

    node: str
    task: str
    parameter: str
    collection: Any

    def __str__(self) -> str:
        return f"Task {self.node}/{self.task}: {self.parameter!r} ({name_lazy(self.collection)})"


@dataclass(frozen=True, slots=True)
class Arrives:
    """Stands for a collection in what workers get: the number of its `LazyArgument` in the group."""

    number: int


def is_of_dask(kind: type) -> bool:
    """Whether values of a class are collections or futures of Dask, by where the class is defined."""
    package = kind.__module__.partition(".")[0]
    if package == "distributed":
        return kind.__name__.endswith("Future")
    return package in ("dask", "dask_expr") and hasattr(kind, "__dask_graph__")


def is_lazy(value: object) -> bool:
    """Whether a value is a collection that Dask has yet to compute, or a future of a cluster."""
    if is_of_dask(type(value)):
        return True  # the graph of a dataframe would take long to make
    # Those of other libraries, such as xarray, have a graph only if they hold such a collection.
    has_graph = hasattr(type(value), "__dask_graph__")
    return has_graph and value.__dask_graph__() is not None  # type: ignore[attr-defined]


def name_lazy(value: object) -> str:
    """What a message calls a collection."""
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if package.startswith("dask"):
        package = "Dask"
    return f"a {package} {kind.__name__}"


def leaves(value: object) -> Iterator[object]:
    """What is in lists, tuples and dicts of any depth; a value that is none of these, itself."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def replaced(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Make a value anew, with `replace` applied to each of its `leaves`."""
    if isinstance(value, dict):
        changed = copy.copy(value)
        for key, item in value.items():
            changed[key] = replaced(item, replace)
        return changed
    if isinstance(value, list | tuple):
        items = [replaced(item, replace) for item in value]
        if hasattr(value, "_fields"):  # a named tuple, which takes its items one by one
            return type(value)(*items)
        return type(value)(items)
    return replace(value)
