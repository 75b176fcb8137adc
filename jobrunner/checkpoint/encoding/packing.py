"""Many plain values at once, by calls of C functions: as arrays, by their types, in order. Pure."""

from __future__ import annotations

import contextlib
import marshal
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, compress, islice
from typing import Any, NamedTuple

import numpy as np

from jobrunner.checkpoint.encoding.dtypes import Array

MANY = 256
"""So many items are looked at as columns."""
SCALARS = (float, int, bool, complex)
SAMPLE = 128
MOST_VALUES = 200
"""More different values are not worth an index."""
_FEW_OBJECTS = 16
_EXACT = 1 << 53
"""Floats hold all smaller integers exactly."""
_MARSHAL_HEAD = 5
_MOST_PADDING = 4
"""Strings are sorted as rows of one length if these are not that many times as long."""
Numbered = tuple[list[Any], Array]
"""Different objects, and which of them each item is."""

_MARSHALLED: Mapping[Any, tuple[int, np.dtype[Any]]] = {
    float: (ord("g"), np.dtype([("code", "u1"), ("value", "<f8")])),
    int: (ord("i"), np.dtype([("code", "u1"), ("value", "<i4")])),
}


def pack(items: Any) -> Array | None:
    """Return floats, bools, integers of up to 64 bits or complex numbers as an array.

    None if they are not alike. An array is returned as it is. Integers take 32 bits each if all can.
    """
    if type(items) is np.ndarray:
        return items
    cls = type(items[0]) if items else None
    # `marshal` copies the memory of arrays too, so look at the first items before.
    if cls in SCALARS and set(map(type, items[:SAMPLE])) == {cls}:
        with contextlib.suppress(ValueError):
            # Faster than to ask for the type of each.
            data = b"" if cls is complex else marshal.dumps(items, 2)
            if cls is bool and len(data) == _MARSHAL_HEAD + len(items):
                codes = np.frombuffer(data, np.uint8, offset=_MARSHAL_HEAD)  # one for each item
                found = codes == ord("T")
                return found if (found | (codes == ord("F"))).all() else None
            if cls in _MARSHALLED and (
                found := _take(memoryview(data)[_MARSHAL_HEAD:], len(items), [cls])
            ):
                return found[0]
        if set(map(type, items)) == {cls}:
            with contextlib.suppress(OverflowError):
                return np.array(items, cls)
    return None


def pack_dict(value: Collection[Any]) -> dict[str, Array] | None:
    """Return keys and values of a long dict as arrays, if they are floats or integers of 32 bits.

    `marshal` goes through both at once; None if they are not alike, or it is no such dict.
    """
    if type(value) is not dict or len(value) < MANY:
        return None
    first = [set(map(type, islice(it, SAMPLE))) for it in (value, value.values())]
    kinds = [cls for kinds in first for cls in kinds if cls in _MARSHALLED]
    if [{cls} for cls in kinds] == first:
        with contextlib.suppress(ValueError):
            data = memoryview(marshal.dumps(value, 2))[1:-1]
            if found := _take(data, len(value), kinds):
                return dict(zip(("keys", "of"), found, strict=True))
    return None


def _take(data: memoryview, count: int, kinds: Sequence[type]) -> list[Array] | None:
    """Take values of these types in turn from where `marshal` puts them; None if others are there.

    If each begins with the code of its type, all have the forms of these and nothing is between them.
    """
    codes, forms = zip(*map(_MARSHALLED.__getitem__, kinds), strict=True)
    row = np.dtype([(str(i), form) for i, form in enumerate(forms)])
    if len(data) != count * row.itemsize:
        return None
    fields = [np.frombuffer(data, row)[str(i)] for i in range(len(kinds))]
    if any((it["code"] != code).any() for it, code in zip(fields, codes, strict=True)):
        return None
    return [it["value"].copy() for it in fields]


def split(items: Sequence[Any], kinds: list[type], codes: Array) -> list[Any]:
    """Return the items of each kind; `codes` are the places of their types in `kinds`.

    Floats and integers, if these are no larger than floats hold exactly, are arrays.
    """
    if {*kinds} == {int, float}:
        with contextlib.suppress(OverflowError):
            whole = np.fromiter(items, np.float64, len(items))
            parts = [whole.compress(codes == code) for code in range(len(kinds))]
            if np.abs(parts[kinds.index(int)]).max() < _EXACT:
                return [
                    part.astype(cls, copy=False) for part, cls in zip(parts, kinds, strict=True)
                ]
    return [list(compress(items, (codes == code).tobytes())) for code in range(len(kinds))]


def sort_numbers(items: list[Any], lengths: Array | list[int]) -> Array | None:
    """Sort the numbers of each of several sets, which have these lengths; None if there are others."""
    data = pack(items)
    if data is None or data.dtype.kind == "c" or (data.dtype.kind == "f" and np.isnan(data).any()):
        return None
    if len(lengths) == 1:
        data.sort()
        return data
    return data[np.lexsort((data, np.repeat(np.arange(len(lengths)), lengths)))]


def sort_sets(sets: Sequence[Any], lengths: Array) -> Any:
    """Sort what each of several sets, of these lengths, holds; return all together."""
    flat = sort_numbers(list(chain.from_iterable(sets)), lengths)
    return list(chain.from_iterable(map(sort_members, sets))) if flat is None else flat


