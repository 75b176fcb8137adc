"""Encode a value as a JSON tree, and arrays that the tree refers to. Pure: no I/O.

JSON stands for itself: None, bool, ints below 2**53, finite floats, short str, list, and dict with str
keys. Everything else is ``{"$": kind, "of": tree}``. The kinds of this module:

============  =====================================================================================
``array``     the index of a part of the blob
``same``      the number of an object that came before
``tuple``     its items
``dict``      keys, and values, each as items
``int``       hexadecimal digits of one that other readers of JSON would round
``float``     hexadecimal digits of the bits of an infinity or NaN
``str``       hexadecimal digits of the UTF-8 of one with lone surrogates, or a part that is its UTF-8
``bytes``     hexadecimal digits, or a part
``numbers``   a list of numbers of one type: a part
``mixed``     a list of ints and floats: three parts, which of them are ints, the ints, the floats
``rows``      a list of tuples of one length: the items at each position
``records``   a list of dicts with the same keys and plain values: keys, and the items under each
``state``     the class of an object, and what its ``state_dict()`` returned
``enum``, ``namedtuple``, ``dataclass``   the class, the names of its fields, and the fields
``codec``     the name of a user's codec, and what it returned
``pickle``    a part, parts for the memory of its arrays, and the classes that it names
============  =====================================================================================

All others are the names of codecs of ours, with what these return.

Objects that can change are numbered in the order in which encoder and decoder come to them, each
before what it contains: so a second reference loads as the same object.
"""

from __future__ import annotations

import struct
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding import everyday, numpy_types
from jobrunner.checkpoint.encoding.codecs import (
    Codec,
    CodecTable,
    RefusedValueError,
    UnsuitableError,
)
from jobrunner.checkpoint.encoding.dtypes import (
    Array,
    ArrayPart,
    Trail,
    Tree,
    UnsupportedDtypeError,
    check_shape,
    dtype_to_spec,
)
from jobrunner.checkpoint.encoding.job_classes import (
    field_names,
    kind_of,
    name_of,
    pickle_by_name,
    state_of,
)
from jobrunner.checkpoint.encoding.libraries import LibraryType, check_device, type_of
from jobrunner.checkpoint.encoding.stateful import has_state, name_class
from jobrunner.names import child_names, is_clean

OWN_CODECS = CodecTable((*everyday.CODECS, *numpy_types.CODECS, numpy_types.OBJECTS))
"""Those of the types of Python and NumPy; checkpoints name them."""

MAX_DEPTH = 150
"""Levels of containers. A level takes at most four calls, and Python allows a thousand."""

EXACT_INT = 1 << 53
"""JSON readers in other languages lose digits of larger ints."""

LEAST_PACKED = 256
"""Fewer items of a list are JSON, which people and other readers see."""

_INLINE_CHARACTERS, _INLINE_BYTES = 4096, 1024
_STATE = "the state of another object"
_LOOP = "it contains itself"
_NO_LOOP = "Refer to the outer object by a name or an index instead"
_PLAIN = frozenset({type(None), bool, int, float})

Encode = Callable[[Any], Tree]


