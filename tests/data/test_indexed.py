"""Readers of records that have numbers: order, batches, shards, and positions."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import pytest

from jobrunner import DefinitionError, JobRunnerError, PlanMismatchError
from jobrunner.data import EndOfData, Reader, from_records
from jobrunner.data.order import Scratch, Shuffled, sorted_numbers


def flat(reader: Any) -> list[int]:
    """All records that are left of the pass, of batches or not."""
    return [int(record) for item in reader for record in np.atleast_1d(item)]


def test_an_array_is_read_in_batches_pass_after_pass() -> None:
    reader = from_records(np.arange(7)).batched(3)
    assert [batch.tolist() for batch in reader] == [[0, 1, 2], [3, 4, 5], [6]]
    assert reader.finished
    with pytest.raises(EndOfData, match="Pass 0 has ended"):
        reader.read()
    assert reader.finished
    assert next(iter(reader)).tolist() == [0, 1, 2]
    assert not reader.finished
    assert reader.state_dict()["pass"] == 1
    assert isinstance(reader, Reader)
    assert issubclass(EndOfData, JobRunnerError)


def test_it_has_finished_with_the_last_record_and_not_one_read_later() -> None:
    reader = from_records([1, 2])
    reader.read()
    assert not reader.finished
    reader.read()
    assert reader.finished


def test_an_empty_batch_is_no_end() -> None:
    reader = from_records([np.empty(0), np.ones(1)])
    assert [len(item) for item in reader] == [0, 1]


def test_no_record_at_all_is_an_end_at_once() -> None:
    for reader in (from_records([]), from_records(np.arange(1)).sharded(0, 2).batched(2)):
        assert reader.finished
        assert list(reader) == []


def test_records_without_batches_are_single_ones() -> None:
    assert list(from_records(np.arange(3))) == [0, 1, 2]
    assert [one.shape for one in from_records(np.zeros((2, 5)))] == [(5,), (5,)]


def test_parts_of_dicts_and_tuples_stay_together() -> None:
    data = {"x": np.arange(10), "y": (np.arange(10) * 2, list("abcdefghij"))}
    for batch in from_records(data).shuffled(3).batched(4):
        assert (batch["x"] * 2 == batch["y"][0]).all()
        assert batch["y"][1] == ["abcdefghij"[i] for i in batch["x"]]
    with pytest.raises(DefinitionError, match=r"\{'x': 2, 'y': 3\}"):
        from_records({"x": [1, 2], "y": [1, 2, 3]})


@pytest.mark.parametrize("data", [3, "text", iter([1]), np.array(1), (), {}, None])
def test_what_has_no_records_by_number_is_refused(data: object) -> None:
    with pytest.raises(DefinitionError, match=r"must have a length.*from_iterable"):
        from_records(data)


def test_wrong_arguments_are_refused() -> None:
    reader = from_records([1])
    for call in (
        lambda: reader.batched(0),
        lambda: reader.batched(1, drop_last=1),  # type: ignore[arg-type]
        lambda: reader.shuffled(-1),
        lambda: reader.sharded(2, 2),
        lambda: reader.sharded(0, 0),
        lambda: reader.limited(batches=0),
        lambda: reader.limited(seconds=0),
    ):
        with pytest.raises(DefinitionError, match="must be"):
            call()


def test_a_batch_cannot_change_the_data() -> None:
    data = np.arange(4)
    batch = from_records(data).batched(2).read()
    with pytest.raises(ValueError, match="read-only"):
        batch[0] = 9
    assert data[0] == 0


ARRAYS = {
    "numbers": np.arange(10),
    "rows": np.arange(60).reshape(10, 2, 3),
    "columns": np.asfortranarray(np.arange(20).reshape(10, 2)),
    "backwards": np.arange(30)[::-3],
    "without width": np.zeros((10, 0)),
    "objects": np.array([[i] for i in range(10)] + [None], dtype=object)[:10],
    "structured": np.zeros(10, [("a", "i4"), ("b", "U3")]),
    "a subclass": np.rec.array(np.arange(10)),
}


@pytest.mark.parametrize("size", [None, 1, 3, 5, 10, 11])
@pytest.mark.parametrize("kind", ARRAYS)
def test_batches_of_an_array_are_its_slices(kind: str, size: int | None) -> None:
    data = ARRAYS[kind]
    reader = from_records(data) if size is None else from_records(data).batched(size)
    expected = [data[i] if size is None else data[i : i + size] for i in range(0, 10, size or 1)]
    passes = [list(reader)]
    iter(reader)
    passes.append([reader.read() for _ in expected])
    for found in passes:
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert type(one) is type(other)
            np.testing.assert_array_equal(one, other)
            if isinstance(one, np.ndarray) and one.size and kind != "objects":
                assert np.shares_memory(one, data)
                assert not one.flags.writeable


@pytest.mark.parametrize("n", [0, 1, 2, 3, 100, 4096, 4097, 7000, 9000])
def test_a_shuffled_pass_has_each_record_once_and_an_order_of_its_own(n: int) -> None:
    reader = from_records(np.arange(n)).shuffled(5).batched(1000)
    passes = [flat(reader) for _ in range(3)]
    assert all(sorted(each) == list(range(n)) for each in passes)
    if n >= 100:
        assert len({tuple(each) for each in [*passes, list(range(n))]}) == 4
        assert flat(from_records(np.arange(n)).shuffled(6)) != passes[0]


def test_the_order_is_the_same_for_ever() -> None:
    """Saved positions mean nothing in another order."""
    assert flat(from_records(np.arange(10)).shuffled(7)) == [3, 8, 7, 2, 0, 1, 4, 9, 6, 5]
    reader = from_records(np.arange(10**6)).shuffled(7).batched(5)
    assert reader.read().tolist() == [584903, 980974, 794902, 413516, 10636]


WHOLE = {
    4096: 582431116,
    4097: 1616487013,
    6826: 3726047656,
    6827: 156620221,
    20_000: 56182799,
    20_001: 3012166540,
    65536: 2200915106,
    65537: 83381682,
}


@pytest.mark.parametrize("n", WHOLE)
def test_a_whole_order_is_the_same_for_ever(n: int) -> None:
    reader = from_records(np.arange(n)).shuffled(7).batched(1000)
    found = np.concatenate(list(reader)).astype("<i8")
    assert zlib.crc32(found.tobytes()) == WHOLE[n]


@pytest.mark.parametrize(
    ("lengths", "crc"),
    [
        ([5000, 8000, 100], 2868036079),
        ([2] * 5000, 1026816111),
        ([70_000, 5000], 881474195),
        ([1 << 17, 4097], 1694576174),
        ([8192, 8000], 3105004368),
        ([100, 4096], 1620244045),
    ],
)
def test_an_order_in_blocks_is_the_same_for_ever(lengths: Any, crc: int) -> None:
    n = sum(lengths)
    order = Shuffled(lengths, 7).at(2, 0, n, n)
    assert sorted(order) == list(range(n))
    assert zlib.crc32(order.astype("<i8").tobytes()) == crc


def test_a_loop_goes_on_from_a_state_that_is_loaded_in_it() -> None:
    for reader in (
        from_records(np.arange(100)).batched(10),
        from_records(np.arange(100)).shuffled(1).batched(10),
    ):
        start, found = reader.state_dict(), []
        for batch in reader:
            found.append(batch.tolist())
            if len(found) == 3:
                reader.load_state_dict(start)
        assert found[3:6] == found[:3]
        assert sorted(chain.from_iterable(found[3:])) == list(range(100))


def test_the_state_in_a_loop_is_that_of_the_batches_handed_out() -> None:
    reader = from_records(np.arange(5000)).shuffled(1)
    for number, _ in enumerate(reader, 1):
        if number % 700 == 0 or number == 4999:
            assert reader.state_dict()["rest"] == [[number, 5000, 1]]
            assert not reader.finished


@pytest.mark.parametrize("n", [4, 5, 4100, 8191])
def test_a_shuffled_order_has_no_pattern(n: int) -> None:
    """Each part of the numbers is about as often near the beginning as any other, for all seeds."""
    seeds = 800 if n < 10 else 300
    counts = np.zeros((4, 4))
    for seed in range(seeds):
        reader = from_records(np.arange(n)).shuffled(seed)
        counts[reader.read() * 4 // n, reader.read() * 4 // n] += 1
    expected = np.full((4, 4), seeds / 16)
    if n < 10:  # the second record is another than the first
        low = np.bincount(np.arange(n) * 4 // n)
        pairs = np.outer(low, low) - np.diag(low)
        expected = seeds * pairs / pairs.sum()
    seen = expected > 0
    chi_squared = ((counts - expected)[seen] ** 2 / expected[seen]).sum()
    assert chi_squared < 40  # of 15 degrees of freedom: once in 2,000


def test_an_order_takes_no_memory() -> None:
    class Many:
        def __len__(self) -> int:
            return 10**15

        def __getitem__(self, i: int) -> int:
            return i

    reader = from_records(Many()).shuffled(1).batched(3)
    first = reader.read()
    assert len(set(first)) == 3
    assert max(first) > 10**12


def test_drop_last_leaves_out_what_is_no_whole_batch() -> None:
    reader = from_records(np.arange(7)).batched(3, drop_last=True)
    assert [batch.tolist() for batch in reader] == [[0, 1, 2], [3, 4, 5]]
    assert reader.finished
    assert len(reader) == 2
    assert len(from_records(np.arange(7)).batched(3)) == 3
    assert len(from_records(np.arange(7)).sharded(1, 2)) == 4


def test_a_limit_ends_the_loop_and_not_the_pass() -> None:
    reader = from_records(list(range(7)))
    loops = []
    while not reader.finished:
        loops.append(list(reader.limited(batches=3)))
    assert loops == [[0, 1, 2], [3, 4, 5], [6]]
    limited = reader.limited(batches=2)
    assert list(limited) == [0, 1]
    assert not limited.finished
    with pytest.raises(EndOfData, match="has read 2 batches"):
        limited.read()
    assert list(limited) == [2, 3]
    assert list(reader.limited(seconds=1e-9)) == [4]
    assert list(reader.limited(seconds=1e6)) == [5, 6]


class Flaky(list):
    """A list whose first item cannot be read at once."""

    has_failed = False

    def __getitem__(self, index):
        if not self.has_failed:
            self.has_failed = True
            raise OSError("busy")
        return super().__getitem__(index)


def test_a_read_that_fails_does_not_count_for_a_limit() -> None:
    limited = from_records(Flaky(range(4))).limited(batches=2)
    with pytest.raises(OSError, match="busy"):
        limited.read()
    limited.read()
    limited.read()
    with pytest.raises(EndOfData, match="has read 2 batches"):
        limited.read()


FORGED = {
    "length": (99, "field 'length': expected 10, found 99. The data has another number of records"),
    "order": ("as stored", "field 'order': expected 'shuffled, seed 1', found 'as stored'"),
    "pass": (-1, "field 'pass': expected an int >= 0, found -1"),
    "shard": ([1, 2], r"field 'shard': expected \[0, 1\], found \[1, 2\].*partition=0"),
    "rest": ([[0, 11, 1]], "field 'rest': expected ranges .* <= 10"),
    "later": ([[[5, 2, 1]]], "field 'later': expected lists of ranges"),
}
FURTHER = [
    ("pass", True),
    ("pass", 2**70),
    ("pass", "1"),
    ("shard", [1, 1]),
    ("shard", [0]),
    ("rest", None),
    ("rest", "ab"),
    ("rest", [7]),
    ("rest", [[None, 5, 1]]),
    ("later", [7]),
    ("rest", [[0, 10, 2]]),
    ("rest", [[0, None, 1]]),
    ("rest", [[0, 5, 1], [4, 6, 1]]),
    ("rest", [[0, 5]]),
    ("rest", [[0, 5.0, 1]]),
    ("rest", [[-1, 5, 1]]),
    ("later", {}),
    ("length", 10.0),
]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [(field, *both) for field, both in FORGED.items()]
    + [(field, value, f"field '{field}': expected") for field, value in FURTHER],
)
def test_a_forged_or_foreign_state_is_refused_by_field(
    field: str, value: object, message: str
) -> None:
    reader = from_records(np.arange(10)).shuffled(1)
    reader.read()
    before = reader.state_dict()
    with pytest.raises(PlanMismatchError, match=message):
        reader.load_state_dict({**before, field: value})
    if field != "shard":
        with pytest.raises(PlanMismatchError, match=f"state 0 of 1, {message}"):
            reader.merge_state_dicts([{**before, field: value}])
    assert reader.state_dict() == before


def test_a_state_of_something_else_is_refused() -> None:
    reader = from_records(np.arange(10))
    for state in ({}, {"position": 3}, [1], None):
        with pytest.raises(PlanMismatchError, match="expected the fields"):
            reader.load_state_dict(state)  # type: ignore[arg-type]


def test_rows_are_sorted_as_argsort_does_even_if_only_low_bits_differ() -> None:
    rows = np.random.default_rng(1).permuted(
        np.tile(np.arange(50, dtype=np.uint64), (3, 1)), axis=1
    )
    for shift in (0, 3, 30, 58):
        assert (sorted_numbers(rows << shift, Scratch()) == np.argsort(rows, axis=1)).all()


@pytest.mark.parametrize("n", [1, 3, 5000])
def test_each_pass_has_its_order_whichever_was_read_before(n: int) -> None:
    def order_of(*passes: int) -> list[int]:
        reader = from_records(np.arange(n)).shuffled(1).batched(7)
        start = reader.state_dict()
        for number in passes:
            reader.load_state_dict({**start, "pass": number})
            order = flat(reader)
        return order

    orders = {number: order_of(number) for number in (0, 1, 4000, 10**9)}
    assert order_of(1, 0) == orders[0]
    assert order_of(0, 10**9, 4000, 3999, 1) == orders[1]
    assert order_of(3999, 4000) == orders[4000]


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_threads_share_a_reader(is_shuffled: bool) -> None:
    reader = from_records(np.arange(1000)).batched(7)
    reader = reader.shuffled(1) if is_shuffled else reader

    def read(_: int) -> list[int]:
        found: list[int] = []
        with suppress(EndOfData):
            while True:
                found += reader.read().tolist()
        return found

    with ThreadPoolExecutor(4) as pool:
        assert sorted(chain.from_iterable(pool.map(read, range(4)))) == list(range(1000))
