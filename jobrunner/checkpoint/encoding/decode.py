"""Decode a tree and its arrays to the value that they stand for. Pure: no I/O."""

from __future__ import annotations

import collections
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import msgspec
import numpy as np

from jobrunner.checkpoint.encoding import tensors, tree
from jobrunner.checkpoint.encoding.codecs import Codec
from jobrunner.checkpoint.encoding.dtypes import Array, UnsupportedDtypeError, dtype_from_spec
from jobrunner.checkpoint.encoding.stateful import SavedState
from jobrunner.errors import CheckpointError, DefinitionError, JobRunnerError


class InvalidTreeError(ValueError):
    """A tree that no encoder produces; names the node."""


_INVALID = (
    *(ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    struct.error,
)
"""What NumPy, PyTorch and Python raise if the fields of a node do not fit together."""


class Decoder:
    """Decodes one blob, which messages call `where`.

    `array` returns the i-th array part, or raises IndexError; `leaf` a stand-in for it where the
    value is that array. With `keeps_states`, an object saved by its ``state_dict()`` becomes a
    `SavedState`, else the state.
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
    ) -> None:
        self._array = array
        self._codecs = {codec.name: codec for codec in codecs}
        self._allow_pickle = allow_pickle
        self._leaf = leaf or array
        self._where = where
        self._made: list[Any] = []  # objects with an identity, in the order of the tree
        self._keeps_states = keeps_states
        self.has_states = False  # whether the decoded value contains a `SavedState`

    def decode(self, item: tree.Tree) -> Any:
        """Decode a tree.

        Raises
        ------
        InvalidTreeError
            No encoder produces such a tree.
        DefinitionError
            It needs a codec that is not registered, or unpickling, which is not allowed.
        CheckpointError
            The codec or the class of a pickled object raised, or this platform lacks a dtype.
        """
        cls = type(item)
        if cls is list:
            made: list[Any] = []
            self._made.append(made)
            made += map(self.decode, item)
            return made
        if cls is not dict:
            return item
        kind = item.get("$")
        if kind is None:
            result: dict[Any, Any] = {}
            self._made.append(result)
            for key, value in item.items():
                result[key] = self.decode(value)
            return result
        try:
            if kind in _PLAIN:
                node_type, method = _PLAIN[kind]
                return method(self, msgspec.convert(item, node_type))
            if kind in _WITH_IDENTITY:
                node_type, method = _WITH_IDENTITY[kind]
                node = msgspec.convert(item, node_type)
                number = len(self._made)  # before those of its items
                self._made.append(None)
                self._made[number] = value = method(self, node)
                return value
        except (JobRunnerError, InvalidTreeError):
            raise
        except UnsupportedDtypeError as error:
            raise self._undecodable(error) from error
        except _INVALID as error:
            raise InvalidTreeError(f"invalid node of kind {kind!r}: {error}") from error
        raise DefinitionError(
            f"{self._where} contains a value of kind {kind!r}, which this version of jobrunner "
            f"cannot read. Read it with the version that wrote it, or a later one."
        )

    # --- parts

    def _data(self, node: tree.DataNode) -> bytes:
        return bytes.fromhex(node.hex) if node.at is None else self._array(node.at).tobytes()  # type: ignore[arg-type]  # one of both

    def _undecodable(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self._where} is whole, but cannot be decoded: {type(error).__name__}: {error}. Fix "
            f"its codec's decode function or the class that it unpickles, or read it on a platform "
            f"that has its dtype."
        )

    # --- values without an identity

    def _same(self, node: tree.SameNode) -> Any:
        return self._made[node.index]

    def _tuple(self, node: tree.TupleNode) -> tuple[Any, ...]:
        if node.items is None:
            return tuple(self._array(node.at).tolist())  # type: ignore[arg-type]  # one of both
        return tuple(map(self.decode, node.items))

    def _scalar(self, node: tree.ScalarNode) -> Any:
        dtype = dtype_from_spec(node.dtype)
        if not dtype.itemsize:
            return np.zeros((), dtype)[()]
        (scalar,) = np.frombuffer(bytearray.fromhex(node.hex), dtype)
        return scalar

    # --- values with an identity

    def _dict(self, node: tree.DictNode) -> dict[Any, Any]:
        result: dict[Any, Any] = {} if node.kind == "dict" else collections.OrderedDict()
        for key, item in node.items:
            decoded = self.decode(key)
            result[decoded] = self.decode(item)
        if node.attributes is not None:
            vars(result).update(self.decode(node.attributes))
        return result

    def _hollow(self, node: tree.HollowNode) -> Array:
        return np.empty(node.shape, dtype_from_spec(node.dtype))

    def _objects(self, node: tree.ObjectsNode) -> Array:
        if node.at is not None:
            return self._array(node.at).astype(object)
        items = [self.decode(item) for item in node.items or ()]
        result = np.empty(len(items), object)
        result[:] = items
        return result.reshape(node.shape or ())

    def _gaps(self, node: tree.GapsNode) -> Array:
        texts, missing = self._array(node.at), self._array(node.missing)
        full = np.empty_like(texts, dtype=dtype_from_spec(node.dtype))
        full[...] = texts
        full[missing] = full.dtype.na_object  # type: ignore[attr-defined]
        return full

    def _tensor(self, node: tree.TensorNode) -> Any:
        if "torch" not in sys.modules:
            try:
                import torch  # noqa: F401
            except ImportError:
                raise DefinitionError(
                    f"{self._where} is a PyTorch tensor, but torch cannot be imported. Install it "
                    f"(pip install torch)."
                ) from None
        return tensors.from_array(None if node.at is None else self._array(node.at), node)

    def _by_codec(self, node: tree.CodecNode) -> Any:
        codec = self._codecs.get(node.name)
        if codec is None:
            raise DefinitionError(
                f"{self._where} was saved by the codec {node.name!r}, which is not registered. "
                f"Register it first: register_codec(..., name={node.name!r})."
            )
        value = self.decode(node.value)
        try:
            return codec.decode(value)
        except Exception as error:
            raise self._undecodable(error) from error

    def _state(self, node: tree.StateNode) -> Any:
        state = self.decode(node.value)
        if not self._keeps_states:
            return state
        self.has_states = True
        return SavedState(node.cls, state)

    def _pickle(self, node: tree.DataNode) -> Any:
        data = self._data(node)
        if not self._allow_pickle:
            raise DefinitionError(
                f"{self._where} contains a pickle, and unpickling runs code from the checkpoint. "
                f"If you trust its author, pass allow_pickle=True to the checkpoint manager "
                f"(--allow-pickle)."
            )
        try:
            return cloudpickle.loads(data)
        except Exception as error:
            raise self._undecodable(error) from error


def _data_as(convert: Callable[[bytes], Any]) -> tuple[type[tree.Node], Callable[..., Any]]:
    return tree.DataNode, lambda decoder, node: convert(decoder._data(node))


_PLAIN: dict[Any, tuple[type[tree.Node], Callable[..., Any]]] = {
    "same": (tree.SameNode, Decoder._same),
    "float": _data_as(lambda data: struct.unpack(">d", data)[0]),
    "complex": _data_as(lambda data: complex(*struct.unpack(">2d", data))),
    "str": _data_as(lambda data: data.decode("utf-8", "surrogatepass")),
    "bytes": _data_as(bytes),
    "np.str_": _data_as(lambda data: np.str_(data.decode("utf-8", "surrogatepass"))),
    "np.bytes_": _data_as(np.bytes_),
    "int": (tree.IntNode, lambda _, node: int(node.hex, 16)),
    "tuple": (tree.TupleNode, Decoder._tuple),
    "scalar": (tree.ScalarNode, Decoder._scalar),
}

_WITH_IDENTITY: dict[Any, tuple[type[tree.Node], Callable[..., Any]]] = {
    "dict": (tree.DictNode, Decoder._dict),
    "odict": (tree.DictNode, Decoder._dict),
    "list": (tree.PartNode, lambda decoder, node: decoder._array(node.at).tolist()),
    "bytearray": _data_as(bytearray),
    "array": (tree.PartNode, lambda decoder, node: decoder._leaf(node.at)),
    "hollow": (tree.HollowNode, Decoder._hollow),
    "objects": (tree.ObjectsNode, Decoder._objects),
    "gaps": (tree.GapsNode, Decoder._gaps),
    "tensor": (tree.TensorNode, Decoder._tensor),
    "codec": (tree.CodecNode, Decoder._by_codec),
    "state": (tree.StateNode, Decoder._state),
    "pickle": (tree.DataNode, Decoder._pickle),
}
