"""The rules by which blobs are values and not references.

A blob is one value. Sharing inside a blob is kept. Between blobs, and between a blob and what a
task was given or returns, nothing that can change is shared:

- `view`: a blob as a task's input. Arrays become read-only views, built-in containers are copied.
- `own`: a blob that a task updates. What something else can reach is copied.
- `settle`: a return value that becomes a blob, or a blob that a task has updated. What something
  else can reach is copied.
- `freeze`: a value for other nodes or for a `TaskOutput`. Later changes do not show in it.

Other mutable objects belong to their node: its tasks share them, other nodes get copies.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

from jobrunner.workspace.contents import (
    Contents,
    Form,
    Known,
    has_objects,
    is_plain,
    is_tensor,
    items_of,
    survey,
)
from jobrunner.workspace.copies import (
    FEW,
    SMALL,
    copy_containers,
    copy_small,
    copy_tensor,
    small_parts,
)
from jobrunner.workspace.kinds import IMMUTABLE
from jobrunner.workspace.memory_limit import copied
from jobrunner.workspace.pickles import Snapshot, snapshot

# What `sys.getrefcount` returns in this interpreter for a value that only its container refers to,
# and for an array that only one view refers to.
SOLE_ITEM = (lambda box: sys.getrefcount(box[0]))([object()])
_SOLE_LOOPED = next(sys.getrefcount(item) for item in [object()])
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
    if items_of(kind) is None or is_tensor(value):
        return value
    if known is None and (new := copy_small(value, _read_only)) is not None:
        return new
    return copy_containers(value, _read_only, known)


def view_small(value: Any) -> Any:
    """Return the view of a small container, of which nothing needs to be known; None of another."""
    return copy_small(value, _read_only)


def own(holder: Any, key: Any, copy: Callable[[np.ndarray, str], np.ndarray] = copied) -> Any:
    """Return blob ``holder[key]`` for an update; what something else can reach is copied.

    A task may have put an input, which shares the blob's memory, into a container or an object. The
    blob then gets the copy, and the input stays as it was. The caller must have no reference to
    the blob: references are counted.
    """
    why = "that something else refers to and a task updates"
    settle(holder, key, tuple, lambda array: copy(array, why), must_write=True)
    return holder[key]


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
    is_sole = references <= SOLE_ITEM
    if kind is np.ndarray:
        has_memory = not value.dtype.hasobject and has_own_memory(value, is_sole)
        return has_memory and (not must_write or value.flags.writeable)
    if kind not in SMALL or not (is_sole or _is_constant(value)):
        return False
    return _are_own(value.values() if kind is dict else value, must_write)


def _are_own(items: Collection[Any], must_write: bool) -> bool:
    """Whether nothing else can reach the few items of a container, nor what is in them."""
    if len(items) > FEW:
        return False
    for item in items:
        kind = type(item)
        if kind in IMMUTABLE:
            continue
        is_sole = sys.getrefcount(item) <= _SOLE_LOOPED
        if kind is np.ndarray:
            if item.dtype.hasobject or not has_own_memory(item, is_sole):
                return False
            if must_write and not item.flags.writeable:
                return False
        elif kind is dict:
            if not is_sole or not _are_own(item.values(), must_write):
                return False
        elif kind is list or kind is tuple:
            if not (is_sole or _is_constant(item)) or not _are_own(item, must_write):
                return False
        elif kind is not set or not is_sole:
            return False
    return True


def _is_constant(value: Any) -> bool:
    return type(value) is tuple and IMMUTABLE.issuperset(map(type, value))


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
    is a container. The caller must have no reference to it; `is_own` may save it the call.
    """
    references = sys.getrefcount(holder[key])
    value = holder[key]
    kind = type(value)
    is_sole = references <= SOLE_ITEM
    spans: Callable[[], list[_Span]] = cache(lambda: _spans(others()))
    if items_of(kind) is None:
        return None
    if is_tensor(value):
        if _overlaps(value, spans()):
            holder[key] = copy_tensor(value)
        return None
    if isinstance(value, np.ndarray) and not has_objects(value):
        if not _is_own(value, is_sole, spans, must_write):
            holder[key] = copy(value)
        return None
    contents = survey(value)
    known = contents.known()
    is_sole = references - contents.ties.get(id(value), 0) <= SOLE_ITEM
    if contents.form is Form.CONSTANT:
        return known
    if isinstance(value, np.ndarray):
        is_sole = _is_own(value, is_sole, spans, must_write)
    shared = contents.shared() if is_sole else set(map(id, contents.memory()))
    foreign = _find_foreign(contents, shared, spans, must_write)
    del contents  # each part would seem to be in two places
    if not is_sole or shared or foreign or _is_borrowed(value):

        def own_memory(part: Any) -> Any:
            if id(part) not in foreign:
                return part
            return copy_tensor(part) if is_tensor(part) else copy(part)

        holder[key] = copy_containers(value, own_memory, known)
    return known


