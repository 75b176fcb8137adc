"""Encode chunks of an array as bytes, and back; compute their checksums. Pure: no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c

from jobrunner.checkpoint.encoding import Array
from jobrunner.checkpoint.storage import BLOCK_BYTES, crc32c_of_zeros
from jobrunner.checkpoint.store.compression import CompressorEntry, compress, decompress
from jobrunner.checkpoint.store.grid import Grid, Piece
from jobrunner.define import Compressor

HEAD_BYTES = 16 << 10
"""The head of a chunk is compared first: most arrays that change, change there."""

_POLYNOMIAL = 0x82F6_3B78
"""The polynomial of the crc32c, reversed, without the highest power."""

_ONE = 1 << 31

_NOWHERE = (1 << 64) - 1
"""Marks a missing piece in the index of a shard."""

TEXT_BYTES, TEXT_RATIO = 96 << 20, 8
"""Texts of a compressed piece have at most so many bytes, or are so many times longer than it."""

_INDEX_ENTRY_BYTES = 16
_CHECKSUM_BYTES = 4


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """The bytes of a chunk: buffers, then zeros."""

    buffers: list[bytes | memoryview]  # the array's own memory where possible
    padding_bytes: int
    pieces: list[int] | None  # lengths of the pieces at the start, if an index is at the end

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(map(len, self.buffers)) + self.padding_bytes


def index_bytes(grid: Grid) -> int:
    """Return the length of the index of pieces at the end of each chunk."""
    return _INDEX_ENTRY_BYTES * grid.num_places + _CHECKSUM_BYTES


def encode_chunk(
    data: Array, grid: Grid, corner: Sequence[int], compressors: Sequence[Compressor]
) -> ChunkBytes:
    """Encode the chunk at `corner` of an array with its axes in memory order."""
    if grid.piece_shape is None:
        # Without the ellipsis, an array of no axes would give a scalar.
        part = data[(*grid.part(corner), ...)]
        encoded, padding_bytes = _encode(part, grid.chunk_shape, compressors)
        return ChunkBytes([encoded], padding_bytes, None)
    buffers: list[bytes | memoryview] = []
    lengths = []
    index = np.full((grid.num_places, 2), _NOWHERE, "<u8")
    start = 0
    for piece in grid.pieces(corner):
        part = data[(*piece.part, ...)]
        encoded, padding_bytes = _encode(part, grid.piece_shape, compressors)
        buffers.append(encoded)
        if padding_bytes:
            buffers.append(bytes(padding_bytes))
        length = len(encoded) + padding_bytes
        index[piece.place] = start, length
        lengths.append(length)
        start += length
    entries = index.tobytes()
    buffers.append(entries + int(crc32c(entries)).to_bytes(_CHECKSUM_BYTES, "little"))
    return ChunkBytes(buffers, 0, lengths)


def _encode(
    part: Array, shape: tuple[int, ...], compressors: Sequence[Compressor]
) -> tuple[bytes | memoryview, int]:
    """Return the bytes of a piece, and how many zero bytes fill it up."""
    if part.shape != shape and not _is_padded_at_the_end(part.shape, shape):
        whole = np.zeros(shape, part.dtype)
        whole[tuple(slice(size) for size in part.shape)] = part
        part = whole
    items = math.prod(shape)
    data: bytes | memoryview
    if isinstance(part.dtype, np.dtypes.StringDType):
        data, padding_bytes = encode_texts(part, items), 0
    else:
        # Copies one piece at a time, and only if the array is not contiguous.
        data = memoryview(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        padding_bytes = (items - part.size) * part.dtype.itemsize
    if compressors:
        if padding_bytes:
            data = bytes(data) + bytes(padding_bytes)
        return compress(data, compressors), 0
    return data, padding_bytes


def _is_padded_at_the_end(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether the padding of a piece comes last in memory."""
    axis = next(i for i, (a, b) in enumerate(zip(part, whole, strict=True)) if a != b)
    return math.prod(whole[:axis]) == 1 and tuple(part[axis + 1 :]) == tuple(whole[axis + 1 :])


def split_chunk(
    data: bytes, grid: Grid, corner: Sequence[int], lengths: Iterable[int]
) -> Iterator[tuple[Piece, bytes]]:
    """Split a verified chunk into its pieces, whose lengths the manifest has."""
    start = 0
    for piece, length in zip(grid.pieces(corner), lengths, strict=True):
        yield piece, data[start : start + length]
        start += length


def decode_piece(
    data: bytes, grid: Grid, dtype: np.dtype[Any], compressors: Sequence[CompressorEntry]
) -> Array:
    """Decode a piece of the array, padding included.

    Raises ValueError if `data` is not such a piece, before it allocates more than such a piece has.
    """
    raw = unpack_piece(data, grid, dtype, compressors)
    if isinstance(dtype, np.dtypes.StringDType):
        return np.array(decode_texts(raw), dtype).reshape(grid.stored_shape)
    whole: Array = np.frombuffer(raw, np.uint8).view(dtype).reshape(grid.stored_shape)
    return whole