class Encoder:
    """Encodes one blob.

    Attributes
    ----------
    parts : list of ArrayPart
        The arrays that the tree refers to.
    memory : list of trail and array
        Each array whose memory the value holds, but those that never change.
    objects : dict
        Objects of the value that can change, by `id`; alive, so that no `id` is used twice.
    classes : dict
        Classes of the job that the tree names.
    has_state : bool
        Whether it contains objects saved by their ``state_dict()``.
    """

    def __init__(self, codecs: CodecTable | None = None) -> None:
        self.parts: list[ArrayPart] = []
        self.memory: list[tuple[Trail, Array]] = []
        self.objects: dict[int, object] = {}
        self.classes: dict[str, type] = {}
        self.has_state = False
        self._codecs = codecs
        self._methods = dict(_METHODS)
        self._numbers: dict[object, int] = {}
        self._kept: list[object] = []  # what codecs returned: no `id` is used twice
        self._inside: set[int] = set()  # containers of what is encoded, by `id`
        self._trail: list[str] = []
        self._holder = ""  # set inside values into which no state_dict() could be loaded
        self._depth = 0
        self._holds = "ndarray"  # what the next array stands for, for other readers
        self._is_frozen = False  # set inside values whose memory never shows a change

    def encode(self, value: Any) -> Tree:
        """Encode a value; raises `RefusedValueError`."""
        cls = type(value)
        if value is None or cls is bool:
            return value
        if cls is int:
            return value if -EXACT_INT <= value <= EXACT_INT else _node("int", hex(value))
        if cls is float:
            # Neither an infinity nor NaN is zero when it is taken from itself.
            return value if value - value == 0 else _node("float", struct.pack(">d", value).hex())
        method = self._methods.get(cls)
        if method is None:
            method = self._methods[cls] = self._method_of(cls)
        try:
            return method(self, value)
        except (UnsuitableError, UnsupportedDtypeError) as error:
            raise self._refuse(value, str(error)) from None

    def pickle(self, value: Any) -> Tree:
        """Encode a whole blob as a pickle."""
        try:
            pickled = pickle_by_name(value, self._name_class)
        except Exception as error:
            reason = f"pickling it raised {type(error).__name__}: {error}"
            raise self._refuse(value, reason) from error
        data = self._part(np.frombuffer(pickled.data, np.uint8), "pickle", "pickle")
        buffers = []
        for i, buffer in enumerate(pickled.buffers):
            memory = np.frombuffer(buffer, np.uint8)
            buffers.append(self._part(memory, "pickled memory", f"buffer{i}"))
        return _node("pickle", [data, buffers, list(pickled.classes)])

    def _refuse(self, value: object, reason: str, remedy: str = "") -> RefusedValueError:
        return RefusedValueError(tuple(self._trail), type(value), reason, remedy)

    def _method_of(self, cls: type) -> _Method:
        """Choose how values of a class are encoded: the user's way comes first."""
        codec = self._codecs.get(cls) if self._codecs else None
        if codec is not None:
            return partial(Encoder._by_users_codec, codec=codec)
        codec = OWN_CODECS.get(cls)
        if codec is not None and codec is not numpy_types.OBJECTS:
            return partial(Encoder._by_codec, codec=codec)
        kind = type_of(cls)
        if kind is not None:
            return partial(Encoder._by_library, kind=kind, codec=kind.codec_for(cls))
        if has_state(cls):
            return Encoder._state
        class_kind = kind_of(cls)
        if class_kind is not None:
            return partial(Encoder._instance, kind=class_kind)
        return Encoder._unknown

    def _unknown(self, value: object) -> Tree:
        if isinstance(value, np.ndarray):
            reason = "a subclass of ndarray would load as a plain one; save np.asarray(...) instead"
            raise UnsuitableError(reason)
        raise UnsuitableError("there is no codec for its type")

    # --- identity and nesting

    def _numbered(self, value: object, key: object = None) -> Tree | None:
        """Number an object; return a ``same`` node if it has a number already."""
        if id(value) in self._inside:
            raise self._refuse(value, _LOOP, _NO_LOOP)
        key = id(value) if key is None else key
        number = self._numbers.get(key)
        if number is not None:
            return _node("same", number)
        self._numbers[key] = len(self._numbers)
        self._kept.append(value)
        return None

    def _changeable(self, value: object) -> Tree | None:
        """Number an object that no two blobs may share, since it can change."""
        if not self._is_frozen:
            self.objects[id(value)] = value
        return self._numbered(value)

    def _enter(self, value: object) -> None:
        """Enter a level of nesting; refuses a value inside itself, and excessive depth."""
        if id(value) in self._inside:
            raise self._refuse(value, _LOOP, _NO_LOOP)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            del self._trail[8:]
            reason = f"containers are nested more than {MAX_DEPTH} deep"
            raise self._refuse(value, reason, "Store it less deep")
        self._inside.add(id(value))

    def _leave(self, value: object) -> None:
        self._depth -= 1
        self._inside.remove(id(value))

    def _within(self, holder: str, value: object, inner: object) -> Tree:
        """Encode what a value consists of; `holder` describes it, if no state can be loaded there."""
        self._enter(value)
        former = self._holder
        self._holder = former or holder
        tree = self.encode(inner)
        self._holder = former
        self._leave(value)
        return tree

    def _name_class(self, cls: type) -> str:
        """Return the name under which the value's class will be found again."""
        name = name_of(cls)
        if self.classes.setdefault(name, cls) is not cls:
            raise UnsuitableError(f"there are two classes with the name {name}")
        return name

    # --- text and bytes

    def _text(self, value: str) -> Tree:
        is_short = len(value) <= _INLINE_CHARACTERS
        if is_short and is_clean(value):
            return value
        data = value.encode("utf-8", "surrogatepass")
        return _node("str", data.hex() if is_short else self._bytes_part(data, "str"))

    def _bytes(self, value: bytes) -> Tree:
        is_short = len(value) <= _INLINE_BYTES
        return _node("bytes", value.hex() if is_short else self._bytes_part(value, "bytes"))

    def _bytes_part(self, data: bytes, holds: str) -> int:
        return self._part(np.frombuffer(data, np.uint8), holds)

    # --- containers

    def _list(self, value: list[Any]) -> Tree:
        same = self._changeable(value)
        if same is not None:
            return same
        self._enter(value)
        tree = self._items(value)
        self._leave(value)
        return tree

    def _tuple(self, value: tuple[Any, ...]) -> Tree:
        self._enter(value)
        tree = self._items(value)
        self._leave(value)
        return _node("tuple", tree)

    def _dict(self, value: dict[Any, Any], names: Callable[[int], str] | None = None) -> Tree:
        same = self._changeable(value)
        if same is not None:
            return same
        self._enter(value)
        keys: Tree = list(value)
        are_plain = _are_plain(keys)
        if not are_plain:
            former, self._holder = self._holder, self._holder or "a key"
            keys = self._items(keys, "_{}_key".format, "_keys")
            self._holder = former
        items = self._items(list(value.values()), names or _ChildNames(value), "_values")
        self._leave(value)
        if are_plain and type(items) is list and "$" not in value:
            return dict(zip(keys, items, strict=True))
        return _node("dict", [keys, items])

    def _items(
        self, items: Sequence[Any], names: Callable[[int], str] = str, place: str = ""
    ) -> Tree:
        """Encode items, each under its name, as a list; or as arrays, if they are many and alike."""
        if len(items) >= LEAST_PACKED:
            packed = self._at(place, self._pack, items)
            if packed is not None:
                return packed
        trees: list[Tree] = []
        for i, item in enumerate(items):
            cls = type(item)
            if cls is str and len(item) <= _INLINE_CHARACTERS and item.isascii():
                trees.append(item)
            elif cls in _PLAIN:
                trees.append(self.encode(item))
            else:
                trees.append(self._at(names(i), self.encode, item))
        return trees

    def _at(self, name: str, encode: Encode, value: Any) -> Tree:
        """Encode what lies below the present place, under this name, or else at it."""
        if not name:
            return encode(value)
        self._trail.append(name)
        tree = encode(value)
        self._trail.pop()
        return tree

    # --- many items that are alike

    def _pack(self, items: Sequence[Any]) -> Tree | None:
        """Encode many items as arrays; None if they are not alike."""
        kinds = set(map(type, items))
        if kinds == {tuple}:
            return self._rows(items)
        if kinds == {dict}:
            return self._records(items)
        if kinds == {int, float}:
            return self._mixed(items)
        if len(kinds) == 1 and kinds <= {int, float, bool}:
            numbers = _as_array(items, kinds.pop())
            if numbers is not None:
                return _node("numbers", self._part(numbers, "numbers"))
        return None

    def _mixed(self, items: Sequence[Any]) -> Tree | None:
        # A float that stands for an int would load as a float.
        are_ints = np.fromiter((type(item) is int for item in items), bool, len(items))
        ints = _as_array([item for item in items if type(item) is int], int)
        if ints is None:
            return None
        floats = np.array([item for item in items if type(item) is float])
        arrays = {"are_ints": are_ints, "ints": ints, "floats": floats}
        return _node("mixed", [self._part(data, "numbers", name) for name, data in arrays.items()])

    def _rows(self, rows: Sequence[tuple[Any, ...]]) -> Tree | None:
        widths = set(map(len, rows))
        if len(widths) > 1 or 0 in widths:
            return None
        return _node("rows", self._columns(list(zip(*rows, strict=True)), str))

    def _records(self, rows: Sequence[dict[Any, Any]]) -> Tree | None:
        keys = list(rows[0])
        if not keys or not _are_plain(keys):
            return None
        kinds: set[type] = set()
        for row in rows:
            if id(row) in self._numbers or list(row) != keys:
                return None
            kinds.update(map(type, row.values()))
        # What a row contains could refer to another row, of which there is no whole yet.
        if not kinds <= _PLAIN | {str} or len(set(map(id, rows))) < len(rows):
            return None
        values = zip(*(row.values() for row in rows), strict=True)
        columns = self._columns(list(values), _ChildNames(keys))
        for row in rows:
            self._changeable(row)
        return _node("records", [keys, columns])

    def _columns(self, columns: Sequence[Sequence[Any]], names: Callable[[int], str]) -> list[Tree]:
        self._enter(columns)
        trees = []
        for i, column in enumerate(columns):
            trees.append(self._at(names(i), self._items, column))
        self._leave(columns)
        return trees

    # --- arrays

    def _array(self, value: Array) -> Tree:
        dtype = value.dtype
        if dtype.hasobject and not isinstance(dtype, np.dtypes.StringDType):
            return self._by_codec(value, numpy_types.OBJECTS)
        spec = dtype_to_spec(dtype)
        check_shape(value)
        key: object = id(value)
        if self._is_frozen:
            key = object()
        elif value.size:
            # Equal views of the same memory count as one array.
            address = value.__array_interface__["data"][0]
            key = (address, value.shape, value.strides, str(spec))
        same = self._numbered(value, key)
        if same is not None:
            return same
        if value.size and not self._is_frozen:
            self.memory.append((tuple(self._trail), value))
        return _node("array", self._part(value, self._holds))

    def _part(self, array: Array, holds: str, name: str = "") -> int:
        """Add an array to the blob's; return its index."""
        order = numpy_types.memory_order(array)
        data = array if order is None else array.transpose(order)
        trail = (*self._trail, name) if name else tuple(self._trail)
        self.parts.append(ArrayPart(data, order, trail, holds))
        return len(self.parts) - 1

    # --- by codecs

    def _by_codec(self, value: Any, codec: Codec) -> Tree:
        if codec.is_mutable:
            same = self._changeable(value)
            if same is not None:
                return same
        holder = "" if codec.name in everyday.KEEP_PLACES else f"a {codec.name}"
        return _node(codec.name, self._within(holder, value, codec.encode(value)))

    def _by_users_codec(self, value: Any, codec: Codec) -> Tree:
        # One of an unknown class counts as constant if it has a hash of its own.
        own_hash: Any = type(value).__hash__
        can_change = own_hash in (None, object.__hash__)
        can_change = can_change and not isinstance(value, type | types.FunctionType)
        same = self._changeable(value) if can_change else self._numbered(value)
        if same is not None:
            return same
        holder = f"the output of its codec {codec.name!r}"
        try:
            inner = codec.encode(value)
        except Exception as error:
            reason = f"the encode function of its codec {codec.name!r} raised "
            reason += f"{type(error).__name__}: {error}"
            raise self._refuse(value, reason) from error
        if type(inner) is type(value):
            reason = f"its codec {codec.name!r} returned a value of the same type"
            raise UnsuitableError(reason)
        return _node("codec", [codec.name, self._within(holder, value, inner)])

    def _by_library(self, value: Any, kind: LibraryType, codec: Codec) -> Tree:
        try:
            parts: Any = codec.encode(value)
            if kind.codec == "torch" and self._holder != _STATE:
                # load_state_dict() copies a state to the device of the object.
                check_device(value)
        except (UnsuitableError, UnsupportedDtypeError):
            raise
        except Exception as error:
            reason = f"reading it raised {type(error).__name__}: {error}"
            raise self._refuse(value, reason) from error
        same = self._numbered_library(kind, value, parts)
        if same is not None:
            return same
        was_frozen, holds = self._is_frozen, self._holds
        self._is_frozen = was_frozen or kind.hides_memory
        if kind.codec == "torch":
            # It lies at the place of the value itself, where other readers expect it.
            self._holds = f"{kind.name} of {parts['dtype']}"
            tree = self._within_lone(kind.name, value, parts)
        else:
            tree = self._within(kind.name, value, parts)
        self._is_frozen, self._holds = was_frozen, holds
        return _node(kind.name, tree)

    def _numbered_library(self, kind: LibraryType, value: Any, parts: Any) -> Tree | None:
        if not kind.is_mutable:
            return self._numbered(value)
        if kind.codec != "torch" or not parts["data"].size:
            return self._changeable(value)
        # Every state_dict() makes tensors anew; two of the same memory are tied weights.
        data = parts["data"]
        address = data.__array_interface__["data"][0]
        key = (address, data.shape, data.strides, str({**parts, "data": None}))
        return self._numbered(value, key)

    def _within_lone(self, holder: str, value: object, parts: dict[str, Any]) -> Tree:
        self._enter(value)
        former = self._holder
        self._holder = former or holder
        tree = self._dict(parts, lambda i: "")
        self._holder = former
        self._leave(value)
        return tree

    def _state(self, value: Any) -> Tree:
        same = self._changeable(value)
        if same is not None:
            return same
        if self._holder:
            reason = f"it is in {self._holder}, so its state_dict() could not be loaded into it"
            raise UnsuitableError(reason)
        try:
            state = value.state_dict()
        except Exception as error:
            reason = f"its state_dict() raised {type(error).__name__}: {error}"
            raise self._refuse(value, reason) from error
        self.has_state = True
        self._kept.append(state)
        return _node("state", [name_class(value), self._within(_STATE, value, state)])

    def _instance(self, value: Any, kind: str) -> Tree:
        cls: Any = type(value)
        state = state_of(kind, value)
        name = self._name_class(cls)
        if kind == "dataclass":
            same = self._changeable(value)
            if same is not None:
                return same
        names = [] if kind == "enum" else list(field_names(cls))
        return _node(kind, [name, names, self._within(cls.__name__, value, state)])


