"""Values of the standard library's types, as nodes and back. Pure: no I/O.

`ENCODERS` hold a function for each exact type; `PLAIN` and `WITH_IDENTITY` one for each kind of
node, whose parameters are the node's fields. An encoder raises `UnsuitableError` if the value cannot
be saved without pickle. The values of `MUTABLE` types are numbered before.
"""

from __future__ import annotations

import array
import datetime as dt
import inspect
import random
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from decimal import Decimal
from fractions import Fraction
from operator import attrgetter
from pathlib import PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import TYPE_CHECKING, Any

import numpy as np

from jobrunner.checkpoint.encoding.codecs import UnsuitableError
from jobrunner.checkpoint.encoding.dtypes import Trail, Tree
from jobrunner.checkpoint.encoding.packing import (
    MANY,
    sort_members,
    sort_numbers,
    sort_texts,
    sort_tuples,
)
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
PATHS = (
    *(PurePosixPath, PureWindowsPath),
    *(PosixPath, WindowsPath),
)


_MOST_BITS = 1 << 17


def check_bits(*numbers: int) -> None:
    """Refuse ints that are so long that a value is made of them only slowly."""
    for number in numbers:
        if type(number) is int and number.bit_length() > _MOST_BITS:
            raise UnsuitableError(f"an int in it has more than {_MOST_BITS} bits")


# --- to nodes


def encode_type(value: type) -> Tree:
    """Encode one of Python's or NumPy's own types."""
    if value not in _TYPE_NAMES:
        raise UnsuitableError("it is a class, and only some of Python's and NumPy's can be saved")
    return {"$": "type", "name": _TYPE_NAMES[value]}


def _set(encoder: Encoder, value: set[Any], trail: Trail) -> Tree:
    return {"$": "set", "items": _members(encoder, value, trail)}


def _frozenset(encoder: Encoder, value: frozenset[Any], trail: Trail) -> Tree:
    return {"$": "frozenset", "items": _members(encoder, value, trail)}


def _members(encoder: Encoder, value: Collection[Any], trail: Trail) -> Tree:
    if len(value) >= MANY:
        found: Any = sort_numbers(list(value), [len(value)])
        found = sort_tuples(value) if found is None else found
        found = sort_texts(value) if found is None else found
        if found is not None and (tree := encoder.columns("tuple", value, {"of": found}, trail)):
            return tree
    members = tuple(sort_members(value))
    return encoder.within("a set", value, members, trail, is_copy=type(value) is set)


def _deque(encoder: Encoder, value: deque[Any], trail: Trail) -> Tree:
    items = encoder.within("a deque", value, tuple(value), trail, is_copy=True)
    return {"$": "deque", "items": items, "maxlen": value.maxlen}


def _defaultdict(encoder: Encoder, value: defaultdict[Any, Any], trail: Trail) -> Tree:
    factory = value.default_factory
    if factory is not None and factory not in _TYPE_NAMES:
        raise UnsuitableError(f"its default_factory is {factory!r:.80}, not one of Python's types")
    name = None if factory is None else _TYPE_NAMES[factory]
    items = _content(encoder, "", value, value, trail)
    return {"$": "defaultdict", "factory": name, "items": items}


def _counter(encoder: Encoder, value: Counter[Any], trail: Trail) -> Tree:
    _refuse_attributes(value)
    return {"$": "Counter", "items": _content(encoder, "a Counter", value, value, trail)}


def _namespace(encoder: Encoder, value: types.SimpleNamespace, trail: Trail) -> Tree:
    items = _content(encoder, "a SimpleNamespace", value, vars(value), trail)
    return {"$": "namespace", "items": items}


def _content(
    encoder: Encoder, holder: str, value: object, items: dict[Any, Any], trail: Trail
) -> Tree:
    if tree := encoder.columns("dict", items, {"keys": items, "of": items.values()}, trail):
        encoder.number(object(), items, trail)  # as a dict of these has one
        return tree
    return encoder.within(holder, value, dict(items), trail, is_copy=True)


def _refuse_attributes(value: object) -> None:
    if vars(value).keys() - {"gauss_next"}:  # part of the state of a random.Random
        raise UnsuitableError("it has attributes of its own")


