"""The values of a workspace. At rest a value never changes: only `thaw` hands one out to be changed.

| value | at rest | a reader gets | an update gets |
|---|---|---|---|
| number, text or other immutable value | itself | itself | itself |
| array | itself, read-only, its memory its own | a view | itself, or a copy if somebody holds it |
| built-in container | `Frozen`: a pickle, its arrays and objects apart | it unpickled, views of its arrays | it unpickled, each array by the rule above |
| list, dict or set of immutable values | a copy | a copy | a copy |
| object of any other class | itself | itself | itself |

A value that a task returns comes to rest by `settle`; one whose maker keeps no reference to it by
`adopt`. `view` gives it to a reader, `thaw` to an update, `opened` to a save. `capture` keeps it as it is
now; what was captured goes to readers by `view`, and by `unshared` to somebody who may change it.

Only references to arrays are counted. Whoever wants an array to stay as it is now, a save or a
message or a retained result, just refers to it: `thaw` then copies it before the update.
"""

from __future__ import annotations

import datetime as dt
import decimal
import fractions
import io
import mmap
import pickle
import sys
import sysconfig
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from enum import Enum
from typing import Any

import numpy as np

from jobrunner.gc_pause import gc_paused
from jobrunner.workspace.pickles import NotPicklableError, Pickled, dumps, from_frames

_NUMPY_SCALARS = frozenset(np.sctypeDict.values()) - {np.void, np.object_}

IMMUTABLE: frozenset[type] = frozenset(
    {
        *(type(None), type(...), bool, int, float, complex, str, bytes, range),
        *(dt.date, dt.time, dt.datetime, dt.timedelta, dt.timezone),
        *(decimal.Decimal, fractions.Fraction, uuid.UUID),
        *_NUMPY_SCALARS,
        type(np.ma.masked),
    }
)
"""Exact types whose values cannot change."""

_FLAT: frozenset[type] = frozenset({list, dict, set, bytearray})
"""Types of containers that are kept as a copy if all that they hold is immutable."""

_CONTAINERS: frozenset[type] = _FLAT | {
    *(tuple, frozenset, deque, OrderedDict, defaultdict, Counter),
    *(np.void, np.record),  # an item of a structured array is a view of the array's memory
}

_NAMED: frozenset[Any] = (
    IMMUTABLE
    | _CONTAINERS
    | {np.ndarray, np.dtype}
    | {np.empty(0, object).__reduce__()[0], np.float64().__reduce__()[0]}
)
"""What the pickle of a container may name; each other class or function is a part of its own."""

BEFORE_COPY: ContextVar[Callable[[int, str], object] | None] = ContextVar(
    "jobrunner_before_copy", default=None
)
"""Called with the size of a large copy and what it is; raises an error if it does not fit."""

_LARGE_BYTES = 32 << 20
_PAUSED_BYTES = 100_000
"""Of a pickle that makes so many objects that the garbage collector had better not look at them."""


class Frozen:
    """A container as it was: its pickle, and apart from it its arrays and objects."""

    __slots__ = ("has_objects", "head", "parts")

    def __init__(self, head: bytes, parts: list[Any], has_objects: bool) -> None:
        self.head = head
        self.parts = parts
        self.has_objects = has_objects  # parts that could change while nobody updates the blob

    def __reduce__(self) -> Any:
        return Frozen, (self.head, self.parts, self.has_objects)

    def open(self, parts: Iterable[Any]) -> Any:
        """Make the container with these parts."""
        # `buffers` may be any objects: the pickle only says where the next one goes.
        if len(self.head) <= _PAUSED_BYTES:
            return pickle.loads(self.head, buffers=parts)
        with gc_paused():
            return pickle.loads(self.head, buffers=parts)


def settle(box: list[Any], i: int = 0) -> Any:
    """Bring to rest item `i` of `box`, which a task has returned: put what to keep in its place.

    Also returns that. An array is kept itself if nothing but `box` refers to it, else copied: so the
    caller must not have the value in a variable.
    """
    kind = type(box[i])
    if kind in IMMUTABLE:
        return box[i]
    if (kind is np.ndarray and not box[i].dtype.hasobject) or _is_memory(box[i]):
        box[i] = _settle_array(box, i)
    elif is_container(box[i]):
        _freeze(box, i, _settle_array)
    return box[i]


def adopt(value: Any) -> Any:
    """Bring to rest a value that its maker has given up, without copies of its arrays; returns it."""
    box = [value]
    if _is_memory(value):
        return _adopt_array(box, 0)
    if is_container(value):
        _freeze(box, 0, _adopt_array)
    return box[0]


def view(stored: Any) -> Any:
    """Return a value at rest, or one that was captured, as a task gets it that only reads it."""
    kind = type(stored)
    if kind in IMMUTABLE:
        return stored
    if kind is np.ndarray:
        return stored.view()  # read-only, as it is itself
    if kind is Frozen:
        return stored.open(map(_viewed, stored.parts))
    if kind in _FLAT:
        return stored.copy()
    if kind is Pickled:
        value = from_frames(stored.frames)
        for array in arrays_of(value):
            array.flags.writeable = False
        return view(value)
    return stored


