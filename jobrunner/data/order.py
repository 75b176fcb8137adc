"""The orders of a pass: which record stands at each position. Pure, and the same for ever.

A saved position means nothing in another order, so orders depend on no library's generator: only on
integer arithmetic and SHA-2. No order holds an entry for every record. A shuffled one computes the
records of some ten thousand positions at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Key = NDArray[np.uint64]

WINDOW = 1 << 16  # positions whose records are computed together
_FEW = 1 << 12  # records whose order is a sort of random numbers
_MORE = 20_000  # the same, where many numbers would be mixed for nothing
_AT_ONCE = 1 << 13  # records of several passes that are sorted together
_MOST_AT_ONCE = 32  # passes
_ROUNDS = 6
_TAIL = 32  # so few numbers are mixed one by one: an array of them takes longer


def key_of(*parts: object) -> Key:
    """64-bit numbers that look random and depend only on `parts`."""
    digest = _digest(parts)
    return np.frombuffer(digest + hashlib.sha512(digest).digest(), "<u8")


def _digest(parts: tuple[object, ...]) -> bytes:
    return hashlib.sha512(repr(("jobrunner.data", *parts)).encode()).digest()


def _is_sorted(n: int, is_former: bool) -> bool:
    """Whether the order of `n` numbers is a sort. Earlier versions mixed more often."""
    unused = (1 << (n - 1).bit_length()) - n
    return n <= _FEW or (not is_former and n <= _MORE and unused > n // 5)


def has_changed(lengths: Sequence[int]) -> bool:
    """Whether earlier versions shuffled blocks of these lengths in other orders."""
    return any(_is_sorted(n, True) != _is_sorted(n, False) for n in {*lengths, len(lengths)})


class Permutation:
    """A shuffled order of the numbers below `n`.

    Few numbers are sorted by random keys; so are some thousand that are much fewer than the next
    power of two. Of others, each position is mixed by steps that map the numbers below that power
    one to one (Kensler, "Correlated multi-jittered sampling", 2013); a result that is too large is
    mixed again until it is not.
    """

    def __init__(self, n: int, key: Key, is_former: bool = False) -> None:
        self._last = n - 1
        bits = self._last.bit_length()
        # The low bits of a product depend on no others, so all types give the same numbers.
        self._dtype = np.dtype(f"u{2 if bits <= 16 else 4 if bits <= 32 else 8}")
        self._mask, self._shift = (1 << bits) - 1, bits // 2
        self._term, *factors = (number & self._mask for number in key[: 1 + _ROUNDS].tolist())
        self._factors = [factor | 1 for factor in factors]
        self._all: Indices | None = None
        if _is_sorted(n, is_former):
            self._all = _sorted(n, key[:1])[0]
        elif n <= WINDOW:
            table = self._mixed(np.arange(1 << bits, dtype=self._dtype))
            self._all = self._again(table[:n].copy(), table.__getitem__)

    def at(self, start: int, stop: int) -> Indices:
        """The numbers at positions from `start` to before `stop`."""
        if self._all is not None:
            return self._all[start:stop]
        found = self._mixed(np.arange(start, stop, dtype=self._dtype))
        return self._again(found, self._mixed)

    def _mixed(self, x: Any) -> Any:
        """An int, or an array, which this changes."""
        x += self._term
        for factor in self._factors:
            x *= factor
            x &= self._mask
            x ^= x >> self._shift
        return x

    def _again(self, found: NDArray[Any], mixed: Callable[[Any], Any]) -> Indices:
        """Mix again what is too large, in an array that this changes."""
        places = np.flatnonzero(found > self._last)
        left = found[places]
        while len(places) > _TAIL:
            found[places] = left = mixed(left)
            outside = np.flatnonzero(left > self._last)
            places, left = places[outside], left[outside]
        for place, number in zip(places.tolist(), left.tolist(), strict=True):
            while number > self._last:
                number = mixed(number)
            found[place] = number
        return found.astype(np.int64)


_NUMBERS = np.arange(_MORE, dtype=np.uint64)
_STEPS = _NUMBERS * np.uint64(0x9E3779B97F4A7C15)


def _sorted(n: int, keys: Key) -> Indices:
    """For each key, the numbers below `n` in the order of their 64-bit hashes (SplitMix64's)."""
    x: NDArray[np.uint64] = _STEPS[:n] + keys[:, None]
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> shift
        x *= factor
    x ^= x >> 31
    return sorted_numbers(x)


def sorted_numbers(rows: NDArray[np.uint64]) -> Indices:
    """As `argsort` of each row, of at most `_MORE` different items, in a third of the time.

    The low bits of the items make room for their numbers, which are then sorted with them.
    """
    n = rows.shape[1]
    mask = np.uint64((1 << n.bit_length()) - 1)
    found = rows & ~mask | _NUMBERS[:n]
    found.sort(axis=1)
    if ((found[:, 1:] ^ found[:, :-1]) <= mask).any():  # the low bits decide
        return np.argsort(rows, axis=1)
    found &= mask
    return found.view(np.int64)


class _FewShuffled:
    """The shuffled orders of few records, of several passes at once."""

    def __init__(self, n: int, seed: int) -> None:
        self._n, self._seed = n, seed
        self._first, self._orders = 0, np.empty((0, n), np.int64)

    def at(self, number: int) -> Indices:
        """The order of pass `number`."""
        if not 0 <= number - self._first < len(self._orders):
            count = max(1, min(_MOST_AT_ONCE, _AT_ONCE // (self._n + 1)))
            passes = range(number, number + count)
            self._first = number
            digests = b"".join(_digest((self._seed, i, 0))[:8] for i in passes)
            self._orders = _sorted(self._n, np.frombuffer(digests, "<u8"))
        order: Indices = self._orders[number - self._first]
        return order


class Shuffled:
    """The shuffled orders of all passes: all records mixed, or block after block.

    Parameters
    ----------
    lengths : sequence of int
        Records of each block. The blocks come in a shuffled order, and the records of each.
    seed : int
    is_former : bool
        Shuffle as earlier versions did.
    """

    def __init__(self, lengths: Sequence[int], seed: int, is_former: bool = False) -> None:
        self._lengths, self._seed = np.asarray(lengths, np.int64), seed
        self._is_former = is_former
        self._starts = np.cumsum(self._lengths) - self._lengths
        n = sum(lengths)
        are_few = len(lengths) == 1 and _is_sorted(n, is_former)
        self._few = _FewShuffled(n, seed) if are_few else None
        self._begin(0)

    def _begin(self, number: int) -> None:
        self._number, self._key = number, (self._seed, number)
        self._block: tuple[int, Permutation] | None = None  # the last one, and its number
        self._from = self._until = 0  # of the records that are computed
        self._window = np.empty(0, np.int64)
        n = len(self._lengths)
        self._blocks = self._permutation(n).at(0, n) if n > 1 else np.zeros(n, int)
        self._counts = self._lengths[self._blocks]
        self._ends = np.cumsum(self._counts)

    def _permutation(self, n: int, *block: int) -> Permutation:
        return Permutation(n, key_of(*self._key, *block), self._is_former)

    def at(self, number: int, start: int, stop: int, limit: int) -> Indices:
        """The records at positions from `start` to before `stop` of pass `number`.

        Those up to `limit` are likely to be asked for next.
        """
        if self._few is not None:
            return self._few.at(number)[start:stop]
        if number != self._number:
            self._begin(number)
        if start < self._from or stop > self._until:
            self._from, self._until = start, max(stop, min(limit, start + WINDOW))
            self._window = self._compute(start, self._until)
        return self._window[start - self._from : stop - self._from]

    def _compute(self, start: int, stop: int) -> Indices:
        found: list[Indices] = []
        place = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end, count = int(self._ends[place]), int(self._counts[place])
            block, first = int(self._blocks[place]), end - count
            if self._block is None or self._block[0] != block:
                self._block = (block, self._permutation(count, block))
            until = min(end, stop)
            rows = self._block[1].at(start - first, until - first)
            found.append(rows + self._starts[block] if block else rows)
            start, place = until, place + 1
        return found[0] if len(found) == 1 else np.concatenate([*found, np.empty(0, np.int64)])

    def end(self, start: int) -> int:
        """The position after the last one of the block, in the pass that `at` was asked for last."""
        return int(self._ends[np.searchsorted(self._ends, start, side="right")])
