"""Blobs with ``history=``: each epoch adds rows to one array of a node."""

import json
import re
import shutil
import uuid
from pathlib import Path

import numpy as np
import pytest
import zarr

from jobrunner import (
    Blob,
    BlobNotFoundError,
    CheckpointCorruptError,
    CopyTo,
    DefinitionError,
    Job,
    JobRunner,
    KeepLast,
    MultiNodeCheckpointManager,
    Node,
    Position,
    SaveEvery,
    Task,
    TaskFailedError,
    current_task,
    epoch_limiter,
)
from jobrunner.checkpoint import Directory, copy_epoch, inspect_directory, repair_log, restore_epoch
from jobrunner.checkpoint.storage.object_files import open_store
from jobrunner.testing import assert_identical

NODES = ("chain:0", "chain:1")


@pytest.fixture
def small_chunks(monkeypatch):
    """A history has many chunks, and readers see each at once."""
    for name in ("_LEAST_BYTES", "_MOST_BYTES"):
        monkeypatch.setattr(f"jobrunner.checkpoint.history_writer.{name}", 64)
    monkeypatch.setattr("jobrunner.checkpoint.history_writer.PUBLISH_SECONDS", 0)


def draw(state):
    task = current_task()
    draws = task.rng.standard_normal((3, 2)) + state[:, None].sum()
    return draws, state + draws[-1, 0], float(state[0])


def sampler(epochs, fails_at=-1, nodes=NODES, steps=1):
    def check(state):
        task = current_task()
        if (task.epoch, task.step) == (fails_at, steps - 1):
            raise ValueError(state)

    with Job("sampler", seed=3, steps_per_epoch=steps) as job:
        for name in nodes:
            with Node(name):
                with job.init_group:
                    Task(lambda: np.zeros(3), outputs="state")
                outputs = [
                    Blob("draws", history="extend"),
                    "state",
                    Blob("energy", history=True),
                ]
                Task(draw, inputs="state", outputs=outputs)
                Task(check, inputs="state")
    epoch_limiter(job, epochs)
    return job


def run(session, path, epochs, fails_at=-1, **options):
    managed = {name: options.pop(name) for name in ("keep", "save", "load_path") if name in options}
    shape = {name: options.pop(name) for name in ("nodes", "steps") if name in options}
    manager = MultiNodeCheckpointManager(path, **managed)
    job = sampler(epochs, fails_at, **shape)
    try:
        JobRunner(job, manager, callbacks=[], **options).run(session)
    except TaskFailedError:
        assert fails_at >= 0
    return manager


def record(session, path, job):
    manager = MultiNodeCheckpointManager(path)
    JobRunner(job, manager, callbacks=[]).run(session)
    return manager


def expect_rows(manager, epochs, nodes=NODES):
    """Compare the histories with what the job computes when it is not interrupted."""
    draws, energy = manager.history_of("draws").compute(), manager.history_of("energy").compute()
    assert draws.shape == (len(nodes), 3 * epochs, 2)
    assert energy.shape == (len(nodes), epochs)
    state = np.zeros((len(nodes), 3))
    for epoch in range(epochs):
        assert np.array_equal(energy[:, epoch], state[:, 0])
        state = state + draws[:, 3 * epoch + 2, 0, None]
    last = manager.open("latest")
    for i, node in enumerate(nodes):
        assert np.array_equal(last[node]["draws"], draws[i, -3:])
        assert last[node].load("energy") == energy[i, -1]
        assert type(last[node].load("energy")) is float
        assert np.array_equal(last[node].load("state"), state[i])


def names_of_histories(manager):
    return sorted(path.name for path in Path(manager.path, "_histories").iterdir())


def test_each_epoch_adds_rows_to_one_array(session, tmp_path):
    manager = run(session, tmp_path / "k", 5)
    expect_rows(manager, 5)
    assert len(names_of_histories(manager)) == 1
    assert manager.history_of("draws", epoch=2).shape == (2, 6, 2)
    assert manager.history_of("energy", nodes=["chain:1"]).shape == (1, 5)
    with pytest.raises(BlobNotFoundError, match="no history of blob 'state'.*draws, energy"):
        manager.history_of("state")
    with pytest.raises(
        BlobNotFoundError, match="no node 'chain:2'.* Its nodes are chain:0, chain:1"
    ):
        manager.history_of("draws", nodes=["chain:2"])
    # At epoch 0 there are no rows, and no blob.
    with pytest.raises(BlobNotFoundError, match="Histories there: none"):
        manager.history_of("draws", epoch=0)


