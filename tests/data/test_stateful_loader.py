"""Readers of loaders with a state of their own; `test_contract.py` has what all readers promise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jobrunner import DefinitionError, PlanMismatchError
from jobrunner.data import EndOfData, from_loader
from tests.data.test_contract import Fault, Loader, Rows, read_on


def loader(n: int, **options: Any) -> Loader:
    return Loader(Fault(), n, **options)


def test_a_loader_with_a_length_has_finished_with_its_last_item() -> None:
    reader = from_loader(loader(2))
    assert list(reader.limited(batches=2)) == [0, 1]
    assert reader.finished
    with pytest.raises(EndOfData):
        reader.read()
    assert list(reader) == [0, 1]
    assert len(reader) == 2


def test_a_loader_that_has_more_than_its_length_is_refused() -> None:
    class Longer(Loader):
        def __len__(self) -> int:
            return self.n - 1

    reader = from_loader(Longer(Fault(), 3))
    reader.read()
    with pytest.raises(DefinitionError, match="Pass 0: expected 2 items of the loader.*found more"):
        reader.read()


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
    reader = from_loader(CountingLoader(Fault(), 4, has_length=has_length))
    assert [reader.read() for _ in range(3)] == [0, 1, 2]
    restored = from_loader(CountingLoader(Fault(), 4, has_length=has_length))
    restored.load_state_dict(reader.state_dict())
    for other in (reader, restored):
        assert [list(other) for _ in range(2)] == [[3], [0, 1, 2, 3]]


def test_a_loader_without_a_state_is_refused() -> None:
    with pytest.raises(DefinitionError, match=r"list lacks .*state_dict.*StatefulDataLoader"):
        from_loader([1])


@pytest.mark.parametrize(
    ("field", "value"), [("pass", -1), ("num_taken", True), ("finished", 1), ("loader", None)]
)
def test_a_forged_state_is_refused(field: str, value: Any) -> None:
    reader = from_loader(loader(2))
    with pytest.raises(PlanMismatchError, match=rf"\$.{field}"):
        reader.load_state_dict({**reader.state_dict(), field: value})


def test_what_a_loader_cannot_do_is_refused() -> None:
    reader = from_loader(loader(2, has_length=False))
    for call in (
        lambda: reader.batched(2),
        lambda: reader.limited(batches=3).sharded(0, 2),
        lambda: reader.prefetched(),
        lambda: reader.shuffled(),
    ):
        with pytest.raises(DefinitionError, match="Let the loader do so"):
            call()
    with pytest.raises(PlanMismatchError, match="another number of nodes"):
        reader.limited(batches=1).merge_state_dicts([])
    with pytest.raises(TypeError):
        len(reader)
    assert reader


def test_a_loader_that_cannot_begin_again_at_once_loses_no_place() -> None:
    class Stuck(Loader):
        opens = 0

        def __iter__(self) -> Iterator[int]:
            self.opens += 1
            if self.opens == 2:
                raise OSError("busy")
            return self._records(self.opens == 1)

        def _records(self, is_first: bool) -> Iterator[int]:
            for item in super().__iter__():
                if is_first and item == 3:
                    raise OSError("busy")
                yield item

    reader = from_loader(Stuck(Fault(), 6))
    assert read_on(reader) == list(range(6))


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


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("is_given", [True, False])
def test_a_loader_of_torchdata_tries_again(is_given: bool) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    loaders = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="pip install 'dask-jobrunner[torchdata]'"
    )

    def make(data: Any) -> Any:
        own = torch.Generator().manual_seed(3) if is_given else None
        torch.manual_seed(4)
        return from_loader(loaders.StatefulDataLoader(data, shuffle=True, generator=own))

    def two_passes(reader: Any) -> list[Any]:
        found = [read_on(reader)]
        iter(reader)
        return [*found, read_on(reader)]

    whole = two_passes(make(list(range(24))))
    assert whole[0] != whole[1]
    fault = Fault()
    fault.bad = frozenset({1, 4, 9, 14})
    assert two_passes(make(Rows(fault))) == whole
    assert fault.calls > 14


@pytest.mark.filterwarnings("ignore")  # of its pickler
def test_a_stream_of_hugging_face_tries_again() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    fault = Fault()
    fault.bad = frozenset({1, 4, 9, 14})

    def rows() -> Iterator[dict[str, int]]:
        for i in range(8):
            fault()
            yield {"n": i}

    reader = from_loader(datasets.IterableDataset.from_generator(rows))
    for _ in range(2):
        found = []
        while not reader.finished:
            try:
                found.append(reader.read()["n"])
            except EndOfData:
                assert reader.finished
            except Exception:  # which the library wraps
                assert fault.calls in fault.bad
        assert found == list(range(8))
        iter(reader)
    assert fault.calls > 16


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
