"""What a manager promises, in one process without a cluster; tests fill the workspaces."""

from __future__ import annotations

import errno
import math
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from jobrunner import (
    BlobNotFoundError,
    CheckpointError,
    CheckpointManager,
    CheckpointNotFoundError,
    CheckpointWriteError,
    DefinitionError,
    KeepLast,
    MultiNodeCheckpointManager,
)
from jobrunner.checkpoint import CommitEntry, blobs_of, repair_log, with_contents
from jobrunner.checkpoint.opened import store_readers
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles, assert_identical
from jobrunner.workspace.workspace import Workspace
from tests.jobs import RefusingFiles
from tests.saves import NodeRun, Save, run_group, save_epoch

NODES = ("server", "trainer:0")


def values(node: str, epoch: int) -> np.ndarray[Any, Any]:
    return np.arange(6.0).reshape(2, 3) + epoch + 100 * NODES.index(node)


def workspaces_at(epoch: int) -> dict[str, Workspace]:
    workspaces = {}
    for node in NODES:
        workspaces[node] = Workspace(node, transient=frozenset({"socket"}))
        workspaces[node].globals.update(socket=open, name=node, w=values(node, epoch))
    return workspaces


@pytest.fixture
def two_nodes(tmp_path: Path) -> Iterator[MultiNodeCheckpointManager]:
    """A run of two nodes that has saved epochs 0 and 2."""
    manager = MultiNodeCheckpointManager(tmp_path / "runs" / "k", files=FaultyFiles(sync=False))
    manager.run.start(NODES, {"plan": {"job": "p"}})
    metrics = {"loss": math.nan, "best": -math.inf}
    for epoch in (0, 2):
        save_epoch(manager, epoch, workspaces_at(epoch), {"metrics": metrics})
    yield manager
    manager.run.end()


def test_making_a_manager_touches_nothing_and_makes_its_path_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    manager = MultiNodeCheckpointManager("runs/k")
    monkeypatch.chdir("/")
    assert manager.path == str(tmp_path / "runs" / "k")
    assert (manager.epochs(), manager.latest()) == ([], None)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DefinitionError):
        MultiNodeCheckpointManager("")


def test_what_stores_contain_is_said_once_and_read_from_them_if_that_entry_is_lost(
    node_run: NodeRun, tmp_path: Path
) -> None:
    """Wherever the directory is by then."""
    for epoch in range(3):
        node_run.save(epoch, {"w": epoch})
    node_run.end()
    directory = node_run.manager.directory
    commits = [entry for entry in directory.log.read_entries() if isinstance(entry, CommitEntry)]
    assert [list(commit.contents) for commit in commits] == [["a"], [], []]
    assert [commit.records[0].contents for commit in commits[1:]] == [commits[0].number] * 2
    Path(directory.handler.path_of(commits[0].number)).write_text("damaged")
    repair_log(directory)
    manager = MultiNodeCheckpointManager(Path(node_run.path).rename(tmp_path / "moved"))
    assert manager.epochs() == [0, 1, 2]
    assert blobs_of(with_contents(manager.directory, manager.record(2))) == {"a": ["w"]}


def test_a_saved_epoch_is_recorded_and_opened(two_nodes: MultiNodeCheckpointManager) -> None:
    assert (two_nodes.epochs(), two_nodes.latest()) == ([0, 2], 2)
    record = two_nodes.record(0)
    assert record.stores["trainer:0"].name == "trainer:0.0"
    assert repr(record.details.metrics) == "{'loss': nan, 'best': -inf}"
    assert two_nodes.directory.info_of(record.run_number) == {"plan": {"job": "p"}}
    checkpoint = two_nodes.open(0)
    assert tuple(checkpoint) == checkpoint.nodes == NODES
    node = checkpoint["trainer:0"]
    assert isinstance(node["w"], zarr.Array)
    assert node["w"][1].tolist() == values("trainer:0", 0)[1].tolist()
    assert node["name"] == "trainer:0"
    assert_identical(values("trainer:0", 0), node.load("w"))
    assert (list(node), len(node), "w" in node, "socket" in node) == (["name", "w"], 2, True, False)
    with pytest.raises(BlobNotFoundError, match="no blob 'x'.*'name', 'w'"):
        node["x"]


