"""Checks of what users pass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from jobrunner.errors import DefinitionError


def check_int(value: object, least: int, what: str) -> int:
    """Return `value` if it is an int >= `least`; else raise `DefinitionError`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DefinitionError(f"{what} must be an int >= {least}; got {value!r}.")
    return value


def dask_hint(value: object) -> str | None:
    """Advice for a Dask collection or a future that was passed as a value; else None."""
    cls = type(value)
    if hasattr(cls, "__dask_graph__"):
        return (
            "pass what .compute() returns, or build the collection inside the task's function, "
            "so that each node computes its own part"
        )
    packages = ("distributed", "concurrent", "asyncio")
    if cls.__name__.endswith("Future") and cls.__module__.split(".")[0] in packages:
        return "pass what .result() returns, or make the value in a task on its node"
    return None


def constants_of(fn: object, kwargs: Mapping[str, object]) -> Iterator[object]:
    """The constant arguments of a task's function, and their items."""
    values = list(kwargs.values())
    while isinstance(fn, functools.partial):
        values += [*fn.args, *fn.keywords.values()]
        fn = fn.func
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        elif type(value) is dict:
            yield from value.values()
        else:
            yield value


def check_runs(fn: object, where: str) -> None:
    """Raise `DefinitionError` if a call of `fn` only makes a coroutine or a generator."""
    fn = _without_partials(fn)
    found = _lazy_kind(fn)
    if found is None and callable(fn) and not inspect.isroutine(fn):
        found = _lazy_kind(_without_partials(type(fn).__call__))
    if found is not None:
        kind, remedy = found
        raise DefinitionError(f"{where} is {kind}, so calling it runs nothing. {remedy}")


def _without_partials(fn: object) -> object:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


def _lazy_kind(fn: Any) -> tuple[str, str] | None:
    if inspect.iscoroutinefunction(fn):
        return "a coroutine function", "Pass a plain function; it may call asyncio.run(...)."
    if inspect.isasyncgenfunction(fn):
        return "an async generator function", "Pass a plain function that returns a list."
    if inspect.isgeneratorfunction(fn):
        return "a generator function", "Return a list or a tuple instead of yielding."
    return None
