"""Blobs of several nodes as one Dask array or data frame, from memory and from disk."""

import numpy as np
import pytest

from jobrunner import (
    Blob,
    BlobNotFoundError,
    DefinitionError,
    Job,
    JobRunner,
    Node,
    Task,
    epoch_limiter,
    joined,
)

NODES = [f"n{i}" for i in range(5)]


def make(i):
    """An array whose length differs, one whose does not, and a number."""
    return np.full((i + 1, 2), float(i)), np.arange(3) + i, i / 2


def change(rows, same):
    rows += 10
    same *= -1


def job_of(epochs, partition=None):
    with Job("out") as job:
        outputs = [Blob("rows", partition=partition), "same", "number"]
        with job.init_group:
            Task.on_each(NODES, make, outputs=outputs, kwargs=lambda i: {"i": i})
        Task.on_each(NODES, change, updates=["rows", "same"])
    epoch_limiter(job, epochs)
    return job


@pytest.fixture(params=["memory", "disk"])
def source(request, inproc_session, manager):
    """What has the collections after epoch 1, and how to compute them."""
    JobRunner(job_of(1), manager).run(inproc_session)
    if request.param == "memory":
        yield inproc_session, lambda x: inproc_session.client.compute(x).result()
    else:
        with manager.open(1) as checkpoint:
            yield checkpoint, lambda x: x.compute(scheduler="synchronous")


def test_values_are_stacked_or_joined_along_an_axis(source):
    collections, compute = source
    same = collections.array("same")
    assert (same.shape, same.dtype, same.npartitions) == ((5, 3), np.dtype(int), 1)
    assert np.array_equal(compute(same), [-(np.arange(3) + i) for i in range(5)])
    assert np.array_equal(compute(same.sum(axis=1)), [-3 - 3 * i for i in range(5)])
    rows = collections.array("rows", axis=0)
    assert np.array_equal(compute(rows), np.concatenate([make(i)[0] + 10 for i in range(5)]))
    some = collections.array("number", nodes=["n3", "n1"])
    assert np.array_equal(compute(some), [1.5, 0.5])


def test_what_differs_is_refused_with_the_first_two(source, inproc_session, manager):
    collections, _ = source
    place = "" if collections is inproc_session else f" at epoch 1 of {manager.path}"
    differs = rf"'rows'{place} is .*\[1, 2\] at node 'n0'.*\[2, 2\] at node 'n1'"
    with pytest.raises(DefinitionError, match=differs):
        collections.array("rows")
    with pytest.raises(
        DefinitionError, match=f"'number' of node 'n0'{place} has 0 axes; got axis=0"
    ):
        collections.array("number", axis=0)
    with pytest.raises(DefinitionError, match=f"'same' of node 'n0'{place} is neither an array"):
        collections.frame("same")
    with pytest.raises(BlobNotFoundError, match="'gone'"):
        collections.array("gone")
    with pytest.raises(DefinitionError, match="nodes must be a list"):
        collections.array("same", nodes="n0")
    with pytest.raises(BlobNotFoundError, match="'elsewhere'"):
        collections.array("same", nodes=["n0", "elsewhere"])


def test_neighbours_make_up_chunks_and_a_large_value_is_one_of_its_own(source, monkeypatch):
    collections, compute = source
    monkeypatch.setattr(joined, "CHUNK_BYTES", 40)
    monkeypatch.setattr("jobrunner.checkpoint.opened.CHUNK_BYTES", 40)
    rows = collections.array("rows", axis=0)  # of 16, 32, 48, 64 and 80 bytes
    assert rows.chunks[0] == (1, 2, 3, 4, 5)
    assert np.array_equal(compute(rows), np.concatenate([make(i)[0] + 10 for i in range(5)]))
    assert collections.array("same").chunks == ((1,) * 5, (3,))
    assert collections.array("number").chunks == ((5,),)


def test_parts_of_a_partitioned_blob_are_joined_along_its_axis(inproc_session, manager):
    JobRunner(job_of(1, partition=0), manager).run(inproc_session)
    whole = np.concatenate([make(i)[0] + 10 for i in range(5)])
    assert np.array_equal(manager.open(1).array("rows").compute(), whole)
    computed = inproc_session.client.compute(inproc_session.array("rows")).result()
    assert np.array_equal(computed, whole)


def test_a_collection_stays_as_it_was_when_it_was_made(inproc_session, manager):
    taken = []
    for epochs in (1, 2, 3):
        JobRunner(job_of(epochs), manager).run(inproc_session)
        taken.append(inproc_session.array("rows", axis=0))
    update = Task(change, updates=["rows", "same"], node="n0")
    inproc_session.run(update)
    compute = inproc_session.client.compute
    assert [compute(rows.min()).result() for rows in taken] == [10, 20, 30]
    assert inproc_session.fetch(Node("n0")["rows"]).min() == 40


def frame_of(i):
    pd = pytest.importorskip("pandas")
    dtype = "int64" if i < 9 else "float64"
    return pd.DataFrame({"a": np.arange(i + 1).astype(dtype), "b": ["x"] * (i + 1)})


def framed(numbers):
    with Job("framed") as job:
        with job.init_group:
            nodes = [f"f{i}" for i in numbers]
            make = lambda i: {"i": numbers[i]}  # noqa: E731
            Task.on_each(nodes, frame_of, outputs="table", kwargs=make)
            Task.on_each(
                nodes, lambda table: table.a, inputs=["table"], outputs="column", name="pick"
            )
        Task.on_each(nodes, add_to_frame, updates="table")
    epoch_limiter(job, 1)
    return job


def add_to_frame(table):
    table["a"] += 1


def test_frames_are_joined(inproc_session, manager):
    pytest.importorskip("pandas")
    runner = JobRunner(framed([0, 1, 2]), manager)
    runner.run(inproc_session)
    expected = [1, 1, 2, 1, 2, 3]
    frames = [inproc_session.frame("table"), manager.open(1).frame("table")]
    inproc_session.run(Task(add_to_frame, updates="table", node="f0"))  # of a frame, not of a copy
    for frame in frames:
        assert list(frame.columns) == ["a", "b"]
        assert frame.npartitions == 1
        computed = inproc_session.client.compute(frame).result()
        assert list(computed.a) == expected
        assert set(computed.b) == {"x"}
    column = inproc_session.client.compute(manager.open(1).frame("column")).result()
    assert list(column) == [0, 0, 1, 0, 1, 2]


def test_frames_that_differ_are_refused(inproc_session, manager):
    pytest.importorskip("pandas")
    JobRunner(framed([0, 9]), manager).run(inproc_session)
    says = "'f0', and a DataFrame of a float64, b str.* at node 'f9'"
    with pytest.raises(DefinitionError, match=says):
        inproc_session.frame("table")
    with pytest.raises(DefinitionError, match=says):
        manager.open(1).frame("table").compute(scheduler="synchronous")
