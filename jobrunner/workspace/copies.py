"""Copies of containers, and of the arrays and tensors in them. Sharing inside a value is kept."""

from __future__ import annotations

import marshal
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice, repeat
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from jobrunner.compile import gc_paused, made_unseen
from jobrunner.workspace.contents import (
    SOLE_PART,
    Form,
    Known,
    Often,
    are_sole,
    by_kind,
    fields_with_objects,
    has_objects,
    items_in,
    items_of,
    number_often,
)
from jobrunner.workspace.kinds import (
    ATTRIBUTED,
    IMMUTABLE,
    LEAVES,
    MAPPINGS,
    MARSHALLED,
    SEQUENCES,
    is_fixed,
    is_memory,
)

Memory = Callable[[Any], Any]
"""Returns what an array or a tensor becomes; gets a copy of an array of objects."""


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


class _NotSmallError(Exception):
    pass


def copy_small(value: Any, memory: Memory) -> Any:
    """Copy a small container as `copy_containers` does, but sooner; None if it is not that simple."""
    if type(value) not in SMALL or len(value) > FEW:
        return None
    try:
        return _copy_small(value, memory, {})
    except _NotSmallError:
        return None


def _copy_small(value: Any, memory: Memory, made: dict[int, Any]) -> Any:
    if (key := id(value)) in made:
        return made[key]
    kind = type(value)
    new: Any
    if kind is np.ndarray and not value.dtype.hasobject:
        new = made[key] = memory(value)
    elif kind is set:
        new = made[key] = value.copy()
    elif kind not in SMALL or len(value) > FEW or len(made) > FEW:
        raise _NotSmallError
    elif kind is dict:
        new = made[key] = {}
        for name, item in value.items():
            new[name] = item if type(item) in IMMUTABLE else _copy_small(item, memory, made)
    else:
        new = []
        if kind is list:
            made[key] = new
        for item in value:
            new.append(item if type(item) in IMMUTABLE else _copy_small(item, memory, made))
        if kind is tuple:  # which may be in itself
            new = made.setdefault(key, value if all(map(is_, new, value)) else tuple(new))
    return new


def copy_containers(value: Any, memory: Memory, known: Known | None = None) -> Any:
    """Copy a value's containers; `memory` returns what its arrays and tensors become."""
    if known is not None and known.form is Form.CONSTANT:
        return value
    if known is not None and known.form is Form.FLAT:
        return value.copy()
    if known is not None and (known.row is not None or known.numbers is not None):
        items: Any = items_of(type(value))(value)  # type: ignore[misc]  # it is a container
        if (numbers := known.numbers) is None:
            items = made_unseen(partial(list, map(known.row.copy, items)), known.size)  # type: ignore[union-attr]
        else:
            items = value if type(value) is list else list(items)
            places = (np.argmax(numbers == i) for i in range(int(numbers.max()) + 1))
            few = Often([items[place] for place in places], numbers, [])
            with gc_paused():  # they may be large
                items = _spread(items, few, memory, {}, False)
        is_new = type(value) is list and items is not value
        return items if is_new else _filled(type(value), [value], items, [])[0]
    if known is not None and known.form is Form.TREE and (packed := pack(value, known)):
        return packed.open()
    with gc_paused():
        return _copied([value], memory, {}, False)[0]


class Packed(NamedTuple):
    """A container as bytes."""

    data: bytes
    size: int  # how many containers are in it
    empty: Any  # a container of its type, if `data` has only the items; else None
    keys: Collection[Any] | None

    def open(self) -> Any:
        """Return the container."""
        found = made_unseen(partial(marshal.loads, self.data), self.size)
        if self.empty is None:
            return found
        kind = type(self.empty)
        return _filled(kind, [self.keys], found, [_EMPTY[kind](self.empty)])[0]


def pack(value: Any, known: Known) -> Packed | None:
    """Pack a container whose form is TREE; None, with its form set to PLAIN, if a copy is better."""
    is_whole = type(value) in MARSHALLED
    is_mapping = type(value) in MAPPINGS
    items = value if is_whole else list(value.values() if is_mapping else value)
    with suppress(ValueError):  # nested too deeply
        data = marshal.dumps(items)
        if len(data) <= _MARSHALLED_BYTES * known.size:
            if is_whole:
                return Packed(data, known.size, None, None)
            keys = list(value) if is_mapping else range(len(value))
            return Packed(data, known.size, _EMPTY[type(value)](value), keys)
    known.form = Form.PLAIN
    return None


_MARSHALLED_BYTES = 256
"""For each container: `marshal` also copies strings, and is slow if few containers hold all."""


def _copied(items: list[Any], memory: Memory, made: dict[int, Any], is_tied: bool) -> list[Any]:
    """Copy many values, those of one type together; returns `items` if nothing in them can change.

    `made` has the copies of what more than one place refers to, and with `is_tied` of all.
    """
    if (often := number_often(items)) and not often.rest:
        return _spread(items, often, memory, made, is_tied)
    groups = by_kind(items)
    copies: dict[type, list[Any]] = {}
    for kind, alike in groups.items():
        if items_of(kind) is None or kind is frozenset:
            continue
        every, new = alike, []
        is_held = is_tied or not are_sole(alike, SOLE_PART + 1)
        if is_held and (often := number_often(alike)) and not often.rest:
            copies[kind] = _spread(alike, often, memory, made, is_tied)
            continue
        if is_held:
            once = dict(zip(map(id, alike), alike, strict=True))
            alike = [part for key, part in once.items() if key not in made]
        if kind in LEAVES:
            new = list(map(kind.copy, alike))  # type: ignore[attr-defined]
        elif is_memory(kind):
            new = [_copy_array(part, memory, made) for part in alike]
        else:
            if is_held and not is_fixed(kind):  # it may contain itself
                new = list(map(_EMPTY[kind], alike))
                made.update(zip(map(id, alike), new, strict=True))
            inner = list(items_in(kind, alike))
            within = _copied(inner, memory, made, is_tied or (is_held and is_fixed(kind)))
            if within is not inner or new:
                new = _filled(kind, alike, within, new)
            else:
                new = alike if is_fixed(kind) else list(map(kind.copy, alike))  # type: ignore[attr-defined]
            if kind in ATTRIBUTED:
                for old, one in zip(alike, new, strict=True):
                    if vars(old):
                        vars(one).update(_copied([vars(old)], memory, made, is_tied)[0])
        if is_held:
            for part, one in zip(alike, new, strict=True):
                made.setdefault(id(part), one)
            new = list(map(made.__getitem__, map(id, every)))
        if new is not every:
            copies[kind] = new
    if not copies:
        return items
    if len(groups) == 1:
        return next(iter(copies.values()))
    take = {kind: iter(copied).__next__ for kind, copied in copies.items()}
    return [take[kind]() if (kind := type(item)) in take else item for item in items]


def _spread(
    items: list[Any], often: Often, memory: Memory, made: dict[int, Any], is_tied: bool
) -> list[Any]:
    """Copy a few objects that `items` are again and again."""
    new = _copied(often.objects, memory, made, is_tied)
    if new is often.objects:
        return items
    return new * len(items) if len(new) == 1 else np.fromiter(new, object)[often.numbers].tolist()


def _filled(kind: type, olds: list[Any], items: Iterable[Any], new: list[Any]) -> list[Any]:
    """Put the copied items of containers of one kind into `new` ones."""
    parts: Iterable[Iterable[Any]] = [items]
    if len(olds) > 1:
        parts = map(islice, repeat(iter(items)), map(len, olds))
    if kind is tuple:
        return list(map(tuple, parts))
    if is_fixed(kind):
        return list(map(tuple.__new__, repeat(kind), parts))
    new = new or list(map(_EMPTY[kind], olds))
    if kind in SEQUENCES:
        deque(map(kind.extend, new, parts), maxlen=0)  # type: ignore[attr-defined]
    else:
        update = OrderedDict.update if kind is OrderedDict else dict.update
        deque(map(update, new, map(zip, olds, parts)), maxlen=0)
    return new


_EMPTY: Mapping[type, Callable[[Any], Any]] = {
    list: lambda old: [],
    dict: lambda old: {},
    deque: lambda old: deque(maxlen=old.maxlen),
    defaultdict: lambda old: defaultdict(old.default_factory),
    OrderedDict: lambda old: OrderedDict(),
    Counter: lambda old: Counter(),
}


def _copy_array(array: Any, memory: Memory, made: dict[int, Any]) -> Any:
    if not has_objects(array):
        return memory(array)
    if id(array) in made:  # it was in another one
        return made[id(array)]
    copy = array.copy(order="K")
    new = made[id(array)] = memory(copy)
    for part in fields_with_objects(copy):
        items = part.ravel().tolist()
        within = _copied(items, memory, made, is_tied=True)
        for place, item in zip(np.ndindex(part.shape), within, strict=True):
            part[place] = item
    return new


def copy_tensor(tensor: Any) -> Any:
    """Copy a tensor or parameter."""
    torch, plain = sys.modules["torch"], tensor.detach()
    try:
        copy = plain.clone()
    except NotImplementedError:  # of a dtype such as uint4, whose bytes can be copied
        copy = plain.view(torch.uint8).clone().view(plain.dtype)
    copy.requires_grad_(tensor.requires_grad)
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    return torch.nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy
