"""Checks of what users pass: to the classes of this package, and to a task's function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jobrunner.errors import DefinitionError


def check_int(value: object, least: int, what: str) -> int:
    """Return `value` if it is an int >= `least`; else raise `DefinitionError`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DefinitionError(f"{what} must be an int >= {least}; got {value!r}.")
    return value


def check_constants(where: str, fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse Dask collections and futures among the constant arguments of a task."""
    if any(not isinstance(key, str) for key in kwargs):
        raise DefinitionError(f"{where}: the keys of kwargs must be str; got {list(kwargs)}.")
    for value in [*kwargs.values(), *_partial_values(fn)]:
        for item in _items(value):
            if hint := dask_hint(item):
                raise DefinitionError(
                    f"{where}: got a {type(item).__name__} as a constant argument. "
                    f"To fix it, {hint}."
                )


def check_call(
    where: str,
    name: str,
    fn: Callable[..., Any],
    inputs: Sequence[object],
    updates: Sequence[object],
    kwargs: Mapping[str, Any],
) -> None:
    """Refuse a function whose signature does not accept these arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(*inputs, *updates, **kwargs)
    except TypeError as error:
        raise DefinitionError(
            f"{where}: {name}{signature} cannot be called with {len(inputs)} inputs, "
            f"{len(updates)} updates and the keywords {sorted(kwargs)}: {error}."
        ) from None


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


def _partial_values(fn: object) -> list[object]:
    values: list[object] = []
    while isinstance(fn, functools.partial):
        values += [*fn.args, *fn.keywords.values()]
        fn = fn.func
    return values


def _items(value: object) -> Sequence[Any]:
    if type(value) is dict:
        return tuple(value.values())
    return value if isinstance(value, list | tuple) else (value,)
