"""Readers of what can only be iterated over, and of loaders with a state of their own."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from jobrunner import DefinitionError, PlanMismatchError
from jobrunner.data import EndOfData, Reader, from_iterable, from_loader, from_records


def test_each_pass_iterates_anew_and_may_know_its_number() -> None:
    reader = from_iterable(lambda number: range(number, number + 3))
    assert [list(reader) for _ in range(3)] == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert list(from_iterable(lambda: "abcde").batched(2)) == [["a", "b"], ["c", "d"], ["e"]]
    assert list(from_iterable(lambda: "abcde").batched(2, drop_last=True))[-1] == ["c", "d"]
    assert list(from_iterable(lambda: range(5)).sharded(1, 2)) == [1, 3]


def test_it_has_finished_with_the_last_record() -> None:
    for reader in (
        from_iterable(lambda: range(3)),
        from_iterable(lambda: range(7)).batched(3),
        from_iterable(lambda: range(7)).batched(2, drop_last=True),
        from_iterable(lambda: range(6)).sharded(0, 2),
    ):
        for _ in range(2):
            assert not reader.finished
            reader.read()
        reader.read()
        assert reader.finished
        with pytest.raises(EndOfData, match="Pass 0 has ended"):
            reader.read()
    empty = from_iterable(list)
    assert list(empty) == []
    assert empty.finished


def test_an_error_arrives_at_its_record_and_the_next_read_tries_again() -> None:
    broken = [True]

    def records() -> Iterator[int]:
        yield from range(3)
        if broken[0]:
            raise OSError("gone")
        yield 3

    for reader in (from_iterable(records), from_iterable(records).prefetched(2)):
        broken[0] = True
        assert list(reader.limited(batches=3)) == [0, 1, 2]
        for _ in range(2):
            with pytest.raises(OSError, match="gone"):
                reader.read()
            assert reader.state_dict()["rest"] == [[3, None, 1]]
        broken[0] = False
        assert list(reader) == [3]
        assert reader.finished


@pytest.mark.parametrize("factory", [[1, 2], iter([1]), None, lambda a, b: a, lambda *, a: a])
def test_what_cannot_begin_anew_is_refused(factory: Any) -> None:
    with pytest.raises(DefinitionError, match="factory must"):
        from_iterable(factory)


def test_a_factory_that_returns_the_same_iterator_again_or_none_is_refused() -> None:
    """The next pass would have no records, and a resumed one would lack some."""
    once = iter(range(3))
    reader = from_iterable(lambda: once)
    assert list(reader) == [0, 1, 2]
    with pytest.raises(
        DefinitionError, match="must return an iterable that begins anew; for pass 1"
    ):
        list(reader)
    with pytest.raises(DefinitionError, match="for pass 0 it has returned None, which is none"):
        from_iterable(lambda: None).read()


def test_one_thread_goes_through_an_iterable() -> None:
    with pytest.raises(DefinitionError, match="threads must be 1"):
        from_iterable(list).prefetched(2, threads=2)


def test_what_a_reader_cannot_do_is_refused_with_what_to_do() -> None:
    with pytest.raises(DefinitionError, match=r"Shuffle in the function.*files"):
        from_iterable(list).batched(2).shuffled(1)
    for call in (
        lambda: from_loader(Loader(2)).batched(2),
        lambda: from_loader(Loader(2)).limited(batches=3).sharded(0, 2),
        lambda: from_loader(Loader(2)).prefetched(),
        lambda: from_loader(Loader(2)).shuffled(),
    ):
        with pytest.raises(DefinitionError, match="Let the loader do so"):
            call()
    for reader in (from_iterable(list), from_loader(Loader(2, has_length=False))):
        with pytest.raises(TypeError):
            len(reader)
        assert reader


def test_data_that_shrank_below_the_position_is_refused() -> None:
    """A job would end as if all had been read."""
    for made in (lambda it: it, lambda it: it.batched(4), lambda it: it.prefetched()):
        reader = made(from_iterable(lambda: range(40)))
        list(reader.limited(batches=5))
        at = reader.state_dict()["rest"][0][0]
        for length in (0, at - 1):
            restored = made(from_iterable(lambda length=length: range(length)))
            restored.load_state_dict(reader.state_dict())
            expected = f"pass 0 .* at least {at} records of the function, found {length}"
            with pytest.raises(PlanMismatchError, match=expected):
                restored.read()
        restored = made(from_iterable(lambda at=at: range(at)))
        restored.load_state_dict(reader.state_dict())
        assert list(restored) == []


@pytest.mark.parametrize("to", [1, 2, 3, 5])
def test_shards_refuse_data_that_shrank_and_no_other(to: int) -> None:
    states, whole = [], from_iterable(lambda: range(40))
    for i, count in ((0, 2), (1, 6), (2, 4)):
        shard = whole.sharded(i, 3)
        list(shard.limited(batches=count))
        states.append(shard.state_dict())
    merged = whole.merge_state_dicts(states)  # all before 17 was read, or seen
    for length, is_refused in ((16, True), (20, False), (40, False)):
        read, refused = 0, 0
        for i in range(to):
            shard = from_iterable(lambda length=length: range(length)).sharded(i, to)
            shard.load_state_dict(merged)
            try:
                read += len(list(shard))
            except PlanMismatchError:
                refused += 1
        if is_refused:
            assert refused
        else:
            assert (read, refused) == (length - 12, 0)


def test_a_forged_state_repeats_no_record() -> None:
    reader = from_iterable(lambda: range(20))
    state = {**reader.state_dict(), "rest": [[2, 20, 3], [5, None, 1]]}
    reader.load_state_dict(state)
    assert list(reader) == [2, *range(5, 20)]
    with pytest.raises(PlanMismatchError, match="field 'rest'"):
        reader.load_state_dict({**state, "rest": [[5, None, 0]]})


class Loader:
    """Yields numbers, and saves how many, as torchdata's loaders do."""

    def __init__(self, n: int, *, has_length: bool = True) -> None:
        self.n, self.has_length = n, has_length
        self.at, self.resumes = 0, False

    def __len__(self) -> int:
        if not self.has_length:
            raise TypeError
        return self.n

    def __iter__(self) -> Iterator[int]:
        self.at, self.resumes = (self.at if self.resumes else 0), False
        while self.at < self.n:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.resumes = state["at"], True


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("read", range(7))
def test_a_loader_resumes_by_its_own_state(read: int, has_length: bool) -> None:
    reader = from_loader(Loader(3, has_length=has_length))
    assert isinstance(reader, Reader)
    for _ in range(read):
        next(iter(reader), None)
    restored = from_loader(Loader(3, has_length=has_length))
    restored.load_state_dict(reader.state_dict())
    for other in (pickle.loads(pickle.dumps(reader)), restored):
        assert other.finished == reader.finished
        assert other.state_dict() == reader.state_dict()
    assert [list(restored) for _ in range(2)] == [list(reader) for _ in range(2)]