def _range(encoder: Encoder, value: range | slice, trail: Trail) -> Tree:
    bounds = (value.start, value.stop, value.step)
    kind = type(value).__name__
    return {"$": kind, "bounds": encoder.within(f"a {kind}", value, bounds, trail)}


def _array(encoder: Encoder, value: array.array[Any], trail: Trail) -> Tree:
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
    if same := encoder.number(id(value), value, trail):
        return same
    return {
        "$": "memoryview",
        "array": encoder.encode(data, trail),
        "readonly": value.readonly,
    }


def _leaf(encoder: Encoder, value: Any, trail: Trail) -> Tree:
    kind, fields = LEAVES[type(value)]
    tree = {"$": kind, **{name: get(value) for name, get in fields.items()}}
    if tree.get("zone") is not None:
        tree["zone"] = encoder.encode(tree["zone"], trail)
    return tree


def _iso(value: Any) -> str:
    return (value if value.tzinfo is None else value.replace(tzinfo=None)).isoformat()  # type: ignore[no-any-return]  # text


_TIME: Mapping[str, Callable[[Any], Tree]] = {
    "iso": _iso,
    "fold": attrgetter("fold"),
    "zone": attrgetter("tzinfo"),
}
LEAVES: Mapping[type, tuple[str, Mapping[str, Callable[[Any], Tree]]]] = {
    dt.date: ("date", {"iso": dt.date.isoformat}),
    dt.time: ("time", _TIME),
    dt.datetime: ("datetime", _TIME),
    dt.timedelta: ("timedelta", {"parts": lambda it: [it.days, it.seconds, it.microseconds]}),
    Decimal: ("decimal", {"text": str}),
    uuid.UUID: ("uuid", {"hex": attrgetter("hex"), "safety": attrgetter("is_safe.name")}),
}
"""Types whose values have no parts but perhaps a zone: the kind of their nodes, and the fields."""


def _timezone(encoder: Encoder, value: dt.timezone, trail: Trail) -> Tree:
    offset, *name = value.__getinitargs__()  # type: ignore[attr-defined]
    tree = {"$": "timezone", "offset": encoder.encode(offset, trail)}
    return {**tree, "name": encoder.encode(name[0], trail)} if name else tree


def _zone(encoder: Encoder, value: zoneinfo.ZoneInfo, trail: Trail) -> Tree:
    if value.key is None:
        raise UnsuitableError("it has no key, so it could not be found again")
    return {"$": "zone", "key": value.key}


def _fraction(encoder: Encoder, value: Fraction, trail: Trail) -> Tree:
    check_bits(*value.as_integer_ratio())
    return {"$": "fraction", "ratio": encoder.encode(value.as_integer_ratio(), trail)}


def _path(encoder: Encoder, value: PurePath, trail: Trail) -> Tree:
    return {"$": "path", "cls": type(value).__name__, "text": encoder.encode(str(value), trail)}


def _random(encoder: Encoder, value: random.Random, trail: Trail) -> Tree:
    _refuse_attributes(value)
    return {"$": "random", "state": encoder.encode(value.getstate(), trail)}


ENCODERS: dict[type, Callable[[Encoder, Any, Trail], Tree]] = {
    type(NotImplemented): lambda *_: {"$": "constant", "name": "NotImplemented"},
    type(...): lambda *_: {"$": "constant", "name": "..."},
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
    dt.timezone: _timezone,
    zoneinfo.ZoneInfo: _zone,
    Fraction: _fraction,
    random.Random: _random,
    **dict.fromkeys(PATHS, _path),
    **dict.fromkeys(LEAVES, _leaf),
}
MUTABLE: frozenset[type] = frozenset(
    {set, deque, defaultdict, Counter, types.SimpleNamespace, array.array, random.Random}
)
"""Those whose values have an identity."""


# --- and back


def _made_by(make: Callable[..., Any], **fields: Any) -> Callable[..., Any]:
    """Return the method of a kind whose values `make` makes of the fields of a node.

    `fields` have a type of JSON each; or tuple or dict, for a tree that stands for one.
    """
    trees = [cls if cls in (tuple, dict) else None for cls in fields.values()]

    def method(decoder: Decoder, *values: Any) -> Any:
        pairs = zip(trees, values, strict=True)
        return make(*(it if cls is None else decoder.decode_as(cls, it) for cls, it in pairs))

    method.brief = make if trees == [None] else None  # type: ignore[attr-defined]  # for columns
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    method.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # which `decode` reads
        [
            inspect.Parameter(name, kind, annotation=Tree if cls in (tuple, dict) else cls)
            for name, cls in {"decoder": Any, **fields}.items()
        ]
    )
    return method


def _to_array(decoder: Decoder, typecode: str, items: Tree) -> Any:
    found = array.array(typecode)
    content = decoder.whole(items)
    if isinstance(content, str):
        found.fromunicode(content)
        return found
    if type(content) is not np.ndarray or content.dtype != np.dtype(typecode):
        raise TypeError(f"items of type {typecode!r} have {found.itemsize} bytes here")
    found.frombytes(content.tobytes())
    return found


def _to_memoryview(decoder: Decoder, array: Tree, readonly: bool) -> memoryview:
    content = decoder.array(array)
    if content.dtype.hasobject:
        raise TypeError(f"items of {content.dtype} are addresses")
    found = memoryview(content)  # type: ignore[arg-type]  # arrays are buffers
    return found.toreadonly() if readonly else found


def _to_time(cls: Any) -> Callable[..., Any]:
    def method(decoder: Decoder, iso: str, fold: Count, zone: Tree) -> Any:
        return cls.fromisoformat(iso).replace(fold=fold, tzinfo=decoder.decode(zone))

    method.brief = cls.fromisoformat  # type: ignore[attr-defined]
    return method


def _to_timezone(decoder: Decoder, offset: Tree, name: Tree = None) -> dt.timezone:
    found = decoder.decode_as(dt.timedelta, offset)
    return dt.timezone(found) if name is None else dt.timezone(found, decoder.decode(name))


def _to_zone(decoder: Decoder, key: str) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(key)
    except (zoneinfo.ZoneInfoNotFoundError, OSError) as error:  # a directory of zones
        raise decoder.undecodable(error) from error


def _to_path(decoder: Decoder, cls: str, text: Tree) -> PurePath:
    kinds = {kind.__name__: kind for kind in PATHS}
    try:
        return kinds[cls](decoder.decode_as(str, text))
    except NotImplementedError as error:  # of another system
        raise decoder.undecodable(error) from error


def _make_defaultdict(factory: str | None, items: dict[Any, Any]) -> defaultdict[Any, Any]:
    return defaultdict(None if factory is None else _TYPES[factory], items)


def _make_random(state: tuple[Any, ...]) -> random.Random:
    found = random.Random()
    found.setstate(state)
    return found


def _make_fraction(ratio: tuple[int, int]) -> Fraction:
    check_bits(*ratio)
    return Fraction(*ratio)


PLAIN: Mapping[str, Callable[..., Any]] = {
    "constant": _made_by(_CONSTANTS.__getitem__, name=str),
    "type": _made_by(_TYPES.__getitem__, name=str),
    "frozenset": _made_by(frozenset, items=tuple),
    "range": _made_by(lambda bounds: range(*bounds), bounds=tuple),
    "slice": _made_by(lambda bounds: slice(*bounds), bounds=tuple),
    "date": _made_by(dt.date.fromisoformat, iso=str),
    "time": _to_time(dt.time),
    "datetime": _to_time(dt.datetime),
    "timedelta": _made_by(lambda parts: dt.timedelta(*parts), parts=tuple[int, int, int]),
    "timezone": _to_timezone,
    "zone": _to_zone,
    "decimal": _made_by(Decimal, text=str),
    "fraction": _made_by(_make_fraction, ratio=tuple),
    "uuid": _made_by(
        lambda digits, safety: uuid.UUID(digits, is_safe=uuid.SafeUUID[safety]),
        digits=str,
        safety=str,
    ),
    "path": _to_path,
}

WITH_IDENTITY: Mapping[str, Callable[..., Any]] = {
    "set": _made_by(set, items=tuple),
    "deque": _made_by(deque, items=tuple, maxlen=Count | None),
    "defaultdict": _made_by(_make_defaultdict, factory=str | None, items=dict),
    "Counter": _made_by(Counter, items=dict),
    "namespace": _made_by(lambda items: types.SimpleNamespace(**items), items=dict),
    "array.array": _to_array,
    "memoryview": _to_memoryview,
    "random": _made_by(_make_random, state=tuple),
}
