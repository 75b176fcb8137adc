"""Encode a value as a JSON tree, and arrays that the tree refers to. Pure: no I/O.

JSON holds None, bool, small int, finite float, str, list, and dict with str keys as they are.
Everything else is a node ``{"$": kind, ...}``. ``"at"`` is the index of an array part of the blob.
Objects with an identity (list, dict, array, ...) are numbered in the order in which they appear, so
that a second reference, ``{"$": "same", "as": n}``, decodes to the same object.
"""

from __future__ import annotations

import math
import struct
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from jobrunner.checkpoint.encoding import classes, everyday, numpy_values
from jobrunner.checkpoint.encoding.codecs import (
    Codec,
    CodecTable,
    UnsuitableError,
    UnsupportedValueError,
    refusing,
)
from jobrunner.checkpoint.encoding.columns import MAX_DEPTH, Tied, encode_columns
from jobrunner.checkpoint.encoding.dtypes import (
    Array,
    ArrayPart,
    Trail,
    Tree,
    UnsupportedDtypeError,
    dtype_to_spec,
)
from jobrunner.checkpoint.encoding.libraries import (
    NotExactError,
    UnsupportedTensorError,
    encode_tensor,
    encode_value,
    find_type,
    is_tensor,
)
from jobrunner.checkpoint.encoding.stateful import has_state, name_class
from jobrunner.names import child_names, is_clean

_EXACT_INT = 1 << 53  # JSON readers in other languages lose digits of larger ints
_INLINE_CHARACTERS, _INLINE_BYTES = 4096, 1024
_STATE = "the state of another object"
_LOOP = "it contains itself"
_NO_LOOP = "Refer to the outer object by a name or an index instead"


