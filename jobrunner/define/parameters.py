"""Which parameter of a task's function gets which input, for inputs that are given by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import Parameter
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from jobrunner.define.checks import without_partials
from jobrunner.errors import DefinitionError

ParameterPlace = tuple[str, int | None]
"""A parameter, and of how many values it gets the list; None: it gets one value."""

HIDDEN = "…"
"""What is recorded of a secret."""


class Arguments(NamedTuple):
    """What a task passes to its function besides `kwargs`."""

    inputs: tuple[Any, ...]
    updates: tuple[Any, ...]
    places: tuple[ParameterPlace, ...] = ()
    """Where the inputs, and then the updates, go; if there are none, they are passed in order."""
    implied: frozenset[str] = frozenset()
    """Parameters that get the blobs of their names, because nothing else was given for them."""


def read_arguments(
    fn: Callable[..., Any],
    inputs: object,
    updates: object,
    keywords: Collection[str],
    where: str,
) -> Arguments:
    """Read a task's `inputs` and `updates`, given the names of its other arguments.

    Raises `DefinitionError`, which names the function and the parameter, if a name is wrong.
    """
    signature = _signature_of(fn)
    called = f"{where}: {_name(fn)}{signature or ''}"
    if not isinstance(inputs, Mapping) and not isinstance(updates, Mapping):
        named_inputs = () if inputs is None else sequence(inputs)
        in_order = Arguments(named_inputs, sequence(updates))
        if signature is None:
            return in_order
        try:
            signature.bind(*in_order.inputs, *in_order.updates, **dict.fromkeys(keywords))
        except TypeError as error:
            if inputs is not None:
                raise DefinitionError(
                    f"{called} cannot be called with {len(in_order.inputs)} inputs, "
                    f"{len(in_order.updates)} updates and the keywords {sorted(keywords)}: {error}."
                ) from None
        else:
            return in_order
    elif not isinstance(inputs, Mapping) and inputs is not None:
        raise DefinitionError(
            f"{where}: updates maps parameters to blobs, so inputs must do so too; got {inputs!r}."
        )
    if signature is None:
        raise DefinitionError(
            f"{called} does not say what its parameters are called. Give inputs and updates as lists."
        )
    by_name: dict[Any, Any] = {}
    if isinstance(inputs, Mapping):
        by_name |= inputs
    if isinstance(updates, Mapping):
        updated = dict(updates)
    else:
        updated = {getattr(blob, "name", blob): blob for blob in sequence(updates)}
    names = [*by_name, *updated, *keywords]
    for name in names:
        if not isinstance(name, str):
            raise DefinitionError(
                f"{called}: inputs and updates must map names of parameters; got {name!r}."
            )
        if names.count(name) > 1:
            raise DefinitionError(f"{called}: it gets parameter {name!r} twice.")
    implied = []
    for name, parameter in signature.parameters.items():
        is_required = parameter.default is parameter.empty
        is_named = parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        if is_required and is_named and name not in names:
            implied.append(name)
    try:
        signature.bind(**dict.fromkeys([*names, *implied]))
    except TypeError as error:
        raise DefinitionError(
            f"{called}: it cannot be called by name with {sorted([*names, *implied])}: {error}. Each "
            f"input and update goes to the parameter of its name; write {{parameter: blob}} for "
            f"another, or give inputs and updates as lists."
        ) from None
    by_name.update((name, name) for name in implied)
    order = {name: i for i, name in enumerate(signature.parameters)}
    places: list[ParameterPlace] = []
    values: list[Any] = []
    for name in sorted(by_name, key=lambda name: order.get(name, len(order))):
        value = by_name[name]
        places.append((name, len(value) if isinstance(value, list | tuple) else None))
        values += sequence(value)
    places += [(name, None) for name in updated]
    if _are_in_order(signature, places):
        places = []
    return Arguments(tuple(values), tuple(updated.values()), tuple(places), frozenset(implied))


def _are_in_order(signature: inspect.Signature, places: Sequence[ParameterPlace]) -> bool:
    first = list(signature.parameters.values())[: len(places)]
    if [(parameter.name, None) for parameter in first] != list(places):
        return False
    return all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in first)


_signatures: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()
"""Of what many tasks may call; to find one takes as long as the rest of a `Task`, or longer."""


def _signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of `fn`; None for a builtin without one."""
    is_kept = type(fn) in (FunctionType, BuiltinFunctionType, type)
    if is_kept and fn in _signatures:
        return _signatures[fn]
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return None
    if is_kept:
        _signatures[fn] = signature
    return signature


def sequence(value: object) -> tuple[Any, ...]:
    """The items of a list or tuple; of another value, itself."""
    if isinstance(value, list | tuple):
        return tuple(value)
    return (value,)


def _name(fn: object) -> str:
    fn = without_partials(fn)
    name = getattr(fn, "__name__", None)
    if isinstance(name, str):
        return name
    return type(fn).__name__
