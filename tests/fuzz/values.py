"""Values of many kinds for random jobs."""

from __future__ import annotations

import datetime as dt
import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.checkpoint.encoding.kinds_of_values import describe

MOST_ITEMS = 60
MOST_BYTES = 300_000

DTYPES = (
    *("?", "u1", "<i2", ">i2", "<i4", ">i4", "<i8", ">u8", "<f2", "<f4", ">f4", "<f8", ">f8"),
    *("<c8", ">c16", "S3", "<U2", ">U2", "<M8[s]", ">M8[D]", ">m8[ms]", "V3"),
    [("a", "<i4"), ("b", ">f8", (2,))],
)
PADDED = np.dtype(
    {"names": ["a", "b"], "formats": ["u1", "<f8"], "offsets": [0, 8], "itemsize": 16}
)


class Chance(random.Random):
    """Random numbers; `has_objects`: values may have arrays of Python objects."""

    has_objects = False


# ---- making values


def make(chance: random.Random, depth: int = 2) -> Any:
    """A new value: an array, a scalar, or a container of values, one of them perhaps twice."""
    kind = chance.random()
    if depth == 0 or kind < 0.45:
        return make_array(chance) if chance.random() < 0.7 else make_scalar(chance)
    items = [make(chance, depth - 1) for _ in range(chance.randint(0, 3))]
    if items and chance.random() < 0.5:
        items.append(chance.choice(items))  # one object twice
        if chance.random() < 0.3:
            items.append([items[-1]])
    return contain(chance, items)


def contain(chance: random.Random, items: list[Any]) -> Any:
    """Put items into a container."""
    kind = chance.randrange(8)
    if kind < 3:
        return items
    if kind < 6:
        return {chance.choice([f"k{i}", i]): item for i, item in enumerate(items)}
    if kind == 6:
        return tuple(items)
    return {"in": tuple(items), "set": {chance.randrange(9) for _ in range(3)}}


def make_scalar(chance: random.Random) -> Any:
    """An immutable value, or one of few bytes."""
    number = chance.randint(-9, 9)
    return chance.choice(
        [
            *(number, 10**30 + number, number / 7, float("nan"), -0.0, complex(number, 1)),
            *(None, True, f"text {number}", "é\0\ud800", b"\0" * abs(number)),
            *(np.float32(number), np.int64(number), np.bool_(number), np.str_(number)),
            *(np.datetime64(abs(number), "s"), np.bytes_(b"x"), np.complex64(number)),
            *(bytearray(b"abc"), {number, 77}, (), dt.date(2000, 1, 10 + number)),
        ]
    )


def make_array(chance: random.Random, dtype: Any = None, shape: Any = None) -> np.ndarray:
    """An array: of many dtypes, contiguous or not, writeable or not, its own memory or not."""
    if dtype is None:
        dtype = chance.choice(DTYPES) if chance.random() < 0.95 else PADDED
    if shape is None:
        shape = chance.choice([(), (0,), (1,), (3,), (4,), (5,), (2, 3), (3, 2), (2, 0), (2, 2, 2)])
        if chance.random() < 0.02:
            shape = (9_000,)
            dtype = "<f8"
    array = fill(np.empty(shape, dtype), chance.randrange(1 << 16))
    way = chance.randrange(12)
    if way == 0:
        return np.asfortranarray(array)
    if way == 1:
        return array.T
    if way == 2 and array.ndim:
        return np.concatenate([array, array])[::2]
    if way == 3 and array.ndim:
        return array[::-1]
    if way == 4:
        array.flags.writeable = False
    if way == 5 and array.ndim == 1 and array.dtype.kind not in "O":
        return np.frombuffer(array.tobytes(), array.dtype)
    if way == 6 and array.ndim == 1:
        return np.frombuffer(bytearray(array.tobytes()), array.dtype)
    if way == 7 and array.ndim == 1:
        return np.broadcast_to(array, (2, *array.shape))
    if way == 8 and getattr(chance, "has_objects", False):
        items = np.empty(2, object)
        items[:] = ["text", [1, 2]]
        return items
    return array


def fill(array: np.ndarray, number: int) -> np.ndarray:
    """Fill an array with values that `number` decides."""
    numbers = (np.arange(array.size) * 37 + number).reshape(array.shape) % 100
    if array.dtype.names is not None:
        for name in array.dtype.names:
            field = array[name]
            field[...] = fill(np.empty(field.shape, field.dtype), number + 1)
    elif array.dtype.kind == "V":
        array[...] = np.void(bytes([number % 251]) * array.itemsize)
    else:
        array[...] = numbers.astype(array.dtype.newbyteorder("="))
    return array


# ---- looking at values


def mutables(value: Any, found: dict[int, Any] | None = None) -> dict[int, Any]:
    """Everything in a value that can be changed, each object once, in order."""
    found = {} if found is None else found
    if id(value) in found:
        return found
    if isinstance(value, np.ndarray | list | dict | set | bytearray):
        found[id(value)] = value
    for item in items_of(value):
        mutables(item, found)
    return found


def items_of(value: Any) -> Iterator[Any]:
    """What a container holds."""
    if isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, np.ndarray) and value.dtype == object:
        yield from value.flat


def is_large(value: Any) -> bool:
    """Whether a value has so many items that it must not grow further."""
    total = [0, 0]

    def count(part: Any) -> None:
        total[0] += 1
        if isinstance(part, np.ndarray):
            total[1] += part.nbytes
        if total[0] <= MOST_ITEMS:
            for item in items_of(part):
                count(item)

    count(value)
    return total[0] > MOST_ITEMS or total[1] > MOST_BYTES


def digest(*values: Any) -> int:
    """A number that depends on every bit of some values."""
    return zlib.crc32(repr([describe(value) for value in values]).encode("utf-8", "surrogatepass"))
