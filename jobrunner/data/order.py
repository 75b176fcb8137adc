"""The orders of a pass: which record stands at each position. Pure, and the same for ever.

A saved position means nothing in another order, so orders depend on no library's generator: only on
integer arithmetic and SHA-2. No order holds an entry for every record. A shuffled one computes the
records of some thousand positions at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Key = NDArray[np.uint64]

_WINDOW = 1 << 14  # positions whose records are computed together
_FEW = 1 << 12  # records whose order is a sort of random numbers
_ROUNDS = 6


def key_of(*parts: object) -> Key:
    """64-bit numbers that look random and depend only on `parts`."""
    digest = hashlib.sha512(repr(("jobrunner.data", *parts)).encode()).digest()
    more = hashlib.sha512(digest).digest()
    return np.frombuffer(digest + more, "<u8")


class Permutation:
    """A shuffled order of the numbers below `n`.

    Few numbers are sorted by random keys. Of many, each position is mixed by steps that map the
    numbers below the next power of two one to one (Kensler, "Correlated multi-jittered sampling",
    2013); a result that is too large is mixed again until it is not.
    """

    def __init__(self, n: int, key: Key) -> None:
        self.n = n
        self._key = key
        self._sorted: Indices | None = None
        bits = max(1, n - 1).bit_length()
        # The low bits of a product depend on no others, so both types give the same numbers.
        self._dtype = dtype = np.uint32 if bits <= 32 else np.uint64
        self._mask, self._shift = dtype((1 << bits) - 1), dtype(bits // 2)
        self._term = key[0].astype(dtype)
        self._factors = [each.astype(dtype) | dtype(1) for each in key[1 : 1 + _ROUNDS]]

    def at(self, start: int, stop: int) -> Indices:
        """The numbers at positions from `start` to before `stop`."""
        if self.n <= _FEW:
            if self._sorted is None:
                self._sorted = np.argsort(_hashed(self.n, self._key), kind="stable")
            return self._sorted[start:stop]
        found = np.arange(start, stop, dtype=self._dtype)
        self._mix(found)
        limit = self._dtype(self.n - 1)
        while len(outside := np.flatnonzero(found > limit)):
            again = found[outside]
            self._mix(again)
            found[outside] = again
        return found.astype(np.int64)

    def _mix(self, x: NDArray[Any]) -> None:
        shifted = np.empty_like(x)
        x += self._term
        for factor in self._factors:
            x *= factor
            x &= self._mask
            np.right_shift(x, self._shift, out=shifted)
            x ^= shifted


def _hashed(n: int, key: Key) -> NDArray[np.uint64]:
    """A 64-bit hash of each number below `n` (SplitMix64's finalizer)."""
    x: NDArray[np.uint64] = np.arange(n, dtype=np.uint64)
    x = x * np.uint64(0x9E3779B97F4A7C15) + key[0]
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    hashed: NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return hashed


class Shuffled:
    """The shuffled orders of all passes: all records mixed, or block after block.

    Parameters
    ----------
    lengths : sequence of int
        Records of each block. The blocks come in a shuffled order, and the records of each.
    seed : int
    """

    def __init__(self, lengths: Sequence[int], seed: int) -> None:
        self._lengths, self._seed = np.asarray(lengths, np.int64), seed
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._total = int(self._lengths.sum())
        self._begin(0)

    def _begin(self, number: int) -> None:
        self._number, self._key = number, (self._seed, number)
        self._block: tuple[int, Permutation] = (-1, Permutation(0, key_of()))
        self._from = self._until = 0  # of the records that are computed
        self._window = np.empty(0, np.int64)
        self._blocks = Permutation(len(self._lengths), key_of(*self._key)).at(0, len(self._lengths))
        self._counts = self._lengths[self._blocks]
        self._ends = np.cumsum(self._counts)

    def at(self, number: int, start: int, stop: int) -> Indices:
        """The records at positions from `start` to before `stop` of pass `number`."""
        if number != self._number:
            self._begin(number)
        if start < self._from or stop > self._until:
            self._from, self._until = start, min(self._total, max(stop, start + _WINDOW))
            self._window = self._compute(start, self._until)
        return self._window[start - self._from : stop - self._from]

    def _compute(self, start: int, stop: int) -> Indices:
        found = []
        place = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end = int(self._ends[place])
            first = end - int(self._counts[place])
            block = int(self._blocks[place])
            if self._block[0] != block:
                length = int(self._counts[place])
                self._block = (block, Permutation(length, key_of(*self._key, block)))
            until = min(end, stop)
            rows = self._block[1].at(start - first, until - first)
            found.append(rows + self._starts[block])
            start, place = until, place + 1
        return found[0] if len(found) == 1 else np.concatenate([*found, np.empty(0, np.int64)])