class Encoder:
    """Encodes one blob."""

    columns = encode_columns

    def __init__(self, codecs: CodecTable | None, allow_pickle: bool) -> None:
        self.parts: list[ArrayPart] = []
        self.memory: list[tuple[Trail, Array]] = []  # each as the value holds it, with its trail
        # Mutable objects but arrays, by `id`; kept alive, so that no `id` is used twice.
        self.identities: dict[int, object] = {}
        self.has_state = False
        self.classes: dict[str, type] = {}  # that the tree refers to, by name
        self.formats = [1]  # whose readers know the nodes of the tree
        self._class_names: dict[type, str] = {}
        self.codecs = codecs
        self._allow_pickle = allow_pickle
        # Of each object with an identity; of a row in a column, its block and index.
        self.numbers: dict[object, int | tuple[int, int]] = {}
        self.num_blocks = self._count = 0
        self.inside: set[int] = set()  # containers of what is encoded, by `id`
        self._kept: list[object] = []
        self.copy: object = None  # what holds all that a value with an identity holds
        self.is_value = False  # set inside values whose memory does not matter
        self._holder = ""  # set inside values into which no state_dict() could be loaded

    def encode(self, value: Any, trail: Trail = ()) -> Tree:
        """Encode the value at `trail` in the blob; may raise `UnsupportedValueError`."""
        cls = type(value)
        if method := _ENCODERS.get(cls):
            return method(self, value, trail)
        if self.codecs is not None and (codec := self.codecs.get(cls)):
            return self._by_codec(value, trail, codec)
        if method := EVERYDAY.get(cls):
            return self._everyday(method, value, trail)
        try:
            if isinstance(value, np.generic):
                return numpy_values.encode_scalar(value)
            if is_tensor(value):
                return encode_tensor(self, value, trail, self._holder == _STATE)
        except (UnsupportedDtypeError, UnsupportedTensorError) as error:
            return self._pickle(value, trail, str(error))
        if kind := find_type(value):
            try:
                return encode_value(self, value, trail, kind)
            except NotExactError as error:
                return self._pickle(value, trail, str(error))
        if has_state(value):
            return self._state(value, trail)
        if method := classes.find_encoder(value):
            return self._everyday(method, value, trail)
        why = "there is no codec for its type"
        if isinstance(value, np.ndarray):
            why = "a subclass of ndarray would load as a plain one; save np.asarray(...) instead"
        return self._pickle(value, trail, why)

    def _everyday(self, method: EncodeMethod, value: Any, trail: Trail) -> Tree:
        if not self._allow_pickle:
            return self._everyday_exactly(method, value, trail)
        # What must be pickled inside of it is pickled with it, so that objects stay shared.
        undo = self.undoing()
        self._allow_pickle = False
        try:
            return self._everyday_exactly(method, value, trail)
        except UnsupportedValueError as error:
            why = error.why
        finally:
            self._allow_pickle = True
        undo()
        return self._pickle(value, trail, why)

    def undoing(self) -> Callable[[], None]:
        """Return the function that takes back what is encoded from now on."""
        dicts = (self.identities, self.numbers, self.classes)
        grown: tuple[Any, ...] = (self.parts, self.memory, self.formats, self._kept, *dicts)
        lengths = [*map(len, grown)]
        before = (self._count, set(self.inside), self._holder, self.has_state, self.num_blocks)

        def undo() -> None:
            for it, length in zip(grown, lengths, strict=True):
                while len(it) > length:
                    it.popitem() if isinstance(it, dict) else it.pop()
            self._count, self.inside, self._holder, self.has_state, self.num_blocks = before

        return undo

    def _everyday_exactly(self, method: EncodeMethod, value: Any, trail: Trail) -> Tree:
        if type(value) in _MUTABLE and (same := self.mutable(value, trail)):
            return same
        try:
            tree = method(self, value, trail)
        except (UnsuitableError, UnsupportedDtypeError) as error:
            raise UnsupportedValueError(trail, type(value), str(error)) from None
        self.formats.append(4)
        return tree

    def name_class(self, cls: type) -> str:
        """Return the name under which the value's class will be found again."""
        name = self._class_names[cls] = self._class_names.get(cls) or classes.name_of(cls)
        if self.classes.setdefault(name, cls) is not cls:
            raise UnsuitableError(f"there are two classes with the name {name}")
        return name

    def within(
        self, holder: str, value: object, inner: object, trail: Trail, *, is_copy: bool = False
    ) -> Tree:
        """Encode what a value consists of; `holder` describes it, if no state can be loaded there.

        With `is_copy`, `inner` holds exactly the items of `value`, which has an identity.
        """
        self._enter(value, trail)
        self.copy = inner if is_copy else None
        tree = self._encode_within(holder, inner, trail)
        self.copy = None
        self.inside.remove(id(value))
        return tree

    def children(
        self, holder: str, value: object, fields: Mapping[str, Any], trail: Trail
    ) -> dict[str, Tree]:
        """Encode the fields of a value, each under its name; see `within`."""
        self._enter(value, trail)
        trees = {
            name: self._encode_within(holder, item, (*trail, place))
            for place, (name, item) in zip(child_names(fields), fields.items(), strict=True)
        }
        self.inside.remove(id(value))
        return trees

    # --- identity

    def number(self, key: object, value: object, trail: Trail) -> Tree | None:
        """Number an object with an identity; return a ``same`` node if it has a number already."""
        if id(value) in self.inside:
            raise UnsupportedValueError(trail, type(value), _LOOP, _NO_LOOP)
        known = self.numbers.get(key)
        if isinstance(known, tuple):
            return {"$": "row", "of": known[0], "at": known[1]}
        if known is not None:
            return {"$": "same", "as": known}
        self.numbers[key] = self._count
        self._count += 1
        self._kept.append(value)
        return None

    def mutable(self, value: object, trail: Trail) -> Tree | None:
        """Number a mutable object; return a ``same`` node if it has a number already."""
        same = self.number(id(value), value, trail)
        if same is None and not self.is_value:
            self.identities[id(value)] = value
        return same

    def add_blocks(self, num_blocks: int, tied: Tied) -> None:
        """Count columns of mutable rows; `tied` are those to which something else may refer."""
        self.num_blocks = num_blocks
        for key, (block, place, row) in tied.items():
            self.numbers[key] = (block, place)
            self._kept.append(row)
            if not self.is_value:
                self.identities[key] = row

    def _object(self, value: object, trail: Trail) -> Tree | None:
        """Number an object of an unknown class, which counts as immutable if it is hashable."""
        can_change = type(value).__hash__ in (None, object.__hash__)
        if can_change and not isinstance(value, type | types.FunctionType):
            return self.mutable(value, trail)
        return self.number(id(value), value, trail)

    # --- plain values

    def text(self, value: str, trail: Trail) -> Tree:
        """Encode a str."""
        if len(value) > _INLINE_CHARACTERS:
            data = np.frombuffer(value.encode("utf-8", "surrogatepass"), np.uint8)
            return {"$": "str", "at": self.part(data, trail, "str")}
        if is_clean(value):
            return value
        return {"$": "str", "hex": value.encode("utf-8", "surrogatepass").hex()}

    def _data(self, kind: str, data: bytes, trail: Trail) -> Tree:
        if len(data) <= _INLINE_BYTES:
            return {"$": kind, "hex": data.hex()}
        return {"$": kind, "at": self.part(np.frombuffer(data, np.uint8), trail, kind)}

    # --- containers

    def _enter(self, value: object, trail: Trail) -> None:
        """Enter a level of nesting, until removed from `inside`; refuses cycles and excessive depth."""
        if id(value) in self.inside:
            raise UnsupportedValueError(trail, type(value), _LOOP, _NO_LOOP)
        if len(self.inside) >= MAX_DEPTH:
            why = f"containers are nested more than {MAX_DEPTH} deep"
            raise UnsupportedValueError(trail[:8], type(value), why, "Store it less deep")
        self.inside.add(id(value))

    def _list(self, value: list[Any], trail: Trail) -> Tree:
        return self.mutable(value, trail) or self._sequence("list", value, trail)

    def _sequence(self, kind: str, value: Sequence[Any], trail: Trail) -> Tree:
        if tree := self.columns(kind, value, {"of": value}, trail):
            return tree
        self._enter(value, trail)
        trees = [self.encode(item, (*trail, str(i))) for i, item in enumerate(value)]
        self.inside.remove(id(value))
        return trees if kind == "list" else {"$": "tuple", "items": trees}

    def _dict(self, value: dict[Any, Any], trail: Trail) -> Tree:
        if same := self.mutable(value, trail):
            return same
        kind = "dict" if type(value) is dict else "odict"
        tree = self.columns(kind, value, {"keys": value, "of": value.values()}, trail)
        self._enter(value, trail)
        tree = tree or self._dict_items(kind, value, trail)
        if kind == "odict" and vars(value):  # where torch keeps a state_dict's versions
            tree["attributes"] = self.encode(vars(value), (*trail, "_attributes"))
        self.inside.remove(id(value))
        return tree

    def _dict_items(self, kind: str, value: dict[Any, Any], trail: Trail) -> dict[str, Tree]:
        named = zip(child_names(value), value.items(), strict=True)
        if kind == "dict" and _are_plain_keys(value):
            return {key: self.encode(item, (*trail, name)) for name, (key, item) in named}
        items = []
        for i, (name, (key, item)) in enumerate(named):
            first = self._encode_within("a key", key, (*trail, f"_{i}_key"))
            items.append([first, self.encode(item, (*trail, name))])
        return {"$": kind, "items": items}

    # --- arrays

    def array(self, value: Array, trail: Trail) -> Tree:
        """Encode an array."""
        try:
            if value.dtype.metadata:
                return numpy_values.encode_noted(self, value, trail)
            if value.dtype == object:
                return numpy_values.encode_objects(self, value, trail)
            spec = value.dtype.str if value.dtype.isbuiltin == 1 else dtype_to_spec(value.dtype)
            if not value.dtype.itemsize:
                numpy_values.check_hollow(value)
        except UnsupportedDtypeError as error:
            return self._pickle(value, trail, str(error))
        if same := self.view(value, str(spec), trail):
            return same
        if value.dtype.itemsize == 0:
            return {"$": "hollow", "dtype": spec, "shape": list(value.shape)}
        if isinstance(value.dtype, np.dtypes.StringDType) and hasattr(value.dtype, "na_object"):
            return numpy_values.encode_gaps(self, value, spec, trail)
        return {"$": "array", "at": self.part(value, trail, "ndarray")}

    def view(self, value: Array, holds: str, trail: Trail) -> Tree:
        """Number an array; equal views of the same memory count as one array."""
        if self.is_value:
            return self.number(object(), value, trail)
        key: object = id(value)
        if value.size and value.itemsize:
            key = (value.__array_interface__["data"][0], value.shape, value.strides, holds)
            if key not in self.numbers:
                self.memory.append((trail, value))
        return self.number(key, value, trail)

    def part(self, array: Array, trail: Trail, holds: str) -> int:
        """Add an array to the blob's; return its index."""
        order = None if array.flags.c_contiguous else numpy_values.memory_order(array)
        data = array if order is None else array.transpose(order)
        self.parts.append(ArrayPart(data, order, trail, holds))
        return len(self.parts) - 1

    # --- anything else

    def _by_codec(self, value: object, trail: Trail, codec: Codec) -> Tree:
        if same := self._object(value, trail):
            return same
        with refusing(value, trail, f"the encode function of its codec {codec.name!r}"):
            inner = codec.encode(value)
        if type(inner) is type(value):
            why = f"its codec {codec.name!r} returned a value of the same type"
            raise UnsupportedValueError(trail, type(value), why)
        tree = self.within(f"the output of its codec {codec.name!r}", value, inner, trail)
        return {"$": "codec", "name": codec.name, "value": tree}

    def _state(self, value: Any, trail: Trail) -> Tree:
        if same := self.mutable(value, trail):
            return same
        if self._holder:
            why = f"it is in {self._holder}, so its state_dict() could not be loaded into it"
            raise UnsupportedValueError(trail, type(value), why)
        with refusing(value, trail, "its state_dict()"):
            state = value.state_dict()
        self.has_state = True
        self._kept.append(state)
        tree = self.within(_STATE, value, state, trail)
        return {"$": "state", "cls": name_class(value), "value": tree}

    def _encode_within(self, holder: str, value: object, trail: Trail) -> Tree:
        before, self._holder = self._holder, self._holder or holder
        tree = self.encode(value, trail)
        self._holder = before
        return tree

    def _pickle(self, value: object, trail: Trail, why: str) -> Tree:
        if not self._allow_pickle:
            raise UnsupportedValueError(trail, type(value), why)
        if same := self._object(value, trail):
            return same
        with refusing(value, trail, "pickling it"):
            data, named = classes.pickle_by_name(value, self.name_class)
        tree = self._data("pickle", data, trail)
        if named:
            self.formats.append(4)
            tree["classes"] = named
        return tree


