"""Decode a tree and its arrays to the value that they stand for. Pure: no I/O."""

from __future__ import annotations

import collections
import inspect
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from jobrunner.checkpoint.encoding import classes, column_decode, everyday, numpy_values
from jobrunner.checkpoint.encoding.classes import unpickle
from jobrunner.checkpoint.encoding.codecs import Codec
from jobrunner.checkpoint.encoding.dtypes import Array, Tree, UnsupportedDtypeError
from jobrunner.checkpoint.encoding.libraries import decode_tensor, decode_value
from jobrunner.checkpoint.encoding.outline import (
    OutlinedError,
    ValueOutline,
    outline_array,
    outline_codec,
    outline_pickle,
    outline_row,
    outline_tensor,
    outlined,
)
from jobrunner.checkpoint.encoding.schema import Count, described
from jobrunner.checkpoint.encoding.stateful import SavedState
from jobrunner.errors import CheckpointError, DefinitionError, JobRunnerError

T = TypeVar("T")


class InvalidTreeError(ValueError):
    """A tree that no encoder produces; names the node."""


_INVALID = (
    *(ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    struct.error,
)
"""What NumPy, PyTorch and Python raise if the fields of a node do not fit together."""

_UNFINISHED: Any = object()
_MOST_SHOWN_BITS = 4096  # Python does not write longer ints as text

_MOST_DEPTH = 250
"""An encoder nests containers at most 150 deep, and some values are another in their container."""


class Decoder:
    """Decodes one blob, which messages call `where`.

    The parameters of a kind's method are the fields of its nodes, checked before the call.
    `array` returns the i-th array part, or raises IndexError; `leaf` a stand-in for it where the
    value is that array; with `is_outline` wherever an array is. With `keeps_states`, an object saved
    by its ``state_dict()`` becomes a `SavedState`, else the state. `classes` are those of the job,
    by name, which must have all that the tree names; None: those of this process, with a
    `SavedObject` in place of others.
    """

    kinds_of_nodes: Mapping[str, tuple[Any, Callable[..., Any]]]  # in columns

    def __init__(
        self,
        array: Callable[[int], Array],
        codecs: Sequence[Codec] = (),
        *,
        allow_pickle: bool = False,
        leaf: Callable[[int], object] | None = None,
        where: str = "",
        keeps_states: bool = False,
        is_outline: bool = False,
        classes: Mapping[str, type] | None = None,
    ) -> None:
        self.part = self._once(array)
        self._codecs = {codec.name: codec for codec in codecs}
        self._allow_pickle = allow_pickle
        self.leaf = self._once(leaf) if leaf else self.part
        self.where = where
        self._classes = classes
        self._used: set[int] = set()  # arrays
        self._depth = 0
        self._made: list[Any] = []  # objects with an identity, in the order of the tree
        self.blocks: list[Sequence[Any]] = []  # rows with an identity, see `columns`
        self._keeps_states = keeps_states
        self.is_outline = is_outline
        self.is_lazy = leaf is not None
        self.lacks_library = False
        self.has_states = False  # whether the decoded value contains a `SavedState`

    def decode(self, item: Tree) -> Any:
        """Decode a tree; raises `InvalidTreeError` if no encoder produces it.

        Raises `DefinitionError` if it needs a codec that is not registered, or unpickling that is
        not allowed; `CheckpointError` if a codec or the class of a pickled object raised, or this
        platform lacks a dtype.
        """
        cls = type(item)
        if cls is not list and cls is not dict:
            return item
        if self._depth == _MOST_DEPTH:
            raise InvalidTreeError(f"values are nested more than {_MOST_DEPTH} deep")
        self._depth += 1
        value = self._decode_list(item) if cls is list else self._decode_dict(item)
        self._depth -= 1
        return value

    def _decode_list(self, item: list[Tree]) -> list[Any]:
        number = len(self._made)
        self._made.append(_UNFINISHED)
        self._made[number] = made = list(map(self.decode, item))
        return made

    def _decode_dict(self, item: dict[str, Tree]) -> Any:
        kind = item.get("$")
        if kind is None:
            number = len(self._made)
            self._made.append(_UNFINISHED)
            self._made[number] = result = {key: self.decode(it) for key, it in item.items()}
            return result
        try:
            if kind == "tuple" and len(item) == 2 and type(item.get("items")) is list:
                return tuple(map(self.decode, item["items"]))  # as below; there may be very many
            if kind in _KINDS:
                fields_type, method = _KINDS[kind]
                if self.is_outline:
                    method = outlined(kind, _OUTLINES.get(kind, method))
                fields = msgspec.structs.astuple(msgspec.convert(item, fields_type))
                if kind in _PLAIN:
                    return method(self, *fields)
                if kind in column_decode.BLOCKS:
                    block = len(self.blocks)  # before those of its items
                    self.blocks.append(())
                    self.blocks[block] = rows = method(self, *fields)
                    return rows
                number = len(self._made)  # before those of its items
                self._made.append(_UNFINISHED)
                self._made[number] = value = method(self, *fields)
                return value
        except (JobRunnerError, InvalidTreeError):
            raise
        except UnsupportedDtypeError as error:
            raise self.undecodable(error) from error
        except _INVALID as error:
            raise InvalidTreeError(f"invalid node of kind {kind!r}: {error}") from error
        raise DefinitionError(
            f"{self.where} contains a value of kind {kind!r}, which this version of jobrunner "
            f"cannot read. Read it with the version that wrote it, or a later one."
        )

    def decode_as(self, cls: type[T], item: Tree) -> T:
        """Decode a tree that must stand for a value of exactly this type."""
        value = self.decode(item)
        if type(value) is not cls:
            if type(value) is ValueOutline:
                raise OutlinedError(value.about.get("value", value.text))
            raise TypeError(f"expected {cls.__name__}, found {type(value).__name__}")
        return value

    def whole(self, item: Tree) -> Any:
        """Decode a tree with whole arrays, also where others are lazy."""
        before, self.leaf = self.leaf, self.part
        try:
            return self.decode(item)
        finally:
            self.leaf = before

    def array(self, item: Tree) -> Array:
        """Decode a tree that must stand for an array, to a whole one."""
        array = self.whole(item)
        if type(array) is not np.ndarray:
            raise TypeError(f"expected an array, found {type(array).__name__}")
        return array

    def find_class(self, name: str) -> type | None:
        """Find a class of the job; None if a `SavedObject` can stand for its values."""
        if self._classes is None:
            return classes.find_class(name)
        if name not in self._classes:
            classes.find_classes([name], self.where)  # raises, unless imported since
        return self._classes.get(name) or classes.find_class(name)

    # --- parts

    def _once(self, array: Callable[[int], T]) -> Callable[[int], T]:
        """Return `array`, which now returns each array to one node only, or their copies add up."""

        def take(i: int) -> T:
            if i in self._used:
                raise ValueError(f"array {i} is that of another node")
            self._used.add(i)
            return array(i)

        return take

    def plain(self, at: int, dtype: np.dtype[Any], ndim: int | None = None) -> Array:
        """Return an array part, which must be of this dtype: others may hold addresses."""
        array = self.part(at)
        if array.dtype != dtype or (ndim is not None and array.ndim != ndim):
            raise TypeError(f"array {at} is {array.dtype}{list(array.shape)}, expected {dtype}")
        return array

    def _data(self, digits: str | None, at: int | None) -> bytes:
        if (digits is None) == (at is None):
            raise ValueError("expected either `hex` or `at`")
        if at is None:
            return bytes.fromhex(digits)  # type: ignore[arg-type]
        return self.plain(at, _BYTE, 1).tobytes()

    def undecodable(self, error: Exception) -> CheckpointError:
        """The error for a value that is whole and cannot be made here."""
        return CheckpointError(
            f"{self.where} is whole, but cannot be decoded: {type(error).__name__}: {error}. Fix "
            f"its codec's decode function or the class that it unpickles, or read it on a platform "
            f"that has its dtype."
        )

    # --- values without an identity

    def _same(self, number: Count) -> Any:
        found = self._made[number]
        if found is _UNFINISHED:
            raise ValueError(f"object {number} contains itself")
        if self.is_outline and not hasattr(found, "shape"):
            return ValueOutline("same", {"value": "(as before)"}, "(as before)")
        return found

    def _int(self, digits: str) -> Any:
        number = int(digits, 16)
        if self.is_outline and number.bit_length() > _MOST_SHOWN_BITS:
            size = f"{number.bit_length()} bits"
            return ValueOutline("int", {"value": size}, f"int of {size}")
        return number

    def _tuple(
        self, items: list[Tree] | None = None, at: Count | None = None, of: Tree = None
    ) -> tuple[Any, ...]:
        if items is None:
            return tuple(self._items(at, of))
        if at is not None or of is not None:
            raise ValueError("expected only one of `items`, `at` and `of`")
        return tuple(map(self.decode, items))

    def _items(self, at: int | None, of: Tree) -> list[Any]:
        if (at is None) == (of is None):
            raise ValueError("expected either `at` or `of`")
        if of is not None:
            return column_decode.decode_items(self, of)
        return column_decode.decode_numbers(self, at)  # type: ignore[arg-type]  # it is not None

    # --- values with an identity

    def _dict(self, items: list[Tree] | None = None, keys: Tree = None, of: Tree = None) -> Any:
        return self._mapping(dict, items, keys, of)

    def _mapping(self, cls: Any, items: list[Tree] | None, keys: Tree, of: Tree) -> Any:
        if items is None:
            return column_decode.decode_dict(self, keys, of, cls)
        if keys is not None or of is not None:
            raise ValueError("expected either `items`, or `keys` and `of`")
        return cls({self.decode(key): self.decode(item) for key, item in items})

    def _ordered_dict(
        self,
        items: list[Tree] | None = None,
        attributes: Tree = None,
        keys: Tree = None,
        of: Tree = None,
    ) -> Any:
        result = self._mapping(collections.OrderedDict, items, keys, of)
        if attributes is not None:
            vars(result).update(self.decode(attributes))
        return result

    def _list(self, at: Count | None = None, of: Tree = None) -> list[Any]:
        return self._items(at, of)

    def _plain_array(self, at: Count) -> object:
        return self.leaf(at)

    def _by_codec(self, name: str, value: Tree) -> Any:
        codec = self._codecs.get(name)
        if codec is None:
            raise DefinitionError(
                f"{self.where} was saved by the codec {name!r}, which is not registered. "
                f"Register it first: register_codec(..., name={name!r})."
            )
        encoded = self.decode(value)
        try:
            return codec.decode(encoded)
        except Exception as error:
            raise self.undecodable(error) from error

    def _state(self, cls: str, value: Tree) -> Any:
        state = self.decode(value)
        if not self._keeps_states:
            return state
        self.has_states = True
        return SavedState(cls, state)

    def _pickle(
        self, digits: str | None = None, at: Count | None = None, classes: list[str] | None = None
    ) -> Any:
        data = self._data(digits, at)
        if not self._allow_pickle:
            raise DefinitionError(
                f"{self.where} contains a pickle, and unpickling runs code from the checkpoint. "
                f"If you trust its author, pass allow_pickle=True to the checkpoint manager "
                f"(--allow-pickle)."
            )
        try:
            return unpickle(data, self.find_class)
        except JobRunnerError:
            raise
        except Exception as error:
            raise self.undecodable(error) from error


def _data_as(convert: Callable[[bytes], Any]) -> Callable[..., Any]:
    """Return the method of text or bytes: ``hex`` if short, else an array of bytes."""

    def method(decoder: Decoder, digits: str | None = None, at: Count | None = None) -> Any:
        return convert(decoder._data(digits, at))

    return method


_BYTE = np.dtype(np.uint8)

_PLAIN: Mapping[str, Callable[..., Any]] = {
    "same": Decoder._same,
    "float": _data_as(lambda data: struct.unpack(">d", data)[0]),
    "complex": _data_as(lambda data: complex(*struct.unpack(">2d", data))),
    "str": _data_as(lambda data: data.decode("utf-8", "surrogatepass")),
    "bytes": _data_as(bytes),
    "np.str_": _data_as(lambda data: np.str_(data.decode("utf-8", "surrogatepass"))),
    "np.bytes_": _data_as(np.bytes_),
    **everyday.PLAIN,
    **numpy_values.PLAIN,
    **classes.PLAIN,
    **column_decode.COLUMNS,
    "row": column_decode.decode_row,
    "int": Decoder._int,
    "tuple": Decoder._tuple,
}

_WITH_IDENTITY: Mapping[str, Callable[..., Any]] = {
    **everyday.WITH_IDENTITY,
    **numpy_values.WITH_IDENTITY,
    **classes.WITH_IDENTITY,
    "dict": Decoder._dict,
    "odict": Decoder._ordered_dict,
    "list": Decoder._list,
    "bytearray": _data_as(bytearray),
    "array": Decoder._plain_array,
    "tensor": decode_tensor,
    "codec": Decoder._by_codec,
    "library": decode_value,
    "state": Decoder._state,
    "pickle": Decoder._pickle,
}


_OUTLINES: Mapping[str, Callable[..., Any]] = {
    "row": outline_row,
    "tensor": outline_tensor,
    "codec": outline_codec,
    "pickle": outline_pickle,
    "np.MaskedArray": outline_array("masked array"),
    "np.matrix": outline_array("matrix"),
    "np.recarray": outline_array("recarray"),
    "memoryview": outline_array("memoryview"),
}


def _fields_type(kind: str, method: Callable[..., Any]) -> type[msgspec.Struct]:
    _, *parameters = inspect.signature(method, eval_str=True).parameters.values()
    fields_type = msgspec.defstruct(
        kind,
        [
            (it.name, it.annotation, msgspec.NODEFAULT if it.default is it.empty else it.default)
            for it in parameters
        ],
        rename={"digits": "hex", "number": "as"},
        forbid_unknown_fields=True,
        tag_field="$",
        tag=kind,
        gc=False,
    )
    return described(fields_type)


_KINDS = {
    kind: (_fields_type(kind, method), method)
    for kind, method in {**_PLAIN, **column_decode.BLOCKS, **_WITH_IDENTITY}.items()
}
Decoder.kinds_of_nodes = {kind: _KINDS[kind] for kind in everyday.PLAIN}
