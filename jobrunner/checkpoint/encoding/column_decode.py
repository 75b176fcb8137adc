"""What columns stand for; see `columns`. Pure: no I/O.

Arrays are checked against each other before anything is made of them, so a forged tree makes no more
items than its arrays have bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from jobrunner.checkpoint.encoding import classes
from jobrunner.checkpoint.encoding.dtypes import Array, Tree
from jobrunner.checkpoint.encoding.outline import outline_columns
from jobrunner.checkpoint.encoding.schema import Count
from jobrunner.compile import gc_paused

_MOST_FIELDS = 16
"""In a node of a value without items, together with those of the nodes inside of it."""

_REPEATED = {"str", "bytes", "enum"}
"""Kinds of the values that a column repeats. Tuples of tuples, each with two references to the next,
would take for ever to hash."""

if TYPE_CHECKING:
    from jobrunner.checkpoint.encoding.decode import Decoder
else:
    Decoder = Any


def decode_items(decoder: Decoder, column: Tree) -> list[Any]:
    """Decode what a container holds from its column."""
    if decoder.is_outline:
        raise outline_columns(decoder.leaf, column)
    with gc_paused():
        return _items(decoder, column)


def decode_dict(decoder: Decoder, keys: Tree, column: Tree) -> dict[Any, Any]:
    """Decode a dict from the columns of its keys and values."""
    if decoder.is_outline:
        raise outline_columns(decoder.leaf, keys, column)
    with gc_paused():
        names = _items(decoder, keys)
        return _make_dict(names, _items(decoder, column))


def decode_numbers(decoder: Decoder, at: Count, scalars: bool = False) -> list[Any]:
    """Decode a column of numbers, of Python's types or NumPy's."""
    found = _data(decoder, at, "biufc")
    return list(found) if scalars else found.tolist()


def _items(decoder: Decoder, column: Tree) -> list[Any]:
    kind = column.get("$") if type(column) is dict else None
    if kind not in COLUMNS and kind not in BLOCKS:
        raise ValueError("expected a column")
    return decoder.decode(column)  # type: ignore[no-any-return]  # columns are lists


def _data(decoder: Decoder, at: int, kinds: str, axes: int = 1) -> Array:
    """Return an array part; raises ValueError if it cannot be that of a column."""
    array = decoder.part(at)
    if array.dtype.kind not in kinds or array.ndim != axes or (axes > 1 and not array.size):
        raise ValueError(f"array {at} is not a column's: {array.dtype} of {array.ndim} axes")
    return array


def _bytes(decoder: Decoder, at: int) -> bytes:
    return _data(decoder, at, "u").astype(np.uint8, casting="no").tobytes()


def _cut(decoder: Decoder, lengths: int, *wholes: Any) -> Iterator[Iterable[Any]]:
    """Cut what rows hold, all of each field together, into the rows; yield those of each field."""
    found = _data(decoder, lengths, "iu").tolist()
    ends = list(accumulate(found))
    total = ends[-1] if ends else 0
    if min(found, default=0) < 0 or any(len(whole) != total for whole in wholes):
        raise ValueError(f"`lengths` add up to {total}, but there are {[*map(len, wholes)]} items")
    for whole in wholes:
        yield map(whole.__getitem__, map(slice, chain([0], ends), ends))


def _join(decoder: Decoder, columns: list[Tree]) -> Iterator[tuple[Any, ...]]:
    """Join columns, one at least, into rows."""
    found = [_items(decoder, it) for it in columns]
    if len(set(map(len, found))) != 1:
        raise ValueError(f"columns of {[*map(len, found)]} items cannot be those of rows")
    return zip(*found, strict=True)


def _make_dict(keys: Iterable[Any], values: Sequence[Any]) -> dict[Any, Any]:
    found = dict(zip(keys, values, strict=True))
    if len(found) != len(values):
        raise ValueError("a key appears twice")
    return found


def _to_texts(
    decoder: Decoder, at: Count, lengths: Count | None = None, count: Count | None = None
) -> list[str]:
    whole = _bytes(decoder, at).decode("utf-8", "surrogatepass")
    if lengths is not None:
        return list(next(_cut(decoder, lengths, whole)))
    found = whole.split("\0")
    if len(found) != count:
        raise ValueError(f"`count` is {count}, but there are {len(found)} strings")
    return found


def _to_buffers(decoder: Decoder, at: Count, lengths: Count) -> list[bytes]:
    return list(next(_cut(decoder, lengths, _bytes(decoder, at))))


def _to_mixed(decoder: Decoder, kinds: Count, values: list[Tree], columns: list[Tree]) -> list[Any]:
    for value in values:
        if type(value) is list or (type(value) is dict and value.get("$") not in _REPEATED):
            raise ValueError("a value that a column repeats is not plain")
    codes = _bytes(decoder, kinds)
    constants = list(map(decoder.decode, values))
    found = [_items(decoder, it) for it in columns]
    counts = [codes.count(code) for code in range(len(constants) + len(found))]
    if sum(counts) != len(codes) or counts[len(constants) :] != list(map(len, found)):
        raise ValueError("`kinds` do not fit `values` and `columns`")
    objects = np.empty(len(counts), object)
    for i, constant in enumerate(constants):
        objects[i] = constant
    numbers = np.frombuffer(codes, np.uint8)
    items = objects[numbers]
    for code, column in enumerate(found, len(constants)):
        items[numbers == code] = np.fromiter(column, object, len(column))
    return items.tolist()  # type: ignore[no-any-return]  # one axis


def _to_nodes(decoder: Decoder, of: Tree) -> list[Any]:
    nodes = _items(decoder, of)
    for node in nodes:
        _check_small(node)  # a few bytes may stand for each
    return list(map(decoder.decode, nodes))


def _check_small(node: Tree) -> None:
    """Check that a tree which was decoded from columns is one of a value without items."""
    level, num_fields = [node], 0
    while level:
        held = [it for it in level if type(it) is dict or type(it) is list]
        num_fields += sum(map(len, held))
        if num_fields > _MOST_FIELDS:
            raise ValueError("a node of a column is not that of one plain value")
        level = [it for each in held for it in (each.values() if type(each) is dict else each)]


def _to_again(
    decoder: Decoder, at: Count, of: Tree = None, block: Count | None = None
) -> list[Any]:
    if (of is None) == (block is None):
        raise ValueError("expected either `of` or `block`")
    if type(of) is dict and of.get("$") not in BLOCKS:
        raise ValueError("only rows that can change occur again")  # see `_REPEATED`
    rows = decoder.blocks[block] if of is None else _items(decoder, of)  # type: ignore[index]
    which = _data(decoder, at, "u")
    if which.max(initial=0) >= len(rows):
        raise ValueError(f"a row is {which.max()}, but there are {len(rows)}")
    return list(map(rows.__getitem__, which.tolist()))


def decode_row(decoder: Decoder, of: Count, at: Count) -> Any:
    """Return a row of an earlier column."""
    return decoder.blocks[of][at]


def _sequences_of(cls: Callable[[Any], Any]) -> Callable[..., list[Any]]:
    """Return the method of rows of this type."""

    def method(
        decoder: Decoder,
        at: Count | None = None,
        columns: list[Tree] | None = None,
        lengths: Count | None = None,
        items: Tree = None,
    ) -> list[Any]:
        if [at, columns, lengths].count(None) != 2:
            raise ValueError("expected one of `at`, `columns` and `lengths`")
        rows: Iterable[Any]
        if at is not None:
            rows = _data(decoder, at, "bif", 2).tolist()
        elif columns is not None:
            rows = _join(decoder, columns)
        else:
            whole: Any = [] if items is None else _items(decoder, items)
            whole = tuple(whole) if cls is tuple else whole
            (rows,) = _cut(decoder, lengths, whole)  # type: ignore[arg-type]  # it is not None
        # Those of a `list` are new ones, and `tuple` returns the tuple that it is given.
        return list(rows if cls is list and columns is None else map(cls, rows))

    return method


def _to_dicts(
    decoder: Decoder,
    names: list[Tree] | None = None,
    columns: list[Tree] | None = None,
    lengths: Count | None = None,
    keys: Tree = None,
    items: Tree = None,
) -> list[dict[Any, Any]]:
    if names is not None and columns is not None and lengths is None:
        fields = list(map(decoder.decode, names))
        if len(set(fields)) != len(columns):
            raise ValueError("`names` do not fit `columns`")
        return list(map(dict, map(zip, repeat(fields), _join(decoder, columns))))
    if names is not None or columns is not None or lengths is None:
        raise ValueError("expected either `names` and `columns`, or `lengths`")
    wholes = [[] if it is None else _items(decoder, it) for it in (keys, items)]
    return list(map(_make_dict, *_cut(decoder, lengths, *wholes)))


def _to_objects(make: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return the method of rows of a class, which `make` makes of their fields."""

    def method(decoder: Decoder, cls: str, names: list[str], columns: list[Tree]) -> list[Any]:
        if len(names) != len(columns):
            raise ValueError("`names` do not fit `columns`")
        return make(decoder, cls, names, _join(decoder, columns))

    return method


COLUMNS: Mapping[str, Callable[..., list[Any]]] = {
    "numbers": decode_numbers,
    "texts": _to_texts,
    "buffers": _to_buffers,
    "mixed": _to_mixed,
    "nodes": _to_nodes,
    "again": _to_again,
    "tuples": _sequences_of(tuple),
    "frozensets": _sequences_of(frozenset),
    "namedtuples": _to_objects(classes.make_named_tuples),
}

BLOCKS: Mapping[str, Callable[..., list[Any]]] = {
    "lists": _sequences_of(list),
    "sets": _sequences_of(set),
    "dicts": _to_dicts,
    "dataclasses": _to_objects(classes.make_dataclasses),
}
