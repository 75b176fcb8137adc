"""Many plain values at once, by calls of C functions: as arrays, by their types, in order. Pure."""

from __future__ import annotations

import contextlib
import marshal
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding.dtypes import Array
from jobrunner.workspace import MANY

SCALARS = (float, int, bool, complex)
SAMPLE = 128
MOST_VALUES = 200
"""More different values are not worth an index."""
_FEW_OBJECTS = 16
_MARSHAL_HEAD = 5
Numbered = tuple[list[Any], Array]
"""Different objects, and which of them each item is."""

_MARSHALLED: Mapping[Any, tuple[int, np.dtype[Any]]] = {
    float: (ord("g"), np.dtype([("code", "u1"), ("value", "<f8")])),
    int: (ord("i"), np.dtype([("code", "u1"), ("value", "<i4")])),
}


def pack(items: Any) -> Array | None:
    """Return floats, bools, integers of up to 64 bits or complex numbers as an array.

    None if they are not alike. An array is returned as it is.
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
            if cls in _MARSHALLED:
                # If all of them begin with this byte, all of them have this form and nothing else
                # is between them.
                code, form = _MARSHALLED[cls]
                if len(data) == _MARSHAL_HEAD + form.itemsize * len(items):
                    values = np.frombuffer(data, form, offset=_MARSHAL_HEAD)
                    if (values["code"] == code).all():
                        return values["value"].astype(cls)
        if set(map(type, items)) == {cls}:
            with contextlib.suppress(OverflowError):
                return np.array(items, cls)
    return None


def sort_numbers(items: list[Any], lengths: Iterable[int]) -> Array | None:
    """Sort the numbers of each of several sets, which have these lengths; None if there are others."""
    data = pack(items)
    if data is None or data.dtype.kind == "c" or (data.dtype.kind == "f" and np.isnan(data).any()):
        return None
    counts = np.fromiter(lengths, np.intp)
    if len(counts) == 1:
        return np.sort(data)
    return data[np.lexsort((data, np.repeat(np.arange(len(counts)), counts)))]


def sort_tuples(rows: Collection[Any]) -> Array | None:
    """Sort tuples of numbers of one type, all of one length; None if there are others."""
    if set(map(type, rows)) != {tuple} or len(widths := set(map(len, rows))) > 1:
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
        numbers[is_same] = len(found)
        found.append(objects[place])
        left &= ~is_same
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
    if len(values) > MOST_VALUES:
        return values, np.empty(0, np.uint8)
    order = dict(zip(values, range(len(values)), strict=True))
    codes = np.frombuffer(bytes(map(order.__getitem__, objects)), np.uint8)
    return values, codes[few[1]] if few else codes
