"""Encode a value as a JSON tree, and arrays that the tree refers to. Pure: no I/O.

JSON stands for itself: None, bool, ints of up to 2**53, finite floats, str, list, and dict with str
keys. Everything else is ``{"$": kind, "of": tree}``. The kinds of this module:

============  =====================================================================================
``array``     the index of a part of the blob
``same``      the number of the list or object of the tree whose value it is, too; see `containers_of`
``numbers``   a long list of numbers of one type: a part
``tuple``     the list of its items
``dict``      the lists of its keys and of its values
``int``       hexadecimal digits of one that other readers of JSON would round
``float``     hexadecimal digits of the bits of an infinity or NaN
``str``       hexadecimal digits of the UTF-8 of one with lone surrogates
``bytes``     hexadecimal digits, or a part
``state``     the class of an object, and what its ``state_dict()`` returned
``instance``  the class of a named tuple or dataclass, the names of its fields, and the fields
``codec``     the name of a user's codec, and what it returned
``pickle``    a part, and the classes that it names
``json``      alone: a part that is the JSON of the whole tree, if that is long
============  =====================================================================================

All others are the names of codecs of ours, with what these return.
"""

from __future__ import annotations

import struct
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

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
    dtype_to_spec,
    memory_order,
)
from jobrunner.checkpoint.encoding.job_classes import (
    PicklerByName,
    field_names,
    has_fields,
    name_of,
    state_of,
)
from jobrunner.checkpoint.encoding.libraries import LibraryType, check_device, type_of
from jobrunner.checkpoint.encoding.stateful import has_state, name_class
from jobrunner.names import child_names, is_clean

OWN_CODECS = CodecTable((*everyday.CODECS, *numpy_types.CODECS, numpy_types.OBJECTS))
"""Those of the types of Python and NumPy; checkpoints name them."""

MAX_DEPTH = 150
"""Levels of containers. A level takes at most five calls, and Python allows a thousand."""

EXACT_INT = 1 << 53
"""JSON readers in other languages lose digits of larger ints."""

LEAST_PACKED = 256
"""Fewer numbers of a list are JSON, which people and other readers see."""

_DTYPES: Mapping[type, Any] = {int: np.int64, float: np.float64, bool: np.bool_}
_INLINE_BYTES = 1024
_STATE = "the state of another object"


def containers_of(tree: Tree) -> Iterator[Tree]:
    """Yield the lists and objects of a tree in the order in which they begin in its JSON.

    So they are numbered, from 0, for nodes of the kind ``same``.
    """
    waiting = [tree]
    while waiting:
        part = waiting.pop()
        if type(part) is list:
            yield part
            waiting.extend(reversed(part))
        elif type(part) is dict:
            yield part
            waiting.extend(reversed(part.values()))


class _Rule(NamedTuple):
    """How values of a class are encoded."""

    encode: Callable[[Encoder, Any], Tree]
    can_change: bool
    """Then one that occurs twice in a blob loads as one object, and no second blob may have it."""


