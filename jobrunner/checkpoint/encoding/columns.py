"""Many alike plain values as columns: arrays of numbers and text, and rows made of them. Pure.

A column is a node that stands for a list of items. Numbers of one type are an array; so are all
strings together; rows (tuples, lists, dicts, named tuples, dataclasses) have a column for each
position, key or field, or else one column of all that they hold, beside their lengths. So much data
makes a short tree, and arrays that a later save can link. `column_decode` is the way back.

Mutable rows have no numbers, as other objects with an identity do: those of one column are a block.
Another reference to one, ``{"$": "row", "of": block, "at": i}``, counts blocks in the order of the
tree.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import chain
from sys import getrefcount
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jobrunner.checkpoint.encoding import classes, everyday
from jobrunner.checkpoint.encoding.codecs import UnsuitableError, UnsupportedValueError
from jobrunner.checkpoint.encoding.dtypes import NUMBERS, Array, ArrayPart, Trail, Tree
from jobrunner.checkpoint.encoding.libraries import find_type
from jobrunner.checkpoint.encoding.packing import (
    MOST_VALUES,
    SAMPLE,
    SCALARS,
    Numbered,
    Texts,
    few_objects,
    lengths_of,
    number_equal,
    number_many,
    number_objects,
    pack,
    pack_dict,
    sort_sets,
    split,
)
from jobrunner.checkpoint.encoding.stateful import has_state
from jobrunner.names import child_names

if TYPE_CHECKING:
    from jobrunner.checkpoint.encoding.encode import Encoder

MAX_DEPTH = 150

_LEAST_ROWS = 16
_LEAST_ITEMS = 256
"""With fewer items in a column, on average, JSON is better."""
_MOST_COLUMNS, _MOST_LEVELS = 256, 32
_LONG_ROW = 8192  # items; longer rows are arrays of their own
_LONG_VALUE = 64
"""Longer values are not worth an index."""

_NUMPY_SCALARS = {np.dtype(name).type for name in NUMBERS}
_FLAT = {type(None), str, bytes, bytearray, *SCALARS}
_LISTS = (list, tuple, np.ndarray, Texts)
_KINDS = {tuple: "tuples", list: "lists", set: "sets", frozenset: "frozensets"}
_UNREFERENCED = next(map(getrefcount, [object()])) - 1

Tied = dict[int, tuple[int, int, object]]
"""Rows that something else may refer to, by `id`: block, row and object."""


class _UnlikeError(Exception):
    """The items have no columns."""


class _Place(NamedTuple):
    """Where a column is."""

    trail: Trail
    holders: int
    """How many references to each item there are, if no other part of the blob has one; 0: unknown."""
    depth: int = 1

    def inside(self, name: str) -> _Place:
        return self._replace(trail=(*self.trail, name))

    def below(self, holders: int) -> _Place:
        return _Place(self.trail, holders, self.depth + 1)


def encode_columns(
    encoder: Encoder, kind: str, value: Collection[Any], content: Mapping[str, Any], trail: Trail
) -> dict[str, Tree] | None:
    """Encode a container of this kind by columns of its `content`; None if that is not alike."""
    if len(value) < _LEAST_ROWS:
        return None
    is_list = {type(items) in _LISTS for items in content.values()} == {True}
    lists: Any = content if is_list else pack_dict(value)
    lists = lists or {name: list(items) for name, items in content.items()}
    if len(value) < _LEAST_ITEMS:
        kinds = set(map(type, chain.from_iterable(lists.values())))
        if kinds <= _FLAT or np.ndarray in kinds:
            return None
    is_copy = value is encoder.copy
    holders = 1 + is_copy + (not is_list) if is_copy or kind != "tuple" else 0
    place = _Place(trail, holders)
    columns = _Columns(encoder, kind)
    undo = encoder.undoing()
    try:
        trees = {
            name: columns.encode(items, place if len(lists) == 1 else place.inside(name))
            for name, items in lists.items()
        }
        columns.finish()
    except (_UnlikeError, UnsuitableError, UnsupportedValueError):
        undo()
        return None
    if len(lists) == 1 and trees["of"].keys() == {"$", "at"} and trees["of"]["$"] == "numbers":
        part = encoder.parts[trees["of"]["at"]]
        encoder.formats.append(4 if part.data.dtype.kind == "c" else 1)
        return {"$": kind, "at": trees["of"]["at"]}  # as in format 1
    encoder.formats.append(columns.format)
    return {"$": kind, **trees}


class _Columns:
    """Columns of one container. The encoder knows nothing of them until they are finished."""

    def __init__(self, encoder: Encoder, holds: str) -> None:
        self._encoder = encoder
        self._holds = holds
        self._parts: list[ArrayPart] = []
        self._first_part, self._num_numbers = len(encoder.parts), len(encoder.numbers)
        self._num_blocks = encoder.num_blocks
        self._tied: Tied = {}
        self._open: set[int] = set()  # blocks of rows that are not complete
        self._num_columns = self._num_items = 0
        self.format = 4  # of the oldest version that reads them

    def finish(self) -> None:
        """Give parts and rows to the encoder.

        Raises `_UnlikeError` if they are too few, or a node has a part or a number.
        """
        before, encoder = (self._first_part, self._num_numbers), self._encoder
        if before != (len(encoder.parts), len(encoder.numbers)):
            raise _UnlikeError
        if self._num_items < _LEAST_ITEMS * self._num_columns:
            raise _UnlikeError
        self._encoder.parts += self._parts
        self._encoder.add_blocks(self._num_blocks, self._tied)

    def encode(self, items: Sequence[Any], at: _Place) -> Tree:
        """Return the node of a column; raises `_UnlikeError`, or `UnsuitableError`."""
        if type(items) is Texts:
            self._count(items.number)
            part = self._part(items.data, at.inside("texts"))
            return {"$": "texts", "count": items.number, "at": part}
        if (data := pack(items)) is not None:
            return self._numbers(data, at)
        if len(first := set(map(type, items[:SAMPLE]))) > 1 and type(None) in first:
            return self._partly_none(items, at)
        few = few_objects(items)
        different = few[0] if few else items
        numbered = number_objects(map(type, different), len(different), MOST_VALUES)
        if numbered is None:
            raise _UnlikeError
        kinds, codes = numbered
        if len(kinds) == 1:
            return self._encode_kind(kinds[0], items, at, few)
        if type(None) in kinds:
            return self._partly_none(items, at)
        columns, codes = [], codes[few[1]] if few else codes
        for code, alike in enumerate(split(items, kinds, codes)):
            place = at.inside(str(code))._replace(holders=at.holders and at.holders + 1)
            columns.append(self._encode_kind(kinds[code], alike, place))
        return self._mixed(codes, [], columns, at)

    def _partly_none(self, items: Sequence[Any], at: _Place) -> Tree:
        objects = np.fromiter(items, object, len(items))
        is_held = np.frombuffer(objects, np.intp) != id(None)
        held = objects.compress(is_held).tolist()  # sooner than by a mask as an index
        del objects
        place = at.inside("1")._replace(holders=at.holders and at.holders + 1)
        return self._mixed(is_held.view(np.uint8), [None], [self.encode(held, place)], at)

    def _encode_kind(
        self, cls: Any, items: Sequence[Any], at: _Place, few: Numbered | None = None
    ) -> Tree:
        """Return the node of a column of one type; `few` are the objects, if there are few."""
        encoder = self._encoder
        if cls in SCALARS:
            data = pack(items)
            return self._nodes(items, at) if data is None else self._numbers(data, at)
        if cls is str or cls is bytes:
            return self._texts(cls, items, at, few)
        if cls is type(None):
            return self._mixed(np.zeros(len(items), np.uint8), [None], [], at)
        if at.depth > _MOST_LEVELS or len(encoder.inside) + at.depth >= MAX_DEPTH:
            raise _UnlikeError
        if cls is list or cls is dict:
            encode = self._dicts if cls is dict else self._sequences
            return self._block(encode, items, at, few)
        if cls is tuple:
            return self._sequences(cls, items, at)
        if encoder.codecs is not None and encoder.codecs.get(cls):
            raise _UnlikeError
        if cls is set:
            return self._block(self._sets, items, at, few)
        if cls is frozenset:
            return self._sets(cls, items, at)
        if cls in _NUMPY_SCALARS:
            return {**self._numbers(np.array(items, cls), at), "scalars": True}
        if cls is bytearray:
            self.format = 6
            return self._block(self._texts, items, at, few)
        if cls in everyday.LEAVES:
            return self._leaves(cls, items, at)
        if cls is Fraction or cls in everyday.PATHS:
            return self._nodes(items, at)
        if has_state(items[0]) or find_type(items[0]) or not classes.find_encoder(items[0]):
            raise _UnlikeError
        if issubclass(cls, enum.Enum):
            numbered = few or number_objects(items, len(items), MOST_VALUES)
            if numbered is None:
                raise _UnlikeError
            return self._values(numbered, at)
        if issubclass(cls, tuple):
            return self._objects(cls, items, at)
        return self._block(self._objects, items, at, few)

    # --- columns

    def _part(self, data: Array, at: _Place) -> int:
        self._parts.append(ArrayPart(data, None, at.trail, self._holds))
        return self._first_part + len(self._parts) - 1

    def _count(self, num_items: int) -> None:
        self._num_columns += 1
        self._num_items += num_items

    def _numbers(self, data: Array, at: _Place) -> dict[str, Tree]:
        self._count(data.size)
        return {"$": "numbers" if data.ndim == 1 else "tuples", "at": self._part(data, at)}

    def _texts(self, cls: Any, items: Any, at: _Place, few: Numbered | None = None) -> Tree:
        if cls is not bytearray and (few or len(set(items[: 2 * MOST_VALUES])) < MOST_VALUES):
            values = (numbered := number_equal(items, few))[0]
            if len(values) <= MOST_VALUES and max(map(len, values)) <= _LONG_VALUE:
                return self._values(numbered, at)
        self._count(len(items))
        whole: Any = ("\0" if cls is str else b"").join(items)
        if cls is str and whole.count("\0") == len(items) - 1:
            tree = {"$": "texts", "count": len(items)}
        else:
            kind = {str: "texts", bytes: "buffers"}.get(cls, "bytearrays")
            tree = {"$": kind, "lengths": self._integers(lengths_of(items), at.inside("lengths"))}
            whole = "".join(items) if cls is str else whole
        data = whole.encode("utf-8", "surrogatepass") if cls is str else whole
        return {**tree, "at": self._part(np.frombuffer(data, np.uint8), at.inside("texts"))}

    def _integers(self, data: Array, at: _Place) -> int:
        return self._part(data.astype(np.min_scalar_type(int(data.max(initial=0)))), at)

    def _values(self, numbered: Numbered, at: _Place) -> Tree:
        """Return the column of items of which there are few different ones."""
        return self._mixed(numbered[1], list(map(self._node, numbered[0])), [], at)

    def _mixed(self, codes: Array, values: list[Tree], columns: list[Tree], at: _Place) -> Tree:
        if not columns:
            self._count(len(codes))
        kinds = self._part(codes, at.inside("kinds"))
        return {"$": "mixed", "kinds": kinds, "values": values, "columns": columns}

    def _nodes(self, items: Sequence[Any], at: _Place) -> Tree:
        """Return a column of the nodes of values that have no identity and no arrays."""
        nodes = list(map(self._node, items))
        return {"$": "nodes", "of": self.encode(nodes, at.below(1))}

    def _leaves(self, cls: Any, items: Sequence[Any], at: _Place) -> Tree:
        """Return the column of the nodes of values that are text and numbers alone."""
        self._num_blocks += 1  # that of the nodes
        kind, fields = everyday.LEAVES[cls]
        content = {"$": [kind] * len(items)} | {it: [*map(fields[it], items)] for it in fields}
        if any(zones := content.get("zone", [])):
            once = {id(it): it for it in zones}
            nodes = {key: self._node(it) for key, it in once.items()}
            content["zone"] = [nodes[id(it)] for it in zones]
            del nodes
        trees = self._fields(child_names(content), content.values(), at.below(1))
        return {"$": "nodes", "of": {"$": "dicts", "names": [*content], "columns": trees}}

    def _node(self, value: Any) -> Tree:
        method = everyday.ENCODERS.get(type(value)) or classes.find_encoder(value)
        # Not by `Encoder.encode`, which might pickle it.
        return method(self._encoder, value, ()) if method else self._encoder.encode(value)

    # --- rows

    def _block(self, encode: Any, rows: Sequence[Any], at: _Place, few: Numbered | None) -> Tree:
        """Return the column of mutable rows, which `encode` makes if they do not occur elsewhere."""
        if tree := self._again(rows, at, few):
            return tree
        block = self._num_blocks
        self._num_blocks += 1
        self._open.add(block)
        tree = encode(type(rows[0]), rows, at)
        self._open.remove(block)
        return tree

    def _again(self, rows: Sequence[Any], at: _Place, few: Numbered | None) -> Tree | None:
        """Return the column of rows that occur several times; note those that could."""
        counts = [] if few else list(map(getrefcount, rows))
        sole = _UNREFERENCED + at.holders if at.holders else -1
        if set(counts) == {sole}:
            return None
        objects, which = few or number_many(rows)
        numbers = self._encoder.numbers
        places: Any = [numbers.get(id(it)) or self._tied.get(id(it)) for it in objects]
        block = places[0][0] if type(places[0]) is tuple else None
        if block not in self._open and all(type(it) is tuple and it[0] == block for it in places):
            self._count(len(rows))
            which = np.array([it[1] for it in places])[which]
            return {"$": "again", "at": self._integers(which, at), "block": block}
        if len(objects) < len(rows):
            self._num_items += len(rows)
            place = at.inside("rows")._replace(holders=0)
            of = self._encode_kind(type(rows[0]), objects, place)
            return {"$": "again", "at": self._integers(which, at.inside("which")), "of": of}
        for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if count != sole:
                if id(row) in self._tied or id(row) in numbers:
                    raise _UnlikeError
                self._tied[id(row)] = (self._num_blocks, i, row)
        return None

    def _frozen(self, rows: Sequence[Any], at: _Place) -> int:
        """Return how many references there are to what rows that cannot change hold; see `_Place`."""
        is_sole = at.holders and set(map(getrefcount, rows)) == {_UNREFERENCED + at.holders}
        return 2 if is_sole else 0

    def _sequences(self, cls: Any, rows: Sequence[Any], at: _Place) -> Tree:
        holders = 2 if cls is list else self._frozen(rows, at)
        flat = list(chain.from_iterable(rows))
        lengths = lengths_of(rows)
        width = int(lengths[0]) if (lengths == lengths[0]).all() else 0
        data = pack(flat) if 0 < width <= _LONG_ROW else None
        if data is not None and data.dtype.kind != "c":  # which has no two axes in format 4
            return {**self._numbers(data.reshape(len(rows), width), at), "$": _KINDS[cls]}
        if 0 < width <= _MOST_COLUMNS:
            columns = [flat[i::width] for i in range(width)]
            del flat
            trees = self._fields(map(str, range(width)), columns, at.below(holders))
            return {"$": _KINDS[cls], "columns": trees}
        return {"$": _KINDS[cls], **self._ragged(lengths, {"items": flat}, at.below(holders))}

    def _sets(self, cls: Any, rows: Sequence[Any], at: _Place) -> Tree:
        holders, lengths = 2 if cls is set else self._frozen(rows, at), lengths_of(rows)
        content = {"items": sort_sets(rows, lengths)}
        return {"$": _KINDS[cls], **self._ragged(lengths, content, at.below(holders))}

    def _dicts(self, _: Any, rows: Sequence[Any], at: _Place) -> Tree:
        below = at.below(2)
        keys = list(chain.from_iterable(rows))
        flat = list(chain.from_iterable(map(dict.values, rows)))
        names = list(rows[0])
        lengths, width = lengths_of(rows), len(names)
        is_even = 0 < width <= _MOST_COLUMNS and (lengths == width).all()
        if is_even and keys == names * len(rows) and set(map(type, keys)) == {str}:
            columns = [flat[i::width] for i in range(width)]
            del flat
            trees = self._fields(child_names(names), columns, below)
            return {"$": "dicts", "names": list(map(self._node, names)), "columns": trees}
        return {"$": "dicts", **self._ragged(lengths, {"keys": keys, "items": flat}, below)}

    def _objects(self, cls: Any, rows: Sequence[Any], at: _Place) -> Tree:
        """Return the column of named tuples, or of instances of a dataclass."""
        kind, names, columns = classes.split_fields(cls, rows)
        if not columns:
            raise _UnlikeError
        holders = 2 if kind == "dataclasses" else self._frozen(rows, at)
        name = self._encoder.name_class(cls)
        trees = self._fields(child_names(names), columns, at.below(holders))
        return {"$": kind, "cls": name, "names": list(names), "columns": trees}

    def _fields(
        self, names: Iterable[str], columns: Iterable[Sequence[Any]], at: _Place
    ) -> list[Tree]:
        return [
            self.encode(column, at.inside(name))
            for name, column in zip(names, columns, strict=True)
        ]

    def _ragged(self, lengths: Array, content: Mapping[str, Any], at: _Place) -> dict[str, Tree]:
        """Return the fields of rows of any lengths: these, and columns of all that they hold."""
        if any(len(flat) > _LONG_ROW * len(lengths) for flat in content.values()):
            raise _UnlikeError
        self._count(len(lengths))
        tree: dict[str, Tree] = {"lengths": self._integers(lengths, at.inside("lengths"))}
        held = {name: flat for name, flat in content.items() if len(flat)}
        return tree | {name: self.encode(flat, at.inside(name)) for name, flat in held.items()}
