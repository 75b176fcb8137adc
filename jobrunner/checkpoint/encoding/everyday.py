"""Codecs of the standard library's types. Pure: no I/O.

`encode` returns plain values and containers, never the value's own: a set becomes a list, a deque its
items. `decode` gets what a stranger may have written, so it checks the types of all that it takes
apart: the items of a range would have no end.
"""

from __future__ import annotations

import array
import datetime as dt
import random
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, TypeVar

import numpy as np

from jobrunner.checkpoint.encoding.codecs import OwnCodec, UnmakeableError, UnsuitableError

T = TypeVar("T")

_MOST_BITS = 1 << 17

_BUILTINS = (
    *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, object),
    *(Counter, OrderedDict, defaultdict, deque, Decimal, Fraction),
)
_BY_NAME: dict[str, Any] = {
    **{cls.__name__: cls for cls in _BUILTINS},
    **{f"numpy.{cls.__name__}": cls for cls in np.sctypeDict.values()},
    "...": ...,
    "NotImplemented": NotImplemented,
}
_NAMES = {value: name for name, value in _BY_NAME.items()}
_PATHS = {cls.__name__: cls for cls in (PurePosixPath, PureWindowsPath, PosixPath, WindowsPath)}


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


def check_bits(*numbers: object) -> None:
    """Refuse ints that are so long that a value is made of them only slowly."""
    for number in numbers:
        if type(number) is int and number.bit_length() > _MOST_BITS:
            raise UnsuitableError(f"an int in it has more than {_MOST_BITS} bits")


# --- sets: two equal ones must be encoded alike, whatever the process's hash seed


def sort_members(members: Collection[Any]) -> list[Any]:
    """Sort the members of a set in an order that does not depend on the process."""
    if set(map(type, members)) in ({str}, {int}):
        return sorted(members)
    return sorted(members, key=lambda item: (type(item).__qualname__, _text_of(item)))


def _text_of(item: object) -> str:
    if isinstance(item, frozenset):
        return repr(sorted(map(_text_of, item)))
    try:
        return repr(item)
    except Exception:  # any class of the user's
        return ""


# --- containers


def _encode_deque(value: deque[Any]) -> object:
    return [list(value), value.maxlen]


def _decode_deque(parts: object) -> deque[Any]:
    items, most = fields_of(parts, list, object)
    return deque(items, most)


def _encode_defaultdict(value: defaultdict[Any, Any]) -> object:
    factory = value.default_factory
    if factory is not None and factory not in _NAMES:
        raise UnsuitableError(f"its default_factory is {factory!r:.80}, not one of Python's types")
    return [factory, dict(value)]


def _decode_defaultdict(parts: object) -> defaultdict[Any, Any]:
    factory, items = fields_of(parts, object, dict)
    if factory is not None and factory not in _NAMES:
        raise TypeError("its default_factory is not one of Python's types")
    return defaultdict(factory, items)


def _encode_ordered(value: OrderedDict[Any, Any]) -> object:
    # Torch keeps the versions of a state_dict in an attribute.
    return [dict(value), dict(vars(value))]


def _decode_ordered(parts: object) -> OrderedDict[Any, Any]:
    items, attributes = fields_of(parts, dict, dict)
    result = OrderedDict(items)
    vars(result).update(attributes)
    return result


def _encode_counter(value: Counter[Any]) -> object:
    _refuse_attributes(value)
    return dict(value)


def _refuse_attributes(value: object) -> None:
    if vars(value).keys() - {"gauss_next"}:  # part of the state of a random.Random
        raise UnsuitableError("it has attributes of its own")


def _encode_array(value: array.array[Any]) -> object:
    if value.typecode in "uw":
        return [value.typecode, value.tounicode()]
    return [value.typecode, np.array(value)]


def _decode_array(parts: object) -> object:
    typecode, content = fields_of(parts, str, object)
    result = array.array(typecode)
    if isinstance(content, str):
        result.fromunicode(content)
        return result
    items = expect(np.ndarray, content)
    if items.dtype != np.dtype(typecode):
        raise TypeError(f"items of type {typecode!r} have {result.itemsize} bytes here")
    result.frombytes(items.tobytes())
    return result


# --- times


def _encode_time(value: Any) -> object:
    plain = value.replace(tzinfo=None).isoformat()
    if value.tzinfo is None and not value.fold:
        return plain
    return [plain, value.fold, value.tzinfo]


def _decode_time(cls: Any, parts: object) -> Any:
    if isinstance(parts, str):
        return cls.fromisoformat(parts)
    text, fold, zone = fields_of(parts, str, int, object)
    return cls.fromisoformat(text).replace(fold=fold, tzinfo=zone)


