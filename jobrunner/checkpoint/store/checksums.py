"""Checksums of a chunk, computed in one pass over it. Pure: no I/O."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from crc32c import crc32c

from jobrunner.checkpoint.storage import BLOCK_BYTES, Files
from jobrunner.checkpoint.store.chunk_bytes import ChunkBytes

HEAD_BYTES = 16 << 10
"""The head of a chunk is compared first: most arrays that change, change there."""

_POLYNOMIAL = 0x82F6_3B78
"""The polynomial of the crc32c, reversed, without the highest power."""

_ONE = 1 << 31


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


def checksum_chunk(files: Files, chunk: ChunkBytes, head: int) -> WrittenChunk:
    """Describe a chunk as a manifest would if it were written."""
    sums, crc = Sums(chunk), 0
    for buffer in chunk.buffers:
        view = memoryview(buffer)
        for start in range(0, len(view), BLOCK_BYTES):
            crc = sums.add(view[start : start + BLOCK_BYTES], crc)
    crc = files.digest_zeros(chunk.padding_bytes, crc)
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
