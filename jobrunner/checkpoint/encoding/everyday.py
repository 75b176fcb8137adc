"""Values of the standard library's types, as nodes and back. Pure: no I/O.

`ENCODERS` hold a function for each exact type; `PLAIN` and `WITH_IDENTITY` one for each kind of
node, whose parameters are the node's fields. An encoder raises `UnsuitableError` first of all, if
the value cannot be saved without pickle.
"""

from __future__ import annotations

import array
import datetime as dt
import random
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import TYPE_CHECKING, Any

import numpy as np

from jobrunner.checkpoint.encoding.codecs import UnsuitableError
from jobrunner.checkpoint.encoding.dtypes import Trail, Tree
from jobrunner.checkpoint.encoding.schema import Count

if TYPE_CHECKING:
    from jobrunner.checkpoint.encoding.decode import Decoder
    from jobrunner.checkpoint.encoding.encode import Encoder
else:
    Decoder = Any


_BUILTINS = (
    *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset, object),
    *(Counter, OrderedDict, defaultdict, deque, Decimal, Fraction),
)
_TYPES: Mapping[str, type] = {
    **{cls.__name__: cls for cls in _BUILTINS},
    **{f"numpy.{cls.__name__}": cls for cls in np.sctypeDict.values()},
}
_TYPE_NAMES = {cls: name for name, cls in _TYPES.items()}
_CONSTANTS: Mapping[str, object] = {"...": ..., "NotImplemented": NotImplemented}
_PATHS = (
    *(PurePosixPath, PureWindowsPath),
    *(PosixPath, WindowsPath),
)


# --- to nodes


def encode_type(value: type) -> Tree:
    """Encode one of Python's or NumPy's own types."""
    if value not in _TYPE_NAMES:
        raise UnsuitableError("it is a class, and only some of Python's and NumPy's can be saved")
    return {"$": "type", "name": _TYPE_NAMES[value]}


def _set(encoder: Encoder, value: set[Any], trail: Trail) -> Tree:
    return encoder.mutable(value) or {"$": "set", "items": _members(encoder, value, trail)}


def _frozenset(encoder: Encoder, value: frozenset[Any], trail: Trail) -> Tree:
    return {"$": "frozenset", "items": _members(encoder, value, trail)}


def _members(encoder: Encoder, value: Collection[Any], trail: Trail) -> Tree:
    rank = repr if set(map(type, value)) == {str} else _rank  # the same order, and much faster
    return encoder.within("a set", value, tuple(sorted(value, key=rank)), trail)


def _rank(item: object) -> tuple[Any, ...]:
    """An order of the members that does not depend on the process."""
    cls = type(item)
    is_number = cls in (int, float) and item == item
    return (not is_number, item if is_number else 0, cls.__qualname__, _text(item))


def _text(item: object) -> str:
    try:
        return repr(sorted(map(_text, item)) if isinstance(item, frozenset) else item)
    except Exception:  # any class of the user's
        return ""


def _deque(encoder: Encoder, value: deque[Any], trail: Trail) -> Tree:
    if same := encoder.mutable(value):
        return same
    items = encoder.within("a deque", value, tuple(value), trail)
    return {"$": "deque", "items": items, "maxlen": value.maxlen}


def _defaultdict(encoder: Encoder, value: defaultdict[Any, Any], trail: Trail) -> Tree:
    factory = value.default_factory
    if factory is not None and factory not in _TYPE_NAMES:
        raise UnsuitableError(f"its default_factory is {factory!r:.80}, not one of Python's types")
    if same := encoder.mutable(value):
        return same
    name = None if factory is None else _TYPE_NAMES[factory]
    return {"$": "defaultdict", "factory": name, "items": _content(encoder, "", value, trail)}


def _counter(encoder: Encoder, value: Counter[Any], trail: Trail) -> Tree:
    _refuse_attributes(value)
    same = encoder.mutable(value)
    return same or {"$": "Counter", "items": _content(encoder, "a Counter", value, trail)}


def _namespace(encoder: Encoder, value: types.SimpleNamespace, trail: Trail) -> Tree:
    if same := encoder.mutable(value):
        return same
    items = encoder.within("a SimpleNamespace", value, dict(vars(value)), trail)
    return {"$": "namespace", "items": items}


def _content(encoder: Encoder, holder: str, value: dict[Any, Any], trail: Trail) -> Tree:
    return encoder.within(holder, value, dict(value), trail)


def _refuse_attributes(value: object) -> None:
    if vars(value).keys() - {"gauss_next"}:  # part of the state of a random.Random
        raise UnsuitableError("it has attributes of its own")