def _encode_timezone(value: dt.timezone) -> object:
    return list(value.__getinitargs__())  # type: ignore[attr-defined]  # its offset, perhaps a name


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


def _encode_fraction(value: Fraction) -> object:
    check_bits(*value.as_integer_ratio())
    return list(value.as_integer_ratio())


def _decode_fraction(parts: object) -> Fraction:
    ratio = fields_of(parts, int, int)
    check_bits(*ratio)
    return Fraction(*ratio)


def _encode_path(value: PurePath) -> object:
    return [type(value).__name__, str(value)]


def _decode_path(parts: object) -> PurePath:
    cls, text = fields_of(parts, str, str)
    try:
        return _PATHS[cls](text)
    except NotImplementedError as error:  # of another system
        raise UnmakeableError(str(error)) from error


def _encode_random(value: random.Random) -> object:
    _refuse_attributes(value)
    return value.getstate()


def _decode_random(state: object) -> random.Random:
    result = random.Random()
    result.setstate(expect(tuple, state))
    return result


def _encode_builtin(value: Any) -> object:
    if value not in _NAMES:
        raise UnsuitableError("it is a class, and only some of Python's and NumPy's can be saved")
    return _NAMES[value]


# --- the table


def _from(make: Callable[[Any], Any], cls: type) -> Callable[[Any], Any]:
    """Make values of what a codec returned, which must be of exactly this type."""
    return lambda parts: make(expect(cls, parts))


def _immutable(cls: type, encode: Any, decode: Any, name: str) -> OwnCodec:
    return OwnCodec(cls, encode, decode, name, is_mutable=False)


def _by_arguments(cls: type, name: str, **arguments: type) -> OwnCodec:
    """The codec of a class whose values are made of some of their attributes."""

    def encode(value: object) -> object:
        return [getattr(value, argument) for argument in arguments]

    def decode(parts: object) -> object:
        return cls(*fields_of(parts, *arguments.values()))

    return _immutable(cls, encode, decode, name)


CODECS = (
    OwnCodec(set, sort_members, _from(set, list), "set"),
    OwnCodec(deque, _encode_deque, _decode_deque, "deque"),
    OwnCodec(
        defaultdict, _encode_defaultdict, _decode_defaultdict, "defaultdict", keeps_states=True
    ),
    OwnCodec(OrderedDict, _encode_ordered, _decode_ordered, "OrderedDict", keeps_states=True),
    OwnCodec(Counter, _encode_counter, _from(Counter, dict), "Counter"),
    OwnCodec(
        types.SimpleNamespace,
        lambda value: dict(vars(value)),
        lambda parts: types.SimpleNamespace(**expect(dict, parts)),
        "namespace",
    ),
    OwnCodec(array.array, _encode_array, _decode_array, "array.array"),
    OwnCodec(random.Random, _encode_random, _decode_random, "random"),
    OwnCodec(bytearray, bytes, _from(bytearray, bytes), "bytearray"),
    _immutable(frozenset, sort_members, _from(frozenset, list), "frozenset"),
    _by_arguments(complex, "complex", real=float, imag=float),
    _by_arguments(range, "range", start=int, stop=int, step=int),
    _by_arguments(slice, "slice", start=object, stop=object, step=object),
    _by_arguments(dt.timedelta, "timedelta", days=int, seconds=int, microseconds=int),
    _immutable(dt.date, dt.date.isoformat, dt.date.fromisoformat, "date"),
    _immutable(dt.time, _encode_time, partial(_decode_time, dt.time), "time"),
    _immutable(dt.datetime, _encode_time, partial(_decode_time, dt.datetime), "datetime"),
    _immutable(
        dt.timezone, _encode_timezone, lambda parts: dt.timezone(*expect(list, parts)), "timezone"
    ),
    _immutable(zoneinfo.ZoneInfo, _encode_zone, _decode_zone, "zone"),
    _immutable(Decimal, str, _from(Decimal, str), "decimal"),
    _immutable(Fraction, _encode_fraction, _decode_fraction, "fraction"),
    _immutable(uuid.UUID, str, _from(uuid.UUID, str), "uuid"),
    *(_immutable(cls, _encode_path, _decode_path, "path") for cls in _PATHS.values()),
    *(
        _immutable(cls, _encode_builtin, _BY_NAME.__getitem__, "builtin")
        for cls in (type, types.EllipsisType, types.NotImplementedType)
    ),
)
"""Each for exactly one type."""