def test_later_entries_do_not_change_a_snapshot(node_run: NodeRun) -> None:
    directory = node_run.manager.directory
    node_run.save(1)
    before = directory.snapshot()
    node_run.save(2)
    node_run.manager.pin(2, "best")
    assert (before.epochs, before.latest, before.pins) == ([Position(1)], Position(1), {})
    assert directory.snapshot().pins == {Position(2): ("best",)}
    assert directory.record(Position(1), before).at == Position(1)


def test_loading_replaces_all_blobs(two_nodes: MultiNodeCheckpointManager) -> None:
    workspaces = workspaces_at(7)
    workspaces["server"].globals["later"] = 1
    run_group(two_nodes.load(0), workspaces)
    for node in NODES:
        assert set(workspaces[node].globals) == {"w", "name"}
        assert_identical(values(node, 0), workspaces[node].globals["w"])


def test_a_partial_load_reads_only_what_is_asked_for(two_nodes: MultiNodeCheckpointManager) -> None:
    files = two_nodes.directory.files
    files.trace.clear()
    run_group(two_nodes.load(0, blobs={"server": ["w"]}), workspaces_at(7))
    read = [path for operation, path in files.trace if operation == "open" and "_log" not in path]
    assert set(read) == {f"{two_nodes.path}/server.0/{name}" for name in ("zarr.json", "w/c.0.0")}


def test_loading_a_missing_epoch_node_or_blob_names_it_at_the_call(
    two_nodes: MultiNodeCheckpointManager,
) -> None:
    with pytest.raises(CheckpointNotFoundError, match="1 .*not recorded; recorded epochs: 0, 2"):
        two_nodes.load(1)
    with pytest.raises(FileNotFoundError):
        two_nodes.open(7)
    with pytest.raises(BlobNotFoundError, match="no node 'x'"):
        two_nodes.load(0, nodes=["x"])
    with pytest.raises(BlobNotFoundError, match="'server' has no blob 'x'.*name, w"):
        two_nodes.load(0, blobs={"server": ["x"]})


def test_a_single_node_manager_saves_and_reads_only_its_node(
    two_nodes: MultiNodeCheckpointManager,
) -> None:
    two_nodes.run.end()
    manager = CheckpointManager(two_nodes.path, "server")
    assert manager.open(0).nodes == ("server",)
    assert {task.node.name for task in manager.load(0).tasks()} == {"server"}
    assert set(manager.record(0).stores) == {"server"}
    with pytest.raises(CheckpointNotFoundError, match="no store of node 'x'"):
        CheckpointManager(two_nodes.path, "x").load(0)
    with pytest.raises(DefinitionError, match=r"one node, 'server'.*'trainer:0'"):
        manager.run.start(NODES, {})
    manager.run.start(["server"], {})
    save_epoch(manager, 3, workspaces_at(3))
    manager.run.end()
    assert manager.get_ckpt_db_name(None, 3) == f"{two_nodes.path}/server.3"


# --- names of stores, and what is deleted


def test_store_names_are_used_once(node_run: NodeRun) -> None:
    def name(epoch: int) -> str:
        return Path(node_run.manager.get_ckpt_db_name("a", epoch)).name

    assert name(0) == "a.0"
    Save(node_run.manager, 0).abandon()
    node_run.save(0)
    assert name(0) == "a.0.r2"  # the number counts the claims
    node_run.save(0)
    assert name(0) == "a.0.r3"
    assert (node_run.path / "a.0.r2").exists()  # the record that was replaced is set aside
    node_run.check(0)
    assert name(1) == "a.1.r3"  # the save before had claimed the names of epoch 1
    node_run.save(1)
    assert name(1) == "a.1.r3"
    assert name(2) == "a.2"