def _range(encoder: Encoder, value: range | slice, trail: Trail) -> Tree:
    bounds = (value.start, value.stop, value.step)
    kind = type(value).__name__
    return {"$": kind, "bounds": encoder.within(f"a {kind}", value, bounds, trail)}


def _array(encoder: Encoder, value: array.array[Any], trail: Trail) -> Tree:
    if same := encoder.mutable(value):
        return same
    is_text = value.typecode in "uw"
    items = value.tounicode() if is_text else np.array(value)  # a copy: tasks may extend it
    return {
        "$": "array.array",
        "typecode": value.typecode,
        "items": encoder.encode(items, trail),
    }


def _memoryview(encoder: Encoder, value: memoryview, trail: Trail) -> Tree:
    try:
        data: Any = np.asarray(value)
        is_own = memoryview(data) == value and memoryview(data).format == value.format
    except (ValueError, NotImplementedError, TypeError):  # released, or of another format
        is_own = False
    if not is_own:
        raise UnsuitableError("NumPy has no array like it; save bytes(...) instead")
    if same := encoder.number(id(value), value):
        return same
    return {
        "$": "memoryview",
        "array": encoder.encode(data, trail),
        "readonly": value.readonly,
    }


def _date(encoder: Encoder, value: dt.date, trail: Trail) -> Tree:
    return {"$": "date", "iso": value.isoformat()}


def _datetime(encoder: Encoder, value: dt.datetime | dt.time, trail: Trail) -> Tree:
    zone = None if value.tzinfo is None else encoder.encode(value.tzinfo, trail)
    kind = type(value).__name__
    return {
        "$": kind,
        "iso": value.replace(tzinfo=None).isoformat(),
        "fold": value.fold,
        "zone": zone,
    }


def _timedelta(encoder: Encoder, value: dt.timedelta, trail: Trail) -> Tree:
    return {"$": "timedelta", "parts": [value.days, value.seconds, value.microseconds]}


def _timezone(encoder: Encoder, value: dt.timezone, trail: Trail) -> Tree:
    offset, *name = value.__getinitargs__()  # type: ignore[attr-defined]
    tree = {"$": "timezone", "offset": encoder.encode(offset, trail)}
    return {**tree, "name": encoder.encode(name[0], trail)} if name else tree


def _zone(encoder: Encoder, value: zoneinfo.ZoneInfo, trail: Trail) -> Tree:
    if value.key is None:
        raise UnsuitableError("it has no key, so it could not be found again")
    return {"$": "zone", "key": value.key}


def _decimal(encoder: Encoder, value: Decimal, trail: Trail) -> Tree:
    return {"$": "decimal", "text": str(value)}


def _fraction(encoder: Encoder, value: Fraction, trail: Trail) -> Tree:
    return {"$": "fraction", "ratio": encoder.encode(value.as_integer_ratio(), trail)}


def _uuid(encoder: Encoder, value: uuid.UUID, trail: Trail) -> Tree:
    return {"$": "uuid", "hex": value.hex, "safety": value.is_safe.name}


def _path(encoder: Encoder, value: PurePath, trail: Trail) -> Tree:
    return {"$": "path", "cls": type(value).__name__, "text": encoder.encode(str(value), trail)}


def _random(encoder: Encoder, value: random.Random, trail: Trail) -> Tree:
    _refuse_attributes(value)
    if same := encoder.mutable(value):
        return same
    return {"$": "random", "state": encoder.encode(value.getstate(), trail)}


ENCODERS: dict[type, Callable[[Encoder, Any, Trail], Tree]] = {
    **{
        type(it): (lambda _, it, trail: {"$": "constant", "name": str(it)})
        for it in (NotImplemented,)
    },
    type(...): lambda _, it, trail: {"$": "constant", "name": "..."},
    type: lambda _, value, trail: encode_type(value),
    set: _set,
    frozenset: _frozenset,
    deque: _deque,
    defaultdict: _defaultdict,
    Counter: _counter,
    types.SimpleNamespace: _namespace,
    range: _range,
    slice: _range,
    array.array: _array,
    memoryview: _memoryview,
    dt.date: _date,
    dt.time: _datetime,
    dt.datetime: _datetime,
    dt.timedelta: _timedelta,
    dt.timezone: _timezone,
    zoneinfo.ZoneInfo: _zone,
    Decimal: _decimal,
    Fraction: _fraction,
    uuid.UUID: _uuid,
    random.Random: _random,
    **dict.fromkeys(_PATHS, _path),
}


# --- and back


def _to_deque(decoder: Decoder, items: Tree, maxlen: Count | None) -> deque[Any]:
    return deque(decoder.decode(items), maxlen)


