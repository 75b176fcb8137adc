"""What a value contains, and which parts of it something else can reach.

Values are walked level by level, not item by item, so that a list of 100,000 tuples takes a few
calls of C functions.
"""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import fractions
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

IMMUTABLE: frozenset[type] = frozenset(
    {
        *(type(None), type(...), bool, int, float, complex, str, bytes, range),
        *(dt.date, dt.time, dt.datetime, dt.timedelta),
        *(decimal.Decimal, fractions.Fraction, uuid.UUID),
        *(kind for kind in np.sctypeDict.values() if kind not in (np.void, np.object_)),
        type(np.ma.masked),
    }
)
"""Exact types whose values cannot change."""

SEQUENCES: frozenset[type] = frozenset({list, collections.deque})
MAPPINGS: frozenset[type] = frozenset(
    {dict, collections.OrderedDict, collections.defaultdict, collections.Counter}
)
MUTABLE_LEAVES: frozenset[type] = frozenset({set, bytearray, np.void, np.record})

_NESTED: frozenset[type] = frozenset({list, dict, tuple})
_TEXTS: frozenset[type] = frozenset({str, bytes})
_MARSHALLED = _NESTED | _TEXTS | {type(None), bool, int, float, complex}
_LONGEST_TEXT = 256


class Form(Enum):
    """How a value can be copied."""

    CONSTANT = "nothing in it can change"
    FLAT = "only the value itself can change: its `copy()` is enough"
    TREE = "lists, dicts, tuples, numbers and short texts"
    OTHER = "anything else"


@dataclass(slots=True, eq=False)
class Known:
    """What is known of a blob until a task updates or replaces it."""

    form: Form
    size: int  # how many containers and arrays are in it
    home: Any = None  # the dictionary that holds the blob
    id: int = 0  # the blob's
    kept: Any = None  # a copy: see `KeptStates`
    encoded: Any = None  # as it was saved last


@dataclass(slots=True, eq=False)
class Contents:
    """The arrays, tensors and built-in containers within a value, not the value itself."""

    form: Form = Form.FLAT
    parts: list[Any] = field(default_factory=list)  # each once
    kinds: set[type] = field(default_factory=set)  # of its items, their items, ...
    ties: dict[int, int] = field(default_factory=dict)  # how often parts are found again, by id
    is_sole: bool = True  # each part was found once, and nothing else refers to it

    def shared(self, held: Callable[[Any], int] = lambda part: 0) -> set[int]:
        """The ids of the parts that something outside of the value can reach.

        References are counted: the caller must have none to a part, but for what `held` returns.
        """
        shared: set[int] = set()
        if self.is_sole:
            return shared
        # In this order: each part is counted before zip refers to it too.
        counted = zip(map(sys.getrefcount, self.parts), self.parts, strict=True)
        more = [(part, count - SOLE_PART) for count, part in counted if count > SOLE_PART]
        for part, extra in more:
            again = self.ties.get(id(part), 0)
            if extra > again + held(part) * (1 + again):
                shared.add(id(part))
                shared.update(map(id, survey(part).parts))
        return shared

    def memory(self) -> list[Any]:
        """The arrays and tensors."""
        if not any(issubclass(kind, np.ndarray) or is_tensor_kind(kind) for kind in self.kinds):
            return []
        return [it for it in self.parts if isinstance(it, np.ndarray) or is_tensor(it)]

    def known(self) -> Known:
        """Return what is worth remembering."""
        return Known(self.form, len(self.parts))


def survey(value: Any) -> Contents:
    """Walk a value."""
    top = type(value)
    if top in MUTABLE_LEAVES:
        return Contents(
            Form.OTHER if top is set and not IMMUTABLE.issuperset(map(type, value)) else Form.FLAT
        )
    contents = Contents()
    kinds, parts = contents.kinds, contents.parts
    found: set[int] = set()
    is_tree = top in _NESTED
    level, of_level = [value], {top}
    while level:
        if not of_level.isdisjoint(MAPPINGS):
            keys = _keys(level)
            of_keys = set(map(type, keys))
            is_tree = is_tree and _are_short(keys, of_keys, _MARSHALLED - _NESTED)
            if not of_keys <= IMMUTABLE:
                kinds.add(object)
        children = _children(level, of_level)
        of_level = set(map(type, children))
        kinds |= of_level
        is_tree = is_tree and _are_short(children, of_level)
        if of_level <= IMMUTABLE:
            break
        level, of_level = _parts(children, of_level), of_level - IMMUTABLE
        del children
        if tuple in of_level:
            inside = _items_of_tuples(_of_kind(level, tuple, of_level))
            inner = set(map(type, inside))
            if inner <= IMMUTABLE:
                is_tree = is_tree and _are_short(inside, inner)
                of_level.discard(tuple)
                level = [part for part in level if type(part) is not tuple] if of_level else []
            del inside
        if contents.is_sole and max(map(sys.getrefcount, level), default=0) > SOLE_PART:
            contents.is_sole = False
            found.update(map(id, parts), [id(value)])
        if not contents.is_sole:
            new = dict(zip(map(id, level), level, strict=True))
            if len(new) < len(level) or not found.isdisjoint(new):
                for key, count in collections.Counter(map(id, level)).items():
                    if again := count - (key not in found):
                        contents.ties[key] = contents.ties.get(key, 0) + again
            level = [part for key, part in new.items() if key not in found]
            found.update(new)
        parts += level
    if all(kind in IMMUTABLE or is_tuple(kind) for kind in kinds):
        if is_tuple(top):
            contents.form = Form.CONSTANT
        elif top is np.ndarray:
            contents.form = Form.OTHER
    else:
        contents.form = Form.TREE if is_tree else Form.OTHER
    return contents


_FEW = 32
"""So few items are looked at one by one."""


def arrays_in_short(value: Any) -> list[np.ndarray] | None:
    """Return the arrays in a short list, dict or tuple; None if it holds anything else that can change.

    The keys of a dict cannot change either.
    """
    kind = type(value)
    if (kind is not dict and kind is not list and kind is not tuple) or len(value) > _FEW:
        return None
    arrays = []
    if kind is dict:
        for name, item in value.items():
            if type(name) not in IMMUTABLE:
                return None
            if type(item) not in IMMUTABLE:
                if type(item) is not np.ndarray or item.dtype.hasobject:
                    return None
                arrays.append(item)
        return arrays
    for item in value:
        if type(item) not in IMMUTABLE:
            if type(item) is not np.ndarray or item.dtype.hasobject:
                return None
            arrays.append(item)
    return arrays


def is_tuple(kind: type) -> bool:
    """Whether it is `tuple`, or a class of named tuples without other attributes."""
    return kind is tuple or (
        issubclass(kind, tuple) and hasattr(kind, "_fields") and not kind.__dictoffset__
    )


_Items = Callable[[Any], Iterable[Any]]


def _items_of(kind: type) -> _Items | None:
    if kind in IMMUTABLE:
        return None
    if kind in SEQUENCES or is_tuple(kind):
        return iter
    if kind is collections.OrderedDict or kind is collections.Counter:
        return _values_and_attributes
    if kind in MAPPINGS:
        return kind.values  # type: ignore[attr-defined, no-any-return]
    if issubclass(kind, np.ndarray):
        return objects_in
    return (lambda value: ()) if kind in MUTABLE_LEAVES or is_tensor_kind(kind) else None


items_of: Callable[[type], _Items | None] = lru_cache(maxsize=1000)(_items_of)
"""The function that lists the items of a value of that kind; None if it is no array or container."""


def is_tensor(value: object) -> bool:
    """Whether it is a PyTorch tensor. Does not import PyTorch."""
    return is_tensor_kind(type(value))


def is_tensor_kind(kind: type) -> bool:
    """Whether it is the class of PyTorch's tensors or a subclass."""
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(kind, torch.Tensor)


def has_objects(array: Any) -> bool:
    """Whether it is an array whose items are Python objects."""
    if not isinstance(array, np.ndarray):
        return False
    return array.dtype.hasobject and not isinstance(array.dtype, np.dtypes.StringDType)


def fields_with_objects(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yield views of an array's fields whose items are Python objects, or of the whole array."""
    if array.dtype.names is None:
        yield array.view(np.ndarray)
    else:
        for name in array.dtype.names:
            if has_objects(array[name]):
                yield from fields_with_objects(array[name])


def objects_in(array: np.ndarray) -> Iterable[Any]:
    """Return the Python objects in an array."""
    if not has_objects(array):
        return ()
    return chain.from_iterable(part.ravel().tolist() for part in fields_with_objects(array))


def _values_and_attributes(value: Any) -> Iterable[Any]:
    return [*value.values(), vars(value)] if vars(value) else value.values()


def _children(nodes: list[Any], kinds: set[type]) -> list[Any]:
    children: list[Any] = []
    for kind in kinds:
        items = items_of(kind)
        if items is not None:
            alike = _of_kind(nodes, kind, kinds)
            lists: Any = alike if items is iter else map(items, alike)
            children += chain.from_iterable(lists)
    return children


def _of_kind(values: list[Any], kind: type, kinds: set[type]) -> list[Any]:
    """Return the values of one of their kinds."""
    return values if len(kinds) == 1 else [value for value in values if type(value) is kind]


def _parts(children: list[Any], kinds: set[type]) -> list[Any]:
    """Return the containers, arrays and tensors among values of these kinds."""
    wanted = {kind for kind in kinds if items_of(kind) is not None}
    return children if wanted == kinds else [it for it in children if type(it) in wanted]


def _items_of_tuples(tuples: list[Any]) -> list[Any]:
    if sum(map(len, tuples)) > 10 * len(tuples):  # one long tuple may be there many times
        tuples = list(dict(zip(map(id, tuples), tuples, strict=True)).values())
    return list(chain.from_iterable(tuples))


def _keys(nodes: list[Any]) -> list[Any]:
    """Return the keys of dicts, and the items of those that are tuples."""
    keys = list(chain.from_iterable([node for node in nodes if type(node) in MAPPINGS]))
    if tuple in set(map(type, keys)):
        tuples = [key for key in keys if type(key) is tuple]
        keys = _items_of_tuples(tuples) + [key for key in keys if type(key) is not tuple]
    return keys


def _are_short(items: list[Any], kinds: set[type], allowed: frozenset[type] = _MARSHALLED) -> bool:
    """Whether `marshal` copies these items, the insides of containers aside, and soon."""
    if not kinds <= allowed:
        return False
    if kinds.isdisjoint(_TEXTS):
        return True
    texts = items if kinds <= _TEXTS else [item for item in items if type(item) in _TEXTS]
    return max(map(len, texts)) <= _LONGEST_TEXT


_probe = [[0]]
SOLE_PART = (lambda parts: max(map(sys.getrefcount, parts)))([*_probe])
"""What `sys.getrefcount` returns for a part that only its container and one list refer to."""
