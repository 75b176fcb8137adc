"""What every reader promises: it goes on at each record, after each error, and in each shard."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import cloudpickle
import dask.bag
import numpy as np
import pytest

from jobrunner import DefinitionError, JobRunnerError, PlanMismatchError
from jobrunner.data import (
    EndOfData,
    Reader,
    from_dask,
    from_iterable,
    from_loader,
    from_records,
)

N = 24


@pytest.fixture(autouse=True)
def collected():
    """Tracebacks refer to readers, whose threads end when nothing does."""
    yield
    gc.collect()


class Fault:
    """Fails at some calls."""

    def __init__(self):
        self.calls, self.bad = 0, frozenset[int]()

    def __call__(self):
        self.calls += 1
        if self.calls in self.bad:
            raise OSError("busy")


class Rows(list[int]):
    def __init__(self, fault):
        super().__init__(range(N))
        self.fault = fault

    def __getitem__(self, index):
        self.fault()
        return super().__getitem__(index)


class Chunked:
    """As an array in chunks, of which blocks have four rows."""

    shape, dtype, chunks = (N,), np.dtype("V2000000"), (2,)

    def __init__(self, fault):
        self.fault = fault

    def __getitem__(self, index):
        self.fault()
        return np.arange(N)[index]


class Loader:
    """Yields numbers, and saves how many, as torchdata's loaders do."""

    def __init__(self, fault, n=N, *, has_length=True):
        self.fault, self.n, self.has_length = fault, n, has_length
        self.at, self.resumes = 0, False

    def __len__(self):
        if not self.has_length:
            raise TypeError
        return self.n

    def __iter__(self):
        self.at, self.resumes = (self.at if self.resumes else 0), False
        while self.at < self.n:
            self.at += 1
            self.fault()
            yield self.at - 1
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at, self.resumes = state["at"], True


def computed(fault):
    def record(i):
        fault()
        return i

    bag = dask.bag.from_sequence(range(N), npartitions=5).map(record)
    return from_dask(bag, lengths=[5, 5, 5, 5, 4])


def iterated(fault):
    def records(number):
        for i in range(N):
            fault()
            yield i

    return from_iterable(records)


READERS = {
    "sequence": lambda fault: from_records(Rows(fault)),
    "dict": lambda fault: from_records({"a": Rows(fault), "b": np.arange(N)}),
    "chunks": lambda fault: from_records(Chunked(fault)),
    "partitions": computed,
    "iterable": iterated,
    "loader": lambda fault: from_loader(Loader(fault)),
}
OPTIONS = {
    "": lambda it: it,
    "batched": lambda it: it.batched(3),
    "shuffled": lambda it: it.shuffled(1).batched(3),
    "mixed": lambda it: it.shuffled(1, by_block=False).batched(5),
    "shard": lambda it: it.sharded(1, 2).batched(5),
    "drop_last": lambda it: it.batched(7, drop_last=True),
    "prefetched": lambda it: it.batched(2).prefetched(3),
}
NUMBERED = ["sequence", "dict", "chunks", "partitions"]
CASES = [
    (kind, how)
    for kind in READERS
    for how in OPTIONS
    if kind in NUMBERED
    or (kind == "iterable" and how not in ("shuffled", "mixed", "prefetched"))
    or how == ""
]


def make(kind, how, fault=None):
    return OPTIONS[how](READERS[kind](fault or Fault()))


def plain(item):
    return np.asarray(item["a"] if isinstance(item, dict) else item).tolist()


def read_pass(reader):
    """What is left of the pass, or the next one."""
    return [plain(item) for item in reader]


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_a_pass_has_each_record_once_and_ends_with_the_last_one(kind, how):
    reader = make(kind, how)
    assert isinstance(reader, Reader)
    passes = [read_pass(reader) for _ in range(2)]
    records = [list(np.hstack(items)) for items in passes]
    count = {"shard": 12, "drop_last": 21}.get(how, N)
    assert [len(set(each)) for each in records] == [count, count]
    assert (passes[0] != passes[1]) == (how in ("shuffled", "mixed"))
    assert reader.finished
    with pytest.raises(EndOfData, match="Pass 1 has ended"):
        reader.read()
    iter(reader)
    for _ in passes[0]:
        assert not reader.finished
        reader.read()
    if kind != "loader":
        assert reader.finished
        assert reader.state_dict()["pass"] == 2
    if kind in NUMBERED:
        assert len(reader) == len(passes[0])