def sort_tuples(rows: Collection[Any]) -> Array | None:
    """Sort tuples of numbers of one type, all of one length; None if there are others."""
    if type(next(iter(rows))) is not tuple or set(map(type, rows)) != {tuple}:
        return None
    if len(widths := set(map(len, rows))) > 1:
        return None
    data = pack(list(chain.from_iterable(rows)))
    if data is None or data.dtype.kind == "c" or np.isnan(data).any():
        return None
    data = data.reshape(-1, *widths)
    return data[np.lexsort(data.T[::-1])]


def sort_members(value: Collection[Any]) -> list[Any]:
    """Sort the members of a set in an order that does not depend on the process."""
    kinds = set(map(type, value))
    if kinds in ({str}, {int}):
        return sorted(value)
    rows = list(value) if kinds == {tuple} and len(value) >= MANY else []
    return (rows and _sort_rows(rows)) or sorted(value, key=_rank)


def _sort_rows(rows: list[tuple[Any, ...]]) -> list[Any] | None:
    """Sort many tuples with numbers or strings of one type at each position; None if others."""
    widths = set(map(len, rows))
    flat = list(chain.from_iterable(rows))
    keys: list[Array] = []
    for i in range(width := widths.pop()):
        key = pack(column := flat[i::width])
        if key is None and set(map(type, column)) == {str}:
            order = {text: i for i, text in enumerate(sorted(set(column)))}
            key = np.fromiter(map(order.__getitem__, column), np.int64, len(column))
        if key is None or np.isnan(key).any():
            return None
        keys.insert(0, key)
    if widths or not keys:
        return None
    return list(map(rows.__getitem__, np.lexsort(keys).tolist()))


class Texts(NamedTuple):
    """Strings without a zero, as their UTF-8 with a zero between them."""

    number: int
    data: Array


def lengths_of(rows: Sequence[Any]) -> Array:
    """How much each row holds."""
    return np.fromiter(map(len, rows), np.int64, len(rows))


def sort_texts(texts: Collection[Any]) -> Texts | None:
    """Sort many strings by their UTF-8, whose order is theirs; None if some are too long for that.

    None also if one has a zero, or is no string.
    """
    if set(map(type, texts)) != {str}:
        return None
    data = np.frombuffer("\0".join(texts).encode("utf-8", "surrogatepass") + b"\0", np.uint8)
    lengths = np.diff(np.flatnonzero(data == 0), prepend=-1) - 1
    width = int(lengths.max())
    if len(lengths) != len(texts) or width * len(lengths) > _MOST_PADDING * len(data):
        return None
    rows = np.zeros((len(lengths), width + 1), np.uint8)
    rows[np.arange(width + 1) <= lengths[:, np.newaxis]] = data
    rows.view(f"S{width + 1}").sort(axis=0)
    is_text = rows != 0
    is_text[:, width] = True  # the zero after each
    return Texts(len(texts), rows[is_text][:-1])


def _rank(item: object) -> tuple[Any, ...]:
    """An order of the members that does not depend on the process."""
    cls = type(item)
    is_number = cls in (int, float) and item == item
    return (not is_number, item if is_number else 0, cls.__qualname__, _text(item))


def _text(item: object) -> str:
    try:
        return repr(sorted(map(_text, item)) if isinstance(item, frozenset) else item)
    except Exception:  # any class of the user's
        return ""


# --- what comes again


def number_objects(items: Iterable[Any], count: int, most: int) -> Numbered | None:
    """Return the different objects among items, the first ones first, and the number of each item's.

    None if there are more than `most`, at most 256. Equal objects may be different.
    """
    if count < MANY:
        few, which = number_many(list(items))
        return None if len(few) > most else (few, which.astype(np.uint8))
    objects = np.fromiter(items, object, count)
    addresses = np.frombuffer(objects, np.intp)
    numbers, left = np.zeros(count, np.uint8), np.ones(count, bool)
    found: list[Any] = []
    place = 0
    while left[place]:
        if len(found) == most:
            return None
        is_same = addresses == addresses[place]
        numbers += is_same.view(np.uint8) * np.uint8(len(found))  # sooner than by a mask
        found.append(objects[place])
        left ^= is_same
        place = int(left.argmax())
    return found, numbers


def few_objects(items: Sequence[Any]) -> Numbered | None:
    """Return the different objects and the number of each item's, if they are few and come again."""
    if len(set(map(id, items[:SAMPLE]))) > _FEW_OBJECTS:
        return None
    few = number_objects(items, len(items), _FEW_OBJECTS)
    return few if few and len(few[0]) < len(items) else None


def number_many(rows: Sequence[Any]) -> Numbered:
    """Return the different objects and the number of each row's; quicker than NumPy if many."""
    once = dict(zip(map(id, rows), rows, strict=True))
    order = dict(zip(once, range(len(once)), strict=True))
    numbers = map(order.__getitem__, map(id, rows))
    return list(once.values()), np.fromiter(numbers, np.int64, len(rows))


def number_equal(items: Sequence[Any], few: Numbered | None) -> Numbered:
    """Return the different values of items, the first ones first, and the number of each item's.

    No numbers if there are too many values.
    """
    objects = few[0] if few else items
    values = list(dict.fromkeys(objects))
    if few and len(values) == len(objects):
        return few
    if len(values) > MOST_VALUES:
        return values, np.empty(0, np.uint8)
    order = dict(zip(values, range(len(values)), strict=True))
    codes = np.frombuffer(bytes(map(order.__getitem__, objects)), np.uint8)
    return values, codes[few[1]] if few else codes
