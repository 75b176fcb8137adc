"""The orders of a pass: which record stands at each position. Pure, and the same for ever.

A saved position means nothing in another order, so orders depend on no library's generator: only on
integer arithmetic and SHA-2. Up to 65,536 numbers are shuffled as a whole. Of more, an order
computes the records of a window of positions at a time, and holds no entry for every record.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

Indices = NDArray[np.int64]
Numbers = NDArray[Any]  # Indices, or shorter ones that take less memory

WINDOW = 1 << 16  # positions whose records are computed together
_MOST_SORTED = 1 << 12  # numbers; more are mixed
_MOST_SHORT = 1 << 16  # numbers that fit in two bytes each
# The orders of so many passes are computed together, while they have no more numbers than these.
_MOST_PASSES, _MOST_TO_SORT, _MOST_TO_MIX = 32, 16_384, 60_000


def _key(*parts: object) -> bytes:
    """128 bytes that look random and depend only on `parts`."""
    digest = hashlib.sha512(repr(("jobrunner.data", *parts)).encode()).digest()
    return digest + hashlib.sha512(digest).digest()


def _dtype_of(n: int) -> DTypeLike:
    """That of numbers below `n`: a short one, or that of indices."""
    return np.uint16 if n <= _MOST_SHORT else np.int64


class Scratch:
    """Memory for arrays that no caller gets to see. To allocate it anew takes longer than to use it."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[np.uint8]] = {}

    def array(self, name: str, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array that is good until one of this name is asked for again."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if name not in self._arrays or len(self._arrays[name]) < size:
            self._arrays[name] = np.empty(size, np.uint8)
        return self._arrays[name][:size].view(dtype).reshape(shape)

    def numbers(self, start: int, stop: int) -> Indices:
        """The numbers from `start` to before `stop`."""
        found = self.array("numbers", (stop - start,), np.int64)
        found.fill(1)
        found[:1] = start
        return found.cumsum(out=found)


class _Feistel:
    """Permutes the numbers below `domain`, which is `n` or a little more. Each key has its own way.

    A number is cut into a high and a low half. In turn, a hash of each half is added to the other (a
    Feistel network): to the low half by exclusive or, to the high one modulo the number of high
    halves, which need not be a power of two (Black and Rogaway, "Ciphers with arbitrary finite
    domains", 2002).
    """

    _ROUNDS = 8

    def __init__(self, n: int, keys: Sequence[bytes], scratch: Scratch) -> None:
        self._scratch, bits = scratch, (n - 1).bit_length()
        bits_low = (bits + 1) // 2
        self.domain = -(-n >> bits_low) << bits_low
        self._dtype = dtype = np.dtype(np.uint16 if bits <= 24 else np.uint32)
        # Arrays without dimensions, which NumPy takes for numbers in half the time.
        self._bits_low, self._mask_low = np.array(bits_low), np.array((1 << bits_low) - 1)
        self._num_highs = np.array(self.domain >> bits_low, dtype)
        width = 8 * dtype.itemsize
        self._shift = np.array(width // 2 - 1, dtype)
        self._shift_to_low = np.array(width - bits_low, dtype)  # a product's highest bits are best
        words = [np.frombuffer(key, f"<u{dtype.itemsize}", 3 * self._ROUNDS) for key in keys]
        # Three words for each round: a term and two factors, which are odd.
        self._words = np.array(words, dtype).T.reshape(-1, 3, len(keys), 1)
        self._words[:, 1:] |= 1
        self._num_rows = len(keys)
        if len(keys) == 1:
            self._words = self._words[..., 0, 0]

    def mixed(self, numbers: Numbers) -> Numbers:
        """What the numbers become, in a row for each key."""
        shape = (self._num_rows, len(numbers)) if self._num_rows > 1 else (len(numbers),)
        high, low, x, y = (
            self._scratch.array(name, shape, self._dtype) for name in ("high", "low", "x", "y")
        )
        np.right_shift(numbers, self._bits_low, out=high, casting="unsafe")
        np.bitwise_and(numbers, self._mask_low, out=low, casting="unsafe")
        for i in range(self._ROUNDS):
            np.add(low if i % 2 else high, self._words[i, 0, ...], x)
            x *= self._words[i, 1, ...]
            x ^= np.right_shift(x, self._shift, y)
            x *= self._words[i, 2, ...]
            if i % 2:  # high = (high + x) % num_highs, in less time
                np.floor_divide(x, self._num_highs, y)
                y *= self._num_highs
                x -= y
                high += x
                # Where `high` is less, the difference wraps around and is greater.
                np.minimum(high, np.subtract(high, self._num_highs, x), out=high)
            else:
                x >>= self._shift_to_low
                low ^= x
        found: Numbers = np.left_shift(
            high, self._bits_low, dtype=_dtype_of(self.domain), casting="unsafe"
        )
        found |= low
        return found.reshape(self._num_rows, len(numbers))


_NUMBERS = np.arange(_MOST_SORTED, dtype=np.uint64)
_STEPS = _NUMBERS * np.uint64(0x9E3779B97F4A7C15)


def _sorted(n: int, keys: Sequence[bytes], scratch: Scratch) -> Numbers:
    """For each key, the numbers below `n` in the order of their 64-bit hashes (SplitMix64's)."""
    firsts = np.frombuffer(b"".join(key[:8] for key in keys), "<u8")
    x, y = (scratch.array(name, (len(keys), n), np.uint64) for name in "xy")
    np.add(_STEPS[:n], firsts[:, None], out=x)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= np.right_shift(x, shift, out=y)
        x *= factor
    x ^= np.right_shift(x, 31, out=y)
    return sorted_numbers(x, scratch)


def sorted_numbers(rows: NDArray[np.uint64], scratch: Scratch) -> Numbers:
    """As `argsort` of each row, of at most `_MOST_SORTED` different items, in a third of the time.

    The low bits of the items make room for their numbers, which are then sorted with them.
    """
    n = rows.shape[1]
    mask = np.uint64((1 << n.bit_length()) - 1)
    found = scratch.array("y", rows.shape, np.uint64)
    np.bitwise_or(np.bitwise_and(rows, ~mask, out=found), _NUMBERS[:n], out=found)
    found.sort(axis=1)
    pairs = scratch.array("z", (len(rows), n - 1), np.uint64) if n else found
    if (np.bitwise_xor(found[:, 1:], found[:, :-1], out=pairs) <= mask).any():  # low bits decide
        return np.argsort(rows, axis=1).astype(np.uint16)
    found &= mask
    return found.astype(np.uint16)


def _below(n: int, rows: Numbers, mixed: Callable[[Indices, Numbers], Numbers]) -> Numbers:
    """The rows, in which this mixes what is not below `n` again until it is.

    `mixed` is called with the numbers of the rows where it stands, and with what stands there.
    """
    places = np.divmod(np.flatnonzero(rows >= n), rows.shape[1])
    while len(places[0]):
        rows[places] = numbers = mixed(places[0], rows[places])
        places = (places[0][numbers >= n], places[1][numbers >= n])
    return rows


def _whole_orders(n: int, keys: Sequence[bytes], scratch: Scratch) -> Numbers:
    """For each key, the numbers below `n`, at most `WINDOW`, in a shuffled order."""
    if n <= _MOST_SORTED:
        return _sorted(n, keys, scratch)
    mixer = _Feistel(n, keys, scratch)
    tables = mixer.mixed(scratch.numbers(0, mixer.domain))
    return _below(n, tables[:, :n], lambda rows, numbers: tables[rows, numbers])


def _order(n: int, key: bytes, scratch: Scratch) -> Callable[[int, int], Indices]:
    """The numbers below `n` in a shuffled order, from a position to before another."""
    if n <= WINDOW:
        whole = _whole_orders(n, [key], scratch)[0].astype(np.int64)
        return lambda start, stop: whole[start:stop]
    mixer = _Feistel(n, [key], scratch)
    is_short = mixer.domain - n <= WINDOW // 16
    tail = mixer.mixed(scratch.numbers(n, mixer.domain))[0] if is_short else None

    def again(_: Indices, numbers: Numbers) -> Numbers:
        found: Numbers = mixer.mixed(numbers)[0] if tail is None else tail[numbers - n]
        return found

    def piece(start: int, stop: int) -> Indices:
        found: Indices = _below(n, mixer.mixed(scratch.numbers(start, stop)), again)[0]
        return found

    def order(start: int, stop: int) -> Indices:
        starts = range(start, stop, 2 * WINDOW)  # one, unless a batch is as large
        pieces = [piece(first, min(first + 2 * WINDOW, stop)) for first in starts]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    return order


class _Passes:
    """The shuffled orders of few records, of several passes at once."""

    def __init__(self, n: int, seed: int) -> None:
        self._n, self._seed = n, seed
        self._scratch, self._orders = Scratch(), np.empty((0, n), np.uint16)
        self._first = self._number = 0
        self._order = np.empty(0, np.int64)  # of pass `number`

    def at(self, number: int) -> Indices:
        """The order of pass `number`."""
        if number != self._number or not len(self._order):
            if not 0 <= number - self._first < len(self._orders):
                self._compute(number)
            self._number, self._order = number, self._orders[number - self._first].astype(np.int64)
        return self._order

    def _compute(self, first: int) -> None:
        """Compute the orders of this pass and the next ones: together they take less each."""
        n = self._n
        most = _MOST_TO_MIX if n > _MOST_SORTED else _MOST_TO_SORT
        count = max(1, min(_MOST_PASSES, most // (n + 1)))
        keys = [_key(self._seed, number, 0) for number in range(first, first + count)]
        self._first, self._orders = first, _whole_orders(n, keys, self._scratch)


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
        self._scratch = Scratch()
        self._number: int | None = None  # of the pass that `_begin` has prepared
        self._starts = np.cumsum(self._lengths) - self._lengths
        n = sum(lengths)
        are_few = len(lengths) == 1 and n <= WINDOW
        self._passes = _Passes(n, seed) if are_few else None

    def _begin(self, number: int) -> None:
        n = len(self._lengths)
        blocks = self._order(number, n)(0, n) if n > 1 else np.zeros(n, int)
        counts = self._lengths[blocks]
        ends = np.cumsum(counts)
        self._blocks, self._counts, self._ends = blocks, counts, ends
        self._block: int | None = None  # whose order is `_within`
        self._from = self._until = 0  # the positions of `_window`
        self._window = np.empty(0, np.int64)
        self._number = number

    def _order(self, number: int, n: int, *block: int) -> Callable[[int, int], Indices]:
        return _order(n, _key(self._seed, number, *block), self._scratch)

    def at(self, number: int, start: int, stop: int, limit: int) -> Indices:
        """The records at positions from `start` to before `stop` of pass `number`.

        Those up to `limit` are likely to be asked for next.
        """
        if self._passes is not None:
            return self._passes.at(number)[start:stop]
        if number != self._number:
            self._begin(number)
        if start < self._from or stop > self._until:
            until = limit if limit - start < 1.25 * WINDOW else start + WINDOW
            until = max(stop, until)
            window = self._compute(number, start, until)
            # Last, and together: if memory was scarce, the next read computes it again.
            self._from, self._until, self._window = start, until, window
        return self._window[start - self._from : stop - self._from]

    def _compute(self, number: int, start: int, stop: int) -> Indices:
        found: list[Indices] = []
        place = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end, count = int(self._ends[place]), int(self._counts[place])
            block, first = int(self._blocks[place]), end - count
            if self._block != block:
                self._block, self._within = block, self._order(number, count, block)
            until = min(end, stop)
            rows = self._within(start - first, until - first)
            found.append(rows + self._starts[block] if block else rows)
            start, place = until, place + 1
        return found[0] if len(found) == 1 else np.concatenate([*found, np.empty(0, np.int64)])

    def end(self, start: int) -> int:
        """The position after the last one of the block, in the pass that `at` was asked for last."""
        return int(self._ends[np.searchsorted(self._ends, start, side="right")])
