"""Which parameter of a task's function gets which input, for inputs that are given by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from jobrunner.errors import DefinitionError

Place = tuple[str, int | None]
"""A parameter, and of how many values it gets the list; None: it gets one value."""

HIDDEN = "…"
"""What is recorded of a secret."""


class Arguments(NamedTuple):
    """What a task passes to its function besides `kwargs`."""

    inputs: tuple[Any, ...]
    updates: tuple[Any, ...]
    places: tuple[Place, ...] = ()
    """Where the inputs, and then the updates, go; if there are none, they are passed in order."""
    implied: frozenset[str] = frozenset()
    """Parameters that get the blobs of their names, because nothing else was given for them."""
    misfit: str = ""
    """Why `fn` cannot be called with them."""


def read_arguments(
    fn: Callable[..., Any],
    inputs: object,
    updates: object,
    kwargs: Mapping[str, Any],
    where: str,
) -> Arguments:
    """Read a task's `inputs` and `updates`.

    Raises `DefinitionError`, which names the function and the parameter, if a name is wrong.
    """
    signature = _signature_of(fn)
    named = isinstance(inputs, Mapping) or isinstance(updates, Mapping)
    if named and not (isinstance(inputs, Mapping) or inputs is None):
        raise DefinitionError(
            f"{where}: updates maps parameters to blobs, so inputs must do so too; got {inputs!r}."
        )
    if not named:
        in_order = Arguments(sequence(() if inputs is None else inputs), sequence(updates))
        if signature is None:
            return in_order
        try:
            signature.bind(*in_order.inputs, *in_order.updates, **kwargs)
        except TypeError as error:
            if inputs is not None:
                return in_order._replace(
                    misfit=f"{_name(fn)}{signature} cannot be called with {len(in_order.inputs)} "
                    f"inputs, {len(in_order.updates)} updates and the keywords {sorted(kwargs)}: "
                    f"{error}."
                )
        else:
            return in_order
    if signature is None:
        raise DefinitionError(
            f"{where}: {_name(fn)} does not say what its parameters are called. Give inputs and "
            f"updates as lists."
        )
    return _Named(f"{where}: ", f"{_name(fn)}{signature}", signature, kwargs).read(inputs, updates)


_signatures: WeakKeyDictionary[Any, inspect.Signature] = WeakKeyDictionary()
"""Of what many tasks may call; to find one takes as long as the rest of a `Task`, or longer."""


def _signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of `fn`; None for a builtin without one."""
    is_kept = type(fn) in (FunctionType, BuiltinFunctionType, type)
    if is_kept and (kept := _signatures.get(fn)) is not None:
        return kept
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return None
    if is_kept:
        _signatures[fn] = signature
    return signature


class _Named(NamedTuple):
    """Reads arguments that are given by name."""

    where: str
    called: str
    signature: inspect.Signature
    kwargs: Mapping[str, Any]

    def read(self, inputs: object, updates: object) -> Arguments:
        parameters = self.signature.parameters
        inputs_by_name = dict(inputs) if isinstance(inputs, Mapping) else {}
        updated = dict(self._updates(updates))
        for argument, names in (("inputs", inputs_by_name), ("updates", updated)):
            for name in names:
                self._check(argument, name)
        if both := sorted(inputs_by_name.keys() & updated.keys()):
            raise self._error(f"inputs and updates both name parameter {both[0]!r}")
        implied = [
            name
            for name, parameter in parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            and not (name in inputs_by_name or name in updated or name in self.kwargs)
        ]
        for name in implied:
            self._check("inputs", name)
        inputs_by_name.update((name, name) for name in implied)
        order = {name: i for i, name in enumerate(parameters)}
        by_place = sorted(inputs_by_name, key=lambda name: order.get(name, len(order)))
        places = [
            (
                name,
                len(inputs_by_name[name])
                if isinstance(inputs_by_name[name], list | tuple)
                else None,
            )
            for name in by_place
        ] + [(name, None) for name in updated]
        try:
            self.signature.bind(**dict.fromkeys((*inputs_by_name, *updated)), **self.kwargs)
        except TypeError as error:
            raise self._error(f"it cannot be called with what the task gives it: {error}") from None
        return Arguments(
            tuple(value for name in by_place for value in sequence(inputs_by_name[name])),
            tuple(updated.values()),
            () if self._is_in_order(places) else tuple(places),
            frozenset(implied),
        )

    def _updates(self, updates: object) -> Iterator[tuple[str, Any]]:
        if isinstance(updates, Mapping):
            yield from updates.items()
            return
        for blob in sequence(updates):
            yield getattr(blob, "name", blob), blob

    def _is_in_order(self, places: Sequence[Place]) -> bool:
        first = list(self.signature.parameters.values())[: len(places)]
        return [(parameter.name, None) for parameter in first] == list(places) and all(
            parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in first
        )

    def _check(self, argument: str, name: object) -> None:
        if not isinstance(name, str):
            raise self._error(f"the keys of {argument} must be names of parameters; got {name!r}")
        parameter = self.signature.parameters.get(name)
        if parameter is None or parameter.kind is Parameter.VAR_KEYWORD:
            if any(
                other_parameter.kind is other_parameter.VAR_KEYWORD
                for other_parameter in self.signature.parameters.values()
            ):
                return
            advice = f"; write {argument}={{parameter: {name!r}}}" if argument == "updates" else ""
            raise self._error(f"{argument} name {name!r}, which is no parameter of it{advice}")
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL):
            star = "*" if parameter.kind is Parameter.VAR_POSITIONAL else ""
            raise self._error(
                f"parameter {star}{name} takes no argument by name. Remove the "
                f"{star or '/'} from the function, or give inputs and updates as lists"
            )
        if name in self.kwargs:
            raise self._error(f"{argument} and kwargs both name parameter {name!r}")

    def _error(self, problem: str) -> DefinitionError:
        return DefinitionError(f"{self.where}{self.called}: {problem}.")


def sequence(value: object) -> tuple[Any, ...]:
    """The items of a list or tuple; of another value, itself."""
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _name(fn: Any) -> str:
    while hasattr(fn, "func"):
        fn = fn.func
    return str(getattr(fn, "__name__", None) or type(fn).__name__)
