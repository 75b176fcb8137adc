"""Checks of what users pass: arguments, by the annotations of public callables; and functions of tasks."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping
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

from jobrunner.define.dask_arguments import WHERE_COMPUTED, is_lazy, leaves
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


def instance(expected: str, cls: Any) -> Rule:
    """An object of a class."""
    return Rule(expected, lambda value: isinstance(value, cls))


_MOST_SECONDS = 1e9  # threads cannot wait for much longer


def _duration(bound: str, is_within: Callable[[Any], bool]) -> Rule:
    """A number of seconds, or a text with a unit."""
    seconds = number("", is_within)

    def read(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        from jobrunner.config import read_seconds  # imports Dask, which few calls need

        return read_seconds(value)

    def fits(value: Any) -> bool:
        try:
            return seconds.fits(read(value))
        except ValueError:
            return False

    expected = (
        f"a number of seconds {bound} 0 and <= {_MOST_SECONDS:g}, or a duration such as '10min'"
    )
    return Rule(expected, fits, read)


def _is_path(value: object) -> bool:
    if not isinstance(value, str | os.PathLike):
        return False
    try:
        encoded = os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return encoded != b"" and b"\0" not in encoded


COUNT = whole(1)
NATURAL = whole(0)
PATH = Rule("a path (str or os.PathLike)", _is_path)
EPOCH = Rule(
    "an int >= 0 or a Position such as (4, 200) or '4.s200', 'latest' or 'best:METRIC'",
    lambda value: read_epoch(value) is not None,
    read_epoch,
)

Count = Annotated[int, COUNT]
Natural = Annotated[int, NATURAL]
Seconds = Annotated[float, _duration(">=", lambda seconds: 0 <= seconds <= _MOST_SECONDS)]
Interval = Annotated[float, _duration(">", lambda seconds: 0 < seconds <= _MOST_SECONDS)]
Label = Annotated[
    str,
    Rule(
        "printable text", lambda text: isinstance(text, str) and text != "" and text.isprintable()
    ),
]

_BY_TYPE = {
    bool: instance("True or False", bool),
    int: Rule("an int", lambda value: isinstance(value, int) and not isinstance(value, bool)),
    float: number("a number", lambda value: True),
    str: instance("a str", str),
}
_BY_UNION = {
    frozenset(get_args(str | os.PathLike[str])): PATH,
    frozenset(get_args(EpochLike)): EPOCH,
}
_MAPPING = Rule(
    "a mapping of str",
    lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value),
)
_LISTS = (collections.abc.Sequence, collections.abc.Collection, collections.abc.Iterable)


def rule_of(kind: Any) -> Rule | None:
    """The rule for a parameter with this annotation; None if it says nothing that can be checked."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        note = parts[1]
        if isinstance(note, Rule):
            return note
        rule = rule_of(parts[0])
        if rule is not None:
            rule = replace(rule, expected=note)
        return rule
    if origin is Literal:
        expected = " or ".join(map(repr, parts))
        return Rule(expected, lambda value: isinstance(value, str) and value in parts)
    if origin in (Union, UnionType):
        rule = _rule_of_union(frozenset(parts) - {NoneType})
        if rule is not None and NoneType in parts:
            rule = _or_none(rule)
        return rule
    if origin in _LISTS:
        return _list_of(origin, rule_of(parts[0]))
    if origin is collections.abc.Mapping:
        return _MAPPING
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
    return Rule(expected, lambda value: any(rule.fits(value) for rule in rules))


def _or_none(rule: Rule) -> Rule:
    def read(value: Any) -> Any:
        if value is None or rule.read is None:
            return value
        return rule.read(value)

    return Rule(rule.expected, lambda value: value is None or rule.fits(value), read)


def _list_of(cls: Any, rule: Rule | None) -> Rule:
    def fits(values: Any) -> bool:
        if not isinstance(values, cls) or isinstance(values, str | bytes):
            return False
        return rule is None or all(map(rule.fits, values))

    if rule is None:
        return Rule("a list", fits)
    read_item = rule.read
    expected = f"a list, and each item {rule.expected}"
    if read_item is None:
        return Rule(expected, fits)
    return Rule(expected, fits, lambda values: list(map(read_item, values)))


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
    rules: dict[str, Rule | None] = {}
    where = target.__qualname__.removesuffix(".__init__")

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not rules:  # at the first call, when all names in the annotations exist
            rules.update(_rules_of(target))
        arguments = {**dict(zip(rules, args, strict=False)), **kwargs}
        if not (arguments.keys() <= rules.keys() or _VARIOUS in rules):
            raise DefinitionError(
                f"{_name_call(where, arguments)} {_find_misspelt(arguments, rules)}"
            )
        for name, value in arguments.items():
            rule = rules.get(name)
            if rule is None:
                continue
            if not rule.fits(value):
                owner = where if name == "name" else _name_call(where, arguments)
                raise DefinitionError(
                    f"{owner}: {name} must be {rule.expected}; got {clip(show(value), 200)}."
                )
            if rule.read is not None:
                arguments[name] = rule.read(value)
        read = [arguments[name] for name in list(rules)[: len(args)]]
        return target(*read, *args[len(read) :], **{name: arguments[name] for name in kwargs})

    return call  # type: ignore[return-value]


