"""Divide an array into chunks, encode these as bytes, and back. Pure: no I/O.

A chunk is a file. All shapes here have their axes in memory order, outermost first, so that the
chunks of an array, by default, are contiguous parts of its memory.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding import Array

CHUNK_BYTES = 16 << 20
"""Size of the longest chunk, by default."""

MOST_RATIO = 1 << 16
"""How many times shorter zstd can make data: a block of 128 KiB takes 4 bytes at least."""

_LEAST_ROWS = 8  # of fewer, one that is padding is too large a part
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Grid:
    """How an array is divided."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]  # the last chunks extend beyond the array
    order: tuple[int, ...] | None  # the axes in memory order; None: they are in it already
    item_axis: bool = False  # whether Zarr has one more axis, the last, along which an item lies

    @property
    def num_chunks(self) -> int:
        """How many chunks the array has."""
        return math.prod(map(_ceil_div, self.shape, self.chunk_shape))

    @cached_property
    def chunks(self) -> list[tuple[tuple[int, ...], str]]:
        """Grid coordinates and file name of each chunk; none if the array has no items."""
        if 0 in self.shape:
            return []  # `product` would list the other axes first
        counts = map(_ceil_div, self.shape, self.chunk_shape)
        return [(corner, self.key(corner)) for corner in itertools.product(*map(range, counts))]

    def number_at(self, corner: Sequence[int]) -> int:
        """Return the number of the chunk at these grid coordinates."""
        number = 0
        for place, length, size in zip(corner, self.shape, self.chunk_shape, strict=True):
            number = number * _ceil_div(length, size) + place
        return number

    def key(self, corner: Sequence[int]) -> str:
        """Return the file name of the chunk at `corner`."""
        names = ["c", *map(str, to_logical(corner, self.order))]
        if self.item_axis:
            names.append("0")
        return ".".join(names)

    def part(self, corner: Sequence[int]) -> tuple[Any, ...]:
        """Return the part of the array that a chunk holds.

        The index ends with an ellipsis: without it, an array of no axes would give a scalar.
        """
        index: list[Any] = []
        for place, size, length in zip(corner, self.chunk_shape, self.shape, strict=True):
            index.append(slice(place * size, min((place + 1) * size, length)))
        return (*index, ...)


def plan_chunks(shape: tuple[int, ...], itemsize: int, limit: int = CHUNK_BYTES) -> tuple[int, ...]:
    """Return a chunk shape of at most `limit` bytes, of chunks contiguous in a C-ordered array."""
    chunk_shape = [max(1, length) for length in shape]
    for axis, length in enumerate(shape):
        row_bytes = itemsize * math.prod(shape[axis + 1 :])
        if length * row_bytes <= limit:
            break  # all that is left of the array is one chunk
        chunk_shape[axis] = 1
        if row_bytes <= limit:
            most = limit // row_bytes
            if most >= _LEAST_ROWS:
                # As many chunks as there must be, and so long that few rows of the last are padding.
                chunk_shape[axis] = _ceil_div(length, _ceil_div(length, most))
            break
    return tuple(chunk_shape)


