"""Reading ahead: bounded, in order, with the position of what was handed out."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from jobrunner import DefinitionError, PlanMismatchError
from jobrunner.data import EndOfData, Reader, from_iterable, from_records


class Watched:
    """A data set that tells which records were read, and can break."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.read: list[int] = []
        self.changed = threading.Condition()
        self.broken: set[int] = set()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> int:
        with self.changed:
            self.read.append(i)
            self.changed.notify_all()
        if i in self.broken:
            raise OSError(f"record {i}")
        return i

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.read) >= count, 10)


def test_threads_read_ahead_as_far_as_told_and_no_further() -> None:
    data = Watched(100)
    reader = from_records(data).batched(2).prefetched(3)
    assert isinstance(reader, Reader)
    assert data.read == []
    assert reader.read() == [0, 1]
    data.wait_for(8)  # one batch handed out, three ahead
    assert reader._cursor._cursor.position.rest == (range(8, 100),)  # type: ignore[attr-defined]  # no more is planned
    assert reader.state_dict()["rest"] == [[2, 100, 1]]
    assert reader.read() == [2, 3]
    data.wait_for(10)
    assert data.read == list(range(10))
    assert reader.state_dict()["rest"] == [[4, 100, 1]]


def test_several_threads_read_at_once_and_in_order() -> None:
    together = threading.Barrier(3)

    class Slow(Watched):
        def __getitem__(self, i: int) -> int:
            together.wait(10)
            return i

    reader = from_records(Slow(9)).prefetched(3, threads=3)
    assert list(reader) == list(range(9))


def test_an_error_arrives_at_the_read_of_its_batch_which_is_read_again() -> None:
    data = Watched(6)
    data.broken = {3}
    reader = from_records(data).prefetched(4, threads=2)
    assert [reader.read() for _ in range(3)] == [0, 1, 2]
    for _ in range(2):
        with pytest.raises(OSError, match="record 3"):
            reader.read()
        assert reader.state_dict()["rest"] == [[3, 6, 1]]
    data.broken = set()
    assert list(reader) == [3, 4, 5]
    assert reader.finished
    with pytest.raises(EndOfData):
        reader.read()
    assert list(reader) == list(range(6))


def test_a_position_can_be_loaded_while_threads_read_ahead() -> None:
    for reader in (
        from_records(np.arange(50)).shuffled(1).prefetched(4, threads=2),
        from_iterable(lambda: range(50)).prefetched(4),
    ):
        first = [reader.read() for _ in range(10)]
        state = reader.state_dict()
        second = [reader.read() for _ in range(10)]
        reader.load_state_dict(state)
        assert [reader.read() for _ in range(10)] == second
        assert len({*first, *second}) == 20
        with pytest.raises(PlanMismatchError):
            reader.load_state_dict({})
        assert len([*first, *second, *reader]) == 50


def test_threads_end_when_the_reader_is_dropped() -> None:
    def own() -> set[threading.Thread]:
        return {it for it in threading.enumerate() if "prefetch" in it.name}

    before = own()
    released = threading.Event()

    class Stuck(Watched):
        def __getitem__(self, i: int) -> int:
            assert i == 0 or released.wait(10)
            return super().__getitem__(i)

    data = Stuck(100)
    reader: Any = from_records(data).prefetched(50)
    reader.read()
    (thread,) = own() - before
    gone = weakref.ref(reader)
    del reader
    gc.collect()
    assert gone() is None
    released.set()
    thread.join(10)
    assert not thread.is_alive()
    assert len(data.read) < 10  # what had not begun was cancelled


def test_a_limited_reader_keeps_its_count_in_its_state() -> None:
    made = [from_records(np.arange(9)).prefetched(2).limited(batches=4) for _ in range(2)]
    assert [made[0].read() for _ in range(3)] == [0, 1, 2]
    made[1].load_state_dict(made[0].state_dict())
    for reader in made:
        assert reader.read() == 3
        with pytest.raises(EndOfData):
            reader.read()
        assert list(reader) == [4, 5, 6, 7]
    state = made[0].state_dict()
    for wrong in ({}, {**state, "loop": -1}, {**state, "taken": 1}, None):
        with pytest.raises(PlanMismatchError):
            made[0].load_state_dict(wrong)  # type: ignore[arg-type]
    merged = made[0].merge_state_dicts([state])
    assert "loop" not in merged
    assert merged["rest"] == [[8, 9, 1]]


def test_limits_batches_and_reading_ahead_combine_in_any_order_and_may_change() -> None:
    data = from_records(np.arange(20))
    made = [
        data.limited(batches=2).batched(3).prefetched(2),
        data.prefetched(2).batched(3).limited(batches=2),
        data.prefetched(2).limited(batches=2).limited(seconds=1e6).batched(3),
    ]
    state = None
    for reader in made:
        if state is not None:
            reader.load_state_dict(state)
        at = data.batched(3).limited(batches=1).state_dict() if state is None else state
        start = at["rest"][0][0]
        assert [batch[0] for batch in reader] == [start, start + 3]
        state = reader.state_dict()
    assert data.batched(2).sharded(0, 1).state_dict().keys() == state.keys() - {"loop"}
    plain = data.batched(1)
    plain.load_state_dict(state)
    assert [int(batch[0]) for batch in plain] == [18, 19]


def test_wrong_arguments_are_refused() -> None:
    reader = from_records([1])
    for call in (lambda: reader.prefetched(0), lambda: reader.prefetched(1, threads=0)):
        with pytest.raises(DefinitionError, match="must be an int >= 1"):
            call()
