"""Positions of numbered records: shards, merges, and saved states of strangers."""

import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from jobrunner import PlanMismatchError
from jobrunner.data import from_records
from jobrunner.data.pass_position import PassPosition
from tests.data.test_sources import Chunked
from tests.sampling import sampled


def read_some(shard, count, seen):
    """Read so many items, over the ends of passes too."""
    for _ in range(count):
        item = next(iter(shard), None)
        if item is not None:
            seen[shard.state_dict()["pass"]].update(np.atleast_1d(item).tolist())


@sampled("histories", sample=range(40), nightly=range(1000))
def test_any_history_of_shards_reads_each_record_once_in_each_pass(histories):
    """Their number changes again and again, in mid-pass and across passes."""
    for history in histories:
        rng = random.Random(history)
        n = rng.randrange(1, 120)
        reader = from_records(np.arange(n))
        if rng.random() < 0.6:
            reader = reader.shuffled(rng.randrange(100))
        if rng.random() < 0.1:
            reader = reader.prefetched(3, threads=2)
        seen = defaultdict(Counter)
        whole = reader.merge_state_dicts([reader.state_dict()])
        for _ in range(4):
            k = rng.randrange(1, 5)
            shards = []
            for i in range(k):
                shard = reader.sharded(i, k)
                shards.append(shard.batched(rng.randrange(1, 9)) if rng.random() < 0.8 else shard)
                shards[-1].load_state_dict(whole)
            for shard in shards:
                read_some(shard, rng.randrange(25), seen)
            states = [shard.state_dict() for shard in shards]
            rng.shuffle(states)
            whole = reader.merge_state_dicts(states)
        last = max(seen, default=0) + 1
        reader.load_state_dict(whole)
        while reader.state_dict()["pass"] < last or not reader.finished:
            read_some(reader, 1, seen)
        assert seen == {number: Counter(range(n)) for number in range(last + 1)}, history


def test_a_merged_state_is_shared_out_evenly():
    reader = from_records(np.arange(100))
    old = [reader.sharded(i, 2) for i in range(2)]
    list(old[0].limited(batches=30))
    list(old[1].limited(batches=10))
    merged = old[0].merge_state_dicts([each.state_dict() for each in old])
    left = []
    for i in range(3):
        shard = reader.sharded(i, 3)
        shard.load_state_dict(merged)
        left.append(list(shard))
    assert [len(each) for each in left] == [20, 20, 20]
    assert [*left[0], *left[1], *left[2]] == [*range(30, 50), *range(60, 100)]


def test_what_drop_last_leaves_out_is_not_read_by_others():
    position = PassPosition(10, "", least=3)
    for _ in range(3):
        position.advance(3)
    assert position.has_ended
    other = PassPosition(10, "")
    other.load_state_dict(position.state_dict())
    assert other.has_ended


FORGED = [
    ("order", "10 records, as stored", "'order': expected '10 records, shuffled, seed 1', found"),
    ("shard", [1, 2], r"'shard': expected \(0, 1\), found \(1, 2\).*partition=0"),
    ("pass", 2**70, "Expected `int` <="),
    ("left", [[[0, 5, 1]]], "length 2"),
    ("left", [[[0, 11]]], "'left': expected ranges .* up to 10, found"),
    ("left", [[[0, 5], [4, 6]]], "expected ranges"),
]


@pytest.mark.parametrize(("field", "value", "message"), FORGED)
def test_a_forged_or_foreign_state_is_refused(field, value, message):
    reader = from_records(np.arange(10)).shuffled(1)
    reader.read()
    before = reader.state_dict()
    with pytest.raises(PlanMismatchError, match=message):
        reader.load_state_dict({**before, field: value})
    if field != "shard":
        with pytest.raises(PlanMismatchError, match=message):
            reader.merge_state_dicts([{**before, field: value}])
    assert reader.state_dict() == before


def test_data_of_another_length_or_in_other_blocks_is_refused():
    state = from_records(Chunked(10)).shuffled(1).state_dict()
    for other, expected in ((10, "10 records, shuffled, seed 1'"), (9, "9 records, shuffled")):
        reader = from_records(range(other)).shuffled(1)
        with pytest.raises(PlanMismatchError, match=f"expected '{expected}.*seed 1, in 3 blocks"):
            reader.load_state_dict(state)


def test_states_of_other_shards_are_refused():
    reader = from_records(np.arange(10))
    states = [reader.sharded(i, 2).state_dict() for i in range(2)]
    whole = reader.merge_state_dicts(states[::-1])
    assert whole == {**reader.state_dict(), "shard": None}
    for wrong in ([], states[:1], [states[0], states[0]], [reader.state_dict()] * 2, [whole]):
        with pytest.raises(PlanMismatchError, match=r"expected one of each shard \(i, n\), found"):
            reader.merge_state_dicts(wrong)
    with pytest.raises(PlanMismatchError, match="'pass': expected numbers that differ by less"):
        reader.merge_state_dicts([states[0], {**states[1], "pass": 2**50}])
    states[1]["left"] = states[0]["left"]
    with pytest.raises(PlanMismatchError, match="same records left, from number 0"):
        reader.merge_state_dicts(states)