_VARIOUS = "**"
"""Stands for keywords of any name among the rules of a function."""


def _rules_of(function: Callable[..., Any]) -> dict[str, Rule | None]:
    """The rules by parameter, in order; None if anything fits."""
    scope = getattr(function, "__globals__", {})
    rules: dict[str, Rule | None] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            rules[_VARIOUS] = None
        elif parameter.annotation is parameter.empty:
            rules[name] = None
        else:
            # One by one: what other annotations name may be imported for type checkers only.
            annotated = SimpleNamespace(__annotations__={name: parameter.annotation})
            rules[name] = rule_of(get_type_hints(annotated, scope, include_extras=True)[name])
    return rules


def _find_misspelt(arguments: Collection[str], rules: Collection[str]) -> str:
    wrong = next(name for name in arguments if name not in rules)
    names = [name for name in rules if name != "self"]
    advice = f"its arguments are {', '.join(names)}."
    matches = get_close_matches(wrong, names, n=1)
    if matches:
        advice = f"did you mean {matches[0]}?"
    return f"has no argument {wrong!r}; {advice}"


def _name_call(where: str, arguments: Mapping[str, Any]) -> str:
    """What is called; with what the caller has called it, which tells it from other such calls."""
    named = [
        arguments.get("name"),
        getattr(arguments.get("job"), "name", None),
        getattr(arguments.get("fn"), "__name__", None),
    ]
    for name in named:
        if isinstance(name, str):
            return f"{where} {name!r}"
    return where


# ---- functions of tasks

_LAZY: dict[str, Callable[[Any], bool]] = {
    "a coroutine function": inspect.iscoroutinefunction,
    "an async generator function": inspect.isasyncgenfunction,
    "a generator function": inspect.isgeneratorfunction,
}


def dask_hint(value: object) -> str | None:
    """Advice for a Dask collection or a future that was passed as a value; else None."""
    if is_lazy(value):
        return f"compute it first, or pass it to {WHERE_COMPUTED}"
    cls = type(value)
    if cls.__name__.endswith("Future") and cls.__module__.split(".")[0] in (
        "concurrent",
        "asyncio",
    ):
        return "pass what .result() returns, or make the value in a task on its node"
    return None


def constants_of(fn: object, kwargs: Mapping[str, object]) -> list[object]:
    """The constant arguments of a task's function, and what lists, tuples and dicts among them hold."""
    values = [*kwargs.values()]
    while isinstance(fn, functools.partial):
        values += [*fn.args, *fn.keywords.values()]
        fn = fn.func
    return list(leaves(values))


def check_runs(fn: object, where: str) -> None:
    """Raise `DefinitionError` if a call of `fn` only makes a coroutine or a generator."""
    fn = without_partials(fn)
    functions = [fn]
    if callable(fn) and not inspect.isroutine(fn):
        functions.append(without_partials(type(fn).__call__))
    for kind, is_of_kind in _LAZY.items():
        if any(is_of_kind(function) for function in functions):
            raise DefinitionError(
                f"{where} is {kind}, so calling it runs nothing. Pass a plain function, which may "
                f"call asyncio.run(...), and returns a list instead of yielding."
            )


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
        keywords = ""
        if names:
            keywords = f" and the keywords {sorted(names)}"
        raise DefinitionError(
            f"{where}: {getattr(fn, '__name__', type(fn).__name__)}{signature} cannot be called with "
            f"{count} arguments{keywords}: {error}."
        ) from None


def read_setup(functions: Mapping[str, Callable[[], Any]] | None, where: str) -> dict[str, Any]:
    """Check functions that make arguments, by parameter; they may be generator functions."""
    read = dict(functions or {})
    for key, fn in read.items():
        is_generator = inspect.isgeneratorfunction(without_partials(fn))
        check_call(fn, 0, (), f"{where}: {key!r}", is_lazy=is_generator)
    return read


def without_partials(fn: object) -> object:
    """The function within `functools.partial` objects."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn
