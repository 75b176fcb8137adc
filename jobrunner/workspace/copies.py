"""Copies of containers, and of the arrays and tensors in them. Sharing inside a value is kept."""

from __future__ import annotations

import marshal
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from operator import is_
from typing import Any

import numpy as np

from jobrunner.compile import gc_paused
from jobrunner.workspace.contents import (
    IMMUTABLE,
    MAPPINGS,
    MUTABLE_LEAVES,
    Form,
    Known,
    arrays_in_short,
    fields_with_objects,
    has_objects,
    is_tuple,
    items_of,
)


def copy_short(value: Any, memory: Callable[[Any], Any]) -> Any:
    """Copy a short container as `copy_containers` does, but sooner; None if it is not that simple."""
    arrays = arrays_in_short(value)
    if arrays is None:
        return None
    kind = type(value)
    if not arrays:
        return value if kind is tuple else value.copy()
    if len(arrays) > 1 and len(set(map(id, arrays))) < len(arrays):
        return None
    if kind is dict:
        return {
            name: item if type(item) in IMMUTABLE else memory(item) for name, item in value.items()
        }
    items = [item if type(item) in IMMUTABLE else memory(item) for item in value]
    return items if kind is list else tuple(items)


def copy_containers(value: Any, known: Known, memory: Callable[[Any], Any]) -> Any:
    """Copy a value's containers; `memory` returns what its arrays and tensors become."""
    if known.form is Form.CONSTANT:
        return value
    if known.form is Form.FLAT:
        return value.copy()
    if known.size < _PAUSED_SIZE:
        return _copy_nested(value, known.form, memory)
    with gc_paused():
        return _copy_nested(value, known.form, memory)


_PAUSED_SIZE = 1000
"""To make fewer containers, a pause of the garbage collector costs more than it saves."""


def _copy_nested(value: Any, form: Form, memory: Callable[[Any], Any]) -> Any:
    if form is Form.TREE:
        with suppress(ValueError):  # nested too deeply
            return marshal.loads(marshal.dumps(value))
    return rebuild(value, memory, {})


def rebuild(value: Any, memory: Callable[[Any], Any], made: dict[int, Any]) -> Any:
    """Rebuild a value's containers; `made` has the copies by the id of what they copy."""
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if id(value) in made:
        return made[id(value)]
    new: Any
    if kind is np.ndarray and not value.dtype.hasobject:
        new = made[id(value)] = memory(value)
        return new
    if kind is list or kind is dict or kind in MUTABLE_LEAVES:
        new = made[id(value)] = value.copy()
        if kind is list and not IMMUTABLE.issuperset(map(type, value)):
            new[:] = [rebuild(item, memory, made) for item in value]
        elif kind is dict:
            for name, item in value.items():
                if type(item) not in IMMUTABLE:
                    new[name] = rebuild(item, memory, made)
        return new
    if items_of(kind) is None:
        return value
    if is_tuple(kind):
        items = [rebuild(item, memory, made) for item in value]
        if id(value) in made:  # it contains itself
            return made[id(value)]
        is_same = all(map(is_, items, value))
        new = made[id(value)] = value if is_same else tuple.__new__(kind, items)
        return new
    if kind is deque:
        new = made[id(value)] = deque(maxlen=value.maxlen)
        new.extend([rebuild(item, memory, made) for item in value])
        return new
    if kind in MAPPINGS:
        new = defaultdict(value.default_factory) if kind is defaultdict else kind()
        made[id(value)] = new
        if (kind is OrderedDict or kind is Counter) and vars(value):
            vars(new).update(rebuild(vars(value), memory, made))
        fields = {name: rebuild(item, memory, made) for name, item in value.items()}
        dict.update(new, fields) if kind is Counter else new.update(fields)
        return new
    if not isinstance(value, np.ndarray) or not has_objects(value):
        new = made[id(value)] = memory(value)
        return new
    array = value.copy(order="K")
    new = made[id(value)] = memory(array)
    for part in fields_with_objects(array):
        for place in np.ndindex(part.shape):
            part[place] = rebuild(part[place], memory, made)
    return new


def copy_tensor(tensor: Any) -> Any:
    """Copy a tensor or parameter."""
    copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    parameter = sys.modules["torch"].nn.Parameter
    return parameter(copy, tensor.requires_grad) if isinstance(tensor, parameter) else copy
