"""What a value contains, and which parts of it something else can reach.

Items of one type are looked at together, not one by one, so that a list of 100,000 tuples takes a
few calls of C functions.
"""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import fractions
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import chain, compress, repeat
from operator import is_, not_
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
ATTRIBUTED: frozenset[type] = frozenset({collections.OrderedDict, collections.Counter})
LEAVES: frozenset[type] = frozenset({set, bytearray, np.void, np.record})
"""Types whose `copy()` is enough: what they hold cannot change, or counts as one value."""
MARSHALLED: frozenset[type] = frozenset(
    {list, dict, tuple, set, type(None), bool, int, float, complex, str, bytes}
)


class Form(Enum):
    """What can change in a value."""

    CONSTANT = "nothing"
    FLAT = "only the value itself: its `copy()` is enough"
    TREE = "only lists, dicts, tuples and some sets, of numbers and strings, in any container"
    PLAIN = "only built-in containers"
    OTHER = "arrays, tensors or objects too, or itself an array"


@dataclass(slots=True, eq=False)
class Known:
    """What is known of a blob until a task updates or replaces it."""

    form: Form
    size: int = 0  # how many containers are in it
    home: Any = None  # the dictionary that holds the blob
    id: int = 0  # the blob's
    kept: Any = None  # a copy: see `KeptStates`
    encoded: Any = None  # as it was saved last


@dataclass(slots=True, eq=False)
class Contents:
    """The arrays, tensors and built-in containers within a value, not the value itself.

    Tuples and frozensets of immutable values are left out.
    """

    form: Form = Form.FLAT
    parts: list[Any] = field(default_factory=list)  # each once
    kinds: set[type] = field(default_factory=set)  # of all that is in it
    held: list[Any] = field(default_factory=list)  # parts that more than one place refers to
    ties: dict[int, int] = field(default_factory=dict)  # how often they are found again, by id

    def shared(self, kept: Callable[[Any], int] = lambda part: 0) -> set[int]:
        """The ids of the parts that something outside of the value can reach.

        References are counted: the caller must have none to a part, but for what `kept` returns.
        """
        # In this order: each part is counted before zip refers to it too.
        counted = zip(map(sys.getrefcount, self.held), self.held, strict=True)
        reached = []
        for part, extra in [(part, count - SOLE_PART - 1) for count, part in counted]:
            again = self.ties.get(id(part), 0)
            if extra > again + kept(part) * (1 + again):
                reached.append(part)
        within = survey(reached)
        return set() if within.form is Form.FLAT else set(map(id, within.parts))

    def known(self) -> Known:
        """Return what is worth remembering."""
        return Known(self.form, len(self.parts))

    def memory(self) -> list[Any]:
        """The arrays and tensors."""
        if not any(map(is_memory, self.kinds)):
            return []
        return [part for part in self.parts if is_memory(type(part))]


def survey(value: Any) -> Contents:
    """Walk a value."""
    contents = Contents()
    found = {id(value)}
    num_sets = 0
    level = {type(value): [value]}
    while level:
        inside: dict[type, list[Any]] = {}
        for kind, alike in level.items():
            for each, items in _inside(kind, alike):
                if each in inside:
                    inside[each] += items
                else:
                    inside[each] = items
                del items  # it would count
        contents.kinds.update(inside)
        level = {}
        for kind, alike in inside.items():
            if items_of(kind) is None or (is_fixed(kind) and _is_constant(kind, alike, contents)):
                continue
            if max(map(sys.getrefcount, alike)) > SOLE_PART:
                alike = _once(contents, alike, found)
            contents.parts += alike
            num_sets += len(alike) if kind is set else 0
            level[kind] = alike
    top, kinds = type(value), contents.kinds - IMMUTABLE
    if issubclass(top, np.ndarray):
        contents.form = Form.OTHER
    elif all(map(is_fixed, kinds)):
        if is_fixed(top):
            contents.form = Form.CONSTANT
    elif _is_tree(value, contents.kinds) and 2 * num_sets <= len(contents.parts):
        contents.form = Form.TREE
    elif np.ndarray not in kinds and all(map(is_plain, kinds)):
        contents.form = Form.PLAIN
    else:
        contents.form = Form.OTHER
    return contents


