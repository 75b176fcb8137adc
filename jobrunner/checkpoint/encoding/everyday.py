"""Codecs of the standard library's types. Pure: no I/O.

`encode` returns plain values and containers, never the value's own: a set becomes a list, a deque its
items. `decode` gets what a stranger may have written, so it checks the types of all that it takes
apart: the items of a range would have no end.
"""

from __future__ import annotations

import datetime as dt
import random
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from decimal import Decimal
from functools import partial
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, TypeVar

from jobrunner.checkpoint.encoding.codecs import OwnCodec, UnmakeableError, UnsuitableError

T = TypeVar("T")

_FACTORIES: dict[str | None, Any] = {
    cls.__name__: cls
    for cls in (bool, int, float, str, list, tuple, dict, set, deque, Counter, OrderedDict)
}
_FACTORIES[None] = None


def expect(cls: type[T], value: object) -> T:
    """Return a value that must be of exactly this type; raises TypeError."""
    if type(value) is not cls:
        raise TypeError(f"expected {cls.__name__}, found {type(value).__name__}")
    return value


def fields_of(parts: object, *classes: type) -> list[Any]:
    """Return the items of a list, which must be of exactly these types."""
    items = expect(list, parts)
    if len(items) != len(classes):
        raise ValueError(f"expected {len(classes)} items, found {len(items)}")
    for item, cls in zip(items, classes, strict=True):
        if cls is not object:
            expect(cls, item)
    return items


# --- containers


def _sort_members(members: Collection[Any]) -> list[Any]:
    """Sort the members of a set, so that equal sets are encoded alike.

    Two runs iterate over a set of texts in different orders, since each hashes texts by a seed of its
    own. Members of different types cannot be compared, but their texts can.
    """

    def text_of(item: object) -> str:
        if isinstance(item, frozenset):
            return repr(sorted(map(text_of, item)))
        return repr(item)

    return sorted(members, key=lambda item: (type(item).__qualname__, text_of(item)))


def _decode_deque(parts: object) -> deque[Any]:
    items, most = fields_of(parts, list, object)
    return deque(items, most)


def _encode_defaultdict(value: defaultdict[Any, Any]) -> object:
    factory: Any = value.default_factory
    name = getattr(factory, "__name__", None)
    if _FACTORIES.get(name) is not factory:
        raise UnsuitableError(f"its default_factory is {factory!r:.80}, not one of Python's types")
    return [name, dict(value)]


def _decode_defaultdict(parts: object) -> defaultdict[Any, Any]:
    name, items = fields_of(parts, object, dict)
    return defaultdict(_FACTORIES[name], items)


def _encode_ordered(value: OrderedDict[Any, Any]) -> object:
    # Torch keeps the versions of a state_dict in an attribute.
    return [dict(value), dict(vars(value))]


def _decode_ordered(parts: object) -> OrderedDict[Any, Any]:
    items, attributes = fields_of(parts, dict, dict)
    result = OrderedDict(items)
    vars(result).update(attributes)
    return result


# --- times


def _encode_time(value: Any) -> object:
    plain = value.replace(tzinfo=None).isoformat()
    return [plain, value.fold, value.tzinfo]


def _decode_time(cls: Any, parts: object) -> Any:
    text, fold, zone = fields_of(parts, str, int, object)
    return cls.fromisoformat(text).replace(fold=fold, tzinfo=zone)


def _encode_zone(value: zoneinfo.ZoneInfo) -> object:
    if value.key is None:
        raise UnsuitableError("it has no key, so it could not be found again")
    return value.key


def _decode_zone(key: object) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(expect(str, key))
    except (zoneinfo.ZoneInfoNotFoundError, OSError) as error:  # a directory of zones
        raise UnmakeableError(str(error)) from error


# --- others


def _decode_path(cls: Any, text: object) -> Any:
    try:
        return cls(expect(str, text))
    except NotImplementedError as error:  # of another system
        raise UnmakeableError(str(error)) from error


def _decode_random(state: object) -> random.Random:
    result = random.Random()
    result.setstate(expect(tuple, state))
    return result


# --- the table


def made_from(make: Callable[[Any], Any], cls: type) -> Callable[[Any], Any]:
    """Make values of what a codec returned, which must be of exactly this type."""
    return lambda parts: make(expect(cls, parts))


def immutable(cls: type, encode: Any, decode: Any, name: str) -> OwnCodec:
    """The codec of a class whose values never change."""
    return OwnCodec(cls, encode, decode, name, is_mutable=False)


def _by_arguments(cls: type, name: str, **arguments: type) -> OwnCodec:
    """The codec of a class whose values are made of some of their attributes."""

    def encode(value: object) -> object:
        return [getattr(value, argument) for argument in arguments]

    def decode(parts: object) -> object:
        return cls(*fields_of(parts, *arguments.values()))

    return immutable(cls, encode, decode, name)


CODECS = (
    OwnCodec(set, _sort_members, made_from(set, list), "set"),
    OwnCodec(deque, lambda value: [list(value), value.maxlen], _decode_deque, "deque"),
    OwnCodec(
        defaultdict, _encode_defaultdict, _decode_defaultdict, "defaultdict", keeps_states=True
    ),
    OwnCodec(OrderedDict, _encode_ordered, _decode_ordered, "OrderedDict", keeps_states=True),
    OwnCodec(Counter, dict, made_from(Counter, dict), "Counter"),
    OwnCodec(random.Random, random.Random.getstate, _decode_random, "random"),
    OwnCodec(bytearray, bytes, made_from(bytearray, bytes), "bytearray"),
    immutable(frozenset, _sort_members, made_from(frozenset, list), "frozenset"),
    _by_arguments(complex, "complex", real=float, imag=float),
    _by_arguments(range, "range", start=int, stop=int, step=int),
    _by_arguments(dt.timedelta, "timedelta", days=int, seconds=int, microseconds=int),
    immutable(dt.date, dt.date.isoformat, dt.date.fromisoformat, "date"),
    immutable(dt.time, _encode_time, partial(_decode_time, dt.time), "time"),
    immutable(dt.datetime, _encode_time, partial(_decode_time, dt.datetime), "datetime"),
    immutable(
        dt.timezone,
        lambda value: list(value.__getinitargs__()),  # its offset, perhaps a name
        lambda parts: dt.timezone(*expect(list, parts)),
        "timezone",
    ),
    immutable(zoneinfo.ZoneInfo, _encode_zone, _decode_zone, "zone"),
    immutable(Decimal, str, made_from(Decimal, str), "decimal"),
    immutable(uuid.UUID, str, made_from(uuid.UUID, str), "uuid"),
    *(
        immutable(cls, str, partial(_decode_path, cls), cls.__name__)
        for cls in (PurePosixPath, PureWindowsPath, PosixPath, WindowsPath)
    ),
)
"""Each for exactly one type."""