def test_a_save_avoids_a_name_that_is_taken_and_does_not_touch_it(tmp_path: Path) -> None:
    stray = tmp_path / "a.0"
    stray.write_text("mine")
    run = NodeRun(tmp_path)
    run.save(0)
    assert run.manager.record(0).stores["a"].name == "a.0.r1"
    run.end()
    assert stray.read_text() == "mine"


def test_names_that_a_worker_may_have_used_are_not_given_back(node_run: NodeRun) -> None:
    node_run.save(0)
    Save(node_run.manager, 1).write({"a": node_run.workspace})
    node_run.end()
    assert node_run.manager.directory.log.refresh().has_claimed((Position(1), 0))


def test_stores_that_a_slow_worker_writes_for_an_abandoned_save_are_deleted(
    node_run: NodeRun,
) -> None:
    """And the save can be committed no more."""
    store = node_run.path / "a.0"
    workspaces = {"a": node_run.workspace}
    save = Save(node_run.manager, 0)
    receipts = save.write(workspaces)
    save.abandon()
    node_run.manager.retention.sweeper.drain()
    assert not store.exists()
    with pytest.raises(CheckpointWriteError, match="was abandoned"):
        save.commit(receipts)
    save.write(workspaces)  # the worker does not know that it was abandoned
    node_run.save(0)
    assert store.is_dir()
    node_run.end()
    assert not store.exists()
    save.write(workspaces)  # and still does not
    again = NodeRun(node_run.path)
    again.manager.retention.sweeper.drain()
    assert [path.name for path in again.path.glob("a.0*")] == ["a.0.r2"]
    again.end()


def test_leftovers_of_a_run_that_died_are_removed_at_the_next_start(node_run: NodeRun) -> None:
    path = node_run.path
    node_run.save(0)
    Save(node_run.manager, 1).write({"a": node_run.workspace})
    (path / "_log" / ".0000000001.json.00ff.tmp").write_text("half an entry")
    (path / "_runs" / "dead").mkdir()
    (path / "stranger.1").mkdir()  # no run of this log has a node of that name
    again = NodeRun(path, take_over=True)
    again.manager.retention.sweeper.drain()
    assert [it.name for it in path.glob("*.1")] == ["stranger.1"]
    assert [it.name for it in (path / "_runs").iterdir()] == [again.manager.run.lock.run]
    assert not list((path / "_log").glob(".*"))
    again.end()


def test_rewinding_sets_later_epochs_aside_and_deletes_nothing(node_run: NodeRun) -> None:
    manager = node_run.manager
    for epoch in range(4):
        node_run.save(epoch, {"w": np.zeros(3)})
    manager.run.finish(Position(3))
    assert manager.directory.snapshot().is_done
    manager.run.rewind(Position(1), "asked for")
    assert (manager.epochs(), manager.directory.snapshot().is_done) == ([0, 1], False)
    for file in ("a.2/zarr.json", "a.2/w/c.0", "a.1/zarr.json"):
        assert (node_run.path / file).exists()
    node_run.save(2)
    assert manager.record(2).stores["a"].name == "a.2.r2"
    manager.run.rewind(None, "afresh")
    assert manager.epochs() == []


def test_the_epoch_resumed_from_is_kept(tmp_path: Path) -> None:
    run = NodeRun(tmp_path / "k", keep=KeepLast(1))
    run.save(0)
    run.manager.load(0)
    for epoch in (1, 2, 3):
        run.save(epoch)
    assert run.manager.epochs() == [0, 3]
    run.end()


class KeepNothing:
    def retires(self, saved: Any) -> Any:
        return [*(row.at for row in saved), 77]


class Broken:
    def retires(self, saved: Any) -> Any:
        raise KeyError("the policy's own mistake")


@pytest.mark.parametrize(("policy", "kept"), [(KeepNothing(), [1]), (Broken(), [0, 1])])
def test_no_policy_can_retire_the_newest_epoch_or_end_the_run(
    tmp_path: Path, policy: Any, kept: list[int]
) -> None:
    run = NodeRun(tmp_path / "k", keep=policy)
    for epoch in (0, 1):
        run.save(epoch)
    assert run.manager.epochs() == kept
    run.end()