def _is_borrowed(part: Any) -> bool:
    """Whether it is an item of a structured array, in the array's memory."""
    return isinstance(part, np.void) and part.base is not None and not has_own_memory(part, True)


def _find_foreign(
    contents: Contents, shared: set[int], spans: Callable[[], list[_Span]], must_write: bool
) -> set[int]:
    """The ids of the arrays and tensors whose memory something else can reach; adds to `shared`."""
    foreign: set[int] = set()
    if not contents.kinds.isdisjoint((np.void, np.record)):
        foreign.update(map(id, filter(_is_borrowed, contents.parts)))
    parts = contents.memory()
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


def has_own_memory(array: np.ndarray | np.void, is_sole: bool) -> bool:
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
    if known is None and small_parts(value, []):
        if is_pickled and not copy:
            return value
        return copy_small(value, array)
    if items_of(kind) is not None:
        kinds = {kind}
        if known is None or known.form is Form.OTHER:
            kinds |= survey(value).kinds
        if all(map(is_plain, kinds)):
            if is_pickled and not (copy and np.ndarray in kinds):
                return value
            return copy_containers(value, array, known)
    if move:
        return value
    if is_tensor(value):
        return Snapshot(copy_tensor(value), copy_tensor)
    return snapshot(value)


def _read_only(array: Any) -> Any:
    if is_tensor(array):  # no tensor is read-only
        return array
    array = array.view()
    array.flags.writeable = False
    return array


def _read_only_copy(array: Any) -> Any:
    if not has_objects(array):
        array = copied(array, "that others read and a task updates")
    return _read_only(array)


_Span = tuple[int, int]
"""First address of an array's or tensor's memory, and the one after the last."""


def _overlaps(value: Any, spans: list[_Span]) -> bool:
    return any(low < b and a < high for low, high in _extents(value) for a, b in spans)


def _spans(values: Iterable[Any]) -> list[_Span]:
    spans = []
    for value in values:
        if isinstance(value, np.ndarray) or is_tensor(value):
            spans += _extents(value)
        elif items_of(type(value)) is not None:
            spans += chain.from_iterable(map(_extents, survey(value).memory()))
    return spans


def _extents(value: Any) -> list[_Span]:
    if isinstance(value, np.ndarray):
        low, high = np.lib.array_utils.byte_bounds(value)
        return [(int(low), int(high))]
    if (layout := str(value.layout)) != "torch.strided":
        parts = (getattr(value, name)() for name in _TENSOR_PARTS.get(layout, ()))
        return list(chain.from_iterable(map(_extents, parts)))
    storage = value.untyped_storage()
    return [(storage.data_ptr(), storage.data_ptr() + storage.nbytes())]


_BY_ROWS = ("crow_indices", "col_indices", "values")
_BY_COLUMNS = ("ccol_indices", "row_indices", "values")
_TENSOR_PARTS = {
    "torch.sparse_coo": ("_indices", "_values"),
    "torch.jagged": ("values",),
    **dict.fromkeys(("torch.sparse_csr", "torch.sparse_bsr"), _BY_ROWS),
    **dict.fromkeys(("torch.sparse_csc", "torch.sparse_bsc"), _BY_COLUMNS),
}
"""By layout, for tensors that have no memory of their own: the methods that return their parts."""
