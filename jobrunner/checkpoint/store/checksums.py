"""What tells the content of one file from another's, computed in one pass over it. Pure: no I/O."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from crc32c import crc32c

from jobrunner.checkpoint.storage import BLOCK_BYTES, PosixFiles
from jobrunner.checkpoint.store.chunk_bytes import Content

HEAD_BYTES = 16 << 10
"""What of a chunk is compared first: most arrays that change at all change there."""

_POLYNOMIAL = 0x82F6_3B78
"""The crc32c's, its highest power, which is left out, after the lowest bit."""

_ONE = 1 << 31


class WrittenChunk(NamedTuple):
    """A chunk as a manifest describes it: two chunks of which all this is equal are the same.

    Attributes
    ----------
    size : int
        In bytes, padding included.
    crc : int
        The crc32c of the file.
    total : int
        The sum, modulo 2**64, of the file's 64-bit words: with the crc32c, which finds what a sum
        does not, it leaves a changed chunk no practical chance to pass for an unchanged one.
    head : int
        The crc32c of its first `HEAD_BYTES`.
    pieces : tuple of (int, int)
        Size and crc32c of each of its pieces, where it has an index of them.
    """

    size: int
    crc: int
    total: int
    head: int
    pieces: tuple[tuple[int, int], ...] = ()


class Sums:
    """Sums the 64-bit words of a file's blocks, modulo 2**64, and digests it and its pieces.

    No byte is digested twice: the file's crc32c is put together from those of its pieces.

    Parameters
    ----------
    content : Content
        What the file holds; the zeros that pad it add nothing to the sum.

    Attributes
    ----------
    total : int
        The sum of what was added.
    pieces : list of (int, int)
        Size and crc32c of each piece that was added whole.
    """

    __slots__ = ("_crc", "_left", "_lengths", "pieces", "total")

    def __init__(self, content: Content) -> None:
        self.total = 0
        self.pieces: list[tuple[int, int]] = []
        self._lengths = content.pieces or []
        self._left = self._lengths[0] if self._lengths else 0
        self._crc = 0

    def add(self, block: memoryview, before: int) -> int:
        """Add the block that comes next.

        Parameters
        ----------
        block : memoryview of bytes
            Of one piece, if of any.
        before : int
            What this gave for the block before; 0 at the start.

        Returns
        -------
        int
            The crc32c of all so far, as of the last piece that is whole.
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


def digest_content(files: PosixFiles, content: Content, head: int) -> WrittenChunk:
    """A file as a manifest would describe it, were it written."""
    sums, crc = Sums(content), 0
    for buffer in content.buffers:
        view = memoryview(buffer)
        for start in range(0, len(view), BLOCK_BYTES):
            crc = sums.add(view[start : start + BLOCK_BYTES], crc)
    crc = files.digest_zeros(content.padding_bytes, crc)
    return WrittenChunk(content.size, crc, sums.total, head, tuple(sums.pieces))


def combine(first: int, second: int, nbytes: int) -> int:
    """The crc32c of what has the crc32c `first`, and after it `nbytes` bytes that have `second`."""
    return _multiply(_shift(nbytes), first) ^ second


@lru_cache(maxsize=64)
def _shift(nbytes: int) -> int:
    """What a crc32c is multiplied by when so many bytes follow: x to the power of their bits."""
    product, power = _ONE, _ONE >> 8
    while nbytes:
        if nbytes & 1:
            product = _multiply(power, product)
        power = _multiply(power, power)
        nbytes >>= 1
    return product


def _multiply(one: int, other: int) -> int:
    """The product of two polynomials over GF(2), modulo the crc32c's."""
    product = 0
    while one:
        if one & _ONE:
            product ^= other
        one = one << 1 & 0xFFFF_FFFF
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
    return product