def test_an_epoch_retired_while_it_is_read_is_not_called_damaged(tmp_path: Path) -> None:
    run = NodeRun(tmp_path / "k", keep=KeepLast(1))
    run.save(0)
    readers = store_readers(run.manager.directory, run.manager.record(0))
    run.save(1)
    with (
        pytest.raises(CheckpointNotFoundError, match="retired while it was read"),
        run.manager.directory.reading(Position(0)),
    ):
        readers["a"].read_document()
    run.end()


# --- the directory


def test_a_start_that_is_interrupted_releases_the_directory(tmp_path: Path) -> None:
    class Interrupted(FaultyFiles):
        def before(self, operation: str, path: str) -> None:
            if operation == "list" and path.endswith("_runs"):
                raise KeyboardInterrupt

    interrupted = MultiNodeCheckpointManager(tmp_path, files=Interrupted(sync=False))
    with pytest.raises(KeyboardInterrupt):
        interrupted.run.start(NODES, {})
    assert not [thread for thread in threading.enumerate() if "heartbeat" in thread.name]
    assert list((tmp_path / "_runs").iterdir()) == []
    NodeRun(tmp_path).end()


@pytest.mark.parametrize("part", ["/_runs/", "/_log/"])
@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EACCES, "Name a directory in which this user may write"),
        (errno.ENOSPC, "Make room"),
        (errno.EIO, r"Repair the storage\."),
    ],
)
def test_a_directory_that_cannot_be_taken_tells_what_is_true_there_and_what_to_do(
    tmp_path: Path, number: int, advice: str, part: str
) -> None:
    for is_new in (True, False):
        refused = MultiNodeCheckpointManager(tmp_path, files=RefusingFiles([part], number))
        with pytest.raises(CheckpointWriteError, match=f"{advice}.*$") as caught:
            refused.run.start([], {})
        assert ("Earlier epochs are still recorded." in str(caught.value)) is not is_new
        run = NodeRun(tmp_path)
        run.save(1 - is_new)
        run.end()


def test_a_read_error_is_never_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CheckpointError, match="cannot read the log.*Checkpoints may exist"):
        MultiNodeCheckpointManager(tmp_path / "loop").epochs()


def test_several_runs_may_use_one_manager_but_not_at_once(node_run: NodeRun) -> None:
    with pytest.raises(DefinitionError, match="already serves a run"):
        node_run.manager.run.start(["a"], {})
    node_run.end()
    node_run.end()
    with pytest.raises(DefinitionError, match="No run of this manager holds"):
        node_run.save(0)
    with pytest.raises(DefinitionError, match="differ only in case"):
        node_run.manager.run.start(["a", "A"], {})
    node_run.manager.run.start(["a"], {})
    node_run.save(0)
    assert node_run.manager.epochs() == [0]


def test_a_worker_that_sees_another_directory_is_named(node_run: NodeRun, tmp_path: Path) -> None:
    run = node_run.manager.run
    probe: Any = pickle.loads(pickle.dumps(run.probe()))
    elsewhere = replace(probe, path=str(tmp_path / "elsewhere"))
    other = replace(probe, token=b"of another run")
    for answer in (elsewhere({}), other({})):
        with pytest.raises(CheckpointError, match=r"Worker tcp://b .*not shared"):
            run.check_probe({"tcp://a": probe({}), "tcp://b": answer})
    unreadable = replace(probe, path=str(tmp_path))
    with pytest.raises(CheckpointWriteError, match=r"tcp://b cannot use .*IsADirectoryError"):
        run.check_probe({"tcp://b": unreadable({})})


def test_a_worker_that_writes_elsewhere_is_noticed_by_its_first_save(
    node_run: NodeRun, tmp_path: Path
) -> None:
    node_run.save(0)
    node_run.manager.run.probe()  # the nodes have moved
    save = Save(node_run.manager, 1)
    receipts = save.write({"a": node_run.workspace})
    (node_run.path / "a.1").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"not shared.*a\.1.*worker of node 'a'"):
        save.commit(receipts)
    assert node_run.manager.epochs() == [0]
