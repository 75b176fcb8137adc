"""The orders of a pass: which record stands at each position. Pure, and the same for ever.

A saved position means nothing in another order. So orders come from `numpy.random.RandomState`,
whose numbers NumPy promises never to change; it does not promise that of its newer generators.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def permutation(n: int, *key: int) -> Indices:
    """The numbers below `n`, in an order that depends on the arguments alone."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    generator = np.random.RandomState(np.frombuffer(digest, "<u4"))
    return generator.permutation(n).astype(np.int64, copy=False)


class Order:
    """The shuffled orders of all passes: block after block, and the records of each block mixed.

    Parameters
    ----------
    lengths : sequence of int
        Records of each block. With one block, all records are mixed.
    seed : int
    """

    def __init__(self, lengths: Sequence[int], seed: int) -> None:
        self._lengths, self._seed = np.asarray(lengths, np.int64), seed
        self._starts = np.cumsum(self._lengths) - self._lengths
        # The order of the blocks, and of two: a batch may end one and begin the next.
        self._permutation = lru_cache(3)(permutation)

    def at(self, number: int, positions: range) -> Indices:
        """The records at these positions of pass `number`."""
        if len(self._lengths) == 1:
            whole = self._permutation(int(self._lengths[0]), self._seed, number, 0)
            return whole[positions.start : positions.stop]
        blocks = self._permutation(len(self._lengths), self._seed, number)
        ends = np.cumsum(self._lengths[blocks])
        pieces = []
        start = positions.start
        place = int(np.searchsorted(ends, start, side="right"))
        while start < positions.stop:
            block, end = int(blocks[place]), int(ends[place])
            length = int(self._lengths[block])
            first, stop = end - length, min(positions.stop, end)
            within = self._permutation(length, self._seed, number, block)
            pieces.append(within[start - first : stop - first] + self._starts[block])
            start, place = stop, place + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
