"""Blobs that several nodes have in common: replicas, and parts of one array."""

import numpy as np
import pytest

from jobrunner import (
    Blob,
    DefinitionError,
    Job,
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Task,
    epoch_limiter,
)


@pytest.fixture(params=[False, True], ids=["at once", "in the background"])
def manager(request, tmp_path):
    return MultiNodeCheckpointManager(tmp_path / "ckpt", asynchronous=request.param)


def replicas(limit, names=("a", "b", "c"), *, diverge=False):
    def step(w, i):
        return w + 1 + (i if diverge else 0)

    with Job("replicas") as job:
        for i, node in enumerate(map(Node, names)):
            with job.init_group:
                Task(
                    lambda: np.zeros(20_000),
                    outputs=Blob("w", replicated=True),
                    node=node,
                    name="zero",
                )
                if i == 0:
                    Task(lambda: 7, outputs="own", node=node, name="own")
            Task(step, inputs="w", outputs="w", kwargs={"i": i}, node=node, name="step")
        epoch_limiter(job, limit)
    return job


def test_one_copy_is_saved_and_all_nodes_load_it(inproc_session, manager):
    JobRunner(replicas(3), manager).run(inproc_session)
    checkpoint = manager.open(3)
    assert [set(np.unique(checkpoint[node]["w"][:])) for node in "abc"] == [{3.0}] * 3
    assert np.array_equal(checkpoint["c"].load("w"), checkpoint["a"].load("w"))
    assert "w" in checkpoint["b"]
    nbytes = {node: store.nbytes for node, store in manager.record(3).stores.items()}
    assert nbytes["a"] > 160_000 > 10_000 > max(nbytes["b"], nbytes["c"])
    result = JobRunner(replicas(5), manager).run(inproc_session)
    assert result.resumed_from == 3
    assert [inproc_session.fetch(Node(node)["w"])[0] for node in "abc"] == [5.0] * 3


def test_replicas_that_differ_are_an_error_that_names_both(inproc_session, manager):
    with pytest.raises(DefinitionError, match=r"'w' is replicated.*epoch 1.*'b'.*'a'"):
        JobRunner(replicas(3, diverge=True), manager).run(inproc_session)
    assert manager.epochs() == [0]


def heat(limit, count, *, axis=0, shape=(10, 6)):
    """Every node holds a part of an array whose items are their own indices."""
    whole = np.arange(float(np.prod(shape))).reshape(shape)

    def part(i):
        return np.array_split(whole, count, axis)[i].copy(order="FC"[i % 2])

    with Job("heat") as job:
        for i in range(count):
            node = Node(f"n{i}")
            with job.init_group:
                Task(part, outputs=Blob("u", partition=axis), kwargs={"i": i}, node=node)
            Task(lambda u: u + 100, inputs="u", outputs="u", node=node, name="step")
        epoch_limiter(job, limit)
    return job, whole


def fetched(session, count, axis):
    return np.concatenate([session.fetch(Node(f"n{i}")["u"]) for i in range(count)], axis)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_another_number_of_nodes_resumes_with_other_parts(inproc_session, tmp_path, axis, count):
    manager = MultiNodeCheckpointManager(tmp_path / "ckpt")
    job, whole = heat(2, 3, axis=axis)
    JobRunner(job, manager).run(inproc_session)
    job, _ = heat(3, count, axis=axis)
    result = JobRunner(job, manager).run(inproc_session)
    assert (result.resumed_from, result.epoch) == (2, 3)
    assert np.array_equal(fetched(inproc_session, count, axis), whole + 300)
    lengths = [inproc_session.fetch(Node(f"n{i}")["u"]).shape[axis] for i in range(count)]
    assert max(lengths) - min(lengths) <= 1
    assert np.array_equal(np.asarray(manager.open(3).array("u")), whole + 300)