def test_any_reader_opens_the_rows_while_the_run_goes_on(session, tmp_path):
    lengths = []

    class Look:
        def on_save(self, report):
            (path,) = (tmp_path / "k" / "_histories").glob("*/draws")
            arrays = list(zarr.open_group(path, mode="r").arrays())
            lengths.extend(array.shape[0] for _, array in arrays)
            for _, array in arrays:
                assert not np.isnan(array[:]).any()

    manager = MultiNodeCheckpointManager(tmp_path / "k", asynchronous=False)
    JobRunner(sampler(3), manager, callbacks=[Look()]).run(session)
    assert lengths[:2] == [3, 3]  # at once; later ones within a second
    assert set(lengths) <= {3, 6, 9}


@pytest.mark.parametrize("save", [SaveEvery(epochs=1), SaveEvery(epochs=3)])
def test_a_resume_goes_on_with_the_rows_of_the_recorded_epoch(save, session, tmp_path):
    manager = run(session, tmp_path / "k", 8, fails_at=6, save=save)
    # What was not recorded does not count, although its rows are there.
    at = manager.latest()
    assert isinstance(at, int)
    expect_rows(manager, at)
    manager = run(session, tmp_path / "k", 8, save=save)
    expect_rows(manager, 8)
    assert len(names_of_histories(manager)) == 2
    whole = run(session, tmp_path / "whole", 8)
    for blob in ("draws", "energy"):
        rows = manager.history_of(blob).compute()
        assert np.array_equal(rows, whole.history_of(blob).compute())


def test_a_rewind_keeps_the_rows_that_a_restore_needs(session, tmp_path):
    manager = run(session, tmp_path / "k", 7)
    before = manager.history_of("draws").compute()
    run(session, tmp_path / "k", 4, resume_from_epoch=2, keep=KeepLast(1))
    expect_rows(manager, 4)
    assert np.array_equal(manager.history_of("draws").compute(), before[:, :12])
    for epochs in (5, 6):
        run(session, tmp_path / "k", epochs, keep=KeepLast(1))
    assert manager.epochs() == [5, 6]  # none of the first run is recorded
    restore_epoch(manager.directory, Position(7))
    assert np.array_equal(manager.history_of("draws").compute(), before)
    expect_rows(manager, 7)


def test_what_no_epoch_needs_is_deleted_by_a_later_run(session, tmp_path):
    for epochs in (3, 5, 7, 9):
        manager = run(session, tmp_path / "k", epochs, keep=KeepLast(1))
        assert manager.epochs()[-1] == epochs
        expect_rows(manager, epochs)
    # The epoch that was loaded stays until the next one is recorded, and one run longer its rows.
    findings = {item.path: item.status for item in inspect_directory(manager.directory)}
    statuses = [findings[f"_histories/{name}"] for name in names_of_histories(manager)]
    assert sorted(statuses) == ["live", "live", "pending"]


def test_what_a_lost_log_recorded_stays(session, tmp_path):
    path = tmp_path / "k"
    run(session, path, 3)
    shutil.rmtree(path / "_log")
    for epochs in (2, 4):  # it starts over, and then goes on
        resume = None if epochs == 2 else "latest"
        manager = run(session, path, epochs, resume_from_epoch=resume)
        expect_rows(manager, epochs)
    assert manager.record(4).histories not in names_of_histories(manager)[:1]
    shutil.rmtree(path / "_log")
    repair_log(manager.directory)
    for epoch in (2, 3, 4):
        manager.verify(epoch)


def test_a_copy_has_the_rows_of_its_epoch(session, tmp_path):
    manager = run(session, tmp_path / "k", 5)
    copy_epoch(manager.directory, Position(3), str(tmp_path / "copy"))
    copy = MultiNodeCheckpointManager(tmp_path / "copy")
    expect_rows(copy, 3)
    copy.verify(3)
    expect_rows(run(session, tmp_path / "copy", 5), 5)
    # A run in a directory of its own copies them, too.
    expect_rows(run(session, tmp_path / "fork", 7, load_path=tmp_path / "k"), 7)
    expect_rows(manager, 5)


def test_a_job_resumes_from_the_rows_that_were_copied_after_its_last_epoch(
    inproc_session, tmp_path
):
    upload = CopyTo(tmp_path / "copy")
    for epochs in (2, 4, 4):  # the last one copies the same epoch again
        run(inproc_session, tmp_path / "k", epochs, upload_task_group_builder=upload)
    shutil.rmtree(tmp_path / "copy" / "_histories" / "2.0")  # each copy has its own
    for i in range(2):
        group = zarr.open_group(tmp_path / "copy" / "_histories" / "4.0" / "draws", mode="r")
        assert group[f"chain:{i}"].shape == (12, 2)
    repair_log(Directory(tmp_path / "copy"))
    expect_rows(MultiNodeCheckpointManager(tmp_path / "copy"), 4)
    expect_rows(run(inproc_session, tmp_path / "copy", 5), 5)


