"""Orders: each record once, without a pattern, and the same for ever."""

import zlib

import numpy as np
import pytest

from jobrunner.data import from_records
from jobrunner.data.order import Order, permutation

GOLDEN = {1: 1696784233, 7: 1132099198, 1000: 3871943935, 1_000_000: 2587932845}


@pytest.mark.parametrize("n", GOLDEN)
def test_a_permutation_is_the_same_for_ever(n):
    """Saved positions mean nothing in another order."""
    order = permutation(n, 7, 2, 0)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(n))
    assert zlib.crc32(order.astype("<i8").tobytes()) == GOLDEN[n]


def test_the_order_of_a_pass_is_the_same_for_ever():
    assert list(from_records(range(10)).shuffled(7)) == [2, 8, 1, 0, 9, 6, 7, 4, 3, 5]
    assert Order([3, 0, 4, 2], 7).at(2, range(9)).tolist() == [1, 0, 2, 5, 3, 4, 6, 7, 8]


@pytest.mark.parametrize("lengths", [[1], [0], [10], [3, 0, 4, 2], [2] * 20])
def test_pieces_of_passes_in_any_sequence_make_the_same_orders(lengths):
    total = sum(lengths)
    passes = {}
    for number in (0, 1, 10**9):
        whole = Order(lengths, 1).at(number, range(total)) if total else np.empty(0, np.int64)
        assert sorted(whole) == list(range(total))
        passes[number] = whole
    order = Order(lengths, 1)
    for start in reversed(range(total)):
        for number, whole in passes.items():
            for stop in (start + 1, total):
                assert np.array_equal(order.at(number, range(start, stop)), whole[start:stop])


def test_the_records_of_a_block_stay_together():
    lengths = [5, 1, 7, 3]
    blocks = np.repeat(np.arange(4), lengths)[Order(lengths, 3).at(0, range(16))]
    assert np.count_nonzero(np.diff(blocks)) == 3
