"""What a message to a worker must contain. It may come from anyone who can reach the worker."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, get_type_hints

import msgspec

from jobrunner.errors import ExecutionError

Number = Annotated[int, msgspec.Meta(ge=1)]
"""Of an operation or a run."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # not NaN: it would upset a loop's timers
Names = Mapping[str, str]


class Calls:
    """Coroutine methods that messages may call by name.

    What they declare is the schema of the messages: these are checked once, before anything acts on
    them.
    """

    def __init__(self, *methods: Callable[..., Awaitable[dict[str, Any]]]) -> None:
        self._methods = {method.__name__: (method, _arguments(method)) for method in methods}

    def __contains__(self, name: str) -> bool:
        return name in self._methods

    async def answer(self, owner: object, name: str, details: dict[str, Any]) -> dict[str, Any]:
        """Call a method of `owner`; raises an `ExecutionError` for a message that does not fit it."""
        try:
            if name not in self._methods:
                raise TypeError(f"expected one of {', '.join(self._methods)}")
            method, schema = self._methods[name]
            arguments = msgspec.convert(details, schema)
        except (TypeError, msgspec.ValidationError) as error:
            raise ExecutionError(
                f"A worker got a message {name!r:.80} that it does not understand: {error}. Use the "
                f"same version of jobrunner on the client and on all workers."
            ) from error
        return await method(owner, **msgspec.structs.asdict(arguments))


def _arguments(method: Callable[..., object]) -> type[msgspec.Struct]:
    hints = get_type_hints(method, include_extras=True)
    fields: list[Any] = []
    for parameter in [*inspect.signature(method).parameters.values()][1:]:
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((parameter.name, hints[parameter.name], *default))
    return msgspec.defstruct(method.__name__, fields, kw_only=True, forbid_unknown_fields=True)
