"""What the files of an array hold: its pieces as bytes, and back. Pure: no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from crc32c import crc32c

from jobrunner.checkpoint.store.compression import compress, decompress
from jobrunner.checkpoint.store.grid import Grid, Piece
from jobrunner.define import Compressor

_NOWHERE = (1 << 64) - 1
"""In a shard's index: there is no such piece."""

_INDEX_ENTRY_BYTES = 16
_DIGEST_BYTES = 4


@dataclass(frozen=True, slots=True)
class Content:
    """What a file holds.

    Attributes
    ----------
    buffers : list of bytes or memoryview
        One after another; memory of the array itself as far as that goes.
    padding_bytes : int
        So many zero bytes follow.
    pieces : list of int or None
        Lengths of the pieces that it begins with, where it has an index of them.
    """

    buffers: list[bytes | memoryview]
    padding_bytes: int
    pieces: list[int] | None

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(map(len, self.buffers)) + self.padding_bytes


def file_content(
    data: np.ndarray[Any, Any], grid: Grid, corner: Sequence[int], compressors: Sequence[Compressor]
) -> Content:
    """What the file at `corner` holds.

    Parameters
    ----------
    data : numpy.ndarray
        Its axes in the order of memory.
    grid : Grid
    corner : sequence of int
    compressors : sequence of mapping
    """
    if grid.piece_shape is None:
        # Without the dots, no axes would give a scalar.
        part = data[(*grid.part(corner), ...)]
        buffers, padding_bytes = _encode(part, grid.chunk_shape, compressors)
        return Content(buffers, padding_bytes, None)
    buffers = []
    lengths = []
    index = np.full((grid.num_places, 2), _NOWHERE, "<u8")
    start = 0
    for piece in grid.pieces(corner):
        part = data[(*piece.part, ...)]
        content, padding_bytes = _encode(part, grid.piece_shape, compressors)
        buffers += content
        if padding_bytes:
            buffers.append(bytes(padding_bytes))
        length = sum(map(len, content)) + padding_bytes
        index[piece.place] = start, length
        lengths.append(length)
        start += length
    told = index.tobytes()
    buffers.append(told + int(crc32c(told)).to_bytes(_DIGEST_BYTES, "little"))
    return Content(buffers, 0, lengths)


def _encode(
    part: np.ndarray[Any, Any],
    shape: tuple[int, ...],
    compressors: Sequence[Compressor],
) -> tuple[list[bytes | memoryview], int]:
    """A piece as bytes, and how many zero bytes follow to make it whole."""
    if part.shape != shape and not _is_padded_at_the_end(part.shape, shape):
        whole = np.zeros(shape, part.dtype)
        whole[tuple(slice(size) for size in part.shape)] = part
        part = whole
    items = math.prod(shape)
    content: bytes | memoryview
    if isinstance(part.dtype, np.dtypes.StringDType):
        content, padding_bytes = encode_texts(part, items), 0
    else:
        # A copy only where the array is not contiguous, and of one piece at a time.
        content = memoryview(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        padding_bytes = (items - part.size) * part.dtype.itemsize
    if compressors:
        if padding_bytes:
            content = bytes(content) + bytes(padding_bytes)
        return [compress(content, compressors)], 0
    return [content], padding_bytes


def _is_padded_at_the_end(part: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether what lacks of a piece lies, in memory, all after what is there."""
    axis = next(i for i, (a, b) in enumerate(zip(part, whole, strict=True)) if a != b)
    return math.prod(whole[:axis]) == 1 and tuple(part[axis + 1 :]) == tuple(whole[axis + 1 :])


def split_content(
    content: bytes, grid: Grid, corner: Sequence[int]
) -> Iterator[tuple[Piece, bytes]]:
    """The pieces of a file, each with its bytes; what it holds must have been verified."""
    if grid.piece_shape is None:
        (piece,) = grid.pieces(corner)
        yield piece, content
        return
    stop = len(content) - _DIGEST_BYTES
    start = stop - _INDEX_ENTRY_BYTES * grid.num_places
    index = np.frombuffer(content[start:stop], "<u8").reshape(-1, 2).tolist()
    for piece in grid.pieces(corner):
        at, length = index[piece.place]
        yield piece, content[at : at + length]


def decode_piece(
    content: bytes,
    piece: Piece,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    compressors: Sequence[Compressor],
) -> np.ndarray[Any, Any]:
    """The part of the array that a piece holds.

    Parameters
    ----------
    content : bytes
    piece : Piece
    shape : tuple of int
        Of a whole piece.
    dtype : numpy.dtype
    compressors : sequence of mapping
    """
    if compressors:
        content = decompress(content, compressors)
    whole: np.ndarray[Any, Any]
    if isinstance(dtype, np.dtypes.StringDType):
        whole = np.array(decode_texts(content), dtype).reshape(shape)
    else:
        whole = np.frombuffer(content, np.uint8).view(dtype).reshape(shape)
    return whole[tuple(slice(part.stop - part.start) for part in piece.part)]


# --- texts


def encode_texts(data: np.ndarray[Any, Any], count: int) -> bytes:
    """Texts in the form of Zarr's ``vlen-utf8``, empty ones added up to `count`."""
    texts = [text.encode() for text in data.ravel().tolist()]
    pieces = [count.to_bytes(4, "little")]
    for text in texts:
        pieces += (len(text).to_bytes(4, "little"), text)
    pieces.append(bytes(4 * (count - len(texts))))
    return b"".join(pieces)


def decode_texts(data: bytes) -> list[str]:
    """The texts that `encode_texts` wrote, the added ones included."""
    texts = []
    position = 4
    for _ in range(int.from_bytes(data[:4], "little")):
        start = position + 4
        position = start + int.from_bytes(data[position:start], "little")
        texts.append(data[start:position].decode())
    return texts