def test_a_blob_is_shared_in_one_way_only_and_parts_are_saved():
    with pytest.raises(DefinitionError, match="one of"):
        Blob("w", replicated=True, transient=True)
    with pytest.raises(DefinitionError, match="axis"):
        Blob("w", partition=-1)
    with Job("two ways") as job, job.init_group:
        Task(lambda: 1, outputs=Blob("w", replicated=True), node="a")
        Task(lambda: 1, outputs=Blob("w", partition=0), node="b")
    with pytest.raises(DefinitionError, match="both replicated and partitioned"):
        job.compile()
    with Job("not saved") as job:
        Task(lambda: 1, outputs=Blob("w", partition=0), node="a")
    with pytest.raises(DefinitionError, match="not checkpointed"):
        job.compile()


RECORDS = np.dtype([("a", "i1"), ("b", ">f8"), ("c", "<U3")])
PARTS = [
    *(">i4", ">f8", ">c16", ">U4", ">M8[s]", "<i2", "g", "T", RECORDS),
    *(("<U2", "<U5"), ("S5", "S2")),  # of the inner node, of the others
]


def cut(count, limit, make, num_blobs=1):
    """Nodes n0, n1, ... whose parts of blobs u0, u1, ... are what `make` makes of their number."""
    with Job("cut") as job:
        for i in range(count):
            with job.init_group:
                outputs = [Blob(f"u{k}", partition=0) for k in range(num_blobs)]
                Task(make, outputs=outputs, kwargs={"i": i}, node=f"n{i}")
            Task(lambda u: None, inputs="u0", node=f"n{i}", name="look")
        epoch_limiter(job, limit)
    return job


@pytest.mark.parametrize("count", [1, 2, 5])
def test_parts_cut_anew_keep_byte_order_and_gaps(inproc_session, tmp_path, count):
    def part(dtype, i):
        form = dtype[i == 1] if isinstance(dtype, tuple) else dtype
        return np.asfortranarray(np.arange(24).reshape(6, 4) + 10 + 24 * i).astype(form)

    def job(count, limit):
        return cut(count, limit, lambda i: [part(it, i % 3) for it in PARTS], len(PARTS))

    manager = MultiNodeCheckpointManager(tmp_path / "ckpt")
    JobRunner(job(3, 1), manager).run(inproc_session)
    JobRunner(job(count, 2), manager).run(inproc_session)
    for k, dtype in enumerate(PARTS):
        rows = [row for i in range(3) for row in part(dtype, i).tolist()]
        for i, places in enumerate(np.array_split(range(len(rows)), count)):
            found = manager.open(2)[f"n{i}"].load(f"u{k}")
            assert found.tolist() == [rows[place] for place in places]
            forms = dtype if isinstance(dtype, tuple) else (dtype,)
            assert repr(found.dtype) in {repr(np.dtype(form)) for form in forms}


UNFIT = {
    "dtype": (
        lambda i: np.arange(4, dtype="i4" if i else "f4"),
        r"float32\[:\] on 'n0'.*int32\[:\]",
    ),
    "byte order": (lambda i: np.arange(4, dtype=">i4" if i else "<i4"), r"int32\[:\].*>i4\[:\]"),
    "trailing shape": (
        lambda i: np.zeros((4, 3 if i == 2 else 2)),
        r"\[:, 2\] on 'n0', 'n1', found .*\[:, 3\] on 'n2'",
    ),
    "axes": (lambda i: np.zeros((4, 1) if i else 4), r"\[:\] on 'n0', found float64\[:, 1\]"),
    "columns": (lambda i: np.zeros(4, [("a", "f8"), ("c" if i else "b", "i4")]), "'b'.*'c'"),
}


@pytest.mark.parametrize("how", UNFIT)
def test_parts_that_do_not_fit_are_refused_before_they_are_recorded(inproc_session, manager, how):
    make, expected = UNFIT[how]
    begins = (
        rf"Epoch 0 of .*: the parts of blob 'u0' do not fit together along axis 0: .*{expected}"
    )
    with pytest.raises(DefinitionError, match=begins):
        JobRunner(cut(3, 1, make), manager).run(inproc_session)
    assert manager.epochs() == []