class Encoder:
    """Encodes one blob.

    Attributes
    ----------
    parts : list of ArrayPart
        The arrays that the tree refers to.
    memory : list of trail and array
        Each array whose memory the value holds, but those that never change.
    objects : dict
        Objects of the value that can change, by `id`.
    classes : dict
        Classes of the job that the tree names.
    has_state : bool
        Whether it contains objects saved by their ``state_dict()``.
    """

    def __init__(self, codecs: CodecTable[Codec]) -> None:
        self.parts: list[ArrayPart] = []
        self.memory: list[tuple[Trail, Array]] = []
        self.objects: dict[int, object] = {}
        self.classes: dict[str, type] = {}
        self.has_state = False
        self._codecs = codecs
        self._rules = dict(_RULES)
        # The trees of what can occur again, by `id` or memory; None: it is being encoded.
        self._trees: dict[object, Tree] = {}
        # What an object is made of may be made for the encoder alone, as a list of the members of a
        # set. If it were freed, the next one could get its `id`, and would be taken for it.
        self._kept: list[object] = []
        self._repeated: list[tuple[Tree, Tree]] = []  # a node `same`, and the tree it refers to
        self._trail: list[str] = []
        self._depth = 0
        # Describes what the present value is in, if no state could be loaded into an object there: a
        # load puts a state into the object that an init task has made at the same place, and finds
        # its way there through lists, tuples and dicts only.
        self._holder = ""
        self._is_frozen = False  # whether it is in a value whose memory never shows a change

    def encode_blob(self, value: Any) -> Tree:
        """Encode the value of a blob; raises `RefusedValueError`."""
        tree = self._encode(value)
        if self._repeated:
            numbers = {id(part): number for number, part in enumerate(containers_of(tree))}
            for node, first in self._repeated:
                node["of"] = numbers[id(first)]
        return tree

    def pickle(self, value: Any) -> Tree:
        """Encode a whole blob as a pickle; raises `RefusedValueError`."""
        self._rules[type(value)] = _Rule(Encoder._pickle, False)
        return self._special(value)

    def _encode(self, value: Any) -> Tree:
        if _is_json(value):
            return value
        return self._special(value)

    def _special(self, value: Any) -> Tree:
        """Encode a value that does not stand for itself."""
        cls = type(value)
        rule = self._rules.get(cls)
        if rule is None:
            rule = self._rules[cls] = self._choose_rule(cls)
        self._depth += 1
        try:
            if self._depth > MAX_DEPTH:
                del self._trail[8:]
                reason = f"containers are nested more than {MAX_DEPTH} deep"
                raise UnsuitableError(reason, "Store it less deep")
            if rule.can_change:
                tree = self._once(value, rule.encode)
            else:
                tree = rule.encode(self, value)
        except UnsuitableError as error:
            # Only here is it known where the value is.
            trail = tuple(self._trail)
            raise RefusedValueError(trail, type(value), error) from error.__cause__
        self._depth -= 1
        return tree

    def _choose_rule(self, cls: type) -> _Rule:
        """Choose how values of a class are encoded: the user's way comes first."""
        codec = self._codecs.get(cls)
        if codec is not None:
            # One of an unknown class counts as constant if it has a hash of its own.
            own_hash: Any = cls.__hash__
            can_change = own_hash in (None, object.__hash__)
            can_change = can_change and not issubclass(cls, type | types.FunctionType)
            return _Rule(partial(Encoder._by_users_codec, codec=codec), can_change)
        own_codec = OWN_CODECS.get(cls) or type_of(cls)
        if own_codec is not None:
            return _Rule(partial(Encoder._by_codec, codec=own_codec), own_codec.is_mutable)
        if has_state(cls):
            return _Rule(Encoder._state, True)
        if has_fields(cls):
            return _Rule(Encoder._instance, not issubclass(cls, tuple))
        return _Rule(Encoder._unknown, False)

    def _unknown(self, value: object) -> Tree:
        if isinstance(value, np.ndarray):
            reason = "a subclass of ndarray would load as a plain one; save np.asarray(...) instead"
            raise UnsuitableError(reason)
        raise UnsuitableError("there is no codec for its type")

    # --- where it is

    def _once(self, value: Any, encode: Callable[[Encoder, Any], Tree]) -> Tree:
        """Encode an object that can change, or refer to its tree if it came before."""
        key = id(value)
        if key in self._trees:
            first = self._trees[key]
            if first is None:
                remedy = "Refer to the outer object by a name or an index instead"
                raise UnsuitableError("it contains itself", remedy)
            return self._refer(first)
        self._trees[key] = None
        self._kept.append(value)
        if not self._is_frozen:
            self.objects[key] = value
        tree = self._trees[key] = encode(self, value)
        return tree

    def _refer(self, first: Tree) -> Tree:
        same = _node("same", None)  # `encode_blob` adds the number, once all containers are known
        self._repeated.append((same, first))
        return same

    def _within(self, parts: object, holder: str, *, hides_memory: bool = False) -> Tree:
        """Encode what a value consists of; `holder` describes it, if no state can be loaded there."""
        former = self._holder, self._is_frozen
        self._holder = self._holder or holder
        self._is_frozen = self._is_frozen or hides_memory
        self._kept.append(parts)
        tree = self._encode(parts)
        self._holder, self._is_frozen = former
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
        return _node("str", value.encode("utf-8", "surrogatepass").hex())

    def _bytes(self, value: bytes) -> Tree:
        if len(value) <= _INLINE_BYTES:
            return _node("bytes", value.hex())
        return _node("bytes", self._part(np.frombuffer(value, np.uint8), "bytes"))

    # --- containers

    def _list(self, value: Sequence[Any]) -> Tree:
        numbers = _as_numbers(value)
        if numbers is None:
            return self._items(value)
        return _node("numbers", self._part(numbers, "numbers"))

    def _tuple(self, value: tuple[Any, ...]) -> Tree:
        return _node("tuple", self._list(value))

    def _dict(self, value: dict[Any, Any]) -> Tree:
        values = list(value.values())
        if set(map(type, value)) <= {str} and is_clean("".join(value)) and "$" not in value:
            return dict(zip(value, self._items(values, value), strict=True))
        self._trail.append("_keys")
        keys = self._within(list(value), "a key")
        self._trail.pop()
        return _node("dict", [keys, self._items(values, value)])

    def _items(self, items: Sequence[Any], keys: Iterable[object] = ()) -> list[Tree]:
        """Encode items one by one, each under its index, or the name of its key."""
        trees: list[Tree] = []
        names: Sequence[str] = ()
        for i, item in enumerate(items):
            if _is_json(item):
                trees.append(item)
                continue
            names = names or child_names(keys)
            self._trail.append(names[i] if names else str(i))
            trees.append(self._special(item))
            self._trail.pop()
        return trees

    # --- arrays

    def _array(self, value: Array, holds: str = "ndarray") -> Tree:
        dtype = value.dtype
        if dtype.hasobject and not isinstance(dtype, np.dtypes.StringDType):
            return self._once(value, partial(Encoder._by_codec, codec=numpy_types.OBJECTS))
        spec = dtype_to_spec(dtype)
        key: object = id(value)
        if self._is_frozen:
            key = object()  # it is like no other: nobody sees that two are one
        elif value.size:
            # Equal views of the same memory count as one array.
            address = value.__array_interface__["data"][0]
            key = (address, value.shape, value.strides, str(spec))
        if key in self._trees:
            return self._refer(self._trees[key])
        self._kept.append(value)
        if value.size and not self._is_frozen:
            self.memory.append((tuple(self._trail), value))
        tree = self._trees[key] = _node("array", self._part(value, holds))
        return tree

    def _part(self, array: Array, holds: str) -> int:
        """Add an array to the blob's; return its index."""
        order = memory_order(array)
        if order is not None:
            array = array.transpose(order)
        self.parts.append(ArrayPart(array, order, tuple(self._trail), holds))
        return len(self.parts) - 1

    # --- by codecs and classes

    def _by_codec(self, value: Any, codec: OwnCodec | LibraryType) -> Tree:
        parts = _call(partial(codec.encode, value), "reading it")
        if codec.name == "torch.Tensor":
            return _node(codec.name, self._tensor(value, parts))
        holder = "" if codec.keeps_states else f"a {codec.name}"
        return _node(codec.name, self._within(parts, holder, hides_memory=codec.hides_memory))

    def _tensor(self, value: Any, parts: dict[str, Any]) -> Tree:
        """Encode a tensor's parts: its array lies where the tensor lies, as other readers expect."""
        if self._holder != _STATE:  # load_state_dict() copies a state to the object's device
            check_device(value)
        return {**parts, "data": self._array(parts["data"], f"torch.Tensor of {parts['dtype']}")}

    def _by_users_codec(self, value: Any, codec: Codec) -> Tree:
        subject = f"its codec {codec.name!r}"
        parts = _call(partial(codec.encode, value), f"the encode function of {subject}")
        if type(parts) is type(value):
            raise UnsuitableError(f"{subject} returned a value of the same type")
        return _node("codec", [codec.name, self._within(parts, f"the output of {subject}")])

    def _state(self, value: Any) -> Tree:
        if self._holder:
            reason = f"it is in {self._holder}, so its state_dict() could not be loaded into it"
            raise UnsuitableError(reason)
        state = _call(value.state_dict, "its state_dict()")
        self.has_state = True
        return _node("state", [name_class(value), self._within(state, _STATE)])

    def _instance(self, value: Any) -> Tree:
        cls: Any = type(value)
        state = self._within(state_of(value), cls.__name__)
        return _node("instance", [self._name_class(cls), list(field_names(cls)), state])

    def _pickle(self, value: Any) -> Tree:
        pickler = PicklerByName(self._name_class)
        pickled = _call(partial(pickler.pickle, value), "pickling it")
        data = self._part(np.frombuffer(pickled, np.uint8), "pickle")
        return _node("pickle", [data, list(pickler.names)])


