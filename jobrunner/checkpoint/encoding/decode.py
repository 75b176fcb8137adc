"""Values made again from the tree and the arrays that `encoding` made of them. Pure: no I/O."""

from __future__ import annotations

import collections
import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import numpy as np

from jobrunner.checkpoint.encoding import tensors
from jobrunner.checkpoint.encoding.codecs import Codec
from jobrunner.checkpoint.encoding.dtypes import dtype_from_spec
from jobrunner.checkpoint.encoding.encode import Tree
from jobrunner.checkpoint.encoding.stateful import SavedState
from jobrunner.errors import DefinitionError


class Decoder:
    """Makes one blob's value of its tree and arrays.

    Parameters
    ----------
    array : callable
        Gives the array of part i, whole.
    codecs : sequence of Codec
    allow_pickle : bool
    leaf : callable, optional
        Gives what stands for an array leaf instead of its array (a lazy one).
    where : str
        For messages.
    keeps_states : bool
        Let `SavedState` objects stand for objects that were saved by their state, which the state
        itself does otherwise.

    Attributes
    ----------
    has_states : bool
        Whether there are such objects in what was decoded, and `keeps_states`.
    """

    def __init__(
        self,
        array: Callable[[int], np.ndarray[Any, Any]],
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
        self._made: list[Any] = []
        self._keeps_states = keeps_states
        self.has_states = False

    def decode(self, tree: Tree) -> Any:
        """The value that `tree` stands for.

        Raises
        ------
        DefinitionError
            It needs a codec that is not registered, or to be unpickled, and that is not allowed.
        """
        cls = type(tree)
        if cls is list:
            made: list[Any] = []
            self._made.append(made)
            made += map(self.decode, tree)
            return made
        if cls is not dict:
            return tree
        kind = tree.get("$")
        if kind is None:
            result: dict[Any, Any] = {}
            self._made.append(result)
            for key, item in tree.items():
                result[key] = self.decode(item)
            return result
        if kind == "same":
            return self._made[tree["as"]]
        if kind in _ATOMS:
            return _ATOMS[kind](self._data(tree))
        if kind == "int":
            return int(tree["hex"], 16)
        if kind == "tuple":
            return self._sequence(tree)
        if kind == "scalar":
            return _scalar(dtype_from_spec(tree["dtype"]), bytes.fromhex(tree["hex"]))
        # What follows has an identity, and its number is that of its first mention.
        place = len(self._made)
        self._made.append(None)
        value = self._identified(kind, tree, place)
        self._made[place] = value
        return value

    def _identified(self, kind: str, tree: Tree, place: int) -> Any:
        if kind in ("dict", "odict"):
            result: dict[Any, Any] = {} if kind == "dict" else collections.OrderedDict()
            self._made[place] = result
            for key, item in tree["items"]:
                known = self.decode(key)
                result[known] = self.decode(item)
            if "attributes" in tree:
                vars(result).update(self.decode(tree["attributes"]))
            return result
        if kind == "list":
            return self._array(tree["at"]).tolist()
        if kind == "bytearray":
            return bytearray(self._data(tree))
        if kind == "array":
            return self._leaf(tree["at"])
        if kind == "hollow":
            return np.empty(tree["shape"], dtype_from_spec(tree["dtype"]))
        if kind == "objects":
            if "at" in tree:
                return self._array(tree["at"]).astype(object)
            result_array = np.empty(tree["shape"], object)
            result_array.ravel()[:] = [self.decode(item) for item in tree["items"]]
            return result_array
        if kind == "gaps":
            texts, missing = self._array(tree["at"]), self._array(tree["missing"])
            full = np.empty_like(texts, dtype=dtype_from_spec(tree["dtype"]))
            full[...] = texts
            full[missing] = full.dtype.na_object  # type: ignore[attr-defined]
            return full
        if kind == "tensor":
            return self._tensor(tree)
        if kind == "codec":
            codec = self._codecs.get(tree["name"])
            if codec is None:
                raise DefinitionError(
                    f"{self._where} was saved by the codec {tree['name']!r}, which is not "
                    f"registered here. Register it first: register_codec(..., "
                    f"name={tree['name']!r})."
                )
            return codec.decode(self.decode(tree["value"]))
        if kind == "state":
            state = self.decode(tree["value"])
            if not self._keeps_states:
                return state
            self.has_states = True
            return SavedState(tree["cls"], state)
        if kind == "pickle":
            data = self._data(tree)
            if not self._allow_pickle:
                raise DefinitionError(
                    f"{self._where} is a pickle, and unpickling runs code that the checkpoint "
                    f"names. If you trust whoever wrote it, give the checkpoint manager "
                    f"allow_pickle=True (--allow-pickle)."
                )
            return cloudpickle.loads(data)
        raise DefinitionError(
            f"{self._where} was saved as {kind!r}, which this version of jobrunner does not "
            f"know. Read it with the version that wrote it, or a later one."
        )

    def _data(self, tree: Tree) -> bytes:
        return bytes.fromhex(tree["hex"]) if "hex" in tree else self._array(tree["at"]).tobytes()

    def _sequence(self, tree: Tree) -> tuple[Any, ...]:
        if "at" in tree:
            return tuple(self._array(tree["at"]).tolist())
        return tuple(map(self.decode, tree["items"]))

    def _tensor(self, tree: Tree) -> Any:
        if "torch" not in sys.modules:
            try:
                import torch  # noqa: F401
            except ImportError:
                raise DefinitionError(
                    f"{self._where} is a PyTorch tensor, and torch cannot be imported here. "
                    f"Install it (pip install torch)."
                ) from None
        array = None if tree["at"] is None else self._array(tree["at"])
        return tensors.from_array(array, tree["shape"], tree)


def _scalar(dtype: np.dtype[Any], data: bytes) -> Any:
    if not dtype.itemsize:
        return np.zeros((), dtype)[()]
    return np.frombuffer(bytearray(data), dtype)[0]


_ATOMS: dict[str, Callable[[bytes], Any]] = {
    "float": lambda data: struct.unpack(">d", data)[0],
    "complex": lambda data: complex(*struct.unpack(">2d", data)),
    "str": lambda data: data.decode("utf-8", "surrogatepass"),
    "bytes": bytes,
    "np.str_": lambda data: np.str_(data.decode("utf-8", "surrogatepass")),
    "np.bytes_": lambda data: np.bytes_(data),
}
