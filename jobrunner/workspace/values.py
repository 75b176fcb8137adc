"""The rules by which blobs are values and not references.

- `view`: a blob as a task's input. Arrays become read-only views, built-in containers are rebuilt.
- `own`: a blob that a task updates. Memory that something else refers to is copied.
- `adopt`: a return value that becomes a blob. Memory that something else can reach is copied.
- `freeze`: a value for other nodes or for a `TaskOutput`. Later changes do not show in it.

Other mutable objects belong to their node: its tasks share them, other nodes get copies.
"""

from __future__ import annotations

import datetime as dt
import decimal
import fractions
import mmap
import pickle
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np

from jobrunner.workspace.memory_limit import copied

IMMUTABLE: frozenset[type] = frozenset(
    {
        *(type(None), type(...), bool, int, float, complex, str, bytes, range),
        *(dt.date, dt.time, dt.datetime, dt.timedelta),
        *(decimal.Decimal, fractions.Fraction, uuid.UUID),
        *(kind for kind in np.sctypeDict.values() if kind not in (np.void, np.object_)),
    }
)
"""Exact types whose values cannot change."""

# What `sys.getrefcount` returns in this interpreter for a value that only its container refers to,
# and for an array that only one view refers to.
SOLE_ITEM = (lambda box: sys.getrefcount(box[0]))([object()])
_SOLE_BASE = (lambda array: sys.getrefcount(array.base))(np.empty(2)[:1])


def view(value: Any) -> Any:
    """Return a blob as a task's input, so that no mistake of the task changes the blob.

    Arrays become read-only views. Exact lists, dicts, sets, tuples and bytearrays are rebuilt with
    views of their items. A `Snapshot` is opened. Anything else is returned as it is.
    """
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if isinstance(value, np.ndarray):
        value = value.view()
        value.setflags(write=False)
        return value
    if kind is list:
        return [item if type(item) in IMMUTABLE else view(item) for item in value]
    if kind is dict:
        return {key: item if type(item) in IMMUTABLE else view(item) for key, item in value.items()}
    if kind is tuple:
        return _same_if_unchanged(value, tuple(view(item) for item in value))
    if kind is set or kind is bytearray or kind is np.void:
        return value.copy()
    return value.open() if isinstance(value, Snapshot) else value


def own(holder: Any, key: Any, copy: Callable[[np.ndarray, str], np.ndarray] = copied) -> Any:
    """Return blob ``holder[key]`` for an update; arrays that something else refers to are copied.

    A task may have put an input, which shares the blob's memory, into a container or an object. The
    blob then gets the copy, and the input stays as it was. The caller must have no reference to
    the blob: references are counted.
    """
    is_sole = sys.getrefcount(holder[key]) <= SOLE_ITEM
    value = holder[key]
    kind = type(value)
    if issubclass(kind, np.ndarray):
        if not _is_own(value, is_sole, ()):
            value = holder[key] = copy(value, "that something else refers to and a task updates")
    elif kind is dict or kind is list:
        if not IMMUTABLE.issuperset(map(type, value.values() if kind is dict else value)):
            for name in value if kind is dict else range(len(value)):
                own(value, name, copy)
    elif kind is tuple and not IMMUTABLE.issuperset(map(type, value)):
        items = list(value)
        del value  # it would count for each item
        holder[key] = None
        for i in range(len(items)):
            own(items, i, copy)
        holder[key] = value = tuple(items)
    return value


def adopt(box: list[Any], arguments: Iterable[Any]) -> Any:
    """Return a task's return value, the one item of `box`, as its node's own.

    Arrays are copied if something else can reach their memory: an argument of the call, a module's
    global, a cache, another part of the value. The caller must have no other reference to the
    value: references are counted.
    """
    if type(box[0]) in IMMUTABLE:
        return box[0]
    return _adopt(box, 0, True, arguments)


def _adopt(holder: Any, key: Any, is_sole: bool, arguments: Iterable[Any]) -> Any:
    is_sole = is_sole and sys.getrefcount(holder[key]) <= SOLE_ITEM
    value = holder[key]
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if isinstance(value, np.ndarray):
        if _is_own(value, is_sole, arguments):
            return value
        return copied(value, "that a task returned and something else can reach")
    if kind is list or kind is tuple:
        items = [_adopt(value, i, is_sole, arguments) for i in range(len(value))]
        adopted = items if kind is list else tuple(items)
        return _same_if_unchanged(value, adopted) if is_sole or kind is tuple else adopted
    if kind is dict:
        fields = {name: _adopt(value, name, is_sole, arguments) for name in value}
        return _same_if_unchanged(value, fields) if is_sole else fields
    if kind is set or kind is bytearray:
        return value if is_sole else value.copy()
    if kind is np.void:
        return value.copy()
    return copy_tensor(value) if is_tensor(value) and _overlaps(value, arguments) else value


def _is_own(array: np.ndarray, is_sole: bool, arguments: Iterable[Any]) -> bool:
    if array.base is None or type(array.base) is np.ndarray:
        return has_own_memory(array, is_sole)
    # What else refers to memory of a buffer or of another library is unknown, and a library may
    # reuse it. So it is copied, but not bytes, nor a map, since that could read in a large file.
    base: Any = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap | bytes) and not _overlaps(array, arguments)


def has_own_memory(array: np.ndarray, is_sole: bool) -> bool:
    """Whether nothing else can reach an array's memory; `is_sole`: nothing refers to the array."""
    base = array.base
    if base is None:
        return is_sole and array.flags.owndata
    if type(base) is not np.ndarray:
        return False
    del base  # it would count
    return is_sole and sys.getrefcount(array.base) <= _SOLE_BASE and array.base.flags.owndata  # type: ignore[union-attr]


