"""Shards of all kinds of readers: each record once in each pass, however their number changes."""

from __future__ import annotations

import pickle
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobrunner import PlanMismatchError
from jobrunner.data import from_iterable, from_records
from tests.sampling import examples


class Counting:
    """A factory of iterables that can be pickled."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self) -> range:
        return range(self.n)


def chunked(n: int) -> Any:
    """Records in blocks, as Zarr arrays are."""

    class Chunked:
        shape, dtype, chunks = (n,), np.dtype("V3000000"), (2,)

        def __len__(self) -> int:
            return n

        def __getitem__(self, index: slice) -> Any:
            return np.arange(n)[index]

    return Chunked()


KINDS: dict[str, Callable[[int], Any]] = {
    "array": lambda n: from_records(np.arange(n)),
    "shuffled": lambda n: from_records(np.arange(n)).shuffled(1),
    "shuffled blocks": lambda n: from_records(chunked(n)).shuffled(2),
    "iterable": lambda n: from_iterable(Counting(n)),
}


def records_of(item: Any) -> list[int]:
    return [int(record) for record in np.atleast_1d(item)]


@pytest.mark.parametrize("is_prefetched", [False, True], ids=["", "prefetched"])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(12, nightly=500))
@given(st.integers(4, 30), st.data())
def test_any_number_of_shards_read_each_record_once_in_each_pass(
    kind: str, is_prefetched: bool, n: int, data: st.DataObject
) -> None:
    """Their number changes again and again, in mid-pass too, and some are ahead of others."""
    reader = KINDS[kind](n)
    seen: dict[int, Counter[int]] = defaultdict(Counter)

    def shards() -> list[Any]:
        k = data.draw(st.integers(1, 4))
        size = data.draw(st.sampled_from([None, 2, 3]))
        each = reader if size is None else reader.batched(size)
        found = [each.sharded(i, k) for i in range(k)]
        return [shard.prefetched(2) for shard in found] if is_prefetched else found

    def read(shard: Any, most: int) -> None:
        for item in shard.limited(batches=most):
            seen[shard.state_dict()["pass"]].update(records_of(item))

    now = shards()
    for _ in range(data.draw(st.integers(1, 4))):
        for shard in now:
            for _ in range(data.draw(st.integers(0, 3))):
                read(shard, data.draw(st.integers(1, n)))
        whole = now[0].merge_state_dicts([shard.state_dict() for shard in now])
        now = shards()
        for shard in now:
            shard.load_state_dict(whole)
    last = max(seen, default=0) + 1
    for shard in now:
        while shard.state_dict()["pass"] < last or not shard.finished:
            read(shard, n)
    assert seen == {number: Counter(range(n)) for number in range(last + 1)}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(12, nightly=500))
@given(st.integers(0, 30), st.data())
def test_a_restored_reader_reads_on_where_the_saved_one_was(
    kind: str, n: int, data: st.DataObject
) -> None:
    shard = data.draw(st.sampled_from([(0, 1), (0, 2), (1, 3)]))
    size = data.draw(st.integers(1, 9))
    drop_last = data.draw(st.booleans())
    made = KINDS[kind](n).batched(size, drop_last=drop_last).sharded(*shard)
    saved = made.prefetched(2) if data.draw(st.booleans()) else made
    for _ in range(data.draw(st.integers(0, 20))):
        next(iter(saved), None)
    restored = KINDS[kind](n).batched(size, drop_last=drop_last).sharded(*shard)
    restored.load_state_dict(saved.state_dict())
    others = [restored]
    if "blocks" not in kind:
        others.append(pickle.loads(pickle.dumps(saved)))
    for other in others:
        assert other.finished == saved.finished
        assert other.state_dict() == saved.state_dict()
    for _ in range(2):
        rest = [records_of(batch) for batch in restored]
        assert rest == [records_of(batch) for batch in saved]


def test_a_merged_state_is_shared_out_evenly() -> None:
    reader = from_records(np.arange(100))
    old = [reader.sharded(i, 2) for i in range(2)]
    list(old[0].limited(batches=30))
    list(old[1].limited(batches=10))
    new = [reader.sharded(i, 3) for i in range(3)]
    for shard in new:
        shard.load_state_dict(old[0].merge_state_dicts([each.state_dict() for each in old]))
    left = [list(shard) for shard in new]
    assert [len(each) for each in left] == [20, 20, 20]
    assert [*left[0], *left[1], *left[2]] == [*range(30, 50), *range(60, 100)]


def test_states_of_iterables_stay_small_while_shards_keep_pace() -> None:
    whole = {**from_iterable(Counting(10_000)).state_dict(), "shard": None}
    for k in (3, 2, 4, 1, 5):
        shards = [from_iterable(Counting(10_000)).sharded(i, k) for i in range(k)]
        for shard in shards:
            shard.load_state_dict(whole)
            list(shard.limited(batches=100))
        whole = shards[0].merge_state_dicts([shard.state_dict() for shard in shards])
        assert len(whole["rest"]) == 1


def test_what_is_left_here_and_there_is_shared_out_evenly() -> None:
    left = [[i, i + 1, 1] for i in range(0, 20, 2)] + [[20, None, 1]]
    whole = {**from_iterable(Counting(20)).state_dict(), "shard": None, "rest": left}
    shards = [from_iterable(Counting(20)).sharded(i, 2) for i in range(2)]
    for shard in shards:
        shard.load_state_dict(whole)
        assert len(list(shard)) == 5


def test_states_of_other_shards_are_refused() -> None:
    reader = from_records(np.arange(10))
    states = [reader.sharded(i, 2).state_dict() for i in range(2)]
    whole = reader.merge_state_dicts(states[::-1])
    assert whole == {**reader.state_dict(), "shard": None}
    for wrong in ([], states[:1], [states[0], states[0]], [reader.state_dict()] * 2, [whole]):
        with pytest.raises(PlanMismatchError, match=r"expected one of each shard \[i, n\], found"):
            reader.merge_state_dicts(wrong)
    with pytest.raises(PlanMismatchError, match=r"expected \[0, 2\], found \[0, 1\].*partition=0"):
        reader.sharded(0, 2).load_state_dict(reader.state_dict())
    with pytest.raises(
        PlanMismatchError, match="field 'pass': expected numbers that differ by less"
    ):
        reader.merge_state_dicts([states[0], {**states[1], "pass": 2**62}])
    states[1]["rest"] = states[0]["rest"]
    with pytest.raises(PlanMismatchError, match="same records left, from number 0"):
        reader.merge_state_dicts(states)
