"""Jobs that read: a resumed run goes on with the next record, on any number of nodes."""

from collections import Counter

import dask
import dask.bag
import numpy as np
import pytest

from jobrunner import (
    Blob,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    PlanMismatchError,
    SaveEvery,
    Task,
    TaskFailedError,
    current_task,
    epoch_limiter,
)
from jobrunner.data import from_dask, from_iterable, from_records
from tests.sampling import sampled

N = 23
STEPS = 3


def _blocks(_):
    pieces = [dask.delayed(range)(start, min(start + 4, N)) for start in range(0, N, 4)]
    bag = dask.bag.from_delayed(pieces)
    return from_dask(bag, lengths=[4] * 5 + [3]).shuffled(3)


KINDS = {
    "shuffled array": lambda _: from_records(np.arange(N)).shuffled(7),
    "iterable": lambda _: from_iterable(lambda number: range(N)),
    "blocks": _blocks,
}


def read(reader):
    """At most two batches: the number of the pass and the record, of each."""
    found = [int(record) for batch in reader.limited(batches=2) for record in batch]
    return [(reader.state_dict()["pass"], record) for record in found]


def collect(seen, *parts):
    return [*seen, *(tuple(record) for part in parts for record in part)]


def reading(make, nodes, epochs, fails_at=None):
    """Each node reads up to two batches in a step; fails in a step, counted from 0."""

    def stumble():
        task = current_task()
        assert task.epoch is not None
        if (task.epoch - 1) * STEPS + task.step == fails_at:
            raise ValueError("stumbled")

    with Job("reading", steps_per_epoch=STEPS) as job:
        with job.init_group:
            Task(list, outputs="seen", node="log")
        parts = []
        for i in range(nodes):
            with Node(f"reader:{i}"):
                with job.init_group:
                    Task(
                        lambda i=i: make().sharded(i, nodes).batched(2),
                        outputs=Blob("reader", partition=0),
                        name="make",
                    )
                parts.append(Task(read, updates="reader", name="read").output())
        Task(collect, inputs=["seen", *parts], outputs="seen", node="log")
        Task(stumble, node="log")
    epoch_limiter(job, epochs)
    return job


def run(session, path, *args, fails_at=None):
    """What the nodes have read, in order."""
    manager = MultiNodeCheckpointManager(path, save=SaveEvery(steps=1))
    runner = JobRunner(reading(*args, fails_at=fails_at), manager)
    if fails_at is None:
        runner.run(session)
    else:
        with pytest.raises(TaskFailedError, match="stumbled"):
            runner.run(session)
    found = session.fetch(Node("log")["seen"])
    return found


@sampled("kinds, steps", sample=(["shuffled array"], [2, 3, 7]), nightly=([*KINDS], range(12)))
def test_a_run_that_was_interrupted_reads_the_same_records(inproc_session, tmp_path, kinds, steps):
    for kind in kinds:
        make = lambda kind=kind: KINDS[kind](tmp_path)  # noqa: E731
        whole = run(inproc_session, tmp_path / f"{kind}-whole", make, 2, 4)
        assert Counter(record for number, record in whole if number == 0) == Counter(range(N))
        for step in steps:
            path = tmp_path / f"{kind}-{step}"
            run(inproc_session, path, make, 2, 4, fails_at=step)
            assert run(inproc_session, path, make, 2, 4) == whole


@sampled(
    "kinds, changes",
    sample=(["shuffled array"], [(2, 3, 1)]),
    nightly=(["shuffled array", "blocks"], [(2, 3, 1), (1, 4, 2), (3, 1, 2), (2, 1, 4)]),
)
def test_another_number_of_nodes_reads_the_rest_of_a_pass(inproc_session, tmp_path, kinds, changes):
    for kind in kinds:
        make = lambda kind=kind: KINDS[kind](tmp_path)  # noqa: E731
        for first, second, third in changes:
            path = tmp_path / f"{kind}-{first}-{second}-{third}"
            run(inproc_session, path, make, first, 9, fails_at=1)
            run(inproc_session, path, make, second, 9, fails_at=3)
            seen = run(inproc_session, path, make, third, 9)
            passes = {number for number, _ in seen}
            for number in range(max(passes)):
                assert Counter(r for p, r in seen if p == number) == Counter(range(N)), number


def sharing(nodes, epochs, open_shard):
    """A job whose nodes read two records of their shards in each epoch; and what they read."""
    names = [f"n:{i}" for i in range(nodes)]
    with Job("sharing") as job:
        with job.init_group:
            blob, kwargs = Blob("reader", partition=0), lambda i: {"i": i}
            Task.on_each(names, open_shard, outputs=blob, kwargs=kwargs, name="open")
        parts = Task.on_each(
            names, lambda reader: [reader.read(), reader.read()], updates="reader", name="read"
        )
        outputs = [part.output() for part in parts]
    epoch_limiter(job, epochs)
    return job, outputs


def test_an_iterable_is_divided_anew_where_its_nodes_have_read_equally_much(
    inproc_session, tmp_path
):
    def dividing(nodes, epochs):
        data = from_iterable(lambda number: range(60))
        return sharing(nodes, epochs, lambda i: data.sharded(i, nodes))

    manager = MultiNodeCheckpointManager(tmp_path)
    JobRunner(dividing(2, 1)[0], manager).run(inproc_session)
    job, parts = dividing(3, 2)
    JobRunner(job, manager).run(inproc_session)
    assert sorted(i for part in parts for i in part.fetch()) == [*range(4, 10)]


def test_shards_of_another_number_than_the_nodes_are_refused_at_a_resume(inproc_session, tmp_path):
    """With `i % 2` of 2 on three nodes, two would read the same records."""

    def open_one_of_two(i):
        return from_records(range(60)).sharded(i % 2, 2)

    manager = MultiNodeCheckpointManager(tmp_path)
    JobRunner(sharing(2, 1, open_one_of_two)[0], manager).run(inproc_session)
    expected = r"expected a shard of 3, .* found one of 2.*\(i, 3\)"
    with pytest.raises(PlanMismatchError, match=expected):
        JobRunner(sharing(3, 2, open_one_of_two)[0], manager).run(inproc_session)
