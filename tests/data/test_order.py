"""Orders in pieces, and the memory in which they are computed."""

from __future__ import annotations

import tracemalloc
import zlib
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobrunner.data import order
from jobrunner.data.order import WINDOW, Shuffled
from tests.sampling import examples

BORDERS = [2, 4096, 4224, 8192, 20_000, WINDOW, WINDOW + 512, WINDOW * 5 // 4, 2 * WINDOW]
SIZES = st.builds(lambda border, more: border + more, st.sampled_from(BORDERS), st.integers(-2, 2))
LENGTHS = st.one_of(SIZES.map(lambda n: [n]), st.lists(SIZES, min_size=2, max_size=4))


@given(
    LENGTHS,
    st.lists(st.integers(0, 20), min_size=2, max_size=2, unique=True),
    st.lists(st.floats(0, 1), max_size=4),
    st.randoms(use_true_random=False),
)
@settings(max_examples=examples(15))
def test_pieces_of_two_passes_in_any_sequence_make_two_orders(
    lengths: list[int], passes: list[int], cuts: list[float], random: Any
) -> None:
    total = sum(lengths)
    shuffled = Shuffled(lengths, 1)
    ends = sorted({0, total, *(int(cut * total) for cut in cuts)})
    pieces = [(number, *each) for number in passes for each in pairwise(ends)]
    random.shuffle(pieces)
    found = {}
    for number, start, stop in pieces:
        limit = random.choice([stop, min(stop + 1000, total), total])
        found[number, start] = shuffled.at(number, start, stop, limit)
    orders = [[*map(found.get, [(number, each) for each in ends[:-1]])] for number in passes]
    for number, parts in zip(passes, orders, strict=True):
        whole = np.concatenate([np.empty(0, np.int64), *parts])
        assert {part.dtype for part in parts} <= {np.dtype(np.int64)}
        assert np.array_equal(np.sort(whole), np.arange(total))
        assert np.array_equal(whole, Shuffled(lengths, 1).at(number, 0, total, total))


LARGE = {
    1 << 24: 1984330847,
    (1 << 24) + 1: 3969029817,
    10**12: 2707563020,
    (1 << 40) + 1: 2825223105,
    (1 << 62) - 7: 3687144954,
}


@pytest.mark.parametrize("n", LARGE)
def test_windows_of_a_large_order_are_the_same_for_ever(n: int) -> None:
    shuffled, checksum = Shuffled([n], 7), 0
    for start in (0, n // 3, n - 30_000):
        found = shuffled.at(5, start, start + 30_000, n)
        assert len(np.unique(found)) == 30_000
        assert 0 <= found.min() <= found.max() < n
        assert (shuffled.at(5, start + 9, start + 99, n) == found[9:99]).all()
        assert (Shuffled([n], 7).at(5, start + 9, start + 99, n) == found[9:99]).all()
        checksum = zlib.crc32(found.astype("<i8").tobytes(), checksum)
    assert checksum == LARGE[n]


def test_an_order_holds_a_window_and_no_more_however_many_records_are_read_at_once() -> None:
    lengths, count = [(1 << 40) + 1], 1 << 19
    tracemalloc.start()
    try:
        shuffled = Shuffled(lengths, 1)
        whole = shuffled.at(0, 0, count, count)
        held = tracemalloc.get_traced_memory()[0] - whole.nbytes
    finally:
        tracemalloc.stop()
    pieces = [shuffled.at(0, start, start + WINDOW, count) for start in range(0, count, WINDOW)]
    assert np.array_equal(whole, np.concatenate(pieces))
    assert held < 64 * WINDOW


@pytest.mark.parametrize("lengths", [[100_000], [300] * 20])
def test_what_could_not_be_computed_is_computed_later(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    total = sum(lengths)
    shuffled = Shuffled(lengths, 1)
    shuffled.at(0, 0, 1000, total)

    def scarce(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(order, "_order", scarce)
        with pytest.raises(MemoryError):
            shuffled.at(1, 400, 1000, total)
    expected = Shuffled(lengths, 1).at(1, 400, 1000, total)
    assert np.array_equal(shuffled.at(1, 400, 1000, total), expected)
