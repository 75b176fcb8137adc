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
``state``     the class of an object, and what its ``state_dict()`` returned
``enum``, ``namedtuple``, ``dataclass``   the class, the names of its fields, and the fields
``codec``     the name of a user's codec, and what it returned
``pickle``    a part, parts for the memory of its arrays, and the classes that it names
============  =====================================================================================

All others are the names of codecs of ours, with what these return. Items are a list of trees; many that
are alike are one node:

============  =====================================================================================
``numbers``   numbers of one type: a part
``rows``      lists, tuples or sets of one length: which of these, and the items at each position
``ragged``    those of any length: which of these, a part with their lengths, and all their items
``records``   dicts with the same keys: the keys, and the items under each
============  =====================================================================================

Objects that can change are numbered in the order in which encoder and decoder come to them, each
before what it contains: so a second reference loads as the same object. Only the rows of a node for
many have their numbers after what they contain.
"""

from __future__ import annotations

import struct
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, count
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding import everyday, numpy_types
from jobrunner.checkpoint.encoding.codecs import (
    Codec,
    CodecTable,
    OwnCodec,
    RefusedValueError,
    UnsuitableError,
)
from jobrunner.checkpoint.encoding.dtypes import (
    Array,
    ArrayPart,
    Trail,
    Tree,
    check_shape,
    dtype_to_spec,
)
from jobrunner.checkpoint.encoding.job_classes import (
    PicklerByName,
    field_names,
    kind_of,
    name_of,
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

_MOST_COLUMNS = 16
"""Longer rows of one length are one array, too."""

_INLINE_CHARACTERS, _INLINE_BYTES = 4096, 1024
_STATE = "the state of another object"
_LEAVES = frozenset({type(None), bool, int, float, str, bytes})

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

    def __init__(self, codecs: CodecTable[Codec] | None = None) -> None:
        self.parts: list[ArrayPart] = []
        self.memory: list[tuple[Trail, Array]] = []
        self.objects: dict[int, object] = {}
        self.classes: dict[str, type] = {}
        self.has_state = False
        self._codecs = codecs
        self._methods = dict(_METHODS)
        self._numbers: dict[object, int] = {}
        self._kept: list[object] = []  # what has a number: no `id` is used twice
        self._inside: set[int] = set()  # containers of what is encoded, by `id`
        self._trail: list[str] = []
        self._holder = (
            ""  # of the present value, inside which no state could be loaded into an object
        )
        self._is_frozen = False  # whether it is in a value whose memory never shows a change

    def encode(self, value: Any) -> Tree:
        """Encode a value; raises `RefusedValueError`."""
        return value if _is_json(value) else self._special(value)

    def _special(self, value: Any) -> Tree:
        """Encode a value that does not stand for itself."""
        cls = type(value)
        method = self._methods.get(cls)
        if method is None:
            method = self._methods[cls] = self._method_of(cls)
        try:
            return method(self, value)
        except UnsuitableError as error:
            raise self._refuse(value, str(error)) from None

    def pickle(self, value: Any) -> Tree:
        """Encode a whole blob as a pickle."""
        pickler = PicklerByName(self._name_class)
        pickled = self._call(partial(pickler.pickle, value), value, "pickling it")
        data = self._part(np.frombuffer(pickled, np.uint8), "pickle", "pickle")
        buffers = []
        for i, buffer in enumerate(pickler.buffers):
            memory = np.frombuffer(buffer.raw(), np.uint8)
            buffers.append(self._part(memory, "pickled memory", f"buffer{i}"))
        return _node("pickle", [data, buffers, list(pickler.names)])

    def _refuse(self, value: object, reason: str, remedy: str = "") -> RefusedValueError:
        return RefusedValueError(tuple(self._trail), type(value), reason, remedy)

    def _method_of(self, cls: type) -> _Method:
        """Choose how values of a class are encoded: the user's way comes first."""
        codec = self._codecs.get(cls) if self._codecs else None
        if codec is not None:
            return partial(Encoder._by_users_codec, codec=codec)
        own_codec = OWN_CODECS.get(cls) or type_of(cls)
        if own_codec is not None:
            return partial(Encoder._by_codec, codec=own_codec)
        if has_state(cls):
            return Encoder._state
        kind = kind_of(cls)
        if kind is not None:
            return partial(Encoder._instance, kind=kind)
        return Encoder._unknown

    def _unknown(self, value: object) -> Tree:
        if isinstance(value, np.ndarray):
            reason = "a subclass of ndarray would load as a plain one; save np.asarray(...) instead"
            raise UnsuitableError(reason)
        raise UnsuitableError("there is no codec for its type")

    # --- identity and nesting

    def _number(self, value: object, *, can_change: bool = True, key: object = None) -> Tree | None:
        """Number an object; return a ``same`` node if it has a number already.

        No two blobs may share an object that can change.
        """
        if id(value) in self._inside:
            raise self._loop(value)
        if can_change and not self._is_frozen:
            self.objects[id(value)] = value
        next_number = len(self._numbers)
        number = self._numbers.setdefault(id(value) if key is None else key, next_number)
        if number < next_number:
            return _node("same", number)
        self._kept.append(value)
        return None

    def _loop(self, value: object) -> RefusedValueError:
        remedy = "Refer to the outer object by a name or an index instead"
        return self._refuse(value, "it contains itself", remedy)

    def _enter(self, value: object) -> None:
        """Enter a level of nesting; refuses a value inside itself, and excessive depth."""
        if id(value) in self._inside:
            raise self._loop(value)
        if len(self._inside) == MAX_DEPTH:
            del self._trail[8:]
            reason = f"containers are nested more than {MAX_DEPTH} deep"
            raise self._refuse(value, reason, "Store it less deep")
        self._inside.add(id(value))

    def _leave(self, value: object) -> None:
        self._inside.remove(id(value))

    def _within(
        self, value: object, parts: object, holder: str, *, hides_memory: bool = False
    ) -> Tree:
        """Encode what a value consists of; `holder` describes it, if no state can be loaded there."""
        self._enter(value)
        former = self._holder, self._is_frozen
        self._holder = self._holder or holder
        self._is_frozen = self._is_frozen or hides_memory
        tree = self.encode(parts)
        self._holder, self._is_frozen = former
        self._leave(value)
        return tree

    def _at(self, name: str, encode: Encode, value: Any) -> Tree:
        """Encode what lies below the present place, under this name."""
        self._trail.append(name)
        tree = encode(value)
        self._trail.pop()
        return tree

    def _name_class(self, cls: type) -> str:
        """Return the name under which the value's class will be found again."""
        name = name_of(cls)
        if self.classes.setdefault(name, cls) is not cls:
            raise UnsuitableError(f"there are two classes with the name {name}")
        return name

    # --- numbers, texts and bytes

    def _int(self, value: int) -> Tree:
        return _node("int", hex(value))

    def _float(self, value: float) -> Tree:
        return _node("float", struct.pack(">d", value).hex())

    def _text(self, value: str) -> Tree:
        return _node("str", self._data(value.encode("utf-8", "surrogatepass"), "str"))

    def _bytes(self, value: bytes) -> Tree:
        return _node("bytes", self._data(value, "bytes"))

    def _data(self, data: bytes, holds: str) -> Tree:
        if len(data) <= _INLINE_BYTES:
            return data.hex()
        return self._part(np.frombuffer(data, np.uint8), holds)

    # --- containers

    def _list(self, value: list[Any]) -> Tree:
        same = self._number(value)
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

    def _dict(self, value: dict[Any, Any]) -> Tree:
        same = self._number(value)
        if same is not None:
            return same
        self._enter(value)
        keys: Tree = list(value)
        are_plain = _are_plain(keys)
        values = list(value.values())
        if not are_plain:
            former, self._holder = self._holder, self._holder or "a key"
            keys = self._at("_keys", self._items, keys)
            self._holder = former
        items: Tree = None
        if len(values) >= LEAST_PACKED:
            items = self._at("_values", self._pack, values)
        is_packed = items is not None
        if not is_packed:
            items = self._walk(values, value)
        self._leave(value)
        if are_plain and not is_packed and "$" not in value:
            return dict(zip(keys, items, strict=True))
        return _node("dict", [keys, items])

    def _items(self, items: Sequence[Any]) -> Tree:
        """Encode items as a list; or as arrays, if they are many and alike."""
        packed = self._pack(items) if len(items) >= LEAST_PACKED else None
        return self._walk(items) if packed is None else packed

    def _walk(self, items: Sequence[Any], keys: Iterable[object] | None = None) -> list[Tree]:
        """Encode items one by one, each under its index, or the name of its key."""
        trees: list[Tree] = []
        names: Sequence[str] = ()
        for i, item in enumerate(items):
            if _is_json(item):
                trees.append(item)
            elif keys is None:
                trees.append(self._at(str(i), self._special, item))
            else:
                names = names or child_names(keys)
                trees.append(self._at(names[i], self._special, item))
        return trees

    # --- many items that are alike

    def _pack(self, items: Sequence[Any]) -> Tree | None:
        """Encode many items as arrays; None if they are not alike."""
        kinds = set(map(type, items))
        if len(kinds) > 1:
            return None
        (cls,) = kinds
        if cls in _DTYPES:
            try:
                numbers = np.array(items, _DTYPES[cls])
            except OverflowError:  # of an int with more than 64 bits
                return None
            return _node("numbers", self._part(numbers, "numbers"))
        if cls is tuple:
            return self._rows(cls, items)
        if cls is dict and not _are_records(items):
            return None
        if cls in (list, set, dict) and self._are_flat(cls, items):
            tree = self._records(items) if cls is dict else self._rows(cls, items)
            identities = list(map(id, items))
            self._numbers.update(zip(identities, count(len(self._numbers)), strict=False))
            self._kept.append(items)
            if not self._is_frozen:
                self.objects.update(zip(identities, items, strict=True))
            return tree
        return None

    def _are_flat(self, cls: type, rows: Sequence[Any]) -> bool:
        """Whether lists, sets or dicts contain only leaves, and only this refers to each of them.

        The decoder makes a row when it has all that the row contains. Were one row in another, or
        were a list in two rows, it would be asked for an object that it has not made yet.
        """
        identities = set(map(id, rows))
        is_alone = len(identities) == len(rows) and self._numbers.keys().isdisjoint(identities)
        contents = map(dict.values, rows) if cls is dict else rows
        return is_alone and set(map(type, chain.from_iterable(contents))) <= _LEAVES

    def _rows(self, cls: type, rows: Sequence[Any]) -> Tree:
        if cls is set:
            rows = list(map(everyday.sort_members, rows))
        contents = list(chain.from_iterable(rows))
        lengths = list(map(len, rows))
        length = lengths[0]
        self._enter(contents)
        if 0 < length <= _MOST_COLUMNS and set(lengths) == {length}:
            columns = []
            for i in range(length):
                columns.append(self._at(str(i), self._items, contents[i::length]))
            tree = _node("rows", [cls.__name__, columns])
        else:
            part = self._part(np.array(lengths, np.int64), "numbers", "lengths")
            items = self._at("items", self._items, contents)
            tree = _node("ragged", [cls.__name__, part, items])
        self._leave(contents)
        return tree

    def _records(self, rows: Sequence[dict[str, Any]]) -> Tree:
        keys = list(rows[0])
        contents = list(chain.from_iterable(map(dict.values, rows)))
        self._enter(contents)
        columns = []
        for i, name in enumerate(child_names(keys)):
            columns.append(self._at(name, self._items, contents[i :: len(keys)]))
        self._leave(contents)
        return _node("records", [keys, columns])

    # --- arrays

    def _array(self, value: Array, holds: str = "ndarray") -> Tree:
        dtype = value.dtype
        if dtype.hasobject and not isinstance(dtype, np.dtypes.StringDType):
            return self._by_codec(value, numpy_types.OBJECTS)
        spec = dtype_to_spec(dtype)
        check_shape(value)
        key: object = None
        if self._is_frozen:
            key = object()
        elif value.size:
            # Equal views of the same memory count as one array.
            address = value.__array_interface__["data"][0]
            key = (address, value.shape, value.strides, str(spec))
        same = self._number(value, can_change=False, key=key)
        if same is not None:
            return same
        if value.size and not self._is_frozen:
            self.memory.append((tuple(self._trail), value))
        return _node("array", self._part(value, holds))

    def _part(self, array: Array, holds: str, name: str = "") -> int:
        """Add an array to the blob's; return its index."""
        order = numpy_types.memory_order(array)
        data = array if order is None else array.transpose(order)
        trail = (*self._trail, name) if name else tuple(self._trail)
        self.parts.append(ArrayPart(data, order, trail, holds))
        return len(self.parts) - 1

    # --- by codecs and classes

    def _call(self, encode: Callable[[], Any], value: object, doing: str) -> Any:
        """Call code of a user or a library."""
        try:
            return encode()
        except UnsuitableError as error:
            raise self._refuse(value, str(error)) from None
        except Exception as error:
            reason = f"{doing} raised {type(error).__name__}: {error}"
            raise self._refuse(value, reason) from error

    def _by_codec(self, value: Any, codec: OwnCodec | LibraryType) -> Tree:
        if codec.is_numbered:
            same = self._number(value, can_change=codec.is_mutable)
            if same is not None:
                return same
        parts = self._call(partial(codec.encode, value), value, "reading it")
        if codec.name == "torch.Tensor":
            return _node(codec.name, self._tensor(value, parts))
        holder = "" if codec.keeps_states else f"a {codec.name}"
        tree = self._within(value, parts, holder, hides_memory=codec.hides_memory)
        return _node(codec.name, tree)

    def _tensor(self, value: Any, parts: dict[str, Any]) -> Tree:
        """Encode a tensor's parts: its array lies where the tensor lies, as other readers expect."""
        if self._holder != _STATE:  # load_state_dict() copies a state to the object's device
            check_device(value)
        self._number(parts, can_change=False)
        return {**parts, "data": self._array(parts["data"], f"torch.Tensor of {parts['dtype']}")}

    def _by_users_codec(self, value: Any, codec: Codec) -> Tree:
        # One of an unknown class counts as constant if it has a hash of its own.
        own_hash: Any = type(value).__hash__
        is_plain = own_hash in (None, object.__hash__)
        can_change = is_plain and not isinstance(value, type | types.FunctionType)
        same = self._number(value, can_change=can_change)
        if same is not None:
            return same
        doing = f"the encode function of its codec {codec.name!r}"
        parts = self._call(partial(codec.encode, value), value, doing)
        if type(parts) is type(value):
            reason = f"its codec {codec.name!r} returned a value of the same type"
            raise UnsuitableError(reason)
        tree = self._within(value, parts, f"the output of its codec {codec.name!r}")
        return _node("codec", [codec.name, tree])

    def _state(self, value: Any) -> Tree:
        same = self._number(value)
        if same is not None:
            return same
        if self._holder:
            reason = f"it is in {self._holder}, so its state_dict() could not be loaded into it"
            raise UnsuitableError(reason)
        state = self._call(value.state_dict, value, "its state_dict()")
        self.has_state = True
        return _node("state", [name_class(value), self._within(value, state, _STATE)])

    def _instance(self, value: Any, kind: str) -> Tree:
        cls: Any = type(value)
        state = state_of(kind, value)
        name = self._name_class(cls)
        if kind == "dataclass":
            same = self._number(value)
            if same is not None:
                return same
        names = [] if kind == "enum" else list(field_names(cls))
        return _node(kind, [name, names, self._within(value, state, cls.__name__)])


