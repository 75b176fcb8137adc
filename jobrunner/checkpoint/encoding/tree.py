"""What a saved value becomes: a JSON tree, and arrays that the tree refers to.

JSON holds None, bool, small int, finite float, str, list, and dict with str keys as they are.
Everything else is a node ``{"$": kind, ...}``. ``"at"`` is the index of an array part of the blob.
Objects with an identity (list, dict, array, ...) are numbered in the order in which they appear, so
that a second reference, ``{"$": "same", "as": n}``, decodes to the same object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from jobrunner.checkpoint.encoding.dtypes import Array, Spec
from jobrunner.checkpoint.encoding.schema import Count, Shape
from jobrunner.define import DEFAULT_ARRAY_OPTIONS, ArrayOptions

Tree = Any
"""A JSON tree that stands for a value."""

Trail = tuple[str, ...]
"""Path within a blob: keys, escaped for file systems, and indices."""


@dataclass(frozen=True, slots=True)
class ArrayPart:
    """One array of a value."""

    data: Array  # axes in memory order, outermost first; not always contiguous
    order: tuple[int, ...] | None  # `data == array.transpose(order)`; None: in memory order already
    trail: Trail
    holds: str  # type of the encoded value: ndarray, bytes, str, ...


@dataclass(frozen=True, slots=True)
class EncodedBlob:
    """A blob as a tree and the arrays that it refers to."""

    tree: Tree
    parts: Sequence[ArrayPart]
    has_state: bool = False  # contains objects saved by their ``state_dict()``
    options: ArrayOptions = DEFAULT_ARRAY_OPTIONS


# --- nodes, as they are read


class Node(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A node of the tree; subclasses list the other fields of each kind."""

    kind: str = msgspec.field(name="$")


class DataNode(Node):
    """Text or bytes: ``hex`` if short, else an array of bytes."""

    hex: str | None = None
    at: Count | None = None

    def __post_init__(self) -> None:
        if (self.hex is None) == (self.at is None):
            raise ValueError("expected either `hex` or `at`")


class IntNode(Node):
    """An int that JSON readers in other languages would round."""

    hex: str


class SameNode(Node):
    """A second reference to an object, by its number."""

    index: Count = msgspec.field(name="as")


class TupleNode(Node):
    """A tuple; ``at`` if it is long and holds numbers only."""

    items: list[Tree] | None = None
    at: Count | None = None

    def __post_init__(self) -> None:
        if (self.items is None) == (self.at is None):
            raise ValueError("expected either `items` or `at`")


class ScalarNode(Node):
    """A NumPy scalar."""

    dtype: Spec
    hex: str


class DictNode(Node):
    """A dict with other keys than str, or an OrderedDict, which may have attributes."""

    items: list[Tree]  # each a key and a value
    attributes: Tree = None


class PartNode(Node):
    """An array, or a long list of numbers."""

    at: Count


class HollowNode(Node):
    """An array with items of no bytes."""

    dtype: Spec
    shape: Shape


class ObjectsNode(Node):
    """An object array of str; ``items`` if some have lone surrogates."""

    at: Count | None = None
    items: list[Tree] | None = None
    shape: Shape | None = None

    def __post_init__(self) -> None:
        if not (self.at is None) == (self.items is not None) == (self.shape is not None):
            raise ValueError("expected either `at`, or `items` and `shape`")


class GapsNode(Node):
    """A string array with missing values."""

    dtype: Spec
    at: Count
    missing: Count


class TensorNode(Node):
    """A PyTorch tensor."""

    at: Count | None
    shape: Shape
    dtype: str
    requires_grad: bool
    parameter: bool


class CodecNode(Node):
    """The output of a codec."""

    name: str
    value: Tree


class StateNode(Node):
    """The state of an object of class ``cls``."""

    cls: str
    value: Tree
