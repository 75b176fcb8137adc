"""What a message to a worker must contain. It may come from anyone who can reach the worker."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, get_type_hints

import msgspec

Number = Annotated[int, msgspec.Meta(ge=1)]
"""Of an operation or a run."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # not NaN: it would upset a loop's timers
Calls = dict[str, tuple[Callable[..., Awaitable[dict[str, Any]]], type[msgspec.Struct]]]


def calls(*methods: Callable[..., Awaitable[dict[str, Any]]]) -> Calls:
    """Methods that messages may call: by name, with the schema that their annotations declare."""
    return {method.__name__: (method, _arguments(method)) for method in methods}


def _arguments(method: Callable[..., object]) -> type[msgspec.Struct]:
    hints = get_type_hints(method, include_extras=True)
    fields: list[Any] = []
    for parameter in [*inspect.signature(method).parameters.values()][1:]:
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((parameter.name, hints[parameter.name], *default))
    return msgspec.defstruct(method.__name__, fields, kw_only=True, forbid_unknown_fields=True)