_Method = Callable[[Encoder, Any], Tree]

_METHODS: Mapping[type, _Method] = {
    int: Encoder._int,
    float: Encoder._float,
    str: Encoder._text,
    bytes: Encoder._bytes,
    list: Encoder._list,
    tuple: Encoder._tuple,
    dict: Encoder._dict,
    np.ndarray: Encoder._array,
}
"""Not bound to an encoder: in a cycle, it would keep the arrays of a save alive."""


def _are_records(rows: Sequence[dict[Any, Any]]) -> bool:
    """Whether dicts have the same few keys, all plain, in the same order."""
    keys = list(rows[0])
    if not 0 < len(keys) <= _MOST_COLUMNS or not _are_plain(keys):
        return False
    return all(list(row) == keys for row in rows)


def _node(kind: str, tree: Tree) -> Tree:
    return {"$": kind, "of": tree}


def _is_json(value: Any) -> bool:
    """Whether a value that is no container stands for itself in JSON."""
    cls = type(value)
    if cls is str:
        return len(value) <= _INLINE_CHARACTERS and is_clean(value)
    if cls is float:
        return bool(value - value == 0)  # which is NaN for an infinity and NaN
    if cls is int:
        return -EXACT_INT <= value <= EXACT_INT  # type: ignore[no-any-return]
    return value is None or cls is bool


def _are_plain(keys: Sequence[object]) -> bool:
    """Whether an object in JSON can have these keys."""
    return set(map(type, keys)) <= {str} and is_clean("".join(keys))  # type: ignore[arg-type]


_DTYPES: Mapping[type, Any] = {int: np.int64, float: np.float64, bool: np.bool_}
