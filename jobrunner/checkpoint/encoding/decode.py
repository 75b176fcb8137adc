"""Decode a tree and its arrays to the value that they stand for. Pure: no I/O.

A stranger may have written the tree. So nothing in it is called or imported: it chooses among the
kinds of this module, the codecs of ours and the job's, and the classes that this process has. Each
array is given to one value only, since copies of one would add up; a value refers to an earlier one by
its number.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from jobrunner.checkpoint.encoding.codecs import Codec, InvalidTreeError, UnmakeableError
from jobrunner.checkpoint.encoding.dtypes import Array, Tree
from jobrunner.checkpoint.encoding.encode import OWN_CODECS, containers_of
from jobrunner.checkpoint.encoding.everyday import expect, fields_of
from jobrunner.checkpoint.encoding.job_classes import (
    find_class,
    find_classes,
    make_instance,
    unpickle,
)
from jobrunner.checkpoint.encoding.libraries import BY_NAME, LibraryType
from jobrunner.checkpoint.encoding.stateful import SavedState
from jobrunner.checkpoint.encoding.unmade import Unmade
from jobrunner.errors import CheckpointError, DefinitionError, JobRunnerError

T = TypeVar("T")

LONE_ARRAY = {"$": "array", "of": 0}
"""The tree of a blob that is an array."""

_MOST_DEPTH = 320
"""An encoder nests containers at most 150 deep, and each may be a node that holds a list."""

_BYTE = np.dtype(np.uint8)
_NUMBERS = (np.dtype("<i8"), np.dtype("<f8"), np.dtype("?"))


def whole_tree(tree: Tree, array: Callable[[int], Array]) -> Tree:
    """Return a tree that may be so long that its JSON is an array."""
    if type(tree) is not dict or tree.get("$") != "json":
        return tree
    try:
        return msgspec.json.decode(array(tree["of"]).tobytes())
    except (LookupError, TypeError, ValueError, RecursionError) as error:
        raise InvalidTreeError(f"an array that is no tree: {error}") from None


@dataclass
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

    array: Callable[[int], Array]
    codecs: Sequence[Codec] = ()
    _: KW_ONLY
    allow_pickle: bool = False
    leaf: Callable[[int], object] | None = None
    where: str = ""
    keeps_states: bool = False
    classes: Mapping[str, type] | None = None
    has_states: bool = field(default=False, init=False)  # whether it decoded a `SavedState`
    _tree: Tree = field(default=None, init=False)
    _containers: list[Tree] = field(default_factory=list, init=False)  # if it has a node `same`
    # By the `id` of the container that stands for it.
    _values: dict[int, Any] = field(default_factory=dict, init=False)
    _used: set[int] = field(default_factory=set, init=False)  # arrays
    _depth: int = field(default=0, init=False)
    # Around the present value; inside of one, arrays are whole.
    _num_codecs: int = field(default=0, init=False)

    def decode(self, tree: Tree) -> Any:
        """Decode the tree of a blob; raises `InvalidTreeError` if no encoder produces it.

        Raises `DefinitionError` if it needs a codec that is not registered, or unpickling that is
        not allowed; `CheckpointError` if a codec or the class of a pickled object raised, or this
        platform lacks a dtype.
        """
        self._tree = whole_tree(tree, self.array)
        try:
            return self._value(self._tree)
        except RecursionError:
            raise InvalidTreeError("values are nested too deep") from None

    def _value(self, tree: Tree) -> Any:
        cls = type(tree)
        if cls is not list and cls is not dict:
            return tree
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise InvalidTreeError(f"values are nested more than {_MOST_DEPTH} deep")
        value: Any
        if cls is list:
            value = list(map(self._value, tree))
        elif "$" in tree:
            value = self._node(tree)
        else:
            value = {}
            for key, item in tree.items():  # a comprehension takes a frame of the stack
                value[key] = self._value(item)
        self._depth -= 1
        # Only now: a node `same` inside of this value finds nothing here, and is refused. The tree
        # lives as long as the decoder, so no other container gets its `id`.
        self._values[id(tree)] = value
        return value

    def _node(self, tree: dict[str, Tree]) -> Any:
        kind, content = tree["$"], tree.get("of")
        try:
            if len(tree) != 2 or type(kind) is not str:
                raise ValueError("expected the fields `$` and `of`")
            method = _KINDS.get(kind)
            if method is not None:
                return method(self, content)
            return self._by_codec(kind, content)
        except (JobRunnerError, InvalidTreeError, RecursionError):
            raise
        except UnmakeableError as error:
            raise self._undecodable(error) from error
        except Exception as error:
            raise InvalidTreeError(f"invalid node of kind {kind!r:.80}: {error}") from error

    def _undecodable(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.where} is whole, but cannot be decoded: {type(error).__name__}: {error}. Fix "
            f"its codec's decode function or the class that it unpickles, or read it on a platform "
            f"that has its dtype."
        )

    # --- arrays

    def _take(self, i: object, get: Callable[[int], T]) -> T:
        """Return an array, to one node only.

        Most nodes copy it. A stranger's tree of a few bytes for each of a million nodes that name
        one array of a gigabyte would take more memory than any machine has.
        """
        index = expect(int, i)
        if index < 0:
            raise ValueError(f"there is no array {index}")
        if index in self._used:
            raise ValueError(f"array {index} is that of another node")
        self._used.add(index)
        return get(index)

    def _flat(self, i: object, *dtypes: np.dtype[Any]) -> Array:
        """Return an array that must be flat and of one of these dtypes: others may hold addresses."""
        array = self._take(i, self.array)
        if array.dtype not in dtypes or array.ndim != 1:
            shape = list(array.shape)
            raise TypeError(f"array {i} is {array.dtype}{shape}, expected {dtypes[0]}")
        return array

    def _lone_array(self, i: Tree) -> Any:
        get: Callable[[int], object] = self.array
        if self.leaf is not None and not self._num_codecs:
            get = self.leaf
        return self._take(i, get)

    # --- plain values

    def _same(self, number: Tree) -> Any:
        if not self._containers:
            self._containers = list(containers_of(self._tree))
        if not 0 <= expect(int, number) < len(self._containers):
            raise ValueError(f"there is no list or object {number}")
        container = self._containers[number]
        if id(container) not in self._values:
            raise ValueError(f"{number} contains itself, or comes later")
        return self._values[id(container)]

    def _int(self, digits: Tree) -> int:
        return int(expect(str, digits), 16)

    def _float(self, digits: Tree) -> Any:
        (value,) = struct.unpack(">d", bytes.fromhex(expect(str, digits)))
        return value

    def _text(self, digits: Tree) -> str:
        return bytes.fromhex(expect(str, digits)).decode("utf-8", "surrogatepass")

    def _bytes(self, content: Tree) -> bytes:
        if isinstance(content, str):
            return bytes.fromhex(content)
        return self._flat(content, _BYTE).tobytes()

    # --- containers

    def _numbers(self, i: Tree) -> list[Any]:
        numbers: list[Any] = self._flat(i, *_NUMBERS).tolist()
        return numbers

    def _tuple(self, tree: Tree) -> tuple[Any, ...]:
        return tuple(expect(list, self._value(tree)))

    def _dict(self, tree: Tree) -> Any:
        keys, values = map(self._value, fields_of(tree, object, list))
        return dict(zip(expect(list, keys), values, strict=True))

    # --- by codecs

    def _parts(self, tree: Tree) -> Any:
        """Decode what a codec makes a value of, with whole arrays."""
        self._num_codecs += 1
        parts = self._value(tree)
        self._num_codecs -= 1
        return parts

    def _by_codec(self, kind: str, tree: Tree) -> Any:
        library_type = BY_NAME.get(kind)
        if library_type is not None:
            return self._by_library(library_type, self._parts(tree))
        codec = OWN_CODECS.named(kind)
        if codec is None:
            raise DefinitionError(
                f"{self.where} contains a value of kind {kind!r:.80}, which this version of "
                f"jobrunner cannot read. Read it with the version that wrote it, or a later one."
            )
        return codec.decode(self._parts(tree))

    def _by_library(self, kind: LibraryType, parts: Any) -> Any:
        try:
            return kind.decode(parts)
        except Exception as error:
            if self.leaf is not None:  # it, or a value that it contains, may need what is missing
                return Unmade(kind.name, parts)
            if isinstance(error, ImportError):
                missing = (error.name or kind.library).partition(".")[0]
                raise DefinitionError(
                    f"{self.where} contains {kind.name}, but {missing} cannot be imported "
                    f"({error}). Install it (pip install {missing}). Its arrays can be read "
                    f"without it: manager.open(epoch)[node][blob].parts."
                ) from error
            raise CheckpointError(
                f"{self.where} is whole, but {kind.library} cannot make {kind.name} of it: "
                f"{type(error).__name__}: {error}. Read it with the version of {kind.library} that "
                f"saved it, or a later one."
            ) from error

    def _by_users_codec(self, tree: Tree) -> Any:
        name, content = fields_of(tree, str, object)
        for codec in self.codecs:
            if codec.name == name:
                return self._call(partial(codec.decode, self._parts(content)))
        raise DefinitionError(
            f"{self.where} was saved by the codec {name!r}, which is not registered. Register it "
            f"first: register_codec(..., name={name!r})."
        )

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
        state = self._value(content)
        if not self.keeps_states:
            return state
        self.has_states = True
        return SavedState(cls, state)

    def _instance(self, tree: Tree) -> Any:
        name, names, content = fields_of(tree, str, list, dict)
        for field_name in names:
            expect(str, field_name)
        state = expect(dict, self._value(content))
        cls = self._find_class(name)
        if cls is None:
            return Unmade(name, state)
        return make_instance(cls, names, state, self.where)

    def _find_class(self, name: str) -> type | None:
        """Find a class of the job; None if `Unmade` can stand for its values."""
        located = (self.classes or {}).get(name) or find_class(name)
        if located is None and self.classes is not None:
            find_classes([name], self.where)  # raises
        return located

    def _pickle(self, tree: Tree) -> Any:
        i, _ = fields_of(tree, int, list)
        if not self.allow_pickle:
            raise DefinitionError(
                f"{self.where} contains a pickle, and unpickling runs code from the checkpoint. "
                f"If you trust its author, pass allow_pickle=True to the checkpoint manager "
                f"(--allow-pickle)."
            )
        data = self._flat(i, _BYTE).tobytes()
        return self._call(partial(unpickle, data, self._find_class))


_KINDS: Mapping[str, Callable[[Decoder, Any], Any]] = {
    "array": Decoder._lone_array,
    "same": Decoder._same,
    "int": Decoder._int,
    "float": Decoder._float,
    "str": Decoder._text,
    "bytes": Decoder._bytes,
    "numbers": Decoder._numbers,
    "tuple": Decoder._tuple,
    "dict": Decoder._dict,
    "state": Decoder._state,
    "instance": Decoder._instance,
    "codec": Decoder._by_users_codec,
    "pickle": Decoder._pickle,
}
"""Kinds that are no codecs of ours."""
