"""Readers of what can only be iterated over; `test_contract.py` has what all readers promise."""

import pytest

from jobrunner import DefinitionError, PlanMismatchError
from jobrunner.data import from_iterable


def test_each_pass_iterates_anew_and_may_know_its_number():
    reader = from_iterable(lambda number: range(number, number + 3))
    assert [list(reader) for _ in range(3)] == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert list(from_iterable(lambda number: "abcde").batched(2)) == [["a", "b"], ["c", "d"], ["e"]]
    assert list(from_iterable(lambda number: [])) == []


def test_what_a_batch_needs_is_read_and_one_record_more():
    taken = []

    def records(number):
        for i in range(9):
            taken.append(i)
            yield i

    reader = from_iterable(records).batched(3)
    reader.read()
    assert taken == [0, 1, 2, 3]


@pytest.mark.parametrize("factory", [[1, 2], None, lambda a, b: a])
def test_what_cannot_begin_anew_is_refused(factory):
    with pytest.raises(DefinitionError, match="from_iterable: factory"):
        from_iterable(factory)


def test_a_factory_that_returns_the_same_iterator_again_or_none_is_refused():
    """The next pass would have no records, and a resumed one would lack some."""
    once = iter(range(3))
    reader = from_iterable(lambda number: once)
    assert list(reader) == [0, 1, 2]
    with pytest.raises(
        DefinitionError, match="must return an iterable that begins anew; for pass 1"
    ):
        list(reader)
    with pytest.raises(DefinitionError, match="for pass 0 it has returned None, which is none"):
        from_iterable(lambda number: None).read()


def test_what_an_iterable_cannot_do_is_refused_with_what_to_do():
    reader = from_iterable(lambda number: [])
    with pytest.raises(DefinitionError, match=r"Shuffle in the function.*files"):
        reader.batched(2).shuffled(1)
    with pytest.raises(DefinitionError, match="Let the function do so"):
        reader.prefetched(2)
    with pytest.raises(TypeError, match=r"no len\(\)"):
        len(reader)
    assert reader


@pytest.mark.parametrize("k", [1, 3])
def test_data_that_shrank_below_the_position_is_refused(k):
    """A job would end as if all had been read."""

    def shards(n):
        return [from_iterable(lambda number: range(n)).sharded(i, k) for i in range(k)]

    for i, shard in enumerate(shards(40)):
        list(shard.limited(batches=5))
        least = 4 * k + i + 1  # the number after its last record's
        restored = shards(least - 1)[i]
        restored.load_state_dict(shard.state_dict())
        with pytest.raises(
            PlanMismatchError,
            match=f"pass 0 .* at least {least} records of the function, found {least - 1}",
        ):
            restored.read()
        restored = shards(least)[i]
        restored.load_state_dict(shard.state_dict())
        assert list(restored) == []
        assert restored.finished


def test_shards_that_have_not_read_equally_much_cannot_be_divided_anew():
    shards = [from_iterable(lambda number: range(10)).sharded(i, 3) for i in range(3)]
    states = []
    for i, shard in enumerate(shards):
        list(shard.limited(batches=1 + (i == 2)))
        states.append(shard.state_dict())
    message = r"read equally much of one pass.*\[\(0, 0, 1\), \(0, 0, 2\)\].*Resume on 3 nodes"
    with pytest.raises(PlanMismatchError, match=message):
        shards[0].merge_state_dicts(states)
    states[2] = {**states[0], "shard": [2, 3], "pass": 1}
    with pytest.raises(PlanMismatchError, match="read equally much of one pass"):
        shards[0].merge_state_dicts(states)
    for shard in shards:  # all to the end, which are four, three and three records
        list(shard)
    merged = shards[0].merge_state_dicts([shard.state_dict() for shard in shards])
    reader = from_iterable(lambda number: range(10))
    reader.load_state_dict(merged)
    assert reader.finished
    assert reader.state_dict()["start"] == 10


def test_shards_change_again_and_again():
    records = []
    state = {**from_iterable(lambda number: range(100)).state_dict(), "shard": None}
    for k in (3, 2, 4, 1, 5):
        shards = [from_iterable(lambda number: range(100)).sharded(i, k) for i in range(k)]
        for shard in shards:
            shard.load_state_dict(state)
            records += list(shard.limited(batches=5))
        state = shards[0].merge_state_dicts([shard.state_dict() for shard in shards])
    assert sorted(records) == list(range(75))
    shrunk = from_iterable(lambda number: range(74))
    shrunk.load_state_dict(state)
    with pytest.raises(PlanMismatchError, match="at least 75 records .* found 74"):
        shrunk.read()