def _viewed(part: Any) -> Any:
    return part.view() if type(part) is np.ndarray else part


def opened(stored: Any) -> Any:
    """Return a value at rest for a save: its arrays are the very ones at rest, not views of them."""
    return stored.open(stored.parts) if type(stored) is Frozen else stored


def thaw(holder: dict[Any, Any], key: Any) -> None:
    """Put in place of the value at rest ``holder[key]`` one that an update may change.

    Its arrays are copied if anything else refers to them: the view of a reader, a save, a message.
    """
    kind = type(holder[key])
    if kind is np.ndarray:
        _make_writable(holder, key)
    elif kind is Frozen:
        stored = holder[key]
        # By index: a variable of the loop would count as another reference to its array.
        for i in range(len(stored.parts)):
            if type(stored.parts[i]) is np.ndarray:
                _make_writable(stored.parts, i)
        holder[key] = stored.open(stored.parts)
    elif kind in _FLAT:
        holder[key] = holder[key].copy()


def unshared(captured: Any) -> Any:
    """Return a captured value as the client gets it, or a task that may keep and change it."""
    kind = type(captured)
    if kind is Pickled:
        return unshared(from_frames(captured.frames))
    holder = {"": captured}
    del captured  # it would count as another reference
    thaw(holder, "")
    return holder[""]


def capture(stored: Any) -> Any:
    """Keep a value at rest as it is now, whatever updates follow, for `view` or `to_frames`.

    Raises `NotPicklableError` if there is an object in it that cannot be pickled.
    """
    if type(stored) is Frozen and not stored.has_objects:
        # With a list of its own, so that the references to each array can be counted.
        return Frozen(stored.head, stored.parts.copy(), has_objects=False)
    if is_provable(stored):
        return stored
    try:
        return Pickled([dumps(stored)])
    except Exception as error:
        raise NotPicklableError(
            f"A value of type {type(opened(stored)).__qualname__} cannot be pickled, so it cannot "
            f"be copied for another node or a TaskOutput ({type(error).__name__}: {error}). Store "
            f"it in a blob, and read that by name in tasks of its own node."
        ) from None


def is_provable(stored: Any) -> bool:
    """Whether nothing can change a stored value but an update: there is no object in it."""
    kind = type(stored)
    if kind is Frozen:
        return not stored.has_objects
    is_flat = kind in _FLAT or kind is tuple or kind is frozenset
    return is_flat or kind in IMMUTABLE or kind is np.ndarray


def arrays_of(stored: Any) -> list[np.ndarray]:
    """The arrays at rest in a stored value."""
    parts = stored.parts if type(stored) is Frozen else [stored]
    return [part for part in parts if type(part) is np.ndarray]


