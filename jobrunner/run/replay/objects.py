"""Compare objects of any class by what makes them up."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

from jobrunner.texts import show

Differences = Iterator[dict[str, Any]]
Compare = Callable[[Any, Any, str], Differences]

_CODE = ("__code__", "__defaults__", "__kwdefaults__", "__closure__")


def are_same_class(one: type, other: type) -> bool:
    """Whether two classes are the same, or were defined by the same statement of a script."""
    return one is other or (one.__module__, one.__qualname__) == (
        other.__module__,
        other.__qualname__,
    )


def compare_objects(one: Any, other: Any, where: str, compare: Compare) -> Differences:
    """The differences between two objects that are neither containers, arrays nor numbers."""
    if _are_equal(one, other):
        return
    whole = {"where": where, "what": f"value: {_shorten(one)} and {_shorten(other)}"}
    if isinstance(one, type) and isinstance(other, type):
        if not are_same_class(one, other):
            yield whole
        return
    parts = [_parts_of(value) for value in (one, other)]
    if parts[0] is None or parts[1] is None:
        yield whole
        return
    found = [
        difference
        for name in parts[0].keys() | parts[1].keys()
        for difference in compare(parts[0].get(name), parts[1].get(name), f"{where}{name}")
    ]
    has_state = any(name.startswith(".") for name in parts[0])
    yield from found if has_state or not found else [whole]


def identical(one: Any, other: Any) -> bool | None:
    """What the objects' own `identical` says, as xarray has it; None if they have none."""
    method = getattr(type(one), "identical", None)
    if method is None:
        return None
    try:
        return bool(method(one, other))
    except Exception:  # of a class that means something else by it
        return None


def _are_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # an array inside is neither true nor false
        return False


def _parts_of(value: Any) -> dict[str, Any] | None:
    """What pickle would make it of again, by name; None if it is one piece."""
    if isinstance(value, types.FunctionType):
        return {f".{name}": getattr(value, name) for name in _CODE}
    if isinstance(value, types.CellType):
        return {".cell_contents": value.cell_contents}
    if type(value).__module__ == "builtins":
        return None
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:
        return None
    if isinstance(reduced, str):
        return None
    function, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    parts: dict[str, Any] = {"(class)": function, "(arguments)": arguments}
    for state_part in state if isinstance(state, tuple) else (state,):
        if isinstance(state_part, dict):
            parts |= {f".{name}": item for name, item in state_part.items()}
        elif state_part is not None:
            parts[f".__getstate__()[{len(parts)}]"] = state_part
    if items is not None:
        parts["(items)"] = list(items)
    if pairs is not None:
        parts["(pairs)"] = dict(pairs)
    return parts


def _shorten(value: object) -> str:
    text = show(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
