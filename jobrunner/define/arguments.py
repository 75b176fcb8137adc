"""1 define: what may be passed to a task's function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jobrunner.errors import DefinitionError


def check_constants(where: str, fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse constant arguments, bound ones included, that are none where the task runs.

    Raises
    ------
    DefinitionError
        Beginning with `where`.
    """
    if any(not isinstance(key, str) for key in kwargs):
        raise DefinitionError(f"{where}: the keys of kwargs are str; got {list(kwargs)}.")
    for value in [*kwargs.values(), *_partial_values(fn)]:
        for item in _items(value):
            hint = dask_hint(item)
            if hint:
                raise DefinitionError(
                    f"{where}: got a {type(item).__name__} as a constant argument. "
                    f"To mend it, {hint}."
                )


def check_call(
    where: str,
    name: str,
    fn: Callable[..., Any],
    inputs: Sequence[object],
    updates: Sequence[object],
    kwargs: Mapping[str, Any],
) -> None:
    """Refuse a function that cannot be called with so many arguments, as far as it says so.

    Raises
    ------
    DefinitionError
        Beginning with `where`.
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # builtins without one
        return
    try:
        signature.bind(*inputs, *updates, **kwargs)
    except TypeError as error:
        raise DefinitionError(
            f"{where}: {name}{signature} cannot be called with {len(inputs)} inputs, "
            f"{len(updates)} updates and the keywords {sorted(kwargs)}: {error}."
        ) from None


def dask_hint(value: object) -> str | None:
    """What to do with a Dask collection or future that stands where none can; else None."""
    cls = type(value)
    if hasattr(cls, "__dask_graph__"):
        return (
            "compute it first, or let each node compute its own part: build the collection "
            "inside the task's function, or pass what .compute() returns"
        )
    if cls.__name__.endswith("Future") and cls.__module__.split(".")[0] in {
        "distributed",
        "concurrent",
        "asyncio",
    }:
        return "pass what .result() returns, or let a task make the value on its node"
    return None


def _partial_values(fn: object) -> list[object]:
    values: list[object] = []
    while isinstance(fn, functools.partial):
        values += [*fn.args, *fn.keywords.values()]
        fn = fn.func
    return values


def _items(value: object) -> Sequence[Any]:
    """What an exact container holds, or the value itself."""
    if type(value) is dict:
        return tuple(value.values())
    return value if isinstance(value, list | tuple) else (value,)
