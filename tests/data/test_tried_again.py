"""A record whose read fails counts as not read, whatever reads it: the next read tries it again."""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import dask.bag
import numpy as np
import pytest

from jobrunner.data import (
    EndOfData,
    from_dask,
    from_iterable,
    from_lines,
    from_loader,
    from_records,
    pass_position,
)
from jobrunner.data.indexed import Indexed
from jobrunner.data.order import Indices
from jobrunner.data.pass_position import PassPosition
from jobrunner.data.reader import reader_of
from jobrunner.data.sources import Part
from tests.data.test_iterables import Loader

N = 24


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Tracebacks refer to readers, whose threads end when nothing does."""
    yield
    gc.collect()


class Fault:
    """Fails at some calls."""

    def __init__(self) -> None:
        self.calls, self.bad = 0, frozenset[int]()

    def __call__(self) -> None:
        self.calls += 1
        if self.calls in self.bad:
            raise OSError("busy")


class Rows(list[int]):
    def __init__(self, fault: Fault) -> None:
        super().__init__(range(N))
        self.fault = fault

    def __getitem__(self, index: Any) -> Any:
        self.fault()
        return super().__getitem__(index)


class Chunked:
    """As an array in chunks."""

    shape, dtype, chunks = (N,), np.dtype("V3000000"), (2,)

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __getitem__(self, index: slice) -> Any:
        self.fault()
        return np.arange(N)[index]


class FaultyLoader(Loader):
    def __init__(self, fault: Fault, *, has_length: bool) -> None:
        super().__init__(N, has_length=has_length)
        self.fault = fault

    def __iter__(self) -> Iterator[int]:
        for item in super().__iter__():
            self.fault()
            yield item


def computed(fault: Fault) -> Any:
    def record(i: int) -> int:
        fault()
        return i

    return dask.bag.from_sequence(range(N), npartitions=5).map(record)


def iterated(fault: Fault) -> Iterator[int]:
    for i in range(N):
        fault()
        yield i


READERS: dict[str, Callable[[Fault], Any]] = {
    "sequence": lambda fault: from_records(Rows(fault)),
    "dict": lambda fault: from_records({"a": Rows(fault), "b": list(range(N))}),
    "chunks": lambda fault: from_records(Chunked(fault)),
    "partitions": lambda fault: from_dask(
        computed(fault), lengths=[5, 5, 5, 5, 4], scheduler="synchronous"
    ),
    "iterable": lambda fault: from_iterable(lambda: iterated(fault)),
    "loader": lambda fault: from_loader(FaultyLoader(fault, has_length=True)),
    "loader without a length": lambda fault: from_loader(FaultyLoader(fault, has_length=False)),
}
OPTIONS: dict[str, Callable[[Any], Any]] = {
    "": lambda it: it,
    "batched": lambda it: it.batched(3),
    "shuffled": lambda it: it.shuffled(1).batched(3),
    "mixed": lambda it: it.shuffled(1, by_block=False).batched(5),
    "shard": lambda it: it.sharded(1, 2).batched(5),
    "drop_last": lambda it: it.batched(7, drop_last=True),
    "prefetched": lambda it: it.batched(2).prefetched(3),
    "limited": lambda it: it.batched(2).limited(batches=100),
}
CASES = [
    (kind, how)
    for kind in READERS
    for how in OPTIONS
    if (kind != "iterable" or how not in ("shuffled", "mixed"))
    and (not kind.startswith("loader") or how in ("", "limited"))
]


def made(kind: str, how: str, fault: Fault) -> Any:
    if kind.startswith("loader"):
        return READERS[kind](fault).limited(batches=100) if how else READERS[kind](fault)
    return OPTIONS[how](READERS[kind](fault))


def plain(items: list[Any]) -> list[Any]:
    return [np.asarray(it["a"] if isinstance(it, dict) else it).tolist() for it in items]


def read_on(reader: Any, *, is_alone: bool = True) -> list[Any]:
    """The rest of the pass, through all errors."""
    found: list[Any] = []
    while not reader.finished:
        before = reader.state_dict()
        try:
            found.append(reader.read())
        except OSError:
            if is_alone and "rest" in before:
                assert reader.state_dict() == before
        except EndOfData:  # another thread has read the last one, or a loader has no length
            assert not is_alone or reader.finished
    return plain(found)


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_the_next_read_tries_again(kind: str, how: str) -> None:
    fault = Fault()
    reader = made(kind, how, fault)
    fault.calls = 0
    passes = [plain(list(reader)) for _ in range(2)]
    count = fault.calls
    for bad in ({1}, {2, 3}, {count // 2}, set(range(1, count, 4))):
        fault = Fault()
        reader = made(kind, how, fault)
        fault.calls, fault.bad = 0, frozenset(bad)
        found = read_on(reader)
        assert found == passes[0]
        iter(reader)
        assert read_on(reader) == passes[1]
        assert fault.calls > max(bad)


@pytest.mark.parametrize("how", ["", "batched", "shuffled"])
def test_what_one_thread_failed_to_read_another_one_reads(how: str) -> None:
    fault = Fault()
    reader = made("sequence", how, fault)
    fault.calls, fault.bad = 0, frozenset(range(1, 200, 3))

    def read(_: int) -> list[Any]:
        return read_on(reader, is_alone=False)

    with ThreadPoolExecutor(3) as pool:
        items = [item for part in pool.map(read, range(3)) for item in part]
    assert sorted(np.concatenate([np.atleast_1d(it) for it in items]).tolist()) == list(range(N))


class Watched:
    """A lock that tells who asks for it."""

    def __init__(self, asked: threading.Event) -> None:
        self.lock, self.asked = threading.Lock(), asked

    def __enter__(self) -> None:
        self.asked.set()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


@pytest.mark.parametrize("changes", ["a failed read", "a later state", "an earlier state"])
def test_no_thread_sees_the_end_while_the_place_changes_in_mid_pass(
    monkeypatch: pytest.MonkeyPatch, changes: str
) -> None:
    fault, asked = Fault(), threading.Event()
    fault.bad = frozenset({1})
    reader = from_records(Rows(fault))
    state = {**reader.state_dict(), "rest": [[9, 12, 1], [20, 24, 1]]}
    earlier = {**state, "rest": [[2, 5, 1]]}
    if changes == "a later state":
        reader.load_state_dict(earlier)
    elif changes == "an earlier state":
        reader.load_state_dict(state)
    looks: list[Future[bool]] = []

    def look() -> None:
        """From another thread, which answers or asks for the lock."""
        if reader._cursor.position.lock.lock.locked():
            asked.clear()
            looks.append(pool.submit(lambda: reader.finished))
            looks[-1].add_done_callback(lambda _: asked.set())
            asked.wait()

    def assign(self: PassPosition, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        look()

    def drop(self: PassPosition) -> int:
        found = dropped(self)
        look()
        return found

    reader._cursor.position.lock = Watched(asked)
    dropped = PassPosition._drop
    with ThreadPoolExecutor(99) as pool, monkeypatch.context() as patch:
        patch.setattr(PassPosition, "__setattr__", assign, raising=False)
        patch.setattr(PassPosition, "_drop", drop)
        if changes == "a failed read":
            with pytest.raises(OSError, match="busy"):
                reader.read()
        else:
            reader.load_state_dict(state if changes == "a later state" else earlier)
    assert len(looks) > 3
    assert not any(each.result() for each in looks)


def test_a_pass_that_went_elsewhere_meanwhile_gets_nothing_back() -> None:
    class Moving(list[int]):
        reader: Any = None

        def __getitem__(self, index: Any) -> Any:
            if self.reader is not None:
                moved, self.reader = self.reader, None
                moved.load_state_dict(start)
                raise OSError("busy")
            return super().__getitem__(index)

    data = Moving(range(6))
    reader = from_records(data)
    start = reader.state_dict()
    assert reader.read() == 0
    data.reader = reader
    with pytest.raises(OSError, match="busy"):
        reader.read()
    assert list(reader) == list(range(6))


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

    reader = from_loader(Stuck(6))
    assert read_on(reader) == list(range(6))


def test_a_file_that_comes_back_is_read_on(tmp_path: Path) -> None:
    path, away = tmp_path / "lines", tmp_path / "away"
    path.write_text("a\nb\nc\n")
    reader = from_lines(path).batched(2)
    path.rename(away)
    with pytest.raises(FileNotFoundError):
        reader.read()
    away.rename(path)
    assert list(reader) == [["a", "b"], ["c"]]


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

    whole = two_passes(make(list(range(N))))
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


class Parts(NamedTuple):
    """Records of which not even a part can be had at some times."""

    fault: Fault
    lengths: tuple[int, ...]
    order: str = ""

    def part(self, start: int, stop: int) -> Part:
        self.fault()
        data = np.arange(N)
        return Part(data.__getitem__, data.__getitem__)


@pytest.mark.parametrize("lengths", [(N,), (10, 0, 4, 10)])
@pytest.mark.parametrize("how", OPTIONS)
def test_a_part_that_cannot_be_had_at_once_is_asked_for_again(
    how: str, lengths: tuple[int, ...]
) -> None:
    fault = Fault()
    reader = OPTIONS[how](reader_of(Indexed, Parts(fault, lengths)))
    expected = plain(list(reader))
    for bad in range(1, fault.calls + 1):
        fault.calls, fault.bad = 0, frozenset({bad, bad + 2})
        again = OPTIONS[how](reader_of(Indexed, Parts(fault, lengths)))
        assert read_on(again) == expected
        fault.calls, found = 0, deque[Any]()
        again = OPTIONS[how](reader_of(Indexed, Parts(fault, lengths)))
        with pytest.raises(OSError, match="busy"):
            found.extend(again)
        assert plain([*found]) + read_on(again) == expected


def test_a_failed_read_gives_back_its_record_alone_whatever_others_read_meanwhile() -> None:
    fault = Fault()
    fault.bad = frozenset({3})
    reader = from_records(Rows(fault))
    found = [reader.read(), reader.read()]

    def other(frame: FrameType, *_: object) -> Any:
        """Read as another thread does that interrupts this one."""
        if frame.f_code.co_filename == pass_position.__file__ and fault.calls > 2:
            found.extend(islice(reader._cursor.position.ready, 1))
        return other

    before = sys.gettrace()
    sys.settrace(other)
    try:
        with pytest.raises(OSError, match="busy"):
            reader.read()
    finally:
        sys.settrace(before)
    assert len(found) > 2
    assert sorted(found + read_on(reader)) == list(range(N))


@pytest.mark.parametrize("kind", ["sequence", "iterable", "loader"])
def test_two_threads_that_saw_the_end_begin_one_pass(kind: str) -> None:
    reader = READERS[kind](Fault())
    list(reader)
    for _ in range(2):
        reader._cursor.position.begin()
        assert reader.state_dict()["pass"] == 1
    assert list(reader) == list(range(N))
    assert reader.finished


class Scarce(NamedTuple):
    """An array in memory, when memory is scarce."""

    fault: Fault
    lengths: tuple[int, ...] = (N,)
    order: str = ""

    def part(self, start: int, stop: int) -> Part:
        def gather(numbers: Indices, axis: int) -> Any:
            self.fault()
            return np.arange(N).take(numbers, axis)

        return Part(list, lambda numbers: gather(numbers, 0), gather=gather)


def test_a_batch_of_an_array_that_memory_does_not_hold_is_tried_again() -> None:
    source = Scarce(Fault())
    reader = reader_of(Indexed, source).shuffled(1).batched(5)
    whole = [batch.tolist() for batch in reader]
    for bad in range(1, len(whole) + 1):
        source.fault.calls, source.fault.bad = 0, frozenset([bad])
        reader.load_state_dict({**reader.state_dict(), "pass": 0, "rest": [[0, N, 1]]})
        with pytest.raises(OSError, match="busy"):
            deque(reader)
        assert reader.state_dict()["rest"] == [[5 * (bad - 1), N, 1]]
        assert [batch.tolist() for batch in reader] == whole[bad - 1 :]
