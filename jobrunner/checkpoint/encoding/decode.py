"""Decode a tree and its arrays to the value that they stand for. Pure: no I/O.

A stranger may have written the tree. So nothing in it is called or imported: it chooses among the
kinds of this module, the codecs of ours and the job's, and the classes that this process has. Each
array is given to one value only, since copies of one would add up; a value refers to an earlier one by
its number.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from jobrunner.checkpoint.encoding.codecs import Codec, UnmakeableError
from jobrunner.checkpoint.encoding.dtypes import Array, Tree
from jobrunner.checkpoint.encoding.encode import OWN_CODECS
from jobrunner.checkpoint.encoding.everyday import expect, fields_of
from jobrunner.checkpoint.encoding.job_classes import (
    find_class,
    find_classes,
    make_instance,
    unpickle,
)
from jobrunner.checkpoint.encoding.libraries import LIBRARY_TYPES, LibraryType, type_named
from jobrunner.checkpoint.encoding.stateful import SavedState
from jobrunner.checkpoint.encoding.unmade import Unmade
from jobrunner.errors import CheckpointError, DefinitionError, JobRunnerError

T = TypeVar("T")

LONE_ARRAY = {"$": "array", "of": 0}
"""The tree of a blob that is an array."""

_MOST_DEPTH = 200
"""An encoder nests containers at most 150 deep, and some values are another in their container."""

_UNFINISHED: Any = object()
_BYTE = np.dtype(np.uint8)
_INT = np.dtype("<i8")
_NUMBERS = (_INT, np.dtype("<f8"), np.dtype("?"))
_NUMBERED = frozenset(
    {
        *("array", "dict", "dataclass", "codec", "state", "numbers", "rows", "ragged", "records"),
        *(codec.name for codec in OWN_CODECS if codec.is_numbered),
        *(library_type.name for library_type in LIBRARY_TYPES),
    }
)
"""Kinds of objects to which `same` can refer, beside lists and dicts."""
_ROW_CLASSES: Mapping[str, type] = {"list": list, "tuple": tuple, "set": set}


class InvalidTreeError(ValueError):
    """A tree that no encoder produces; names the node."""


class Decoder:
    """Decodes one blob, which messages call `where`.

    Parameters
    ----------
    array : callable
        Returns the i-th array of the blob, whole; raises LookupError if there is none.
    codecs : sequence of Codec
        Those of users.
    allow_pickle : bool
        Whether pickles are loaded, which runs code from the checkpoint.
    leaf : callable, optional
        Returns what stands for an array where the value is that array, such as a lazy array. Then
        `Unmade` stands for values of libraries that this process lacks.
    where : str
        Names the blob in messages.
    keeps_states : bool
        Whether an object saved by its ``state_dict()`` becomes a `SavedState`, else the state.
    classes : mapping, optional
        The job's classes by name, which must have all that the tree names. By default those of this
        process, with `Unmade` in place of values of others.
    """

    def __init__(
        self,
        array: Callable[[int], Array],
        codecs: Sequence[Codec] = (),
        *,
        allow_pickle: bool = False,
        leaf: Callable[[int], object] | None = None,
        where: str = "",
        keeps_states: bool = False,
        classes: Mapping[str, type] | None = None,
    ) -> None:
        self.has_states = False  # whether the decoded value contains a `SavedState`
        self._array = array
        self._leaf = leaf or array
        self._codecs = {codec.name: codec for codec in codecs}
        self._allow_pickle = allow_pickle
        self._where = where
        self._keeps_states = keeps_states
        self._is_lazy = leaf is not None
        self._classes = classes
        self._used: set[int] = set()  # arrays
        self._made: list[Any] = []  # numbered objects, in the order of the tree
        self._depth = 0
        self._num_codecs = 0  # around the present value; inside of one, arrays are whole

    def decode(self, tree: Tree) -> Any:
        """Decode a tree; raises `InvalidTreeError` if no encoder produces it.

        Raises `DefinitionError` if it needs a codec that is not registered, or unpickling that is
        not allowed; `CheckpointError` if a codec or the class of a pickled object raised, or this
        platform lacks a dtype.
        """
        cls = type(tree)
        if cls is not list and cls is not dict:
            return tree
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise InvalidTreeError(f"values are nested more than {_MOST_DEPTH} deep")
        try:
            if cls is dict and "$" in tree:
                value = self._decode_node(tree)
            else:
                number = self._reserve()
                value = self._items(tree) if cls is list else self._plain_dict(tree)
                self._made[number] = value
        except RecursionError:
            raise InvalidTreeError("values are nested too deep") from None
        self._depth -= 1
        return value

    def _decode_node(self, tree: dict[str, Tree]) -> Any:
        kind, content = tree["$"], tree.get("of")
        try:
            if len(tree) != 2 or type(kind) is not str:
                raise ValueError("expected the fields `$` and `of`")
            number = self._reserve() if kind in _NUMBERED else None
            method = _KINDS.get(kind)
            if method is not None:
                value = method(self, content)
            elif kind in _MANY:
                value = self._items(tree)
            else:
                value = self._by_codec(kind, content)
            if number is not None:
                self._made[number] = value
            return value
        except (JobRunnerError, InvalidTreeError, RecursionError):
            raise
        except UnmakeableError as error:
            raise self._undecodable(error) from error
        except Exception as error:
            raise InvalidTreeError(f"invalid node of kind {kind!r:.80}: {error}") from error

    def _reserve(self) -> int:
        """Take the next number, before those of what the object contains."""
        self._made.append(_UNFINISHED)
        return len(self._made) - 1

    def _undecodable(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self._where} is whole, but cannot be decoded: {type(error).__name__}: {error}. Fix "
            f"its codec's decode function or the class that it unpickles, or read it on a platform "
            f"that has its dtype."
        )

    # --- arrays

    def _take(self, i: object, get: Callable[[int], T]) -> T:
        """Return an array, to one node only, or their copies add up."""
        index = expect(int, i)
        if index < 0:
            raise ValueError(f"there is no array {index}")
        if index in self._used:
            raise ValueError(f"array {index} is that of another node")
        self._used.add(index)
        return get(index)

    def _flat(self, i: object, *dtypes: np.dtype[Any]) -> Array:
        """Return an array that must be flat and of one of these dtypes: others may hold addresses."""
        array = self._take(i, self._array)
        if array.dtype not in dtypes or array.ndim != 1:
            shape = list(array.shape)
            raise TypeError(f"array {i} is {array.dtype}{shape}, expected {dtypes[0]}")
        return array

    def _lone_array(self, i: Tree) -> Any:
        return self._take(i, self._array if self._num_codecs else self._leaf)

    def _data(self, content: Tree) -> bytes:
        """Return bytes that are hexadecimal digits, or an array."""
        if isinstance(content, str):
            return bytes.fromhex(content)
        return self._flat(content, _BYTE).tobytes()

    # --- plain values

    def _same(self, number: Tree) -> Any:
        if not 0 <= expect(int, number) < len(self._made):
            raise ValueError(f"there is no object {number}")
        value = self._made[number]
        if value is _UNFINISHED:
            raise ValueError(f"object {number} contains itself")
        return value

    def _int(self, digits: Tree) -> int:
        return int(expect(str, digits), 16)

    def _float(self, digits: Tree) -> Any:
        (value,) = struct.unpack(">d", bytes.fromhex(expect(str, digits)))
        return value

    def _text(self, content: Tree) -> str:
        return self._data(content).decode("utf-8", "surrogatepass")

    # --- containers

    def _plain_dict(self, tree: dict[str, Tree]) -> dict[str, Any]:
        items = {}
        for key, item in tree.items():
            items[key] = self.decode(item)
        return items

    def _tuple(self, tree: Tree) -> tuple[Any, ...]:
        return tuple(self._items(tree))

    def _dict(self, tree: Tree) -> Any:
        keys, values = (self._items(items) for items in fields_of(tree, object, object))
        return dict(zip(keys, values, strict=True))

    def _items(self, tree: Tree) -> list[Any]:
        """Decode items: those of a list, or a node for many that are alike."""
        if type(tree) is list:
            return list(map(self.decode, tree))
        if len(tree) != 2:
            raise ValueError("expected the fields `$` and `of`")
        # A level for each, or a forged tree could nest them without end.
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise InvalidTreeError(f"values are nested more than {_MOST_DEPTH} deep")
        items = _MANY[tree["$"]](self, tree["of"])
        self._depth -= 1
        return items

    # --- many items that are alike

    def _numbers(self, i: Tree) -> list[Any]:
        numbers: list[Any] = self._flat(i, *_NUMBERS).tolist()
        return numbers

    def _rows(self, tree: Tree) -> list[Any]:
        kind, trees = fields_of(tree, str, list)
        columns = list(map(self._items, trees))
        return self._make_rows(kind, zip(*columns, strict=True))

    def _ragged(self, tree: Tree) -> list[Any]:
        kind, part, content = fields_of(tree, str, int, object)
        lengths = self._flat(part, _INT).tolist()
        items = self._items(content)
        if min(lengths, default=0) < 0 or sum(lengths) != len(items):
            raise ValueError("the lengths of the rows are not those of their items")
        remaining = iter(items)
        return self._make_rows(kind, (islice(remaining, length) for length in lengths))

    def _make_rows(self, kind: str, contents: Iterable[Iterable[Any]]) -> list[Any]:
        cls = _ROW_CLASSES[kind]
        rows: list[Any] = list(map(cls, contents))
        if cls is not tuple:
            self._made += rows
        return rows

    def _records(self, tree: Tree) -> list[Any]:
        keys, trees = fields_of(tree, list, list)
        if set(map(type, keys)) != {str} or len(trees) != len(keys):
            raise ValueError("records have a text for each of their columns")
        columns = list(map(self._items, trees))
        records = [dict(zip(keys, values, strict=True)) for values in zip(*columns, strict=True)]
        self._made += records
        return records

    # --- by codecs

    def _parts(self, tree: Tree) -> Any:
        """Decode what a codec makes a value of, with whole arrays."""
        self._num_codecs += 1
        parts = self.decode(tree)
        self._num_codecs -= 1
        return parts

    def _by_codec(self, kind: str, tree: Tree) -> Any:
        library_type = type_named(kind)
        if library_type is not None:
            return self._by_library(library_type, self._parts(tree))
        codec = OWN_CODECS.named(kind)
        if codec is None:
            raise DefinitionError(
                f"{self._where} contains a value of kind {kind!r:.80}, which this version of "
                f"jobrunner cannot read. Read it with the version that wrote it, or a later one."
            )
        return codec.decode(self._parts(tree))

    def _by_library(self, kind: LibraryType, parts: Any) -> Any:
        try:
            return kind.decode(parts)
        except Exception as error:
            if self._is_lazy:  # it, or a value that it contains, may need what is missing
                return Unmade(kind.name, parts)
            if isinstance(error, ImportError):
                missing = (error.name or kind.library).partition(".")[0]
                raise DefinitionError(
                    f"{self._where} contains {kind.name}, but {missing} cannot be imported "
                    f"({error}). Install it (pip install {missing}). Its arrays can be read "
                    f"without it: manager.open(epoch)[node][blob].parts."
                ) from error
            raise CheckpointError(
                f"{self._where} is whole, but {kind.library} cannot make {kind.name} of it: "
                f"{type(error).__name__}: {error}. Read it with the version of {kind.library} that "
                f"saved it, or a later one."
            ) from error

    def _by_users_codec(self, tree: Tree) -> Any:
        name, content = fields_of(tree, str, object)
        codec = self._codecs.get(name)
        if codec is None:
            raise DefinitionError(
                f"{self._where} was saved by the codec {name!r}, which is not registered. "
                f"Register it first: register_codec(..., name={name!r})."
            )
        return self._call(partial(codec.decode, self._parts(content)))

    def _call(self, make: Callable[[], Any]) -> Any:
        """Call code of a user."""
        try:
            return make()
        except JobRunnerError:
            raise
        except Exception as error:
            raise self._undecodable(error) from error

    # --- by classes

    def _state(self, tree: Tree) -> Any:
        cls, content = fields_of(tree, str, object)
        state = self.decode(content)
        if not self._keeps_states:
            return state
        self.has_states = True
        return SavedState(cls, state)

    def _instance(self, tree: Tree, kind: str) -> Any:
        name, names, content = fields_of(tree, str, list, dict)
        for field in names:
            expect(str, field)
        state = expect(dict, self.decode(content))
        cls = self._find_class(name)
        if cls is None:
            return Unmade(name, state)
        return make_instance(kind, cls, names, state, self._where)

    def _find_class(self, name: str) -> type | None:
        """Find a class of the job; None if `Unmade` can stand for its values."""
        if self._classes is None:
            return find_class(name)
        if name not in self._classes:
            find_classes([name], self._where)  # raises, unless imported since
        return self._classes.get(name) or find_class(name)

    def _pickle(self, tree: Tree) -> Any:
        i, buffers, _ = fields_of(tree, int, list, list)
        if not self._allow_pickle:
            raise DefinitionError(
                f"{self._where} contains a pickle, and unpickling runs code from the checkpoint. "
                f"If you trust its author, pass allow_pickle=True to the checkpoint manager "
                f"(--allow-pickle)."
            )
        data = self._flat(i, _BYTE).tobytes()
        memory = [self._flat(place, _BYTE) for place in buffers]
        return self._call(partial(unpickle, data, memory, self._find_class))


_KINDS: Mapping[str, Callable[[Decoder, Any], Any]] = {
    "array": Decoder._lone_array,
    "same": Decoder._same,
    "int": Decoder._int,
    "float": Decoder._float,
    "str": Decoder._text,
    "bytes": Decoder._data,
    "tuple": Decoder._tuple,
    "dict": Decoder._dict,
    "state": Decoder._state,
    "enum": partial(Decoder._instance, kind="enum"),
    "namedtuple": partial(Decoder._instance, kind="namedtuple"),
    "dataclass": partial(Decoder._instance, kind="dataclass"),
    "codec": Decoder._by_users_codec,
    "pickle": Decoder._pickle,
}
"""Kinds that are no codecs of ours."""

_MANY: Mapping[str, Callable[[Decoder, Any], list[Any]]] = {
    "numbers": Decoder._numbers,
    "rows": Decoder._rows,
    "ragged": Decoder._ragged,
    "records": Decoder._records,
}
"""Each a list of items that are alike."""