def test_a_loader_with_a_length_has_finished_with_its_last_item() -> None:
    reader = from_loader(Loader(2))
    assert list(reader.limited(batches=2)) == [0, 1]
    assert reader.finished
    with pytest.raises(EndOfData):
        reader.read()
    assert list(reader) == [0, 1]


class CountingLoader(Loader):
    """As PyTorch's: also its iterators have a `__len__`, which asks the loader's."""

    def __iter__(self) -> Iterator[int]:
        loader, records = self, super().__iter__()

        class Counting:
            def __next__(self) -> int:
                return next(records)

            def __len__(self) -> int:
                return len(loader)

        return Counting()  # type: ignore[return-value]


@pytest.mark.parametrize("has_length", [True, False])
def test_a_loader_whose_iterators_have_a_length_or_lack_it_is_read(has_length: bool) -> None:
    reader = from_loader(CountingLoader(4, has_length=has_length))
    assert [reader.read() for _ in range(3)] == [0, 1, 2]
    restored = from_loader(CountingLoader(4, has_length=has_length))
    restored.load_state_dict(reader.state_dict())
    for other in (reader, restored):
        assert [list(other) for _ in range(2)] == [[3], [0, 1, 2, 3]]


def test_a_loader_without_a_state_is_refused() -> None:
    with pytest.raises(DefinitionError, match=r"list lacks .*state_dict.*StatefulDataLoader"):
        from_loader([1])
    reader = from_loader(Loader(2))
    for field, value in (("pass", -1), ("taken", True), ("finished", 1), ("loader", None)):
        with pytest.raises(PlanMismatchError, match=f"field '{field}': expected"):
            reader.load_state_dict({**reader.state_dict(), field: value})
    with pytest.raises(PlanMismatchError, match="expected the fields"):
        reader.load_state_dict({})
    with pytest.raises(PlanMismatchError, match="another number of nodes"):
        reader.limited(batches=1).merge_state_dicts([])


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("is_given", [True, False])
def test_a_loader_of_torchdata_resumes_to_the_batch_in_this_pass_and_the_next(
    is_given: bool,
) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    loaders = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="pip install 'dask-jobrunner[torchdata]'"
    )

    def make() -> Any:
        own = torch.Generator().manual_seed(3) if is_given else None
        torch.manual_seed(4)
        return from_loader(
            loaders.StatefulDataLoader(list(range(10)), batch_size=3, shuffle=True, generator=own)
        )

    def read(reader: Any, most: int) -> list[Any]:
        return [next(iter(reader)).tolist() for _ in range(most)]

    whole = read(make(), 12)
    for taken in range(13):
        saved = make()
        first = read(saved, taken)
        restored = make()
        restored.load_state_dict(saved.state_dict())
        torch.manual_seed(taken)
        assert first + read(restored, 12 - taken) == whole