_RULES: Mapping[type, _Rule] = {
    int: _Rule(Encoder._int, False),
    float: _Rule(Encoder._float, False),
    str: _Rule(Encoder._text, False),
    bytes: _Rule(Encoder._bytes, False),
    list: _Rule(Encoder._list, True),
    tuple: _Rule(Encoder._tuple, False),
    dict: _Rule(Encoder._dict, True),
    np.ndarray: _Rule(Encoder._array, False),
}
"""Not bound to an encoder: in a cycle, it would keep the arrays of a save alive."""


def _node(kind: str, tree: Tree) -> Tree:
    return {"$": kind, "of": tree}


def _call(encode: Callable[[], Any], subject: str) -> Any:
    """Call code of a user or a library, which messages call `subject`."""
    try:
        return encode()
    except UnsuitableError:
        raise
    except Exception as error:
        raise UnsuitableError(f"{subject} raised {type(error).__name__}: {error}") from error


def _as_numbers(items: Sequence[Any]) -> Array | None:
    """A long list of numbers of one type, as an array; None of others."""
    if len(items) < LEAST_PACKED:
        return None
    classes = set(map(type, items))
    dtype = _DTYPES.get(classes.pop())
    if dtype is None or classes:
        return None
    try:
        return np.array(items, dtype)
    except OverflowError:  # of an int with more than 64 bits
        return None


def _is_json(value: Any) -> bool:
    """Whether a value that is no container stands for itself in JSON."""
    cls = type(value)
    if cls is str:
        return value.isascii() or is_clean(value)
    if cls is float:
        return bool(value - value == 0)  # which is NaN for an infinity and NaN
    if cls is int:
        return -EXACT_INT <= value <= EXACT_INT  # type: ignore[no-any-return]
    return value is None or cls is bool
