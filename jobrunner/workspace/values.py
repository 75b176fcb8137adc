"""The rules by which blobs are values and not references.

A blob is one value. Sharing inside a blob is kept. Between blobs, and between a blob and what a
task was given or returns, nothing that can change is shared:

- `view`: a blob as a task's input. Arrays become read-only views, built-in containers are copied.
- `own`: a blob that a task updates. What something else can reach is copied.
- `adopt`: a return value that becomes a blob; `settle`: the blob that a task has updated. What
  something else can reach is copied.
- `freeze`: a value for other nodes or for a `TaskOutput`. Later changes do not show in it.

Other mutable objects belong to their node: its tasks share them, other nodes get copies.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from jobrunner.workspace.contents import (
    IMMUTABLE,
    SOLE_PART,
    Contents,
    Form,
    Known,
    arrays_in_short,
    has_objects,
    is_tensor,
    items_of,
    survey,
)
from jobrunner.workspace.copies import copy_containers, copy_short, copy_tensor
from jobrunner.workspace.memory_limit import copied
from jobrunner.workspace.pickles import Snapshot, snapshot

# What `sys.getrefcount` returns in this interpreter for a value that only its container refers to,
# and for an array that only one view refers to.
SOLE_ITEM = (lambda box: sys.getrefcount(box[0]))([object()])
_SOLE_BASE = (lambda array: sys.getrefcount(array.base))(np.empty(2)[:1])


def view(value: Any, known: Known | None = None) -> Any:
    """Return a blob as a task's input, so that no mistake of the task changes the blob.

    Arrays become read-only views. Exact built-in containers are copied, with views of their items;
    `known` may be what `settle` returned. A `Snapshot` is opened. Anything else is returned as it is.
    """
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    if kind is np.ndarray and not value.dtype.hasobject:
        value = value.view()
        value.flags.writeable = False
        return value
    if kind is Snapshot:
        return value.open()
    if isinstance(value, np.ndarray) and not has_objects(value):
        return _read_only(value)
    if known is None and (new := copy_short(value, _read_only)) is not None:
        return new
    if items_of(kind) is None or is_tensor(value):
        return value
    return copy_containers(value, known or survey(value).known(), _read_only)


def view_short(value: Any) -> Any:
    """Return the view of a short container, of which nothing needs to be known; None of another."""
    return copy_short(value, _read_only)


def own(holder: Any, key: Any, copy: Callable[[np.ndarray, str], np.ndarray] = copied) -> Any:
    """Return blob ``holder[key]`` for an update; what something else can reach is copied.

    A task may have put an input, which shares the blob's memory, into a container or an object. The
    blob then gets the copy, and the input stays as it was. The caller must have no reference to
    the blob: references are counted.
    """
    why = "that something else refers to and a task updates"
    settle(holder, key, tuple, lambda array: copy(array, why), must_write=True)
    return holder[key]


def adopt(box: list[Any], arguments: Sequence[Any]) -> Any:
    """Return a task's return value, the one item of `box`, as its node's own.

    What something else can reach is copied: an argument of the call, a module's global, a cache.
    The caller must have no other reference to the value: references are counted.
    """
    settle(box, 0, lambda: arguments)
    return box[0]


def _copied_result(array: np.ndarray) -> np.ndarray:
    return copied(array, "that a task returned or stored, and something else can reach")


def is_own(holder: Any, key: Any, must_write: bool = False) -> bool:
    """Whether nothing else can reach ``holder[key]``; False also if that takes more than a glance.

    With `must_write`, arrays must not be read-only. The caller must have no reference to the value.
    """
    references = sys.getrefcount(holder[key])
    value = holder[key]
    kind = type(value)
    if kind in IMMUTABLE:
        return True
    if kind is np.ndarray and not value.dtype.hasobject:
        flags = value.flags
        is_its = references <= SOLE_ITEM and value.base is None and flags.owndata
        return is_its and (flags.writeable or not must_write)
    arrays = arrays_in_short(value) if references <= SOLE_ITEM or kind is tuple else None
    if not arrays:
        return arrays is not None
    if references > SOLE_ITEM or max(map(sys.getrefcount, arrays)) > SOLE_PART:
        return False
    for array in arrays:
        if array.base is not None:
            return False
        flags = array.flags
        if not flags.owndata or (must_write and not flags.writeable):
            return False
    return True


def settle(
    holder: Any,
    key: Any,
    others: Callable[[], Iterable[Any]],
    copy: Callable[[np.ndarray], np.ndarray] = _copied_result,
    *,
    must_write: bool = False,
) -> Known | None:
    """Make ``holder[key]`` a value of its own: copy what `others` or anything else can reach.

    With `must_write`, also copy arrays that are read-only. Return what is known of the value, if it
    is a container and not a short one. The caller must have no reference to it.
    """
    if is_own(holder, key, must_write):
        return None
    references = sys.getrefcount(holder[key])
    value = holder[key]
    kind = type(value)
    is_sole = references <= SOLE_ITEM
    spans: Callable[[], list[_Span]] = lambda: _spans(others())  # noqa: E731
    if isinstance(value, np.ndarray) and not has_objects(value):
        if not _is_own(value, is_sole, spans, must_write):
            holder[key] = copy(value)
        return None
    if is_sole and _settle_short(value, copy, spans, must_write):
        return None
    if items_of(kind) is None:
        return None
    if is_tensor(value):
        if _overlaps(value, spans()):
            holder[key] = copy_tensor(value)
        return None
    contents = survey(value)
    known = contents.known()
    is_sole = references - contents.ties.get(id(value), 0) <= SOLE_ITEM
    if known.form is Form.CONSTANT or (known.form is Form.FLAT and is_sole):
        return known
    if isinstance(value, np.ndarray):
        is_sole = _is_own(value, is_sole, spans, must_write)
    shared = contents.shared() if is_sole else set(map(id, contents.parts))
    foreign = _find_foreign(contents, shared, cache(spans), must_write)
    if not is_sole or shared or foreign:

        def own_memory(part: Any) -> Any:
            if id(part) not in foreign:
                return part
            return copy_tensor(part) if is_tensor(part) else copy(part)

        holder[key] = copy_containers(value, known, own_memory)
    return known


def _settle_short(
    value: Any,
    copy: Callable[[np.ndarray], np.ndarray],
    spans: Callable[[], list[_Span]],
    must_write: bool,
) -> bool:
    """Settle a short container that nothing else refers to; False if it is not that simple."""
    arrays = arrays_in_short(value)
    if arrays is None:
        return False
    counts = list(map(sys.getrefcount, arrays))
    if max(counts, default=0) > SOLE_PART and len(set(map(id, arrays))) < len(arrays):
        return False
    foreign = {
        id(array)
        for array, count in zip(arrays, counts, strict=True)
        if not _is_own(array, count <= SOLE_PART, spans, must_write)
    }
    if foreign and type(value) is tuple:
        return False
    if foreign:
        for name, item in value.items() if type(value) is dict else enumerate(value):
            if id(item) in foreign:
                value[name] = copy(item)
    return True


def _find_foreign(
    contents: Contents, shared: set[int], spans: Callable[[], list[_Span]], must_write: bool
) -> set[int]:
    """The ids of the arrays and tensors whose memory something else can reach; adds to `shared`."""
    parts = contents.memory()
    foreign = set()
    for part in parts:
        # Whoever has its memory can reach its items too.
        if has_objects(part) and not _is_own(part, id(part) not in shared, spans, must_write):
            shared.update(map(id, survey(part).parts))
            foreign.add(id(part))
    for part in parts:
        if is_tensor(part):
            is_foreign = _overlaps(part, spans())
        else:
            is_foreign = not _is_own(part, id(part) not in shared, spans, must_write)
        if is_foreign:
            foreign.add(id(part))
    return foreign


def _is_own(
    array: np.ndarray, is_sole: bool, spans: Callable[[], list[_Span]], must_write: bool
) -> bool:
    if must_write and not array.flags.writeable:
        return False
    if array.base is None or type(array.base) is np.ndarray:
        return has_own_memory(array, is_sole)
    # What else refers to memory of a buffer or of another library is unknown, and a library may
    # reuse it. So it is copied, but not bytes, nor a map, since that could read in a large file.
    base: Any = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap | bytes) and not _overlaps(array, spans())


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
    if kind is np.ndarray and not (value.dtype.hasobject and has_objects(value)):
        if value.nbytes >= least_bytes and has_own_memory(
            value, references - held(value) <= SOLE_ITEM
        ):
            yield value
    elif kind not in IMMUTABLE and items_of(kind) is not None:
        contents = survey(value)
        if references - contents.ties.get(id(value), 0) > SOLE_ITEM:
            return
        if np.ndarray in contents.kinds:
            shared = contents.shared(held)
            for part in contents.parts:
                if type(part) is not np.ndarray or part.nbytes < least_bytes or has_objects(part):
                    continue
                if has_own_memory(part, id(part) not in shared):
                    yield part


def freeze(
    value: Any,
    *,
    copy: bool,
    move: bool = False,
    is_pickled: bool = False,
    known: Known | None = None,
) -> Any:
    """Freeze a value, so that later changes do not show in it. Each reader gets its `view`.

    Returns plain data (immutable values, read-only arrays, containers of these) or a `Snapshot`;
    raises `NotPicklableError` if neither is possible. `copy`: copy arrays, since a task updates
    them later. `move`: one reader on the same node gets the value, so it needs no `Snapshot`.
    `is_pickled`: the caller pickles it at once, so containers need no copy. `known` may be what
    `settle` returned.
    """
    kind = type(value)
    if kind in IMMUTABLE:
        return value
    array = _read_only_copy if copy else _read_only
    if kind is np.ndarray and not (value.dtype.hasobject and has_objects(value)):
        return array(value)
    if known is None and is_pickled and not copy and arrays_in_short(value) is not None:
        return value
    if known is None and (new := copy_short(value, array)) is not None:
        return new
    if kind in _PLAIN:
        if known is None or known.form is Form.OTHER:
            contents = survey(value)
            known = contents.known()
            parts = contents.parts if known.form is Form.OTHER else ()
            is_plain = contents.kinds <= _PLAIN and not any(map(_is_complex, (value, *parts)))
        else:
            is_plain = not _is_complex(value)
        if is_plain and is_pickled and not (copy and known.form is Form.OTHER):
            return value
        if is_plain:
            return copy_containers(value, known, array)
    if move:
        return value
    if is_tensor(value):
        return Snapshot(copy_tensor(value), copy_tensor)
    return snapshot(value)


_PLAIN = IMMUTABLE | {list, tuple, dict, np.ndarray}


def _is_complex(part: Any) -> bool:
    """Whether an array holds objects, or a dict has keys that could."""
    if type(part) is np.ndarray:
        return has_objects(part)
    return type(part) is dict and not IMMUTABLE.issuperset(map(type, part))


def _read_only(array: np.ndarray) -> np.ndarray:
    array = array.view()
    array.flags.writeable = False
    return array


def _read_only_copy(array: np.ndarray) -> np.ndarray:
    array = copied(array, "that others read and a task updates")
    array.flags.writeable = False
    return array


_Span = tuple[int, int]
"""First address of an array's or tensor's memory, and the one after the last."""


def _overlaps(value: Any, spans: list[_Span]) -> bool:
    low, high = _extent(value)
    return any(low < b and a < high for a, b in spans)


def _spans(values: Iterable[Any]) -> list[_Span]:
    spans = []
    for value in values:
        if isinstance(value, np.ndarray) or is_tensor(value):
            spans.append(_extent(value))
        elif items_of(type(value)) is not None:
            spans += map(_extent, survey(value).memory())
    return spans


def _extent(value: Any) -> _Span:
    if isinstance(value, np.ndarray):
        low, high = np.lib.array_utils.byte_bounds(value)
        return int(low), int(high)
    storage = value.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
