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
    }
)
"""Exact types whose values cannot change."""

SEQUENCES: frozenset[type] = frozenset({list, collections.deque})
MAPPINGS: frozenset[type] = frozenset(
    {dict, collections.OrderedDict, collections.defaultdict, collections.Counter}
)
MUTABLE_LEAVES: frozenset[type] = frozenset({set, bytearray, np.void})

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
    found: dict[int, Any] = field(default_factory=dict)  # by id
    ties: dict[int, int] = field(default_factory=dict)  # how often each is found again
    kinds: set[type] = field(default_factory=set)  # of its items, their items, ...

    def shared(self, held: Callable[[Any], int] = lambda part: 0) -> set[int]:
        """The ids of the parts that something outside of the value can reach.

        References are counted: the caller must have none to a part, but for what `held` returns.
        """
        ties = self.ties
        counted = zip(self.found, map(sys.getrefcount, self.found.values()), strict=True)
        more = [(key, count - _SOLE) for key, count in counted if count > _SOLE]
        shared: set[int] = set()
        for key, extra in more:
            again = ties.get(key, 0)
            if extra > again + held(self.found[key]) * (1 + again):
                shared.add(key)
                shared.update(survey(self.found[key]).found)
        return shared

    def memory(self) -> list[Any]:
        """The arrays and tensors."""
        if not any(issubclass(kind, np.ndarray) or is_tensor_kind(kind) for kind in self.kinds):
            return []
        return [it for it in self.found.values() if isinstance(it, np.ndarray) or is_tensor(it)]

    def known(self) -> Known:
        """Return what is worth remembering."""
        return Known(self.form, len(self.found))


def survey(value: Any) -> Contents:
    """Walk a value."""
    top = type(value)
    if top in MUTABLE_LEAVES:
        return Contents()
    contents = Contents()
    found, kinds = contents.found, contents.kinds
    is_tree = top in _NESTED
    level = [value]
    while level:
        if is_tree:
            keys = list(chain.from_iterable([node for node in level if type(node) is dict]))
            is_tree = _are_short(keys, {*map(type, keys)}, _MARSHALLED - _NESTED)
        children = _children(level)
        here = set(map(type, children))
        kinds |= here
        is_tree = is_tree and _are_short(children, here)
        if here <= IMMUTABLE:
            break
        parts = [child for child in children if items_of(type(child)) is not None]
        del children
        if tuple in here:
            inside = _items_of_tuples(parts)
            inner = set(map(type, inside))
            if inner <= IMMUTABLE:
                is_tree = is_tree and _are_short(inside, inner)
                parts = [part for part in parts if type(part) is not tuple]
            del inside
        new = dict(zip(map(id, parts), parts, strict=True))
        if len(new) < len(parts) or id(value) in new or not found.keys().isdisjoint(new):
            _count_ties(contents, collections.Counter(map(id, parts)), id(value))
            new.pop(id(value), None)
        level = [part for key, part in new.items() if key not in found]
        found.update(new)
    if all(kind in IMMUTABLE or is_tuple(kind) for kind in kinds):
        if is_tuple(top):
            contents.form = Form.CONSTANT
        elif top is np.ndarray:
            contents.form = Form.OTHER
    else:
        contents.form = Form.TREE if is_tree else Form.OTHER
    return contents


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


def _children(level: list[Any]) -> list[Any]:
    kinds = set(map(type, level))
    children: list[Any] = []
    for kind in kinds:
        nodes = level if len(kinds) == 1 else [node for node in level if type(node) is kind]
        items = items_of(kind)
        assert items is not None
        children += chain.from_iterable(map(items, nodes))
    return children


def _items_of_tuples(parts: list[Any]) -> list[Any]:
    tuples = [part for part in parts if type(part) is tuple]
    if sum(map(len, tuples)) > 10 * len(tuples):  # one long tuple may be there many times
        tuples = list(dict(zip(map(id, tuples), tuples, strict=True)).values())
    return list(chain.from_iterable(tuples))


def _are_short(items: list[Any], kinds: set[type], allowed: frozenset[type] = _MARSHALLED) -> bool:
    """Whether `marshal` copies these items, the insides of containers aside, and soon."""
    if not kinds <= allowed:
        return False
    if kinds.isdisjoint(_TEXTS):
        return True
    return max(map(len, [item for item in items if type(item) in _TEXTS])) <= _LONGEST_TEXT


def _count_ties(contents: Contents, counts: dict[int, int], top: int) -> None:
    ties = contents.ties
    for key, count in counts.items():
        again = count if key in contents.found or key == top else count - 1
        if again:
            ties[key] = ties.get(key, 0) + again


_probe = [[0]]
_SOLE = max(map(sys.getrefcount, survey(_probe).found.values()))
"""What `sys.getrefcount` returns in `shared` for a part that only its container refers to."""