def test_tensors_and_data_sets_of_pytorch_are_records() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    data = {"x": torch.arange(20).reshape(10, 2), "y": list(range(10))}
    for batch in from_records(data).shuffled(1).batched(4):
        assert batch["x"][:, 0].tolist() == [2 * y for y in batch["y"]]
    pairs = from_records(torch.utils.data.TensorDataset(data["x"])).batched(10).read()
    assert [one[0].tolist() for one in pairs] == data["x"].tolist()


class Stream:
    """As Hugging Face's: begins each pass with the state that it has loaded, if that is of its epoch."""

    __module__ = "datasets.iterable_dataset"

    def __init__(self) -> None:
        self.epoch, self.loaded, self.state = 0, None, {"at": 0, "epoch": 0}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, int]]:
        self.state = {"at": 0, "epoch": self.epoch}
        if self.loaded and self.loaded["epoch"] == self.epoch:
            self.state = dict(self.loaded)
        while (at := self.state["at"]) < 6:
            self.state["at"] += 1
            yield {"n": (at * 5 + self.epoch) % 6}

    def state_dict(self) -> dict[str, int]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.loaded = state


def _shuffled_stream() -> Any:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    data = datasets.Dataset.from_dict({"n": list(range(6))})
    return data.to_iterable_dataset(num_shards=6).shuffle(seed=3, buffer_size=1)


@pytest.mark.filterwarnings("ignore")  # of its pickler
@pytest.mark.parametrize("make", [Stream, _shuffled_stream])
@pytest.mark.parametrize("taken", range(15))
def test_a_stream_resumes_in_any_pass_and_reads_whole_passes_then(make: Any, taken: int) -> None:
    def passes(reader: Any, count: int) -> list[list[int]]:
        return [[int(one["n"]) for one in reader] for _ in range(count)]

    whole = passes(from_loader(make()), 5)
    assert all(sorted(each) == list(range(6)) for each in whole)
    assert len(set(map(tuple, whole))) > 1  # each pass has another order
    number, count = divmod(taken, 6)
    saved = from_loader(make())
    passes(saved, number)
    for _ in range(count):
        next(iter(saved))
    first = from_loader(make())
    first.load_state_dict(saved.state_dict())
    restored = from_loader(make())
    restored.load_state_dict(first.state_dict())  # saved again before anything was read
    assert restored.finished == saved.finished
    rest = [whole[number][count:]] if count else []
    assert (
        passes(restored, len(rest) + 2) == [*rest, *whole[number + (count > 0) :]][: len(rest) + 2]
    )


def test_a_stream_gets_the_number_of_each_pass_from_0_on() -> None:
    stream = Stream()
    stream.set_epoch(4)
    reader = from_loader(stream)
    for number in range(3):
        assert [one["n"] for one in reader] == [(at * 5 + number) % 6 for at in range(6)]