_Method = Callable[[Encoder, Any], Tree]

_METHODS: Mapping[type, _Method] = {
    str: Encoder._text,
    bytes: Encoder._bytes,
    list: Encoder._list,
    tuple: Encoder._tuple,
    dict: Encoder._dict,
    np.ndarray: Encoder._array,
}
"""Not bound to an encoder: in a cycle, it would keep the arrays of a save alive."""


class _ChildNames:
    """Names for files of what lies under keys; made when the first one is needed."""

    def __init__(self, keys: Iterable[object]) -> None:
        self._keys = keys
        self._names: list[str] | None = None

    def __call__(self, i: int) -> str:
        if self._names is None:
            self._names = child_names(self._keys)
        return self._names[i]


def _node(kind: str, tree: Tree) -> Tree:
    return {"$": kind, "of": tree}


def _are_plain(keys: Sequence[object]) -> bool:
    """Whether an object in JSON can have these keys."""
    return set(map(type, keys)) <= {str} and is_clean("".join(keys))  # type: ignore[arg-type]


def _as_array(items: Sequence[Any], cls: type) -> Array | None:
    """Return numbers of one type as an array; None if one has more than 64 bits."""
    try:
        return np.array(items, _DTYPES[cls])
    except OverflowError:
        return None


_DTYPES: Mapping[type, Any] = {int: np.int64, float: np.float64, bool: np.bool_}