def owner_of(array: np.ndarray) -> int:
    """The identity of the array that owns the memory of an array."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return id(owner)


def size_of(stored: Any) -> int:
    """Approximate size of a stored value in bytes; of most containers, without their items."""
    if type(stored) is Frozen:
        return len(stored.head) + sum(map(size_of, stored.parts))
    nbytes = getattr(stored, "nbytes", None)  # tensors and frames of other libraries, too
    return nbytes if isinstance(nbytes, int) else sys.getsizeof(stored)


def is_container(value: Any) -> bool:
    """Whether a value is a built-in container, a named tuple or an array of objects."""
    kind = type(value)
    if kind in _CONTAINERS:
        return True
    return _is_named_tuple(kind) or (kind is np.ndarray and value.dtype.hasobject)


def _is_named_tuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields") and not kind.__dictoffset__


def _is_memory(value: Any) -> bool:
    """Whether a value is an array whose memory holds no references to objects."""
    if type(value) is not np.ndarray and type(value) is not np.memmap:
        return False
    return not value.dtype.hasobject or isinstance(value.dtype, np.dtypes.StringDType)


# ---- containers


class _Freezer(pickle.Pickler):
    """Pickles a container, but puts its arrays and objects into `parts`.

    `reducer_override` is not called for numbers, texts and exact built-in containers, so these are
    pickled at the speed of C. For a part it returns a call of `_same` with an empty buffer that is
    pickled out of band. Unpickling takes the next of its `buffers` there, and that is the part.
    """

    parts: list[Any]

    def reducer_override(self, obj: Any) -> Any:
        """Say how to pickle an object."""
        kind = type(obj)
        if kind in IMMUTABLE or kind in _CONTAINERS or isinstance(obj, np.dtype):
            return NotImplemented
        if kind is np.ndarray and not _is_memory(obj):
            return NotImplemented
        if _is_named_tuple(kind):
            return _named_tuple, (kind, tuple(obj))
        if obj is _same or obj is _named_tuple:
            return NotImplemented
        if (isinstance(obj, type) or kind is _BUILTIN) and obj in _NAMED:
            return NotImplemented
        self.parts.append(obj)
        return _same, (pickle.PickleBuffer(_NOTHING),)


_BUILTIN = type(len)
_NOTHING = bytearray()


def _same(part: Any) -> Any:
    return part


def _named_tuple(kind: type[tuple[Any, ...]], items: tuple[Any, ...]) -> Any:
    return tuple.__new__(kind, items)


def _freeze(box: list[Any], i: int, settle_array: Callable[[list[Any], int], np.ndarray]) -> None:
    """Put what to keep of a container in its place; `settle_array` settles each array in it."""
    if _is_flat(box[i]):
        if type(box[i]) in _FLAT:
            box[i] = box[i].copy()
        return
    head, parts = _take_apart(box[i])
    # This drops the container. An array that only it referred to has now one reference: in `parts`.
    frozen = box[i] = Frozen(head, parts, has_objects=False)
    constants = set()
    for k in range(len(parts)):
        if _is_memory(parts[k]):
            parts[k] = settle_array(parts, k)
            # Two arrays over the same `bytes` are each kept as they are. A save takes equal views of
            # one memory for one array. So they would load as one, and after a resume an update of
            # the first would change the second, too: the second is copied.
            if _is_constant(parts[k]):
                place = _place_of(parts[k])
                if place in constants:
                    parts[k] = _copied(parts[k], "whose memory another one in its blob has")
                    parts[k].setflags(write=False)
                constants.add(place)
        elif not isinstance(parts[k], type | Enum):
            frozen.has_objects = True


def _is_flat(value: Any) -> bool:
    kind = type(value)
    if kind is bytearray:
        return True
    if kind is dict:
        return IMMUTABLE.issuperset(map(type, value.values())) and IMMUTABLE.issuperset(
            map(type, value)
        )
    is_simple = kind in (list, tuple, set, frozenset)
    return is_simple and IMMUTABLE.issuperset(map(type, value))


def _take_apart(value: Any) -> tuple[bytes, list[Any]]:
    file = io.BytesIO()
    freezer = _Freezer(file, 5, buffer_callback=lambda _: None)
    freezer.parts = []
    freezer.dump(value)
    return file.getvalue(), freezer.parts


# ---- arrays

# What `sys.getrefcount` returns here for an item that only its list refers to, and for an array
# that only one view of it refers to. Without the global lock, counts of other threads are late.
_COUNTS = not sysconfig.get_config_var("Py_GIL_DISABLED")
_SOLE = (lambda box: sys.getrefcount(box[0]))([object()])
_SOLE_BASE = (lambda array: sys.getrefcount(array.base))(np.empty(2)[:1])


def _is_sole(array: np.ndarray, references: int) -> bool:
    """Whether nothing else can reach an array's memory, to which there are so many references."""
    if references > _SOLE or not _COUNTS:
        return False
    if array.base is None:
        return array.flags.owndata
    # No variable holds the base, which would count as another reference to it.
    if type(array.base) is not np.ndarray or not array.base.flags.owndata:
        return False
    return sys.getrefcount(array.base) <= _SOLE_BASE


def _settle_array(holder: list[Any], i: int) -> np.ndarray:
    references = sys.getrefcount(holder[i])
    array: np.ndarray = holder[i]
    if type(array) is not np.ndarray:
        array = np.asarray(array)  # of a memory map
    # An array that does not lie at a multiple of its item's size is computed with by other code of
    # NumPy, which may round differently. After a resume it would be aligned: other last bits.
    flags = array.flags
    is_own = flags.aligned and flags.writeable and _is_sole(array, references)
    if not is_own and not (flags.aligned and _is_constant(array)):
        array = _copied(array, "that a task returned or stored, and something else can reach")
    array.setflags(write=False)
    return array


def _adopt_array(holder: list[Any], i: int) -> np.ndarray:
    array = np.asarray(holder[i])
    if not array.flags.aligned:
        array = _copied(array, "that is not aligned")
    array.setflags(write=False)
    return array


def _make_writable(holder: Any, key: Any) -> None:
    references = sys.getrefcount(holder[key])
    array = holder[key]
    if not _is_sole(array, references):
        array = holder[key] = _copied(array, "that something else refers to and a task updates")
    array.setflags(write=True)


def _is_constant(array: np.ndarray) -> bool:
    """Whether nothing can change an array's memory: that of `bytes`, or a map to read a file."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return not array.flags.writeable and isinstance(base, bytes | mmap.mmap)


def _place_of(array: np.ndarray) -> tuple[Any, ...]:
    """What equal views of the same memory have in common, and no other two arrays."""
    address = array.__array_interface__["data"][0]
    return address, array.shape, array.strides, array.dtype


def _copied(array: np.ndarray, description: str) -> np.ndarray:
    if array.nbytes >= _LARGE_BYTES and (check := BEFORE_COPY.get()) is not None:
        check(array.nbytes, f"A copy of an array {description}")
    return array.copy(order="K")
