"""What a value contains, and which parts of it something else can reach.

Items of one type are looked at together, not one by one, so that a list of 100,000 tuples takes a
few calls of C functions.
"""

from __future__ import annotations

import collections
import gc
import marshal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import chain, compress, filterfalse, islice, starmap
from operator import not_
from typing import Any, NamedTuple

import numpy as np

from jobrunner.workspace.kinds import (
    ATTRIBUTED,
    IMMUTABLE,
    LEAVES,
    MAPPINGS,
    MARSHALLED,
    ROWS,
    SEQUENCES,
    is_fixed,
    is_immutable,
    is_memory,
    is_tensor_kind,
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
    row: type | None = None  # of all its items, if nothing else is in it: their `copy()` is enough
    numbers: np.ndarray | None = None  # of the object that each item is, if they are few
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
    row: type | None = None
    numbers: np.ndarray | None = None
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

    def tie(self, part: Any, count: int) -> None:
        """Note that an object is found again so many times, if it can change."""
        if count and items_of(type(part)) is not None:
            self.ties[id(part)] = self.ties.get(id(part), 0) + count

    def known(self) -> Known:
        """Return what is worth remembering."""
        return Known(self.form, len(self.parts), self.row, self.numbers)

    def memory(self) -> list[Any]:
        """The arrays and tensors."""
        if not any(map(is_memory, self.kinds)):
            return []
        return [part for part in self.parts if is_memory(type(part))]


def survey(value: Any) -> Contents:
    """Walk a value."""
    contents = Contents()
    found = {id(value)}
    levels: list[set[type]] = []  # of the parts that can change
    level = {(type(value), False): [value]}  # by their type, and whether nothing else has them
    while level:
        inside: dict[type, list[Any]] = {}
        for (kind, is_sole), alike in level.items():
            for items in _held_by(kind, alike, is_sole):
                for some in _without_repeats(items, contents):
                    for each, parts in by_kind(some).items():
                        if each in inside:
                            inside[each] += parts
                        else:
                            inside[each] = parts
                        del parts  # it would count
                    del some
                del items
        contents.kinds.update(inside)
        level = {}
        for kind, alike in inside.items():
            if items_of(kind) is None or (is_fixed(kind) and _is_constant(kind, alike, contents)):
                continue
            if not (is_sole := are_sole(alike, SOLE_PART)):
                alike = _once(contents, alike, found)
            if alike:
                contents.parts += alike
                level[kind, is_sole] = alike
        levels += [{kind for kind, _ in level}] if level else []
    contents.form = _form(value, contents, levels)
    return contents


def _form(value: Any, contents: Contents, levels: list[set[type]]) -> Form:
    """The form of a value; notes what else makes its copies easy."""
    top, parts = type(value), contents.parts
    is_easy = top in MARSHALLED or top in SEQUENCES or top in MAPPINGS
    is_easy = is_easy and not (top in ATTRIBUTED and vars(value))
    if not is_easy or id(value) in contents.ties:  # it may contain itself
        contents.numbers = None
    kinds = set(filterfalse(is_fixed, filterfalse(is_immutable, contents.kinds)))
    if issubclass(top, np.ndarray):
        return Form.OTHER
    if not kinds:
        return Form.CONSTANT if is_fixed(top) else Form.FLAT
    is_row = len(kinds) == 1 and kinds <= ROWS and levels == [kinds] and not contents.ties
    if is_easy and is_row and len(parts) == len(value):
        (contents.row,) = kinds
    if is_easy and contents.kinds <= MARSHALLED and len(value) <= _MOST_ITEMS * len(parts):
        return Form.TREE
    is_plain_too = np.ndarray not in kinds and all(map(is_plain, kinds))
    return Form.PLAIN if is_plain_too else Form.OTHER


_MOST_ITEMS = 50
"""For each container: `marshal` is slow if few containers hold all."""


def _without_repeats(items: Collection[Any], contents: Contents) -> Iterator[Collection[Any]]:
    """List a level's items: those that come again and again, once each, and the others."""
    often = number_often(items)
    if often is None:
        yield items
        return
    if not (contents.kinds or often.rest):  # they are those of the value
        contents.numbers = often.numbers
    for number, part in enumerate(often.objects):
        contents.tie(part, int(np.count_nonzero(often.numbers == number)) - 1)
    yield often.objects
    yield often.rest


def _once(contents: Contents, alike: list[Any], found: set[int]) -> list[Any]:
    """Return those of a level's parts that were not found before, each once; note the others."""
    is_held = list(map(SOLE_PART.__lt__, map(sys.getrefcount, alike)))
    held = list(compress(alike, is_held))
    sole = [] if len(held) == len(alike) else list(compress(alike, map(not_, is_held)))
    once = dict(zip(map(id, held), held, strict=True))
    known = found & once.keys()
    if known or len(once) < len(held):
        for key, count in collections.Counter(map(id, held)).items():
            if again := count - (key not in known):
                contents.ties[key] = contents.ties.get(key, 0) + again
    new = [part for key, part in once.items() if key not in known]
    found.update(once)
    contents.held += new
    return sole + new


class Often(NamedTuple):
    """Items of which some are the same few objects again and again."""

    objects: list[Any]
    numbers: np.ndarray  # of the object that each item is; as many as there are objects: another
    rest: list[Any]  # the other items


def number_often(items: Collection[Any]) -> Often | None:
    """Find what comes again and again from the beginning on; None if nothing that can change does."""
    if len(items) < MANY:
        return None
    first = list(islice(items, MANY))
    kinds = set(filterfalse(is_immutable, set(map(type, first))))
    first = [item for item in first if type(item) in kinds] if kinds else []
    if len({*map(id, first)}) > len(first) - _OFTEN + 1:
        return None  # sooner than to count each
    counts = collections.Counter(map(id, first))
    often = {id(item): item for item in first if counts[id(item)] >= _OFTEN}
    if not often:
        return None
    objects = np.fromiter(items, object, len(items))
    addresses = np.frombuffer(objects, np.intp)
    numbers = np.full(len(items), len(often), np.uint8)
    for number, address in enumerate(often):
        numbers[addresses == address] = number
    return Often(list(often.values()), numbers, objects[numbers == len(often)].tolist())


MANY = 256
"""NumPy takes longer for fewer objects."""
_OFTEN = MANY // 16


def _is_constant(kind: type, alike: list[Any], contents: Contents) -> bool:
    """Whether nothing in tuples or frozensets of one kind can change; notes what is in them."""
    if sum(map(len, alike)) > 10 * len(alike):  # a long one may be there many times
        alike = list(dict(zip(map(id, alike), alike, strict=True)).values())
    if not all(map(is_immutable, map(type, islice(items_in(kind, alike), 8)))):
        return False
    for items in _held_by(kind, alike, True):
        kinds = kinds_of(items)
        contents.kinds |= kinds
        if not all(map(is_immutable, kinds)):
            return False
    return True


def kinds_of(items: Collection[Any]) -> set[type]:
    """The types of items."""
    kinds = set(map(type, islice(items, MANY // 4)))
    others = kinds - {type(None)}
    if len(others) > 1:
        return kinds.union(map(type, items))
    if kinds == {bool} and type(items) is list and _are_bools(items):
        return kinds
    if others == kinds:
        types = list(map(type, items))
    else:
        types = [type(item) for item in items if item is not None]
    is_known = sum(map(types.count, others)) == len(types)  # sooner than a set of all
    return kinds if is_known else kinds.union(types)


def _are_bools(items: list[Any]) -> bool:
    """Whether `marshal`, which is sooner than the type of each, makes the code of a bool of each."""
    with suppress(ValueError):
        slices = (items[i : i + AT_ONCE] for i in range(0, len(items), AT_ONCE))
        return not any(marshal.dumps(it, 2)[5:].translate(None, b"TF") for it in slices)
    return False


def by_kind(items: Collection[Any]) -> dict[type, list[Any]]:
    """Group items by their types; without the items of immutable types."""
    kinds = kinds_of(items)
    groups: dict[type, list[Any]] = {kind: [] for kind in kinds}
    others = set(filterfalse(is_immutable, kinds))
    if len(kinds) == len(others) == 1:
        return {kinds.pop(): list(items)}
    if len(others) == 1:
        (other,) = others
        groups[other] = [item for item in items if type(item) is other]
    elif others:
        for item in items:
            if type(item) in others:
                groups[type(item)].append(item)
    return groups


def _held_by(kind: type, alike: list[Any], is_sole: bool) -> Iterable[Any]:
    """List what is in values of one kind, the keys of dicts too, but not if all are strings."""
    # The garbage collector lists it sooner; but not what is in the `__dict__` of an object, which
    # refers to it.
    if kind in _VISITED and is_sole:
        slices = (alike[i : i + AT_ONCE] for i in range(0, len(alike), AT_ONCE))
        some = alike[:MANY] if kind in (list, tuple) else []
        if sum(map(len, some)) > _LONG * len(some):
            return map(_Joined, slices)
        return starmap(gc.get_referents, slices)
    if kind not in MAPPINGS:
        is_one = len(alike) == 1 and items_of(kind) is iter
        return [alike[0] if is_one else [*items_in(kind, alike)]]
    attributes = [vars(value) for value in alike if vars(value)] if kind in ATTRIBUTED else []
    # As of dicts: an OrderedDict takes five times as long.
    if len(alike) == 1:
        return [dict.values(alike[0]), dict.keys(alike[0]), attributes]
    values, keys = map(dict.values, alike), map(dict.keys, alike)
    return [list(chain.from_iterable(values)), list(chain.from_iterable(keys)), attributes]


AT_ONCE = 4096
"""Containers; a list of what more of them hold would not stay in the processor's cache."""
_VISITED: frozenset[type] = frozenset({dict, list, tuple, set, frozenset})
_LONG = 8


@dataclass(slots=True, frozen=True)
class _Joined:
    """The items of several containers: no list of them is made where types are enough."""

    containers: list[Collection[Any]]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.containers)

    def __len__(self) -> int:
        return sum(map(len, self.containers))


def items_in(kind: type, alike: list[Any]) -> Iterable[Any]:
    """List the items of values of one kind, one after another."""
    items = items_of(kind)
    assert items is not None
    return chain.from_iterable(alike if items is iter else map(items, alike))


def are_sole(parts: list[Any], references: int) -> bool:
    """Whether there are only so many references to each part; see `SOLE_PART`."""
    counts = list(map(sys.getrefcount, parts))
    return counts.count(references) == len(counts) or max(counts) <= references


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


def is_plain(kind: type) -> bool:
    """Whether it is a class of immutable values, of built-in containers, or `numpy.ndarray`."""
    if is_immutable(kind) or kind is np.ndarray:
        return True
    return items_of(kind) is not None and not is_memory(kind)


def is_tensor(value: object) -> bool:
    """Whether it is a PyTorch tensor. Does not import PyTorch."""
    return is_tensor_kind(type(value))


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
