"""Checks of what users pass."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, NoReturn, TypeVar

from jobrunner.errors import DefinitionError
from jobrunner.positions import is_whole, read_epoch
from jobrunner.texts import clip, show

_Callee = TypeVar("_Callee", bound=Callable[..., Any])

MOST_DIGITS = 1000
"""Of an integer in JSON: the time to read or write one grows with their square."""


class Rule(NamedTuple):
    """What an argument must be."""

    expected: str
    fits: Callable[[Any], bool]
    read: Callable[[Any], Any] | None = None
    """What the callee gets in place of an argument that fits."""


def whole(least: int) -> Rule:
    """An int that is at least `least`, also one of NumPy; no bool."""
    return Rule(f"an int >= {least}", lambda it: is_whole(it, least), int)


def number(expected: str, is_within: Callable[[Any], bool]) -> Rule:
    """A number for which `is_within` is true, as it must not be for NaN and infinities."""
    return Rule(
        expected,
        lambda it: isinstance(it, Real) and not isinstance(it, bool) and is_within(it),
    )


def one_of(*values: str) -> Rule:
    """One of some names."""
    return Rule(" or ".join(map(repr, values)), lambda it: isinstance(it, str) and it in values)


def instance(what: str, cls: Any) -> Rule:
    """An object of class `cls`."""
    return Rule(what, lambda it: isinstance(it, cls))


def some(what: str, cls: Any, item: Any) -> Rule:
    """An object of class `cls` whose items are of class `item`; a str has none."""
    return Rule(
        what,
        lambda it: (
            isinstance(it, cls)
            and not isinstance(it, str | bytes)
            and all(isinstance(one, item) for one in it)
        ),
    )


_MOST = 1e9  # seconds; threads cannot wait for much longer

FLAG = Rule("True or False", lambda it: isinstance(it, bool))
COUNT = whole(1)
NATURAL = whole(0)
EPOCH = Rule(
    "an int >= 0 or a Position such as (4, 200) or '4.s200', 'latest' or 'best:METRIC'",
    lambda it: read_epoch(it) is not None,
    read_epoch,
)
EPOCHS = Rule(
    "a collection of epochs",
    lambda it: some("", Collection, object).fits(it) and all(map(EPOCH.fits, it)),
    lambda it: [*map(read_epoch, it)],
)
SECONDS = number(f"a number of seconds >= 0 and <= {_MOST:g}", lambda it: 0 <= it <= _MOST)
INTERVAL = number(f"a number of seconds > 0 and <= {_MOST:g}", lambda it: 0 < it <= _MOST)
TEXT = Rule("a str", lambda it: isinstance(it, str))
LABEL = Rule("printable text", lambda it: isinstance(it, str) and it != "" and it.isprintable())
NAMES = some("a collection of names (str)", Collection, str)
NAMES_BY_NAME = Rule(
    "a mapping of names to collections of names (str)",
    lambda it: isinstance(it, Mapping) and NAMES.fits(it) and all(map(NAMES.fits, it.values())),
)


def _is_path(value: object) -> bool:
    if not isinstance(value, str | os.PathLike) or not isinstance(text := os.fspath(value), str):
        return False
    try:
        return text != "" and b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


PATH = Rule("a path (str or os.PathLike)", _is_path)


def checked(**rules: Rule) -> Callable[[_Callee], _Callee]:
    """Check arguments of a function, or of the constructor of a class, and read them, at each call.

    None fits where it is the default. Calls raise `DefinitionError` before they do anything else.
    """

    def decorate(target: Any) -> Any:
        if not isinstance(target, type):
            return _checking(target, rules)
        target.__init__ = _checking(target.__init__, rules)  # type: ignore[misc]
        return target

    return decorate


def _checking(function: Callable[..., Any], rules: Mapping[str, Rule]) -> Callable[..., Any]:
    parameters = inspect.signature(function).parameters
    fitting = {
        name: or_none(rule) if parameters[name].default is None else rule
        for name, rule in rules.items()
    }
    by_position = [
        (i, name, fitting[name])
        for i, (name, parameter) in enumerate(parameters.items())
        if name in fitting and parameter.kind is not parameter.KEYWORD_ONLY
    ]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for i, name, rule in by_position:
            if i >= len(args):
                break
            if not rule.fits(args[i]):
                _refuse(function, name, rule, args[i], args, kwargs)
            if rule.read is not None:
                args = (*args[:i], rule.read(args[i]), *args[i + 1 :])
        for name, rule in fitting.items():
            if name not in kwargs:
                continue
            if not rule.fits(kwargs[name]):
                _refuse(function, name, rule, kwargs[name], args, kwargs)
            if rule.read is not None:
                kwargs[name] = rule.read(kwargs[name])
        return function(*args, **kwargs)

    return call


def or_none(rule: Rule) -> Rule:
    """The same, or None."""
    read = rule.read or (lambda value: value)
    return Rule(
        rule.expected,
        lambda value: value is None or rule.fits(value),
        lambda value: None if value is None else read(value),
    )


def _refuse(
    function: Callable[..., Any],
    parameter: str,
    rule: Rule,
    value: object,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> NoReturn:
    where = function.__qualname__.removesuffix(".__init__")
    # What the caller has called it tells one of many such calls from the others.
    given = {**dict(zip(inspect.signature(function).parameters, args, strict=False)), **kwargs}
    names = (getattr(given.get("job"), "name", None), getattr(given.get("fn"), "__name__", None))
    name = next((it for it in (given.get("name"), *names) if isinstance(it, str)), None)
    what = where if name is None or parameter == "name" else f"{where} {name!r}"
    raise DefinitionError(
        f"{what}: {parameter} must be {rule.expected}; got {clip(show(value), 200)}."
    )


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
    found = _lazy_kind(fn)
    if found is None and callable(fn) and not inspect.isroutine(fn):
        found = _lazy_kind(without_partials(type(fn).__call__))
    if found is not None:
        kind, remedy = found
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