def _is_tree(value: Any, kinds: set[type]) -> bool:
    """Whether `marshal` can copy what is in a container of built-in type."""
    top = type(value)
    is_known = top in MARSHALLED or top in SEQUENCES or top in MAPPINGS
    return is_known and kinds <= MARSHALLED and not (top in ATTRIBUTED and vars(value))


def _once(contents: Contents, alike: list[Any], found: set[int]) -> list[Any]:
    """Return those of a level's parts that were not found before, each once; note the others."""
    is_held = list(map(SOLE_PART.__lt__, map(sys.getrefcount, alike)))
    held = list(compress(alike, is_held))
    sole = [] if len(held) == len(alike) else list(compress(alike, map(not_, is_held)))
    once, numbers = each_once(held)
    known = found & once.keys()
    if known or len(once) < len(held):
        counts: Mapping[int, int]
        if numbers is None:
            counts = collections.Counter(map(id, held))
        else:
            counts = dict(zip(once, np.bincount(numbers).tolist(), strict=True))
        for key, count in counts.items():
            if again := count - (key not in known):
                contents.ties[key] = contents.ties.get(key, 0) + again
    new = [part for key, part in once.items() if key not in known]
    found.update(once)
    contents.held += new
    return sole + new


def each_once(parts: list[Any]) -> tuple[dict[int, Any], np.ndarray | None]:
    """Return the parts by `id`, each once, and if they are few, the number of each place's part."""
    if len(parts) >= MANY and (numbered := number_objects(parts, len(parts), _FEW_OBJECTS)):
        objects, numbers = numbered
        return dict(zip(map(id, objects), objects, strict=True)), numbers
    return dict(zip(map(id, parts), parts, strict=True)), None


MANY = 256
"""NumPy takes longer for fewer objects."""
_FEW_OBJECTS = 16


def number_objects(
    items: Iterable[Any], count: int, most: int
) -> tuple[list[Any], np.ndarray] | None:
    """Return the different objects among items, the first ones first, and the number of each item's.

    None if there are more than `most`, at most 256. Equal objects may be different.
    """
    if count < MANY:
        ids = list(map(id, few := list(items)))
        once = dict(zip(ids, few, strict=True))
        order = dict(zip(once, range(len(once)), strict=True))
        if len(once) > most:
            return None
        return list(once.values()), np.frombuffer(bytes(map(order.__getitem__, ids)), np.uint8)
    objects = np.fromiter(items, object, count)
    addresses = np.frombuffer(objects, np.intp)
    numbers, left = np.zeros(count, np.uint8), np.ones(count, bool)
    found: list[Any] = []
    place = 0
    while left[place]:
        if len(found) == most:
            return None
        is_same = addresses == addresses[place]
        numbers[is_same] = len(found)
        found.append(objects[place])
        left &= ~is_same
        place = int(left.argmax())
    return found, numbers


def _is_constant(kind: type, alike: list[Any], contents: Contents) -> bool:
    """Whether nothing in tuples or frozensets of one kind can change; notes what is in them."""
    if sum(map(len, alike)) > 10 * len(alike):  # a long one may be there many times
        alike = list(dict(zip(map(id, alike), alike, strict=True)).values())
    items = all_items(kind, alike)
    if not IMMUTABLE.issuperset(map(type, items[:8])):
        return False
    kinds = set(map(type, items))
    contents.kinds |= kinds
    return kinds <= IMMUTABLE