def unpack_piece(
    data: bytes, grid: Grid, dtype: np.dtype[Any], compressors: Sequence[CompressorEntry]
) -> bytes:
    """Return the bytes of a piece, not compressed, of which there are as many as there must be."""
    items = math.prod(grid.stored_shape)
    if not isinstance(dtype, np.dtypes.StringDType):
        nbytes = items * dtype.itemsize
        raw = decompress(data, compressors, nbytes) if compressors else data
        if len(raw) != nbytes:
            raise ValueError(f"a piece has {len(raw)} bytes, expected {nbytes}")
        return raw
    most = max(TEXT_BYTES, TEXT_RATIO * len(data))
    raw = decompress(data, compressors, most) if compressors else data
    if int.from_bytes(raw[:4], "little") != items or len(raw) < 4 + 4 * items:
        raise ValueError(f"a piece does not hold {items} texts")
    return raw


# --- texts


def encode_texts(data: Array, count: int) -> bytes:
    """Encode strings as Zarr's ``vlen-utf8``, filled up with empty ones to `count`."""
    texts = [text.encode() for text in data.ravel().tolist()]
    pieces = [count.to_bytes(4, "little")]
    for text in texts:
        pieces += (len(text).to_bytes(4, "little"), text)
    pieces.append(bytes(4 * (count - len(texts))))
    return b"".join(pieces)


def decode_texts(data: bytes) -> list[str]:
    """Decode the strings that `encode_texts` encoded."""
    texts = []
    position = 4
    for _ in range(int.from_bytes(data[:4], "little")):
        start = position + 4
        position = start + int.from_bytes(data[position:start], "little")
        if position > len(data):
            raise ValueError("the texts are cut off")
        texts.append(data[start:position].decode())
    if position != len(data):
        raise ValueError(f"{len(data) - position} bytes follow the texts")
    return texts


# --- checksums


class WrittenChunk(NamedTuple):
    """A chunk as a manifest describes it; chunks that are equal in all this are the same.

    A changed chunk has no practical chance of the same crc32c and the same sum.
    """

    size: int  # in bytes, padding included
    crc: int  # crc32c of the file
    total: int  # sum of its 64-bit words, modulo 2**64
    head: int  # crc32c of its first `HEAD_BYTES`
    pieces: tuple[tuple[int, int], ...] = ()  # size and crc32c of each, if it has an index of them


class Sums:
    """Computes the sum of a chunk's 64-bit words, its crc32c, and those of its pieces.

    Each byte is read once: the crc32c of the chunk is combined from those of its pieces.
    """

    __slots__ = ("_crc", "_left", "_lengths", "pieces", "total")

    def __init__(self, chunk: ChunkBytes) -> None:
        self.total = 0  # of all blocks so far; padding adds nothing
        self.pieces: list[tuple[int, int]] = []  # size and crc32c of each complete one
        self._lengths = chunk.pieces or []
        self._left = self._lengths[0] if self._lengths else 0
        self._crc = 0

    def add(self, block: memoryview, before: int) -> int:
        """Add the next block, of one piece at most.

        Return the crc32c of all complete pieces so far; `before` is the one returned last, or 0.
        """
        whole = len(block) & ~7
        total = int(np.add.reduce(np.frombuffer(block[:whole], np.uint64)))
        total += int.from_bytes(block[whole:], "little")
        self.total = (self.total + total) & 0xFFFF_FFFF_FFFF_FFFF
        if not self._left:
            return int(crc32c(block, before))
        self._crc = int(crc32c(block, self._crc))
        self._left -= len(block)
        if self._left:
            return before
        length = self._lengths[len(self.pieces)]
        self.pieces.append((length, self._crc))
        after = combine(before, self._crc, length)
        self._crc = 0
        if len(self.pieces) < len(self._lengths):
            self._left = self._lengths[len(self.pieces)]
        return after


def checksum_chunk(chunk: ChunkBytes, head: int) -> WrittenChunk:
    """Describe a chunk as a manifest would if it were written."""
    sums, crc = Sums(chunk), 0
    for buffer in chunk.buffers:
        view = memoryview(buffer)
        for start in range(0, len(view), BLOCK_BYTES):
            crc = sums.add(view[start : start + BLOCK_BYTES], crc)
    crc = crc32c_of_zeros(chunk.padding_bytes, crc)
    return WrittenChunk(chunk.size, crc, sums.total, head, tuple(sums.pieces))


def combine(first: int, second: int, nbytes: int) -> int:
    """Return the crc32c of bytes with the crc32c `first`, followed by `nbytes` with `second`."""
    return _multiply(_shift(nbytes), first) ^ second


@lru_cache(maxsize=64)
def _shift(nbytes: int) -> int:
    """Return the factor of a crc32c if so many bytes follow: x to the power of their bits."""
    product, power = _ONE, _ONE >> 8
    while nbytes:
        if nbytes & 1:
            product = _multiply(power, product)
        power = _multiply(power, power)
        nbytes >>= 1
    return product


def _multiply(one: int, other: int) -> int:
    """Multiply two polynomials over GF(2), modulo the crc32c's."""
    product = 0
    while one:
        if one & _ONE:
            product ^= other
        one = one << 1 & 0xFFFF_FFFF
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product