def test_a_renamed_node_takes_its_rows_along_and_a_new_one_begins_without(session, tmp_path):
    run(session, tmp_path / "k", 3)
    names = ("chain:1", "other")
    rename = {"chain:0": "chain:1", "chain:1": "other"}
    manager = run(session, tmp_path / "k", 5, nodes=names, rename=rename)
    expect_rows(manager, 5, names)
    run(session, tmp_path / "k", 7, nodes=(*names, "new"), missing="init")
    says = r"float64\[21, 2\] at node .chain:1., and float64\[6, 2\] at node .new"
    with pytest.raises(DefinitionError, match=says):
        manager.history_of("draws")
    assert manager.history_of("draws", nodes=["new"]).shape == (1, 6, 2)
    assert manager.history_of("draws", nodes=names).shape == (2, 21, 2)


def test_one_damaged_old_chunk_does_not_damage_every_epoch(inproc_session, tmp_path, small_chunks):
    path = tmp_path / "k"
    manager = run(inproc_session, path, 4)
    (chunk,) = path.glob("_histories/*/draws/chain:0/c.0.0")
    content = bytearray(chunk.read_bytes())
    content[3] ^= 1
    chunk.write_bytes(content)
    manager = run(inproc_session, path, 6)
    last = manager.open(6)["chain:0"].load("draws")
    assert last.shape == (3, 2)
    with pytest.raises(CheckpointCorruptError, match=r"draws/chain:0/c.0.0.*of its rows 0 to 3"):
        manager.verify(6)
    with pytest.raises(CheckpointCorruptError, match=r"draws/chain:0/c.0.0"):
        manager.history_of("draws").compute()
    assert manager.history_of("draws", nodes=["chain:1"]).compute().shape == (1, 18, 2)


def test_a_damaged_document_of_an_array_does_no_harm(inproc_session, tmp_path, small_chunks):
    path = tmp_path / "k"
    manager = run(inproc_session, path, 4)
    (document,) = path.glob("_histories/*/draws/chain:0/zarr.json")
    content = document.read_bytes()
    digest = json.loads(content)["attributes"]["digests"][1]
    for damaged in (b"", content[:-1], content.replace(digest.encode(), b"0" * 32)):
        document.write_bytes(damaged)
        expect_rows(manager, 4)
        manager.verify(4)
    expect_rows(run(inproc_session, path, 6), 6)
    name = manager.record("latest").histories
    (path / "_histories" / name / "draws" / "chain:1" / "c.2.0").unlink()
    with pytest.raises(CheckpointCorruptError, match="expected 5 chunks"):
        manager.history_of("draws")


def test_a_damaged_tail_makes_a_resume_fall_back(session, tmp_path):
    path = tmp_path / "k"
    run(session, path, 4)
    (chunk,) = path.glob("_histories/*/energy/chain:0/c.0")
    content = bytearray(chunk.read_bytes())
    content[3 * 8] ^= 1  # the row of epoch 4
    chunk.write_bytes(content)
    manager = run(session, path, 5)
    expect_rows(manager, 5)


def put(values):
    return values[current_task().epoch - 1]


def putting(values, **options):
    """An epoch for each value, which it puts into blob "h"."""
    with Job("j") as job, Node("a"):
        Task(put, outputs=Blob("h", **options), kwargs={"values": values}, inputs=())
    epoch_limiter(job, len(values))
    return job


@pytest.mark.parametrize(
    ("history", "values", "message"),
    [
        (True, [np.zeros(2), np.zeros(3)], r"expected rows of float64 and shape \(2,\)"),
        (True, [1.0, 1], "expected rows of float64 and shape .*found int64"),
        (True, ["text"], "expected arrays or numbers .*found <class 'str'>"),
        (True, [np.array(["a"])], "found an array of <U1"),
        (True, [np.zeros((2, 0))], "expected rows with items"),
        (True, [2**70], "expected arrays or numbers"),
        ("extend", [1.0], "expected arrays whose first axis are rows"),
        ("extend", [np.zeros((2, 3)), np.zeros((2, 4))], r"shape \(3,\), as those before"),
    ],
)
def test_what_is_no_row_fails_its_task(history, values, message, inproc_session, tmp_path):
    with pytest.raises(DefinitionError, match="Task a/put") as caught:
        record(inproc_session, tmp_path / "k", putting(values, history=history))
    assert re.search(message, str(caught.value), re.S)


