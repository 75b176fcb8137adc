"""What a manager promises, in one process without a cluster; tests fill the workspaces."""

from __future__ import annotations

import errno
import math
import os
import pickle
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import dask
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
    register_codec,
)
from jobrunner.checkpoint import CommitEntry, blobs_of, repair_log, with_contents
from jobrunner.checkpoint.log.log_writer import STATE_INTERVAL
from jobrunner.checkpoint.opened import store_readers
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles, assert_identical
from jobrunner.workspace.workspace import Workspace
from tests.jobs import RefusingFiles
from tests.saves import Save, run_group, save_epoch

NODES = ("server", "trainer:0")


class Rig:
    """A manager in a run, and workspaces that it saves."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.files = FaultyFiles(sync=False)
        self.manager = MultiNodeCheckpointManager(path, files=self.files, **options)
        self.workspaces = workspaces()

    def start(self) -> Rig:
        self.manager.run.start(NODES, {"plan": {"job": "p"}})
        return self

    def save(self, epoch: int, details: Mapping[str, Any] | None = None) -> None:
        for node, workspace in self.workspaces.items():
            workspace.globals["w"] = values(node, epoch)
        save = Save(self.manager, Position.of(epoch), details)
        save.send()
        save.commit(save.write(self.workspaces))
        self.manager.retention.sweeper.drain()


def workspaces() -> dict[str, Workspace]:
    found = {}
    for node in NODES:
        found[node] = Workspace(node, transient=frozenset({"socket"}))
        found[node].globals.update(socket=open, name=node)
    return found


def values(node: str, epoch: int) -> np.ndarray[Any, Any]:
    return np.arange(6.0).reshape(2, 3) + epoch + 100 * NODES.index(node)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "runs" / "k").start()
    yield rig
    rig.manager.run.end()


def test_making_a_manager_touches_nothing_and_makes_its_path_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    manager = MultiNodeCheckpointManager("runs/k")
    monkeypatch.chdir("/")
    assert manager.path == str(tmp_path / "runs" / "k")
    assert (manager.epochs(), manager.latest()) == ([], None)
    assert not manager.directory.snapshot().is_done
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DefinitionError):
        MultiNodeCheckpointManager("")


def test_what_stores_contain_is_said_once_and_read_from_them_if_that_entry_is_lost(
    rig: Rig, tmp_path: Path
) -> None:
    """Wherever the directory is by then."""
    for epoch in range(3):
        rig.save(epoch)
    rig.manager.run.end()
    commits = [it for it in rig.manager.directory.log.read_entries() if isinstance(it, CommitEntry)]
    first, *later = commits
    assert set(first.contents) == set(NODES)
    assert [commit.contents for commit in later] == [{}, {}]
    assert [commit.records[0].contents for commit in later] == [first.number] * 2
    Path(rig.manager.directory.handler.path_of(first.number)).write_text("damaged")
    repair_log(rig.manager.directory)
    manager = MultiNodeCheckpointManager(Path(rig.manager.path).rename(tmp_path / "moved"))
    assert manager.epochs() == [0, 1, 2]
    assert blobs_of(with_contents(manager.directory, manager.record(2))) == {
        node: ["name", "w"] for node in NODES
    }


def test_a_saved_epoch_is_recorded_verified_and_opened(rig: Rig) -> None:
    rig.save(0, {"metrics": {"loss": math.nan, "best": -math.inf}, "stopped_by": ["a/b"]})
    manager = rig.manager
    assert (manager.epochs(), manager.latest()) == ([0], 0)
    manager.verify(0)
    record = manager.record(0)
    assert set(record.stores) == set(NODES)
    assert record.stores["trainer:0"].name == "trainer:0.0"
    assert math.isnan(record.details.metrics["loss"])
    assert record.details.metrics["best"] == -math.inf
    assert manager.directory.info_of(manager.record(0).run_number) == {"plan": {"job": "p"}}
    assert blobs_of(with_contents(manager.directory, manager.record(0))) == {
        node: ["name", "w"] for node in NODES
    }
    checkpoint = manager.open(0)
    assert checkpoint.nodes == NODES
    assert list(checkpoint) == list(NODES)
    node = checkpoint["trainer:0"]
    assert isinstance(node["w"], zarr.Array)
    assert node["w"][1].tolist() == values("trainer:0", 0)[1].tolist()
    assert node["name"] == "trainer:0"
    assert_identical(values("trainer:0", 0), node.load("w"))
    assert (list(node), len(node), "w" in node, "socket" in node) == (["name", "w"], 2, True, False)
    with pytest.raises(BlobNotFoundError, match="no blob 'x'.*'name', 'w'"):
        node["x"]


def test_later_entries_do_not_change_a_snapshot(rig: Rig) -> None:
    rig.save(1)
    before = rig.manager.directory.snapshot()
    rig.save(2)
    rig.manager.pin(2, "best")
    after = rig.manager.directory.snapshot()
    assert (before.epochs, before.latest, before.pins) == ([Position(1)], Position(1), {})
    assert (after.epochs, after.latest) == ([Position(1), Position(2)], Position(2))
    assert after.pins == {Position(2): ("best",)}
    assert rig.manager.directory.record(Position(1), before).at == Position(1)


def test_loading_replaces_all_blobs_after_all_nodes_are_verified(rig: Rig) -> None:
    rig.save(0)
    rig.save(1)
    fresh = workspaces()
    fresh["server"].globals["later"] = 1
    run_group(rig.manager.load(0), fresh)
    for node in NODES:
        assert set(fresh[node].globals) == {"w", "name"}
        assert_identical(values(node, 0), fresh[node].globals["w"])


def test_a_partial_load_reads_only_what_is_asked_for(rig: Rig) -> None:
    rig.workspaces["server"].globals["other"] = np.ones(1000)
    rig.save(0)
    rig.files.trace.clear()
    run_group(rig.manager.load(0, blobs={"server": ["w"]}), workspaces())
    read = {path for operation, path in rig.files.trace if operation == "open"}
    root = Path(rig.manager.path)
    stores = {str(Path(path).relative_to(root)) for path in read if "_log" not in path}
    assert stores == {f"server.0/{name}" for name in ("zarr.json", "w/c.0.0")}


def test_loading_a_missing_epoch_node_or_blob_names_it_at_the_call(rig: Rig) -> None:
    rig.save(0)
    rig.save(2)
    with pytest.raises(
        CheckpointNotFoundError, match="Epoch 1 .*not recorded; recorded epochs: 0, 2"
    ):
        rig.manager.load(1)
    with pytest.raises(FileNotFoundError):
        rig.manager.open(7)
    with pytest.raises(BlobNotFoundError, match="no node 'x'"):
        rig.manager.load(0, nodes=["x"])
    with pytest.raises(BlobNotFoundError, match="'server' has no blob 'x'.*name, w"):
        rig.manager.load(0, blobs={"server": ["x"]})
    with pytest.raises(DefinitionError, match="int"):
        rig.manager.record("0")


def test_store_names_are_used_once(rig: Rig) -> None:
    manager, root = rig.manager, Path(rig.manager.path)
    assert manager.get_ckpt_db_name("server", 0) == str(root / "server.0")
    Save(manager, Position(0)).abandon()
    rig.save(0)
    assert manager.get_ckpt_db_name("server", 0) == str(root / "server.0.r2")
    # The number counts the claims.
    assert manager.record(0).stores["server"].name == "server.0.r2"
    rig.save(0)
    assert manager.get_ckpt_db_name("server", 0) == str(root / "server.0.r3")
    assert (root / "server.0.r2").exists()  # the record that was replaced is set aside
    manager.verify(0)
    # The save before had claimed the names of epoch 1.
    assert manager.get_ckpt_db_name("server", 1) == str(root / "server.1.r3")
    rig.save(1)
    assert manager.record(1).stores["server"].name == "server.1.r3"
    assert manager.get_ckpt_db_name("server", 2) == str(root / "server.2")


def test_the_record_of_the_epoch_before_is_not_read_again(rig: Rig) -> None:
    epochs = STATE_INTERVAL
    for epoch in range(epochs):
        rig.save(epoch)
    done, there = len(rig.files.trace), os.listdir(os.path.join(rig.manager.path, "_log"))
    there = [name for name in there if name[0].isdigit()]
    Save(rig.manager, Position.of(epochs))
    read = [path for operation, path in rig.files.trace[done:] if operation == "open"]
    # The last entry of the log shows that the directory is still the same.
    assert [name for path in read if (name := os.path.basename(path)) in there] == [max(there)]


def test_a_save_avoids_a_name_that_is_taken_and_does_not_touch_it(tmp_path: Path) -> None:
    stray = tmp_path / "server.0"
    stray.write_text("mine")
    rig = Rig(tmp_path).start()
    rig.save(0)
    assert rig.manager.record(0).stores["trainer:0"].name == "trainer:0.0.r1"
    rig.manager.run.end()
    assert stray.read_text() == "mine"


def test_the_epoch_resumed_from_is_kept(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "k", keep=KeepLast(1)).start()
    rig.save(0)
    rig.manager.load(0)
    for epoch in (1, 2, 3):
        rig.save(epoch)
    assert rig.manager.epochs() == [0, 3]
    rig.manager.run.end()


def test_no_policy_can_retire_the_newest_epoch(tmp_path: Path) -> None:
    class KeepNothing:
        def retires(self, saved: Any) -> Any:
            return [*(row.at for row in saved), 77]

    rig = Rig(tmp_path / "k", keep=KeepNothing()).start()
    rig.save(0)
    rig.save(1)
    assert rig.manager.epochs() == [1]
    rig.manager.run.end()


def test_a_policy_that_raises_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def retires(self, saved: object) -> list[int]:
            raise KeyError("the policy's own mistake")

    rig = Rig(tmp_path / "k", keep=Broken()).start()
    rig.save(0)
    assert rig.manager.epochs() == [0]
    assert "no epoch was retired after epoch 0: KeyError" in caplog.text
    rig.manager.run.end()


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
    following = MultiNodeCheckpointManager(tmp_path)
    following.run.start(NODES, {})
    following.run.end()


def test_rewinding_sets_later_epochs_aside_and_deletes_nothing(rig: Rig) -> None:
    for epoch in range(4):
        rig.save(epoch)
    rig.manager.run.finish(Position(3))
    assert rig.manager.directory.snapshot().is_done
    rig.manager.run.rewind(Position(1), "asked for")
    assert (rig.manager.epochs(), rig.manager.directory.snapshot().is_done) == ([0, 1], False)
    root = Path(rig.manager.path)
    for file in ("server.2/zarr.json", "server.2/w/c.0.0", "server.1/zarr.json"):
        assert (root / file).exists()
    rig.save(2)
    assert rig.manager.record(2).stores["server"].name == "server.2.r2"
    rig.manager.run.rewind(None, "afresh")
    assert rig.manager.epochs() == []


def test_a_missing_receipt_is_an_error_that_names_the_node(rig: Rig) -> None:
    save = Save(rig.manager, Position(0))
    receipts = save.write({"server": rig.workspaces["server"]})
    with pytest.raises(CheckpointWriteError, match="none from trainer:0"):
        save.commit(receipts)
    assert rig.manager.epochs() == []


def test_an_abandoned_save_cannot_be_committed(rig: Rig) -> None:
    save = Save(rig.manager, Position(0))
    receipts = save.write(rig.workspaces)
    save.abandon()
    rig.manager.retention.sweeper.drain()
    assert not list(Path(rig.manager.path).glob("server*"))
    with pytest.raises(CheckpointWriteError, match="was abandoned"):
        save.commit(receipts)


def test_names_that_a_worker_may_have_used_are_not_given_back(rig: Rig) -> None:
    rig.save(0)
    save = Save(rig.manager, Position(1))
    save.write(rig.workspaces)
    rig.manager.run.end()
    assert rig.manager.directory.log.refresh().has_claimed((Position(1), 0))


def test_stores_that_a_slow_worker_writes_for_an_abandoned_save_are_deleted(rig: Rig) -> None:
    root = Path(rig.manager.path)
    save = Save(rig.manager, Position(0))
    save.abandon()
    rig.manager.retention.sweeper.drain()
    save.write(rig.workspaces)  # the worker does not know that it was abandoned
    rig.save(0)
    assert (root / "server.0").is_dir()
    rig.manager.run.end()
    assert not (root / "server.0").exists()
    save.write(rig.workspaces)  # and still does not
    again = Rig(root).start()
    again.manager.retention.sweeper.drain()
    assert {path.name for path in root.glob("*.0*")} == {"server.0.r2", "trainer:0.0.r2"}
    again.manager.run.end()


def test_a_blob_that_cannot_be_encoded_is_found_before_anything_is_written(rig: Rig) -> None:
    rig.workspaces["trainer:0"].globals["bad"] = open
    save = Save(rig.manager, Position(0))
    rig.files.trace.clear()
    with pytest.raises(DefinitionError, match="'trainer:0', blob 'bad'"):
        save.write(rig.workspaces)
    assert rig.files.trace == []


def test_a_directory_that_cannot_be_created_is_a_write_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    manager = MultiNodeCheckpointManager(tmp_path / "file" / "runs")
    assert manager.epochs() == []
    with pytest.raises(
        CheckpointWriteError, match="cannot be a checkpoint directory: it is a file, or in a file"
    ):
        manager.run.start(NODES, {})


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
        manager = MultiNodeCheckpointManager(tmp_path)
        manager.run.start([], {})
        save_epoch(manager, Position(1 - is_new))
        manager.run.end()


def test_a_read_error_is_never_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CheckpointError, match="cannot read the log.*Checkpoints may exist"):
        MultiNodeCheckpointManager(tmp_path / "loop").epochs()


def test_writing_outside_a_run_is_an_error(tmp_path: Path) -> None:
    manager = MultiNodeCheckpointManager(tmp_path / "k")
    for call in (lambda: Save(manager, Position(0)), manager.run.probe):
        with pytest.raises(DefinitionError, match="No run of this manager holds"):
            call()


def test_nodes_that_differ_only_in_case_are_refused(tmp_path: Path) -> None:
    manager = MultiNodeCheckpointManager(tmp_path / "k")
    with pytest.raises(DefinitionError, match="differ only in case"):
        manager.run.start(["a", "A"], {})
    assert not (tmp_path / "k").exists()


def test_several_runs_may_use_one_manager_but_not_at_once(rig: Rig) -> None:
    rig.save(0)
    with pytest.raises(DefinitionError, match="already serves a run"):
        rig.start()
    rig.manager.run.end()
    rig.manager.run.end()
    rig.start().save(1)
    assert rig.manager.epochs() == [0, 1]


def test_leftovers_of_a_run_that_died_are_removed_at_the_next_start(rig: Rig) -> None:
    root = Path(rig.manager.path)
    rig.save(0)
    Save(rig.manager, Position(1)).write(rig.workspaces)
    (root / "_log" / ".0000000001.json.00ff.tmp").write_text("half an entry")
    (root / "_runs" / "dead").mkdir()
    (root / "stranger.1").mkdir()  # no run of this log has a node of that name
    again = Rig(root, take_over=True).start()
    again.manager.retention.sweeper.drain()
    assert [path.name for path in root.glob("*.1")] == ["stranger.1"]
    assert [path.name for path in (root / "_runs").iterdir()] == [again.manager.run.lock.run]
    assert not list((root / "_log").glob(".*"))
    again.manager.run.end()


def test_an_epoch_retired_while_it_is_read_is_not_called_damaged(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "k", keep=KeepLast(1)).start()
    rig.save(0)
    checkpoint = store_readers(rig.manager.directory, rig.manager.record(0))
    rig.save(1)
    with (
        pytest.raises(CheckpointNotFoundError, match="retired while it was read"),
        rig.manager.directory.reading(Position(0)),
    ):
        checkpoint["server"].read_document()
    rig.manager.run.end()


# --- do workers share the directory?


def test_a_worker_that_sees_another_directory_is_named(rig: Rig, tmp_path: Path) -> None:
    probe: Any = pickle.loads(pickle.dumps(rig.manager.run.probe()))
    elsewhere = replace(probe, path=str(tmp_path / "elsewhere"))
    other = replace(probe, token=b"of another run")
    for answer in (elsewhere({}), other({})):
        with pytest.raises(CheckpointError, match=r"Worker tcp://b .*not shared"):
            rig.manager.run.check_probe({"tcp://a": probe({}), "tcp://b": answer})
    unreadable = replace(probe, path=str(tmp_path))
    with pytest.raises(CheckpointWriteError, match=r"tcp://b cannot use .*IsADirectoryError"):
        rig.manager.run.check_probe({"tcp://b": unreadable({})})


def test_a_worker_that_writes_elsewhere_is_noticed_by_its_first_save(
    rig: Rig, tmp_path: Path
) -> None:
    rig.save(0)
    rig.manager.run.probe()  # the nodes have moved
    save = Save(rig.manager, Position(1))
    receipts = save.write(rig.workspaces)
    (Path(rig.manager.path) / "server.1").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"not shared.*server\.1.*worker of node 'server'"):
        save.commit(receipts)
    assert rig.manager.epochs() == [0]


# --- one node


def test_a_single_node_manager_saves_its_node(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "k", "trainer:0")
    with pytest.raises(DefinitionError, match=r"one node, 'trainer:0'.*'server'"):
        manager.run.start(NODES, {})
    manager.run.start(["trainer:0"], {})
    save_epoch(manager, Position(0), workspaces())
    manager.run.end()
    assert manager.get_ckpt_db_name(None, 0) == str(tmp_path / "k" / "trainer:0.0")


@pytest.mark.parametrize("value", ["soon", float("nan")], ids=str)
def test_configuration_is_checked(tmp_path: Path, value: object) -> None:
    manager = MultiNodeCheckpointManager(tmp_path / "k")
    with (
        dask.config.set({"jobrunner.checkpoint.silence-seconds": value}),
        pytest.raises(DefinitionError, match="silence-seconds in Dask's configuration"),
    ):
        manager.run.start(NODES, {})


def test_codecs_registered_on_the_client_are_sent_with_the_save(rig: Rig) -> None:
    register_codec(Celsius, lambda c: c.degrees, Celsius)
    rig.workspaces["server"].globals["t"] = Celsius(21.5)
    rig.save(0)
    assert rig.manager.open(0)["server"]["t"].degrees == 21.5


class Celsius:
    def __init__(self, degrees: float) -> None:
        self.degrees = degrees


def test_a_single_node_manager_reads_only_its_node(rig: Rig) -> None:
    rig.save(0)
    manager = CheckpointManager(rig.manager.path, "server")
    assert manager.open(0).nodes == ("server",)
    assert [task.node.name for task in manager.load(0).tasks()] == ["server"] * 3
    assert set(manager.record(0).stores) == {"server"}
    with pytest.raises(CheckpointNotFoundError, match="no store of node 'x'"):
        CheckpointManager(rig.manager.path, "x").load(0)
