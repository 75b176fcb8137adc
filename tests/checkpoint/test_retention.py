"""What is given up, and how its stores are hidden and then deleted."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from jobrunner import KeepAll, MultiNodeCheckpointManager, Position
from jobrunner.checkpoint import SavedEpoch
from jobrunner.checkpoint.retention import Sweeper
from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.testing import FaultyFiles
from tests.saves import NodeRun


class OldSystem(FaultyFiles):
    """It turns out to have no `syncfs`."""

    def _sync_file_system(self, descriptor: int) -> int:
        return errno.ENOSYS


def make_stores(path: Path, *names: str) -> None:
    for name in names:
        (path / name).mkdir()
        (path / name / "zarr.json").touch()
        (path / name / "c.0").touch()


def sweep(files: FaultyFiles, path: Path) -> list[tuple[str, str]]:
    """Delete two stores together, then one more; returns what was changed and synced."""
    make_stores(path, "a.0", "a.1", "a.2")
    sweeper = Sweeper(files, str(path))
    for stores in (["a.0", "a.1"], ["a.2"]):
        sweeper.add(stores)
        assert sweeper.drain(60)
    assert not list(path.iterdir())
    steps = [(what, Path(where).name) for what, where in files.trace]
    return [step for step in steps if step[0] in ("rename", "fsync", "syncfs", "unlink")]


def test_without_syncfs_a_root_document_is_deleted_durably_before_the_rest(tmp_path: Path) -> None:
    trace = sweep(OldSystem(), tmp_path)
    for epoch in range(3):
        deleted = [i for i, step in enumerate(trace) if step == ("unlink", "c.0")][epoch]
        assert ("fsync", f"a.{epoch}") in trace[:deleted]


def test_one_syncfs_is_enough_for_all_stores_if_the_system_has_it(tmp_path: Path) -> None:
    steps = [what for what, _ in sweep(FaultyFiles(sync=False), tmp_path)]
    # The documents of two stores are deleted, durably, and then the rest; so is the third store.
    two_stores = ["unlink", "unlink", "syncfs", "unlink", "unlink"]
    assert steps == [*two_stores, "unlink", "syncfs", "unlink"]


def test_an_earlier_removal_is_made_durable_before_the_store_is_deleted(tmp_path: Path) -> None:
    """A process removed the document and died before the fsync."""
    make_stores(tmp_path, "a.0")
    (tmp_path / "a.0" / "zarr.json").unlink()
    files = OldSystem()
    sweeper = Sweeper(files, str(tmp_path))
    sweeper.add(["a.0"])
    assert sweeper.drain(60)
    steps = [step for step in files.trace if step[0] in ("fsync", "unlink")]
    store = f"{tmp_path}/a.0"
    assert steps[-2:] == [("fsync", store), ("unlink", f"{store}/c.0")]


class KeepOdd(KeepAll):
    def retires(self, saved: Sequence[SavedEpoch]) -> list[Position]:
        return [row.at for row in saved if row.epoch % 2 == 0]


def test_a_policy_that_derives_from_keep_all_is_asked(tmp_path: Path) -> None:
    run = NodeRun(tmp_path, keep=KeepOdd())
    for epoch in range(4):
        run.save(epoch)
    run.end()
    assert run.manager.epochs() == [1, 3]


class Stubborn(PosixFiles):
    def remove_file(self, path: str) -> None:
        if "/a.1/" in path:
            raise PermissionError(path)
        super().remove_file(path)

    def remove_tree(self, path: str) -> None:
        if path.endswith("/a.2"):
            raise PermissionError(path)
        super().remove_tree(path)


def test_a_leftover_that_cannot_be_deleted_hinders_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dead = MultiNodeCheckpointManager(tmp_path)
    dead.run.start(["a"], {})
    dead.directory.log.claim(Position(3), [])
    make_stores(tmp_path, "a.1", "a.2", "a.3")
    dead.run.leave()
    NodeRun(tmp_path, files=Stubborn()).end()
    assert sorted(path.name for path in tmp_path.glob("a.*")) == ["a.1", "a.2"]
    assert "a.1, a.2 could not be deleted; the next run tries again" in caplog.text