@pytest.mark.parametrize(
    "values",
    [
        [np.float32(1), np.float32(2)],
        [True, False],
        [3, 4],
        [1j, 2j],
        [np.array(5, "<M8[s]"), np.array(6, "<M8[s]")],
        [np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(3, 2).T],
        [np.array([1, 2], ">i4"), np.array([3, 4], ">i4")],
    ],
)
def test_the_last_value_comes_back_as_it_was(values, inproc_session, tmp_path):
    manager = record(inproc_session, tmp_path / "k", putting(values, history=True))
    assert_identical(
        np.ascontiguousarray(values[1]) if np.ndim(values[1]) else values[1],
        manager.open(2)["a"].load("h"),
    )
    rows = manager.history_of("h").compute()
    assert np.array_equal(rows[0], np.stack([np.asarray(value) for value in values]))


def test_updates_add_rows_and_init_only_makes_the_first_value(inproc_session, tmp_path):
    def add(x):
        x += 1

    with Job("j") as job, Node("a"):
        with job.init_group:
            Task(lambda: np.zeros(2), outputs=Blob("x", history=True))
        Task(add, updates="x")
        Task(add, updates="x", name="again")
    epoch_limiter(job, 3)
    manager = record(inproc_session, tmp_path / "k", job)
    assert manager.history_of("x").compute().tolist() == [[[2, 2], [4, 4], [6, 6]]]
    assert manager.open(0)["a"].load("x").tolist() == [0, 0]


def test_a_history_is_declared_the_same_way_in_all_tasks():
    with Job("j") as job, Node("a"):
        Task(float, outputs=Blob("x", history=True), inputs=())
        Task(float, outputs=Blob("x", history="extend"), inputs=(), name="again")
    epoch_limiter(job, 1)
    with pytest.raises(DefinitionError, match="Declare it the same way in all tasks"):
        job.compile()


def test_an_object_store_has_the_same_histories(inproc_session, tmp_path, small_chunks):
    url = f"memory://{uuid.uuid4().hex}"
    expect_rows(run(inproc_session, url, 5, fails_at=4), 3)
    manager = run(inproc_session, url, 5)
    expect_rows(manager, 5)
    name = manager.record(5).histories
    objects = zarr.storage.ObjectStore(open_store(url))
    shown = zarr.open_group(objects, path=f"_histories/{name}/draws", mode="r")
    rows = manager.history_of("draws").compute()
    for i, node in enumerate(NODES):
        assert np.array_equal(shown[node][:], rows[i])
    copy_epoch(manager.directory, Position(5), str(tmp_path / "copy"))
    expect_rows(run(inproc_session, f"{url}-fork", 6, load_path=tmp_path / "copy"), 6)


@pytest.mark.parametrize(("history", "names"), [(True, ["i"]), ("extend", ["draw", "i"])])
def test_axes_have_the_names_that_the_blob_gave_them(history, names, inproc_session, tmp_path):
    values = [np.zeros((2, 3)[-len(names) :])]
    job = putting(values, history=history, dims=names)
    manager = record(inproc_session, tmp_path / "k", job)
    copy_epoch(manager.directory, Position(1), str(tmp_path / "copy"))
    for directory in ("k", "copy"):
        (path,) = (tmp_path / directory / "_histories").glob("*/h/a")
        shown = zarr.open_array(path).metadata.dimension_names
        assert list(shown) == ["a draw" if history == "extend" else "a row", "i"]
    job = putting(values, history=history, dims=[*names, "j"])
    with pytest.raises(DefinitionError, match=r"dims=.* expect values of"):
        record(inproc_session, tmp_path / "other", job)


def test_after_a_loss_in_the_same_run_no_row_is_lost_or_doubled(inproc_session, tmp_path):
    def put_twice(x):
        mark = tmp_path / f"lost {current_task().epoch}"
        if mark.name in ("lost 3", "lost 6") and not mark.exists():
            mark.touch()
            raise ConnectionError
        return x + 1, x + 1

    with Job("j") as job, Node("a"):
        with job.init_group:
            Task(float, outputs="x", inputs=())
        outputs = ["x", Blob("h", history=True)]
        Task(put_twice, inputs="x", outputs=outputs, transient_errors=ConnectionError)
    epoch_limiter(job, 8)
    manager = record(inproc_session, tmp_path / "k", job)
    assert manager.history_of("h").compute().tolist() == [list(range(1, 9))]
    # Each placement has a directory of its own, as workers of the one before may still write.
    assert len(names_of_histories(manager)) == 3