_ENCODERS: dict[type, Callable[[Encoder, Any, Trail], Tree]] = {
    type(None): lambda _, value, trail: value,
    bool: lambda _, value, trail: value,
    int: lambda _, v, trail: v if abs(v) <= _EXACT_INT else {"$": "int", "hex": hex(v)},
    float: lambda _, v, trail: v if math.isfinite(v) else {"$": "float", "hex": _bits(v)},
    complex: lambda _, value, trail: {"$": "complex", "hex": _bits(value.real, value.imag)},
    str: Encoder.text,
    bytes: lambda encoder, value, trail: encoder._data("bytes", value, trail),
    bytearray: lambda encoder, value, trail: (
        encoder.mutable(value, trail) or encoder._data("bytearray", bytes(value), trail)
    ),
    list: Encoder._list,
    tuple: lambda encoder, value, trail: encoder._sequence("tuple", value, trail),
    dict: Encoder._dict,
    OrderedDict: Encoder._dict,
    np.ndarray: Encoder.array,
}

EncodeMethod: TypeAlias = Callable[[Encoder, Any, Trail], Tree]

EVERYDAY: dict[type, EncodeMethod] = {**everyday.ENCODERS, **numpy_values.ENCODERS}
_MUTABLE = everyday.MUTABLE | numpy_values.MUTABLE


def _are_plain_keys(keys: Collection[Any]) -> bool:
    """Whether an object in JSON can have these keys."""
    is_plain = set(map(type, keys)) <= {str} and "$" not in keys
    return is_plain and (all(map(str.isascii, keys)) or is_clean("".join(keys)))


def _bits(*values: float) -> str:
    return struct.pack(f">{len(values)}d", *values).hex()
