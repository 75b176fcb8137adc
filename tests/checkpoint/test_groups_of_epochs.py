"""Several epochs in one order, one flush and one entry of the log."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobrunner import CheckpointWriteError, KeepLast, MultiNodeCheckpointManager, Position
from jobrunner.checkpoint import CommitEntry, SaveQueue, Written
from jobrunner.testing import FaultyFiles, FaultyObjects
from jobrunner.workspace.values import settle
from jobrunner.workspace.workspace import Workspace


class Full:
    """Has no room for stores whose names begin so."""

    stores = "none"

    def before(self, operation: str, path: str) -> None:
        super().before(operation, path)  # type: ignore[misc]
        if operation in ("create", "put") and f"/{self.stores}" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


class FullFiles(Full, FaultyFiles):
    """A file system."""


class FullObjects(Full, FaultyObjects):
    """An object store, where the stores of a group are written at the same time."""


class Rig:
    """A run of two nodes that captures epochs and saves them in groups; it has saved two."""

    def __init__(self, path: Any, files: Any = None, **options: Any) -> None:
        self.files = files or FullFiles(sync=False)
        self.manager = MultiNodeCheckpointManager(path, files=self.files, **options)
        self.manager.run.start(["a", "b"], {})
        self.encoding = self.manager.run.encoding()
        self.queue = SaveQueue(self.encoding)
        self.workspaces = {node: Workspace(node) for node in "ab"}
        for workspace in self.workspaces.values():
            workspace.put("same", settle([np.zeros(100_000)]))
        self.save(0)
        committed = self.save(*range(1, 20))  # and so claims the names of many epochs
        assert list(committed.recorded) == [Position(1)]  # the only one that epoch 0 has claimed

    def capture(self, *epochs: int) -> dict[Position, Any]:
        """Capture epochs; returns what their records say."""
        details = {}
        for epoch in epochs:
            for workspace in self.workspaces.values():
                workspace.put("w", settle([np.full(3, epoch)]))
            self.queue.capture(self.workspaces, at=Position(epoch))
            details[Position(epoch)] = {"metrics": {"loss": epoch}}
        return details

    def save(self, *epochs: int) -> Any:
        """Save epochs in one order: the names of more than one must have been claimed before."""
        return self.write(self.capture(*epochs))

    def write(self, captured: dict[Position, Any]) -> Any:
        order = self.manager.run.order(captured, self.encoding)
        return self.manager.run.commit(order, self.queue.write(self.workspaces, order=order))

    def groups(self) -> list[list[int]]:
        """The epochs that each commit entry records."""
        groups = []
        for entry in self.manager.directory.log.read_entries():
            if isinstance(entry, CommitEntry):
                groups.append([record.at.epoch for record in entry.records])
        return groups

    def check(self) -> None:
        for epoch in self.manager.epochs():
            self.manager.verify(epoch)
            for node in "ab":
                assert self.manager.open(epoch)[node].load("w").tolist() == [epoch] * 3


@pytest.fixture
def rig(tmp_path: Path) -> Any:
    rig = Rig(tmp_path / "k")
    yield rig
    rig.manager.run.end()


def test_a_group_costs_one_flush_and_one_entry(rig: Rig) -> None:
    rig.files.trace.clear()
    assert [at.epoch for at in rig.save(2, 3, 4, 5).recorded] == [2, 3, 4, 5]
    flushed = [path for what, path in rig.files.trace if what in ("syncfs", "fsync")]
    assert flushed.count(rig.manager.path) == 1
    assert rig.groups() == [[0], [1], [2, 3, 4, 5]]
    # Nothing was claimed anew, and what has not changed is linked.
    stores = [Path(rig.manager.path, f"a.{epoch}") for epoch in range(6)]
    assert len({os.stat(store / "same" / "c.0").st_ino for store in stores}) == 1
    rig.check()


def test_what_precedes_a_position_that_fails_is_recorded_and_the_rest_is_not(rig: Rig) -> None:
    rig.files.stores = "b.4"
    committed = rig.save(2, 3, 4, 5)
    assert [at.epoch for at in committed.recorded] == [2, 3]
    assert isinstance(committed.problem, CheckpointWriteError)
    assert f"jobrunner prune {rig.manager.path} --keep-last N" in str(committed.problem)
    assert rig.manager.epochs() == [0, 1, 2, 3]
    rig.files.stores = "none"
    rig.save(6)
    rig.manager.retention.sweeper.drain()
    assert rig.manager.epochs() == [0, 1, 2, 3, 6]
    assert not Path(rig.manager.path, "a.4").exists()
    assert Path(rig.manager.get_ckpt_db_name("a", 6)).name == "a.6.r2"  # claimed, and maybe used
    rig.check()


def test_in_an_object_store_the_epoch_that_failed_is_named_not_the_first_of_its_group(
    tmp_path: Path,
) -> None:
    rig = Rig("s3://bucket/k", FullObjects("s3://bucket/k", tmp_path))
    rig.files.stores = "b.4"
    with pytest.raises(CheckpointWriteError, match=r"^Epoch 4 of b could not be written: s3://"):
        rig.save(2, 3, 4, 5)
    rig.manager.run.end()
    assert rig.manager.epochs() == [0, 1]


def test_an_epoch_without_all_receipts_and_all_that_follow_are_not_recorded(rig: Rig) -> None:
    run = rig.manager.run
    order = run.order(rig.capture(2, 3, 4), rig.encoding)
    receipts = rig.queue.write(rig.workspaces, order=order).receipts
    receipts[1].pop("b")
    committed = run.commit(order, Written(receipts))
    assert [at.epoch for at in committed.recorded] == [2]
    assert "epoch 3" in str(committed.problem).lower()
    assert rig.manager.epochs() == [0, 1, 2]


def test_what_the_policy_would_retire_at_once_is_not_written_but_its_metrics_are(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path / "k", keep=KeepLast(2))
    rig.files.trace.clear()
    rig.save(2, 3, 4, 5)
    rig.manager.retention.sweeper.drain()
    assert rig.manager.epochs() == [4, 5]
    assert not [path for _, path in rig.files.trace if "/a.2" in path or "/a.3" in path]
    rows = rig.manager.past_epochs()
    assert [(row["epoch"], row["metrics"]["loss"]) for row in rows] == [(n, n) for n in range(6)]
    rig.manager.run.end()
    rig.check()


def test_stores_that_contain_other_blobs_are_told_of_in_another_entry(rig: Rig) -> None:
    captured = rig.capture(2, 3)
    for workspace in rig.workspaces.values():
        workspace.put("more", 1)
    rig.write(captured | rig.capture(4, 5))
    assert rig.groups()[-2:] == [[2, 3], [4, 5]]
    rig.check()


def test_a_worker_without_tasks_is_captured_when_it_is_written(rig: Rig) -> None:
    run = rig.manager.run
    encoding = replace(run.encoding(), busy=frozenset("a"))
    idle = SaveQueue(encoding)
    order = run.order(rig.capture(2, 3), encoding)
    busy = {"a": rig.workspaces["a"]}
    queue = SaveQueue(encoding)
    with pytest.raises(CheckpointWriteError, match="no copy of its blobs"):
        queue.write(busy, order=order)
    written = idle.write({"b": rig.workspaces["b"]}, order=order)
    assert [list(receipts) for receipts in written.receipts] == [["b"], ["b"]]
    run.abandon(order)