class Records:
    """As a data set of Hugging Face, which counts what it does."""

    __module__ = "datasets.arrow_dataset"
    column_names = ("n",)

    def __init__(self, numbers: range, has_indexes: bool = False) -> None:
        self.numbers, self.has_indexes = numbers, has_indexes
        self.slices = self.selected = 0
        self.bad: int | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: Any) -> Any:
        self.slices += 1
        return {"n": self.numbers[index]}

    def list_indexes(self) -> list[str]:
        return ["n"] * self.has_indexes

    def select(self, numbers: range) -> Records:
        assert not self.has_indexes
        self.selected += 1
        found = Records(self.numbers[numbers.start : numbers.stop])
        found.bad = self.bad
        return found

    def iter(self, size: int) -> Iterator[Any]:
        for start in range(0, len(self), size):
            batch = self.numbers[start : start + size]
            if self.bad in batch:
                raise OSError("busy")
            yield {"n": batch}


def numbers_of(batches: Iterable[Any]) -> list[int]:
    return [n for batch in batches for n in batch["n"]]


def test_batches_of_hugging_face_in_order_are_iterated_over() -> None:
    data = Records(range(23))
    reader = from_records(data).batched(4)
    for _ in range(3):
        assert numbers_of(reader) == list(range(23))
    shard = from_records(data).sharded(1, 2).batched(4)
    for _ in range(3):
        assert numbers_of(shard) == list(range(11, 23))
    assert (data.slices, data.selected) == (0, 1)
    limited = reader.limited(batches=2)
    other = from_records(data).batched(3)
    found = [numbers_of(it) for _ in range(3) for it in (limited, other.limited(batches=2))]
    assert found[::2] == [list(range(8)), list(range(8, 16)), list(range(16, 23))]
    assert found[1::2] == [list(range(6 * i, 6 * i + 6)) for i in range(3)]
    assert numbers_of(reader.prefetched(4, threads=3)) == list(range(23))
    indexed = from_records(Records(range(23), has_indexes=True)).sharded(1, 2).batched(4)
    assert numbers_of(indexed) == list(range(11, 23))


def test_readers_of_one_data_set_of_hugging_face_read_sizes_of_their_own() -> None:
    both = from_records(Records(range(16)))
    by_four, by_eight = both.batched(4), both.batched(8)
    assert numbers_of([by_four.read(), by_four.read()]) == list(range(8))
    by_eight.load_state_dict(by_four.state_dict())
    assert numbers_of([by_eight.read()]) == list(range(8, 16))
    assert numbers_of(by_four) == list(range(8, 16))


def test_a_batch_of_hugging_face_that_failed_is_tried_again() -> None:
    data = Records(range(23))
    reader, data.bad = from_records(data).batched(4), 9
    found = [reader.read(), reader.read()]
    with pytest.raises(OSError, match="busy"):
        reader.read()
    data.bad = None
    assert numbers_of([*found, *reader]) == list(range(23))


@pytest.mark.filterwarnings("ignore")  # of its pickler
def test_data_sets_of_hugging_face_are_records_and_their_streams_are_loaders() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    data = datasets.Dataset.from_dict({"n": list(range(20)), "t": ["a"] * 20})
    batches = list(from_records(data).shuffled(1).batched(6))
    assert sorted(n for batch in batches for n in batch["n"]) == list(range(20))
    assert from_records(data).read() == {"n": 0, "t": "a"}
    for form in (None, "pandas", "arrow"):
        for kept in (data, data.select(range(3, 17))):
            kept = kept.with_format(form)
            for i in range(2):
                found = list(from_records(kept).sharded(i, 2).batched(3))
                half = range(i * len(kept) // 2, (i + 1) * len(kept) // 2)
                expected = [kept[k : min(k + 3, half.stop)] for k in half[::3]]
                assert [type(it) for it in found] == [type(it) for it in expected]
                assert str(found) == str(expected)
    saved, restored = (from_loader(data.to_iterable_dataset()) for _ in range(2))
    assert [saved.read()["n"] for _ in range(3)] == [0, 1, 2]
    restored.load_state_dict(saved.state_dict())
    assert [one["n"] for one in restored] == list(range(3, 20))
