"""Recorded epochs as an axis: `manager.array` and `manager.to_xarray`, without a cluster."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.array
import numpy as np
import pytest

from jobrunner import (
    Blob,
    BlobNotFoundError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointManager,
    CheckpointNotFoundError,
    DefinitionError,
    Job,
    JobRunner,
    Mean,
    MultiNodeCheckpointManager,
    Session,
    Task,
    current_task,
    epoch_limiter,
    joined,
)
from jobrunner.checkpoint import epoch_axis
from jobrunner.testing import FaultyFiles
from jobrunner.workspace.workspace import Workspace
from tests.saves import save_epoch


@pytest.fixture(autouse=True)
def _compute_in_this_thread() -> Any:
    with dask.config.set(scheduler="synchronous"):
        yield


class Run:
    """Saves epochs of two nodes; each value is that of the epoch before unless one is put."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.files = FaultyFiles(sync=False)
        self.manager = MultiNodeCheckpointManager(path, files=self.files, **options)
        self.workspaces = {node: Workspace(node) for node in "ab"}
        self.manager.run.start(tuple(self.workspaces), {})

    def save(self, epoch: Any, a: Any, b: Any, **metrics: float) -> None:
        for node, blobs in {"a": a, "b": b}.items():
            for name, value in blobs.items():
                self.workspaces[node].put(name, value)
        save_epoch(self.manager, epoch, self.workspaces, {"metrics": metrics})

    def reads(self, name: str) -> int:
        """How many files of this name were read since the last call."""
        read = [path for operation, path in self.files.trace if operation == "open"]
        self.files.trace.clear()
        return len([path for path in read if Path(path).name == name])


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Five epochs: `w` of both nodes changes at 2 and 4, `n` is a number, `names` is no array."""
    run = Run(tmp_path / "run")
    for epoch in range(5):
        changed = {}
        if epoch % 2 == 0:
            changed["w"] = np.arange(6.0).reshape(2, 3) + epoch
        numbers = {"n": epoch, "names": ["x"]}
        run.save(epoch, {**changed, **numbers}, {"w": np.ones((2, 3)), **numbers}, loss=epoch / 2)
    run.files.trace.clear()
    yield run
    run.manager.run.end({})


def w_of_a(epoch: int) -> Any:
    return np.arange(6.0).reshape(2, 3) + epoch // 2 * 2


def test_an_array_has_the_axes_epoch_node_and_those_of_the_blob(run: Run) -> None:
    array = run.manager.array("w")
    assert run.reads("zarr.json") == 2  # a document of each node
    assert array.shape == (5, 2, 2, 3)
    values = pickle.loads(pickle.dumps(array)).compute()
    for epoch in range(5):
        assert np.array_equal(values[epoch, 0], w_of_a(epoch))
    assert np.all(values[:, 1] == 1)
    chosen = run.manager.array("w", nodes=["a"], epochs=np.array([4, 1])).compute()
    assert np.array_equal(chosen, [w_of_a(4), w_of_a(1)])
    numbers = run.manager.array("n", nodes=["b"])
    assert numbers.dtype == np.int64
    assert numbers.compute().tolist() == [0, 1, 2, 3, 4]


def test_equal_values_are_read_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.manager.array("w").compute()
    assert run.reads("c.0.0") == 4
    # Large ones, which make up chunks of their own, by one task.
    monkeypatch.setattr(epoch_axis, "_SMALL_BYTES", 48)
    array = run.manager.array("w")
    assert array.numblocks == (5, 2, 1, 1)
    values = array.compute()
    assert run.reads("c.0.0") == 4
    assert np.array_equal(values[:, 0], [w_of_a(epoch) for epoch in range(5)])


def test_chunks_hold_as_many_epochs_and_nodes_as_fit(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run.manager.array("w").compute()
    for limit, chunks in ((200, ((2, 2, 1), (2,))), (60, ((1,) * 5, (1, 1)))):
        monkeypatch.setattr(joined, "CHUNK_BYTES", limit)
        monkeypatch.setattr(epoch_axis, "CHUNK_BYTES", limit)
        array = run.manager.array("w")
        assert array.chunks[:2] == chunks
        assert np.array_equal(array.compute(), expected)


def test_a_chunk_verifies_what_it_reads(run: Run) -> None:
    array = run.manager.array("w", nodes=["a"])
    [chunk] = Path(run.manager.path, "a.4", "w").glob("c*")
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointCorruptError, match=r"a\.4/w/c"):
        array.compute()
    Path(run.manager.path, "a.0", "zarr.json").write_bytes(b"{}")
    with pytest.raises(CheckpointCorruptError, match=r"a\.0/zarr\.json"):
        array.compute()


@pytest.mark.parametrize("small_bytes", [8 << 20, 1])
def test_epochs_of_another_shape_or_dtype_are_named(
    run: Run, small_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for epoch in (5, 6):
        run.save(epoch, {"w": np.ones(3)}, {})
    monkeypatch.setattr(epoch_axis, "_SMALL_BYTES", small_bytes)
    with pytest.raises(
        CheckpointError,
        match=r"at epochs 0 to 4, node 'a' has float64\[2, 3\] instead of float64\[3",
    ):
        run.manager.array("w", nodes=["a"]).compute()
    assert run.manager.array("w", nodes=["a"], epochs=[5, 6]).compute().shape == (2, 3)
    with pytest.raises(DefinitionError, match=r"float64\[3\] at node 'a', and float64\[2, 3\] at"):
        run.manager.array("w")


@pytest.mark.parametrize(
    ("name", "options", "error", "told"),
    [
        ("late", {}, BlobNotFoundError, "node 'a' has no blob 'late' at epochs 0 to 4"),
        ("v", {}, BlobNotFoundError, "No node has a blob 'v' at epoch 5 .* late, n, names, w"),
        ("w", {"nodes": ["c"]}, BlobNotFoundError, "node 'c' has no blob 'w'"),
        ("names", {}, DefinitionError, "'names' of node 'a' is neither an array nor a number"),
        ("w", {"epochs": [9]}, CheckpointNotFoundError, "Epoch 9"),
        ("w", {"epochs": []}, DefinitionError, "at least one epoch"),
    ],
)
def test_what_cannot_be_opened_is_named(
    run: Run, name: str, options: dict[str, Any], error: type[Exception], told: str
) -> None:
    run.save(5, {"late": np.ones(2)}, {})
    with pytest.raises(error, match=told):
        run.manager.array(name, **options)


def test_nothing_of_a_checkpoint_is_run(run: Run) -> None:
    trusting = Run(Path(run.manager.path).with_name("trusting"), allow_pickle=True)
    trusting.save(0, {"w": Opens()}, {})
    trusting.save(1, {"w": np.ones(2)}, {})
    trusting.manager.run.end({})
    with pytest.raises(CheckpointError, match="at epochs 0, node 'a' has no array"):
        trusting.manager.array("w", nodes=["a"]).compute()


class Opens:
    def __reduce__(self) -> Any:
        return sys.exit, ("unpickled",)


# --- shared blobs, from a job


def _start(i: int) -> Any:
    return np.arange(4.0)[2 * i : 2 * i + 2], np.full(3, 7.0)


def _step(u: Any, same: Any) -> Any:
    current_task().report(u=Mean(float(u.mean())))
    return u + 1, same, u[:1]


def test_parts_are_joined_and_replicas_read_once(inproc_session: Session, tmp_path: Path) -> None:
    u, same = Blob("u", partition=0, dims="x"), Blob("same", replicated=True)
    with Job("shared") as job:
        nodes = ["part:0", "part:1"]
        with job.init_group:
            Task.on_each(nodes, _start, outputs=[u, same], kwargs=lambda i: {"i": i})
        rows = Blob("rows", history="extend")
        Task.on_each(nodes, _step, inputs=["u", "same"], outputs=["u", "same", rows])
        epoch_limiter(job, 2)
    manager = MultiNodeCheckpointManager(tmp_path)
    JobRunner(job, manager).run(inproc_session)
    expected = np.arange(4.0) + np.arange(3)[:, None]
    assert np.array_equal(manager.array("u").compute(), expected)
    assert np.array_equal(manager.array("same").compute(), np.full((3, 3), 7.0))
    one_node = CheckpointManager(tmp_path, "part:1")
    assert np.array_equal(one_node.array("u", nodes=["part:1"]).compute(), expected[:, 2:])
    with pytest.raises(DefinitionError, match=r"'rows' .* is a history.*history_of\('rows'\)"):
        manager.array("rows", epochs=[1, 2])
    pytest.importorskip("xarray")
    whole = manager.to_xarray(epochs=[1, 2])
    problem = "blob 'rows' of node 'part:0' is a history: see history_of('rows')"
    assert problem in whole.attrs["left_out"]
    labelled = manager.to_xarray(blobs=["u"])
    assert labelled["u"].dims == ("epoch", "x")
    assert np.array_equal(labelled["u"], expected)
    assert np.array_equal(labelled["metric_u"], [np.nan, 1.5, 2.5], equal_nan=True)


# --- xarray


def test_a_run_is_a_dataset_if_its_nodes_are_alike(run: Run) -> None:
    xarray = pytest.importorskip("xarray")
    labelled = run.manager.to_xarray()
    assert type(labelled) is xarray.Dataset
    assert labelled["w"].dims == ("epoch", "node", "w_0", "w_1")
    assert np.array_equal(labelled["w"].sel(epoch=3, node="a"), w_of_a(3))
    assert labelled["n"].sel(epoch=3, node="b") == 3
    assert labelled["loss"].sel(epoch=3) == 1.5
    assert len(labelled.attrs["left_out"]) == 2
    assert "'names' of node 'a' is no array" in labelled.attrs["left_out"][0]
    within = run.manager.to_xarray(epochs=[2, 4], nodes=["a"], blobs=["w"])
    assert dict(within.sizes) == {"epoch": 2, "w_0": 2, "w_1": 3}


def test_names_of_axes_are_free_for_them(inproc_session: Session, tmp_path: Path) -> None:
    pytest.importorskip("xarray")

    def report(x: Any) -> None:
        current_task().report(step=2.0)

    with Job("labels") as job:
        with job.init_group:
            for name, dims in {"x": "x", "epoch": "x", "y": "node"}.items():
                Task(np.ones, outputs=Blob(name, dims=dims), kwargs={"shape": 2}, name=name)
        Task(report, inputs="x")
        epoch_limiter(job, 1)
    manager = MultiNodeCheckpointManager(tmp_path)
    JobRunner(job, manager).run(inproc_session)
    labelled = manager.to_xarray()
    assert labelled["blob_x"].dims == labelled["blob_epoch"].dims == ("epoch", "x")
    assert labelled["y"].dims == ("epoch", "y_0")
    assert np.array_equal(labelled["metric_step"], [np.nan, 2.0], equal_nan=True)


def test_a_run_is_a_tree_if_its_nodes_differ(run: Run) -> None:
    xarray = pytest.importorskip("xarray")
    run.save(5, {"late": 1.0}, {"w": np.ones(3)})
    run.save("5.s7", {}, {})
    tree = run.manager.to_xarray(epochs=[5, "5.s7"])
    assert type(tree) is xarray.DataTree
    assert tree["a/w"].dims == ("epoch", "w_0", "w_1")
    assert tree["b/w"].shape == (2, 3)
    assert tree["a/late"].values.tolist() == [1, 1]
    assert tree["step"].values.tolist() == [0, 7]
    with pytest.raises(BlobNotFoundError, match="'v'"):
        run.manager.to_xarray(blobs=["v"])


def test_what_epochs_lack_is_nan(run: Run) -> None:
    pytest.importorskip("xarray")
    for node in ("a", "b"):
        del run.workspaces[node].globals["n"]
    a: dict[str, Any] = {"late": np.array([1, 2]), "text": np.array(["x"])}
    run.save(5, {**a, "day": np.datetime64("2026-01-01", "D")}, {})
    run.save(6, {}, {"late": np.array([3, 4])})
    labelled = run.manager.to_xarray(epochs=[0, 4, 5, 6], nodes=["a"])
    gap = np.full(2, np.nan)
    assert np.array_equal(labelled["late"], [gap, gap, [1, 2], [1, 2]], equal_nan=True)
    assert labelled["late"].attrs == {"missing": "node 'a' has no blob 'late' at epochs 0, 4"}
    assert labelled["w"].attrs == {}
    assert np.array_equal(labelled["n"], [0, 4, np.nan, np.nan], equal_nan=True)
    assert labelled["day"].isnull().values.tolist() == [True, True, False, False]
    assert "node 'a' has no blob 'text' at epochs 0, 4" in labelled.attrs["left_out"]
    with pytest.raises(BlobNotFoundError, match="'text' at epochs 0, 4"):
        run.manager.to_xarray(epochs=[0, 4, 5], nodes=["a"], blobs=["text"])
    both = run.manager.to_xarray(epochs=[5, 6], blobs=["late"])["late"]
    assert both.dims == ("epoch", "node", "late_0")
    assert np.array_equal(both, [[[1, 2], gap], [[1, 2], [3, 4]]], equal_nan=True)


def test_a_missing_xarray_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xarray", None)
    with pytest.raises(DefinitionError, match="pip install xarray"):
        run.manager.to_xarray()