def _ceil_div(length: int, size: int) -> int:
    return -(-length // size)


def to_logical(sizes: Sequence[int], order: Sequence[int] | None) -> list[int]:
    """Reorder sizes from memory order to the array's own axes."""
    if not order:
        return list(sizes)
    logical = [0] * len(order)
    for axis, size in zip(order, sizes, strict=True):
        logical[axis] = size
    return logical


def to_memory(sizes: Sequence[int], order: Sequence[int] | None) -> tuple[int, ...]:
    """Reorder sizes from the array's own axes to memory order."""
    if not order:
        return tuple(sizes)
    return tuple(sizes[axis] for axis in order)


# --- a chunk as bytes


@dataclass(frozen=True, slots=True)
class Zstd:
    """The one compressor, with its settings."""

    level: int = 0
    checksum: bool = False


def is_text(dtype: np.dtype[Any]) -> bool:
    """Whether items are strings of any length."""
    return isinstance(dtype, np.dtypes.StringDType)


def encode_chunk(
    data: Array, grid: Grid, corner: Sequence[int], zstd: Zstd | None
) -> list[bytes | memoryview]:
    """Return the bytes of a chunk, in parts: the array's own memory where possible."""
    shape = grid.chunk_shape
    part = data
    if data.shape != shape:
        part = data[grid.part(corner)]
    if part.shape != shape and (is_text(part.dtype) or not padding_is_last(part.shape, shape)):
        whole = np.zeros(shape, part.dtype)
        whole[tuple(map(slice, part.shape))] = part
        part = whole
    items = math.prod(shape)
    if is_text(part.dtype):
        return [encode_texts(part, items)]
    # Copies one chunk at a time, and only if the array is not contiguous.
    memory = memoryview(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    buffers: list[bytes | memoryview] = [memory]
    if part.size < items:
        buffers.append(bytes((items - part.size) * part.dtype.itemsize))
        if zstd is not None:
            buffers = [b"".join(buffers)]
    if zstd is not None:
        return [compress(buffers[0], zstd)]
    return buffers


def padding_is_last(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether the padding of a chunk comes last in memory, or there is none.

    Of a chunk of 4 x 6 items, the last rows may lack; of one of 1 x 6, the last items.
    """
    for axis, (size, whole_size) in enumerate(zip(part, whole, strict=True)):
        if size != whole_size:
            # There is only one of all that is further out, and nothing lacks further in.
            outer, inner = whole[:axis], slice(axis + 1, None)
            return math.prod(outer) == 1 and tuple(part[inner]) == tuple(whole[inner])
    return True


def decode_chunk(data: bytes, grid: Grid, dtype: np.dtype[Any], zstd: Zstd | None) -> Array:
    """Decode a chunk, padding included.

    Raises ValueError if `data` is not such a chunk, before it allocates more than such a chunk has.
    """
    raw = unpack_chunk(data, grid, dtype, zstd)
    if is_text(dtype):
        return np.array(decode_texts(raw), dtype).reshape(grid.chunk_shape)
    whole: Array = np.frombuffer(raw, np.uint8).view(dtype).reshape(grid.chunk_shape)
    return whole


def unpack_chunk(
    data: bytes, grid: Grid, dtype: np.dtype[Any], zstd: Zstd | None
) -> bytes | memoryview:
    """Return the bytes of a chunk, not compressed, of which there are as many as there must be."""
    items = math.prod(grid.chunk_shape)
    if is_text(dtype):
        if _LENGTH.unpack_from(data)[0] != items or len(data) < 4 + 4 * items:
            raise ValueError(f"a chunk does not hold {items} texts")
        return data
    nbytes = items * dtype.itemsize
    raw: bytes | memoryview = data
    if zstd is not None:
        raw = decompress(data, nbytes)
    if len(raw) != nbytes:
        raise ValueError(f"a chunk has {len(raw)} bytes, expected {nbytes}")
    return raw


def encode_texts(data: Array, count: int) -> bytes:
    """Encode `count` strings as Zarr's ``vlen-utf8``."""
    parts = [_LENGTH.pack(count)]
    for text in data.ravel().tolist():
        encoded = text.encode()
        parts.append(_LENGTH.pack(len(encoded)))
        parts.append(encoded)
    return b"".join(parts)


def decode_texts(data: bytes | memoryview) -> list[str]:
    """Decode the strings that `encode_texts` encoded."""
    texts = []
    position = _LENGTH.size
    for _ in range(_LENGTH.unpack_from(data)[0]):
        start = position + _LENGTH.size
        position = start + int.from_bytes(data[position:start], "little")
        if position > len(data):
            raise ValueError("the texts are cut off")
        texts.append(str(data[start:position], "utf-8"))
    if position != len(data):
        raise ValueError(f"{len(data) - position} bytes follow the texts")
    return texts


# --- zstd


def compress(data: bytes | memoryview, zstd: Zstd) -> bytes:
    """Compress data to one frame."""
    import numcodecs  # slow to import, and seldom needed

    return bytes(numcodecs.Zstd(zstd.level, zstd.checksum).encode(data))


def decompress(data: bytes, nbytes: int) -> memoryview:
    """Decompress what `compress` returned; raises ValueError if it has more than so many bytes."""
    import numcodecs

    content = np.zeros(nbytes, np.uint8)
    try:
        numcodecs.Zstd().decode(data, out=content)
    except Exception as error:
        raise ValueError(f"zstd cannot decompress it: {error}") from error
    return content.data