def by_kind(items: list[Any]) -> dict[type, list[Any]]:
    """Group items by their types; without the items of immutable types."""
    kinds = set(map(type, items))
    groups: dict[type, list[Any]] = {kind: [] for kind in kinds}
    others = kinds - IMMUTABLE
    if len(kinds) == len(others) == 1:
        return {kinds.pop(): items[:]}
    if len(others) <= _FEW_KINDS:
        for kind in others:
            groups[kind] += compress(items, map(is_, map(type, items), repeat(kind)))
    else:
        for item in items:
            groups[type(item)].append(item)
    return groups


_FEW_KINDS = 3
"""More take longer one after another."""


def _inside(kind: type, alike: list[Any]) -> list[tuple[type, list[Any]]]:
    """Group what is in values of one kind and not immutable, the keys of dicts too."""
    if kind is list and len(alike) == 1:
        return list(by_kind(alike[0]).items())
    if kind not in MAPPINGS:
        return list(by_kind(all_items(kind, alike)).items())
    # As dicts: an OrderedDict takes five times as long.
    both: tuple[Callable[..., Iterable[Any]], ...] = (dict.values, dict.keys)
    lists = [list(chain.from_iterable(map(of, alike))) for of in both]
    lists += [[vars(value) for value in alike if vars(value)]] if kind in ATTRIBUTED else []
    return list(chain.from_iterable(by_kind(items).items() for items in lists))


def all_items(kind: type, alike: list[Any]) -> list[Any]:
    """Return the items of values of one kind, one after another."""
    items = items_of(kind)
    assert items is not None
    return list(chain.from_iterable(alike if items is iter else map(items, alike)))


FEW = 32

SMALL: frozenset[type] = frozenset({dict, list, tuple})


def small_parts(value: Any, parts: list[Any]) -> bool:
    """Add what can change in a small dict, list or tuple to `parts`; False if it is not that simple.

    It may hold arrays, dicts, lists, sets and tuples; each is added as often as it is found. All
    keys and members of sets are immutable.
    """
    kind = type(value)
    if kind not in SMALL or len(value) > FEW or len(parts) > FEW:
        return False
    if kind is dict and not IMMUTABLE.issuperset(map(type, value)):
        return False
    for item in value.values() if kind is dict else value:
        kind = type(item)
        if kind in IMMUTABLE:
            continue
        parts.append(item)
        if kind is np.ndarray:
            if item.dtype.hasobject:
                return False
        elif kind is set:
            if not IMMUTABLE.issuperset(map(type, item)):
                return False
        elif not small_parts(item, parts):
            return False
    return True


def is_fixed(kind: type) -> bool:
    """Whether it is `frozenset`, `tuple`, or a class of named tuples without other attributes."""
    if kind is tuple or kind is frozenset:
        return True
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and not kind.__dictoffset__


_Items = Callable[[Any], Iterable[Any]]


def _items_of(kind: type) -> _Items | None:
    if kind in IMMUTABLE:
        return None
    if kind in SEQUENCES or kind is set or is_fixed(kind):
        return iter
    if kind in MAPPINGS:
        return kind.values  # type: ignore[attr-defined, no-any-return]
    if issubclass(kind, np.ndarray):
        return objects_in
    return (lambda value: ()) if kind in LEAVES or is_tensor_kind(kind) else None


items_of: Callable[[type], _Items | None] = lru_cache(maxsize=1000)(_items_of)
"""The function that lists the items of a value of that kind; None if it is no array or container."""


def is_memory(kind: type) -> bool:
    """Whether it is a class of arrays or tensors."""
    return issubclass(kind, np.ndarray) or is_tensor_kind(kind)


def is_plain(kind: type) -> bool:
    """Whether it is a class of immutable values, of built-in containers, or `numpy.ndarray`."""
    if kind in IMMUTABLE or kind is np.ndarray:
        return True
    return items_of(kind) is not None and not is_memory(kind)


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


_probe = [[0]]
SOLE_PART = (lambda parts: max(map(sys.getrefcount, parts)))([*_probe])
"""What `sys.getrefcount` returns for a part that only its container and one list refer to."""