def _to_defaultdict(decoder: Decoder, factory: str | None, items: Tree) -> defaultdict[Any, Any]:
    found: dict[Any, Any] = decoder.decode_as(dict, items)
    return defaultdict(None if factory is None else _TYPES[factory], found)


def _to_counter(decoder: Decoder, items: Tree) -> Counter[Any]:
    return Counter(decoder.decode_as(dict, items))


def _to_namespace(decoder: Decoder, items: Tree) -> types.SimpleNamespace:
    return types.SimpleNamespace(**decoder.decode_as(dict, items))


def _to_array(decoder: Decoder, typecode: str, items: Tree) -> Any:
    found = array.array(typecode)
    content = decoder.whole(items)
    if isinstance(content, str):
        found.fromunicode(content)
        return found
    if content.itemsize != found.itemsize:
        raise TypeError(f"items of type {typecode!r} have {found.itemsize} bytes here")
    found.frombytes(content.tobytes())
    return found


def _to_memoryview(decoder: Decoder, array: Tree, readonly: bool) -> memoryview:
    found = memoryview(decoder.whole(array))
    return found.toreadonly() if readonly else found


def _to_datetime(decoder: Decoder, iso: str, fold: Count, zone: Tree) -> dt.datetime:
    found = dt.datetime.fromisoformat(iso)
    return found.replace(fold=fold, tzinfo=decoder.decode(zone))


def _to_time(decoder: Decoder, iso: str, fold: Count, zone: Tree) -> dt.time:
    return dt.time.fromisoformat(iso).replace(fold=fold, tzinfo=decoder.decode(zone))


def _to_timezone(decoder: Decoder, offset: Tree, name: Tree = None) -> dt.timezone:
    found = decoder.decode_as(dt.timedelta, offset)
    return dt.timezone(found) if name is None else dt.timezone(found, decoder.decode(name))


def _to_zone(decoder: Decoder, key: str) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(key)
    except zoneinfo.ZoneInfoNotFoundError as error:
        raise decoder.undecodable(error) from error


def _to_uuid(decoder: Decoder, digits: str, safety: str) -> uuid.UUID:
    return uuid.UUID(digits, is_safe=uuid.SafeUUID[safety])


def _to_path(decoder: Decoder, cls: str, text: Tree) -> PurePath:
    kinds = {kind.__name__: kind for kind in _PATHS}
    try:
        return kinds[cls](decoder.decode_as(str, text))
    except NotImplementedError as error:  # of another system
        raise decoder.undecodable(error) from error


def _to_random(decoder: Decoder, state: Tree) -> random.Random:
    found = random.Random()
    found.setstate(decoder.decode_as(tuple, state))
    return found


def _to_range(decoder: Decoder, bounds: Tree) -> range:
    return range(*decoder.decode_as(tuple, bounds))


def _to_slice(decoder: Decoder, bounds: Tree) -> slice:
    return slice(*decoder.decode_as(tuple, bounds))


def _to_timedelta(decoder: Decoder, parts: tuple[int, int, int]) -> dt.timedelta:
    return dt.timedelta(*parts)


def _to_fraction(decoder: Decoder, ratio: Tree) -> Fraction:
    return Fraction(*decoder.decode_as(tuple, ratio))


def _to_constant(decoder: Decoder, name: str) -> object:
    return _CONSTANTS[name]


def _to_type(decoder: Decoder, name: str) -> type:
    return _TYPES[name]


def _to_set(decoder: Decoder, items: Tree) -> set[Any]:
    return set(decoder.decode_as(tuple, items))


def _to_frozenset(decoder: Decoder, items: Tree) -> frozenset[Any]:
    return frozenset(decoder.decode_as(tuple, items))


def _to_date(decoder: Decoder, iso: str) -> dt.date:
    return dt.date.fromisoformat(iso)


def _to_decimal(decoder: Decoder, text: str) -> Decimal:
    return Decimal(text)


PLAIN: Mapping[str, Callable[..., Any]] = {
    "constant": _to_constant,
    "type": _to_type,
    "frozenset": _to_frozenset,
    "range": _to_range,
    "slice": _to_slice,
    "date": _to_date,
    "time": _to_time,
    "datetime": _to_datetime,
    "timedelta": _to_timedelta,
    "timezone": _to_timezone,
    "zone": _to_zone,
    "decimal": _to_decimal,
    "fraction": _to_fraction,
    "uuid": _to_uuid,
    "path": _to_path,
}

WITH_IDENTITY: Mapping[str, Callable[..., Any]] = {
    "set": _to_set,
    "deque": _to_deque,
    "defaultdict": _to_defaultdict,
    "Counter": _to_counter,
    "namespace": _to_namespace,
    "array.array": _to_array,
    "memoryview": _to_memoryview,
    "random": _to_random,
}
