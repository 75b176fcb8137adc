"""What columns stand for; see `columns`. Pure: no I/O.

Arrays are checked against each other before anything is made of them, so a forged tree makes no more
items than its arrays have bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from jobrunner.checkpoint.encoding import classes
from jobrunner.checkpoint.encoding.dtypes import Array, Tree
from jobrunner.checkpoint.encoding.outline import outline_columns
from jobrunner.checkpoint.encoding.schema import Count
from jobrunner.compile import gc_paused

_MOST_FIELDS = 16
"""In a node of a value without items, together with those of the nodes inside of it."""

_NARROW = 64  # bytes, or items of a row

_REPEATED = {"str", "bytes", "enum"}
"""Kinds of the values that a column repeats. Tuples of tuples, each with two references to the next,
would take for ever to hash."""

D = TypeVar("D", bound=dict[Any, Any])

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


def decode_dict(decoder: Decoder, keys: Tree, column: Tree, cls: type[D]) -> D:
    """Decode a dict from the columns of its keys and values."""
    if decoder.is_outline:
        raise outline_columns(decoder.leaf, keys, column)
    with gc_paused():
        names = _items(decoder, keys)
        return _make_dict(names, _items(decoder, column), cls)


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


def _bounds(decoder: Decoder, lengths: int, *wholes: Any) -> tuple[Array, Array]:
    """Return where each row begins in what all rows hold together, and the lengths."""
    counts = _data(decoder, lengths, "iu")
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if ends.size else 0
    is_valid = counts.min(initial=0) >= 0 and int(counts.max(initial=0)) <= total
    if not (is_valid and {total}.issuperset(map(len, wholes)) and ends.min(initial=0) >= 0):
        raise ValueError(f"`lengths` do not add up to {[*map(len, wholes)]} items, but to {total}")
    return ends - counts.astype(np.int64), counts


def _cut(decoder: Decoder, lengths: int, *wholes: Any) -> Iterator[list[Any]]:
    """Cut what rows hold, all of each field together, into the rows; yield those of each field."""
    bounds = [*_bounds(decoder, lengths, *wholes)[0].tolist(), len(wholes[0])]
    for whole in wholes:
        yield [whole[start:end] for start, end in pairwise(bounds)]


def _rows(rows: Iterable[Any], count: int) -> list[Any]:
    """List rows that functions of C make one by one."""
    with gc_paused():
        return list(rows)


def _join(decoder: Decoder, columns: list[Tree]) -> tuple[Iterator[tuple[Any, ...]], int]:
    """Join columns, one at least, into rows; return how many these are, too."""
    found = [_items(decoder, it) for it in columns]
    if len(set(map(len, found))) != 1:
        raise ValueError(f"columns of {[*map(len, found)]} items cannot be those of rows")
    return zip(*found, strict=True), len(found[0])


def _make_dict(keys: Iterable[Any], values: Sequence[Any], cls: type[D]) -> D:
    found = cls(zip(keys, values, strict=True))
    if len(found) != len(values):
        raise ValueError("a key appears twice")
    return found


def _to_texts(
    decoder: Decoder, at: Count, lengths: Count | None = None, count: Count | None = None
) -> list[str]:
    whole = _bytes(decoder, at).decode("utf-8", "surrogatepass")
    if lengths is not None:
        return next(_cut(decoder, lengths, whole))
    found = whole.split("\0")
    if len(found) != count:
        raise ValueError(f"`count` is {count}, but there are {len(found)} strings")
    return found


class _Numbers(msgspec.Struct, tag_field="$", tag="numbers", forbid_unknown_fields=True):
    at: Count


def _by_width(counts: Array, make: Callable[[int, Array], Iterable[Any]]) -> list[Any]:
    """Return rows of these lengths; `make` makes all of one length, given which these are."""
    found = np.empty(len(counts), object)
    order = np.argsort(counts, kind="stable")
    widths, firsts = np.unique(counts[order], return_index=True)
    for width, which in zip(widths.tolist(), np.split(order, firsts[1:]), strict=True):
        found[which] = np.fromiter(make(width, which), object, len(which))
    return found.tolist()


def _to_buffers(decoder: Decoder, at: Count, lengths: Count) -> list[bytes]:
    data = _bytes(decoder, at)
    starts, counts = _bounds(decoder, lengths, data)

    def make(width: int, which: Array) -> Iterable[bytes]:
        if 0 < width <= _NARROW:  # NumPy takes those of one length from where they begin
            any_of = np.ndarray(len(data) - width + 1, f"V{width}", data, strides=(1,))
            return any_of[starts[which]].astype(object)
        return (data[at : at + width] for at in starts[which].tolist())

    return _by_width(counts, make)


def _to_bytearrays(decoder: Decoder, at: Count, lengths: Count) -> list[bytearray]:
    data = _bytes(decoder, at)
    starts, counts = _bounds(decoder, lengths, data)
    if 0 < len(data) <= _NARROW * len(starts):  # to split short ones is faster than to cut them
        unused = next((it for it in map(bytes, zip(range(256))) if it not in data), None)
        if unused is not None:
            whole = np.insert(np.frombuffer(data, np.uint8), starts[1:], unused[0])
            return bytearray(whole).split(unused)
    spans = zip(starts.tolist(), counts.tolist(), strict=True)
    return [bytearray(data[at : at + count]) for at, count in spans]


def _to_tuples_of_numbers(decoder: Decoder, lengths: Count, items: Tree) -> list[Any]:
    """Make all tuples of one length at once, which is faster than to cut them."""
    data = _data(decoder, msgspec.convert(items, _Numbers).at, "biufc")
    starts, counts = _bounds(decoder, lengths, data)

    def make(width: int, which: Array) -> Iterable[Any]:
        if not width:
            return repeat((), len(which))
        if width <= _NARROW <= len(which):
            fields = [data[starts[which] + i].tolist() for i in range(width)]
            return _rows(zip(*fields, strict=True), len(which))
        return (tuple(data[at : at + width].tolist()) for at in starts[which].tolist())

    return _by_width(counts, make)


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


_LONG_TEXT = 64


def _to_nodes(decoder: Decoder, of: Tree) -> list[Any]:
    match of:
        case {"$": "dicts", "names": ["$", *names], "columns": [{"values": [str(kind)]}, *_]}:
            fields_type, method = decoder.kinds_of_nodes.get(kind, (None, None))
            fields = msgspec.structs.fields(fields_type) if fields_type else ()
            if fields and names == [it.encode_name for it in fields]:
                return _to_alike(decoder, kind, method, [it.type for it in fields], of["columns"])
    return list(map(_decode_small, repeat(decoder), _items(decoder, of)))


def _to_alike(
    decoder: Decoder, kind: str, method: Any, types: list[Any], columns: list[Tree]
) -> list[Any]:
    """Decode nodes of one kind, each field of all of them at once."""
    decoder.blocks.append(())  # the nodes', to which nothing refers
    kinds, *fields = (_items(decoder, it) for it in columns)
    if {len(kinds)} != set(map(len, fields)) or set(kinds) != {kind}:
        raise ValueError("columns of nodes do not fit each other")
    fields = [msgspec.convert(it, list[cls]) for it, cls in zip(fields, types, strict=True)]  # type: ignore[valid-type]
    for texts in (it for it, cls in zip(fields, types, strict=True) if cls is str):
        once = {id(text): text for text in texts}.values()
        if sum(map(len, texts)) > sum(map(len, once)) + _LONG_TEXT * len(texts):
            raise ValueError("columns of nodes repeat a long text")  # each one would be read again
    if (brief := getattr(method, "brief", None)) and not any(map(any, fields[1:])):
        return list(map(brief, fields[0]))
    for i in [i for i, cls in enumerate(types) if cls is Tree]:
        nodes = {id(node): node for node in fields[i]}
        values = {key: _decode_small(decoder, node) for key, node in nodes.items()}
        fields[i] = [values[id(node)] for node in fields[i]]  # to decode a value does nothing
    return list(map(method, repeat(decoder), *fields))


def _decode_small(decoder: Decoder, node: Tree) -> Any:
    """Decode a tree which was decoded from columns, if small: a few bytes may stand for each."""
    level, num_fields = [node], 0
    while level:
        held = [it for it in level if type(it) is dict or type(it) is list]
        num_fields += sum(map(len, held))
        if num_fields > _MOST_FIELDS:
            raise ValueError("a node of a column is not that of one plain value")
        level = [it for each in held for it in (each.values() if type(each) is dict else each)]
    return decoder.decode(node)


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
    return np.fromiter(rows, object, len(rows))[which].tolist()  # type: ignore[no-any-return]  # one axis


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
        if columns is not None:
            joined, count = _join(decoder, columns)
            return _rows(joined if cls is tuple else map(cls, joined), count)
        if at is not None:
            data = _data(decoder, at, "bif", 2)
            if cls is tuple and data.shape[1] <= _NARROW:
                fields = data.T.tolist()  # faster, without a list for each row
                return _rows(zip(*fields, strict=True), len(data))
            rows = data.tolist()
            return rows if cls is list else list(map(cls, rows))
        is_numbers = type(items) is dict and items.get("$") == "numbers"
        if cls is tuple and is_numbers and "scalars" not in items:
            return _to_tuples_of_numbers(decoder, lengths, items)  # type: ignore[arg-type]  # it is not None
        whole: Any = [] if items is None else _items(decoder, items)
        (rows,) = _cut(decoder, lengths, tuple(whole) if cls is tuple else whole)  # type: ignore[arg-type]  # it is not None
        return rows if cls in (list, tuple) else list(map(cls, rows))

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
        return list(map(dict, map(zip, repeat(fields), _join(decoder, columns)[0])))
    if names is not None or columns is not None or lengths is None:
        raise ValueError("expected either `names` and `columns`, or `lengths`")
    wholes = [[] if it is None else _items(decoder, it) for it in (keys, items)]
    return list(map(_make_dict, *_cut(decoder, lengths, *wholes), repeat(dict)))


def _to_objects(make: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Return the method of rows of a class, which `make` makes of their fields."""

    def method(decoder: Decoder, cls: str, names: list[str], columns: list[Tree]) -> list[Any]:
        if len(names) != len(columns):
            raise ValueError("`names` do not fit `columns`")
        return make(decoder, cls, names, _join(decoder, columns)[0])

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
    "bytearrays": _to_bytearrays,
    "lists": _sequences_of(list),
    "sets": _sequences_of(set),
    "dicts": _to_dicts,
    "dataclasses": _to_objects(classes.make_dataclasses),
}
