"""Checks of what users pass: arguments, by the annotations of public callables; and functions of tasks."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from numbers import Real
from types import NoneType, SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from jobrunner.errors import DefinitionError
from jobrunner.positions import EpochLike, is_whole, read_epoch
from jobrunner.texts import clip, show

_Callee = TypeVar("_Callee", bound=Callable[..., Any])

MOST_DIGITS = 1000
"""Of an integer in JSON: the time to read or write one grows with their square."""

# ---- what an argument must be


@dataclass(frozen=True, slots=True)
class Rule:
    """What an argument must be. In `Annotated`, it replaces what follows from the type."""

    expected: str
    fits: Callable[[Any], bool]
    read: Callable[[Any], Any] | None = None
    """What the callee gets in place of an argument that fits."""


def whole(least: int) -> Rule:
    """An int that is at least `least`, also one of NumPy; no bool."""
    return Rule(f"an int >= {least}", lambda value: is_whole(value, least), int)


def number(expected: str, is_within: Callable[[Any], bool]) -> Rule:
    """A number for which `is_within` is true, as it must not be for NaN and infinities."""

    def fits(value: Any) -> bool:
        return isinstance(value, Real) and not isinstance(value, bool) and is_within(value)

    return Rule(expected, fits)


_MOST_SECONDS = 1e9  # threads cannot wait for much longer


def _duration(expected: str, is_within: Callable[[Any], bool]) -> Rule:
    """A number of seconds, or a text with a unit."""

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        from jobrunner.config import read_seconds  # imports Dask, which few calls need

        return read_seconds(value)

    seconds = number("", is_within)

    def fits(value: Any) -> bool:
        try:
            return seconds.fits(read(value))
        except ValueError:
            return False

    return Rule(f"a number of seconds {expected}, or a duration such as '10min'", fits, read)


def _is_path(value: object) -> bool:
    if not isinstance(value, str | os.PathLike):
        return False
    text = os.fspath(value)
    if not isinstance(text, str) or text == "":
        return False
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


FLAG = Rule("True or False", lambda value: isinstance(value, bool))
COUNT = whole(1)
NATURAL = whole(0)
SECONDS = _duration(f">= 0 and <= {_MOST_SECONDS:g}", lambda seconds: 0 <= seconds <= _MOST_SECONDS)
INTERVAL = _duration(f"> 0 and <= {_MOST_SECONDS:g}", lambda seconds: 0 < seconds <= _MOST_SECONDS)
LABEL = Rule(
    "printable text", lambda value: isinstance(value, str) and value != "" and value.isprintable()
)
PATH = Rule("a path (str or os.PathLike)", _is_path)
EPOCH = Rule(
    "an int >= 0 or a Position such as (4, 200) or '4.s200', 'latest' or 'best:METRIC'",
    lambda value: read_epoch(value) is not None,
    read_epoch,
)

Count = Annotated[int, COUNT]
Natural = Annotated[int, NATURAL]
Seconds = Annotated[float, SECONDS]
Interval = Annotated[float, INTERVAL]
Label = Annotated[str, LABEL]

_BY_TYPE = {
    bool: FLAG,
    int: Rule("an int", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    float: number("a number", lambda value: True),
    str: Rule("a str", lambda value: isinstance(value, str)),
}
_BY_UNION = {
    frozenset(get_args(str | os.PathLike[str])): PATH,
    frozenset(get_args(EpochLike)): EPOCH,
}
_LISTS = {
    collections.abc.Sequence: "a list",
    collections.abc.Collection: "a collection",
    collections.abc.Iterable: "a list",
}


def rule_of(kind: Any) -> Rule | None:
    """The rule for a parameter with this annotation; None if it says nothing that can be checked."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        note = parts[1]
        if isinstance(note, Rule):
            return note
        rule = rule_of(parts[0])
        return None if rule is None else replace(rule, expected=note)
    if origin is Literal:
        return one_of(*parts)
    if origin in (Union, UnionType):
        rule = _rule_of_union(frozenset(parts) - {NoneType})
        return or_none(rule) if rule is not None and NoneType in parts else rule
    if origin in _LISTS:
        return _list_of(origin, parts[0])
    if origin is collections.abc.Mapping:
        return _mapping_of(*parts)
    if isinstance(kind, type) and kind not in (Any, object):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        return _BY_TYPE.get(kind) or instance(f"{article} {kind.__name__}", kind)
    return None