@pytest.mark.parametrize(("kind", "how"), CASES)
def test_a_restored_reader_reads_on_at_each_record_of_two_passes(kind, how):
    saved = make(kind, how)
    whole = [(number, item) for number in range(3) for item in read_pass(saved)]
    saved = make(kind, how)
    for place in range(len(whole) * 2 // 3 + 1):
        restored = make(kind, how)
        restored.load_state_dict(saved.state_dict())
        copied = cloudpickle.loads(cloudpickle.dumps(saved))
        for other in (restored, copied):
            assert other.finished == saved.finished
            assert other.state_dict() == saved.state_dict()
            number = whole[place][0]
            rest = [item for pass_number, item in whole[place:] if pass_number == number]
            # A loader tells of the end of the last pass only now.
            assert (read_pass(other) or read_pass(other)) == rest
        if saved.finished:
            iter(saved)
        item = next(saved, None)
        if item is None:
            item = next(iter(saved))
        assert plain(item) == whole[place][1]


def read_on(reader):
    """The rest of the pass, through all errors."""
    items, errors = [], 0
    while not reader.finished and errors <= 2 * N:
        before = reader.state_dict()
        try:
            items.append(plain(reader.read()))
        except OSError:
            errors += 1
            assert reader.state_dict() == before
    return items


@pytest.mark.parametrize(("kind", "how"), [case for case in CASES if case[0] != "loader"])
def test_after_an_error_at_each_record_the_next_read_tries_again(kind, how):
    fault = Fault()
    reader = make(kind, how, fault)
    passes = [read_pass(reader) for _ in range(2)]
    count = fault.calls // 2
    each = range(1, count + 1, count // 3 if kind == "partitions" else 1)
    for bad in (*({i} for i in each), {2, 3}, set(range(1, 2 * count, 4))):
        fault = Fault()
        reader = make(kind, how, fault)
        fault.bad = frozenset(bad)
        assert read_on(reader) == passes[0]
        iter(reader)
        assert read_on(reader) == passes[1]
        assert fault.calls > max(bad)


@pytest.mark.parametrize("kind", READERS)
def test_threads_that_share_a_reader_read_each_record_once_also_after_errors(kind):
    fault = Fault()
    if kind != "loader":  # which cannot go on
        fault.bad = frozenset(range(1, 200, 3))
    reader = make(kind, "", fault)

    def read(_):
        items = []
        with suppress(EndOfData):
            while True:
                with suppress(OSError):
                    items.append(plain(reader.read()))
        return items

    with ThreadPoolExecutor(4) as pool:
        records = [record for part in pool.map(read, range(4)) for record in part]
    assert sorted(records) == list(range(N))


@pytest.mark.parametrize("how", ["batched", "shuffled", "prefetched"])
def test_a_loop_goes_on_from_a_state_that_is_loaded_in_it(how):
    reader = make("sequence", how)
    start, batches = reader.state_dict(), []
    for batch in reader:
        batches.append(batch)
        if len(batches) == 3:
            reader.load_state_dict(start)
    assert batches[3:6] == batches[:3]
    assert sorted(record for batch in batches[3:] for record in batch) == list(range(N))


@pytest.mark.parametrize("kind", [*NUMBERED, "iterable"])
def test_a_limit_ends_the_loop_and_not_the_pass(kind):
    reader = make(kind, "")
    loops = []
    while not reader.finished:
        loops.append(read_pass(reader.limited(batches=10)))
    assert loops == [[*range(10)], [*range(10, 20)], [*range(20, N)]]
    assert read_pass(reader.limited(batches=2)) == [0, 1]
    assert not reader.finished
    assert read_pass(reader.limited(seconds=1e-9)) == [2]
    assert read_pass(reader.limited(batches=2, seconds=1e6)) == [3, 4]
    assert read_pass(reader.limited()) == [*range(5, N)]


# Reading ahead


class Watched:
    """A data set that tells which records were read, and waits for them."""

    def __init__(self, n):
        self.n = n
        self.read = []
        self.changed = threading.Condition()

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        with self.changed:
            self.read.append(i)
            self.changed.notify_all()
        return i

    def wait_for(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.read) >= count, 10)


def test_threads_read_ahead_as_far_as_told_and_no_further():
    data = Watched(100)
    reader = from_records(data).batched(2).prefetched(3)
    assert data.read == []
    for number in range(3):
        assert reader.read() == [2 * number, 2 * number + 1]
        data.wait_for(2 * number + 8)  # one batch handed out, three ahead
        assert data.read == list(range(2 * number + 8))
        assert reader.state_dict()["left"] == [[[2 * number + 2, 100]]]


def test_several_threads_read_at_once_and_in_order():
    together = threading.Barrier(3)

    class Slow(Watched):
        def __getitem__(self, i):
            together.wait(10)
            return i

    reader = from_records(Slow(9)).prefetched(2, threads=3)
    assert list(reader) == list(range(9))


def test_threads_end_when_the_reader_is_dropped():
    def own():
        return {thread for thread in threading.enumerate() if "prefetch" in thread.name}

    before = own()
    released = threading.Event()

    class Stuck(Watched):
        def __getitem__(self, i):
            assert i == 0 or released.wait(10)
            return super().__getitem__(i)

    data = Stuck(100)
    reader = from_records(data).prefetched(50)
    reader.read()
    (thread,) = own() - before
    gone = weakref.ref(reader)
    del reader
    gc.collect()
    assert gone() is None
    released.set()
    thread.join(10)
    assert not thread.is_alive()
    assert len(data.read) < 60  # what had not begun was cancelled


# What is refused


def test_wrong_arguments_are_refused():
    reader = from_records([1])
    for call in (
        lambda: reader.batched(0),
        lambda: reader.batched(1, drop_last=1),
        lambda: reader.shuffled(-1),
        lambda: reader.sharded(2, 2),
        lambda: reader.sharded(0, 0),
        lambda: list(reader.limited(batches=0)),
        lambda: list(reader.limited(seconds=0)),
        lambda: reader.prefetched(0),
        lambda: reader.prefetched(1, threads=0),
    ):
        with pytest.raises(DefinitionError, match="must be"):
            call()
    assert issubclass(EndOfData, JobRunnerError)


@pytest.mark.parametrize("kind", READERS)
def test_a_state_of_something_else_is_refused(kind):
    reader = make(kind, "")
    reader.read()
    state = reader.state_dict()
    for wrong in ({}, {"position": 3}, [1], None, {**state, "extra": 1}, {**state, "pass": -1}):
        with pytest.raises(PlanMismatchError, match="is not one of this reader"):
            reader.load_state_dict(wrong)
    assert reader.state_dict() == state