def sole_arrays(
    holder: Any, key: Any, least_bytes: int, held: Callable[[np.ndarray], int] = lambda array: 0
) -> Iterator[np.ndarray]:
    """Yield the arrays in blob ``holder[key]`` that nothing else can reach.

    A new reference to one of them keeps it as it is now, since `own` then copies it before an
    update. The caller must have no reference to the blob: references are counted, except as many
    as `held` returns for an array.
    """
    references = sys.getrefcount(holder[key])
    value = holder[key]
    kind = type(value)
    if kind is np.ndarray:
        if value.nbytes >= least_bytes:
            is_sole = references - held(value) <= SOLE_ITEM
            if has_own_memory(value, is_sole):
                yield value
    elif kind in (dict, list, tuple) and references <= SOLE_ITEM:
        items = value.values() if kind is dict else value
        if not IMMUTABLE.issuperset(map(type, items)):
            for name in value if kind is dict else range(len(value)):
                yield from sole_arrays(value, name, least_bytes, held)


def freeze(value: Any, *, copy: bool, move: bool = False) -> Any:
    """Freeze a value, so that later changes do not show in it. Each reader gets its `view`.

    Returns plain data (immutable values, read-only arrays, containers of these) or a `Snapshot`;
    raises `NotPicklableError` if neither is possible. `copy`: copy arrays, since a task updates
    them later. `move`: one reader on the same node gets the value, so it needs no `Snapshot`.
    """
    with suppress(_NotPlainError):
        return _freeze_plain(value, copy)
    if move:
        return value
    if is_tensor(value):
        return Snapshot(copy_tensor(value), copy_tensor)
    return Snapshot(_pickle(value), pickle.loads)


class NotPicklableError(TypeError):
    """A value that cannot leave its node, since it cannot be pickled."""


class _NotPlainError(Exception):
    """The value is not made of immutable values, arrays and exact containers alone."""


def _freeze_plain(value: Any, copy: bool) -> Any:
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if kind is np.ndarray and not value.dtype.hasobject:
        array = copied(value, "that others read and a task updates") if copy else value.view()
        array.flags.writeable = False
        return array
    if kind is list:
        return [_freeze_plain(item, copy) for item in value]
    if kind is tuple:
        return tuple(_freeze_plain(item, copy) for item in value)
    if kind is dict and all(type(key) in IMMUTABLE for key in value):
        return {key: _freeze_plain(item, copy) for key, item in value.items()}
    raise _NotPlainError


@dataclass(eq=False, slots=True)
class Snapshot:
    """A frozen value of which every reader gets a copy."""

    data: Any
    restore: Callable[[Any], Any]

    def open(self) -> Any:
        """Return a copy of the value."""
        return self.restore(self.data)


def to_frames(value: Any) -> list[Any]:
    """Pickle a value for `from_frames`, with large buffers apart.

    The buffers are not copied: the value must not change until they are sent.
    """
    buffers: list[pickle.PickleBuffer] = []
    try:
        head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    except Exception:  # definitions of a script or a notebook are pickled by value
        buffers.clear()
        head = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return [head, *(buffer.raw() for buffer in buffers)]


def from_frames(frames: Sequence[Any]) -> Any:
    """Unpickle a value; its arrays use the memory of `frames`."""
    return pickle.loads(frames[0], buffers=frames[1:])


def open_frames(frames: Sequence[Any]) -> Any:
    """Unpickle a received value for one of its readers; all use the same memory."""
    return view(from_frames(frames))


def is_tensor(value: object) -> bool:
    """Whether it is a PyTorch tensor. Does not import PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _pickle(value: Any) -> bytes:
    with suppress(Exception):
        return pickle.dumps(value, protocol=5)
    try:  # definitions of a script or a notebook are pickled by value
        return bytes(cloudpickle.dumps(value, protocol=5))
    except Exception as error:
        raise NotPicklableError(
            f"A value of type {type(value).__qualname__} cannot be pickled, so it cannot be "
            f"copied for another node or a TaskOutput ({type(error).__name__}: {error}). Store "
            f"it in a blob, and read that by name in tasks of its own node."
        ) from None


def _same_if_unchanged(old: Any, new: Any) -> Any:
    """Return `old` if `new` has the same items, so that the new container is freed."""
    before, after = (old.values(), new.values()) if type(old) is dict else (old, new)
    return old if all(a is b for a, b in zip(before, after, strict=True)) else new


def copy_tensor(tensor: Any) -> Any:
    """Copy a tensor or parameter."""
    copy = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    parameter = sys.modules["torch"].nn.Parameter
    return parameter(copy, tensor.requires_grad) if isinstance(tensor, parameter) else copy


def _overlaps(value: Any, others: Iterable[Any]) -> bool:
    low, high = _extent(value)
    return any(low < b and a < high for other in others for a, b in _extents(other))


def _extents(value: Any) -> Iterable[tuple[int, int]]:
    if isinstance(value, np.ndarray) or is_tensor(value):
        yield _extent(value)
    elif type(value) in (list, tuple, dict):
        for item in value.values() if type(value) is dict else value:
            yield from _extents(item)


def _extent(value: Any) -> tuple[int, int]:
    """First address of an array's or tensor's memory, and the one after the last."""
    if isinstance(value, np.ndarray):
        low, high = np.lib.array_utils.byte_bounds(value)
        return int(low), int(high)
    storage = value.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