def _rule_of_union(kinds: frozenset[Any]) -> Rule | None:
    if kinds in _BY_UNION:
        return _BY_UNION[kinds]
    if len(kinds) == 1:
        return rule_of(*kinds)
    if not all(isinstance(kind, type) or get_origin(kind) is Literal for kind in kinds):
        return None  # lists of many kinds and the like: what reads them has better messages
    rules = [rule for rule in map(rule_of, kinds) if rule is not None]
    expected = " or ".join(sorted(rule.expected for rule in rules))
    if kinds.isdisjoint([bool, int, float]) and all(isinstance(kind, type) for kind in kinds):
        return instance(expected, tuple(kinds))  # faster, for what many tasks are made of
    return Rule(expected, lambda value: any(rule.fits(value) for rule in rules))


def instance(expected: str, cls: Any) -> Rule:
    """An object of a class."""
    return Rule(expected, lambda value: isinstance(value, cls))


def one_of(*values: str) -> Rule:
    """One of some names."""
    expected = " or ".join(map(repr, values))
    return Rule(expected, lambda value: isinstance(value, str) and value in values)


def or_none(rule: Rule) -> Rule:
    """The same, or None."""
    fits, read = rule.fits, rule.read
    read_or_none = None
    if read is not None:

        def read_or_none(value: Any) -> Any:
            return None if value is None else read(value)

    return Rule(rule.expected, lambda value: value is None or fits(value), read_or_none)


def _list_of(cls: Any, kind: Any) -> Rule:
    rule = rule_of(kind)
    expected = _LISTS[cls] if rule is None else f"{_LISTS[cls]} of {_names(kind)}"

    def fits(values: Any) -> bool:
        if not isinstance(values, cls) or isinstance(values, str | bytes):
            return False
        return rule is None or all(map(rule.fits, values))

    read = None if rule is None else rule.read
    if read is None:
        return Rule(expected, fits)
    return Rule(expected, fits, lambda values: [*map(read, values)])


def _mapping_of(key: Any, value: Any) -> Rule:
    rules = rule_of(key), rule_of(value)
    texts = [_names(kind) for kind in (key, value)]

    def fits(mapping: Any) -> bool:
        if not isinstance(mapping, Mapping):
            return False
        for rule, items in zip(rules, (mapping, mapping.values()), strict=True):
            if rule is not None and not all(map(rule.fits, items)):
                return False
        return True

    return Rule(f"a mapping of {texts[0]} to {texts[1]}", fits)


def _names(kind: Any) -> str:
    """A type as text, such as ``str or Blob``."""
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_names, get_args(kind)))
    rule = rule_of(kind)
    if isinstance(kind, type):
        return "values" if kind in (Any, object) else kind.__name__
    return "values" if rule is None else rule.expected


# ---- calls


def checked(target: _Callee) -> _Callee:
    """Check the arguments of a function, or of the constructor of a class, by their annotations.

    At each call, before anything else: a `Rule` in `Annotated` says what an argument must be, and
    may read it; a text there replaces how its type is described. Calls raise `DefinitionError`,
    also for a keyword that is no parameter.
    """
    if isinstance(target, type):
        target.__init__ = checked(target.__init__)  # type: ignore[misc]
        return target
    arguments = _Arguments(target)

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.keys() <= arguments.rules.keys():
            arguments.check_names(args, kwargs)
        read = list(args)
        for i, (name, rule) in enumerate(arguments.in_order[: len(args)]):
            if rule is not None:
                read[i] = arguments.read(name, rule, args[i], args, kwargs)
        for name, value in kwargs.items():
            rule = arguments.rules.get(name)
            if rule is not None:
                kwargs[name] = arguments.read(name, rule, value, args, kwargs)
        return target(*read, **kwargs)

    return call  # type: ignore[return-value]


class _Arguments:
    """The parameters of a function, and the rules for them, which are found at its first call.

    Then all names in its annotations exist, also those that its module defines later.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._where = function.__qualname__.removesuffix(".__init__")

    @functools.cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self._function).parameters

    @functools.cached_property
    def rules(self) -> dict[str, Rule | None]:
        """By parameter, in order; None if anything fits."""
        scope = getattr(self._function, "__globals__", {})
        rules: dict[str, Rule | None] = {}
        for name, parameter in self._parameters.items():
            rules[name] = None
            if parameter.annotation is parameter.empty or parameter.kind is parameter.VAR_KEYWORD:
                continue
            # One by one: what other annotations name may be imported for type checkers only.
            annotated = SimpleNamespace(__annotations__={name: parameter.annotation})
            hints = get_type_hints(annotated, scope, include_extras=True)
            rules[name] = rule_of(hints[name])
        return rules

    @functools.cached_property
    def in_order(self) -> list[tuple[str, Rule | None]]:
        """The parameters that may be given without their names, and their rules."""
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return [
            (name, self.rules[name])
            for name, parameter in self._parameters.items()
            if parameter.kind in kinds
        ]

    def read(
        self, name: str, rule: Rule, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Check one argument of a call; returns what the function gets for it."""
        if rule.fits(value):
            return value if rule.read is None else rule.read(value)
        where = self._where if name == "name" else self._name_call(args, kwargs)
        raise DefinitionError(
            f"{where}: {name} must be {rule.expected}; got {clip(show(value), 200)}."
        )

    def check_names(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuse a keyword that is no parameter."""
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in self._parameters.values()):
            return
        wrong = next(name for name in kwargs if name not in self._parameters)
        names = [name for name in self._parameters if name != "self"]
        close = get_close_matches(wrong, names, n=1)
        advice = f"did you mean {close[0]}?" if close else f"its arguments are {', '.join(names)}."
        raise DefinitionError(
            f"{self._name_call(args, kwargs)} has no argument {wrong!r}; {advice}"
        )

    def _name_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """What is called; with what the caller has called it, which tells it from other such calls."""
        arguments = {**dict(zip(self._parameters, args, strict=False)), **kwargs}
        named = [
            arguments.get("name"),
            getattr(arguments.get("job"), "name", None),
            getattr(arguments.get("fn"), "__name__", None),
        ]
        for name in named:
            if isinstance(name, str):
                return f"{self._where} {name!r}"
        return self._where


# ---- functions of tasks


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
    fn = without_partials(fn)
    lazy_kind = _lazy_kind(fn)
    if lazy_kind is None and callable(fn) and not inspect.isroutine(fn):
        lazy_kind = _lazy_kind(without_partials(type(fn).__call__))
    if lazy_kind is not None:
        kind, remedy = lazy_kind
        raise DefinitionError(f"{where} is {kind}, so calling it runs nothing. {remedy}")


def check_call(
    fn: Callable[..., Any],
    count: int,
    names: Collection[str],
    where: str,
    *,
    is_lazy: bool = False,
) -> None:
    """Raise `DefinitionError` if `fn` cannot be called with so many arguments and these keywords.

    It may be a generator function only if `is_lazy`.
    """
    if not callable(fn):
        raise DefinitionError(f"{where} must be callable; got {fn!r:.200}.")
    if not is_lazy:
        check_runs(fn, where)
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin without a signature
        return
    try:
        signature.bind(*range(count), **dict.fromkeys(names))
    except TypeError as error:
        keywords = f" and the keywords {sorted(names)}" if names else ""
        raise DefinitionError(
            f"{where}: {getattr(fn, '__name__', type(fn).__name__)}{signature} cannot be called with "
            f"{count} arguments{keywords}: {error}."
        ) from None


def value_at(value: Any, i: int, where: str) -> Any:
    """What a function returns for an index, or what is given for all."""
    if not callable(value):
        return value
    try:
        return value(i)
    except Exception as error:
        raise DefinitionError(
            f"{where}: {getattr(value, '__name__', type(value).__name__)}({i}) raised "
            f"{type(error).__name__}: {error}. Such a function gets the index of a node, and returns "
            f"what its task gets."
        ) from error


def read_setup(functions: object, where: str) -> Mapping[str, Callable[[], Any]]:
    """Check functions that make arguments, by parameter; they may be generator functions."""
    if functions is None:
        return {}
    if not (
        isinstance(functions, Mapping)
        and all(isinstance(key, str) and callable(fn) for key, fn in functions.items())
    ):
        raise DefinitionError(
            f"{where} must map names of parameters to functions; got {functions!r}."
        )
    for key, fn in functions.items():
        is_generator = inspect.isgeneratorfunction(without_partials(fn))
        check_call(fn, 0, (), f"{where}: {key!r}", is_lazy=is_generator)
    return dict(functions)


def without_partials(fn: object) -> object:
    """The function within `functools.partial` objects."""
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
