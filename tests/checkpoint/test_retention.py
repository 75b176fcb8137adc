"""What is given up, and how its stores are deleted."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

import pytest

from jobrunner import KeepAll, KeepLast, MultiNodeCheckpointManager, Position
from jobrunner.checkpoint import SavedEpoch
from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.testing import FaultyFiles
from tests.saves import NodeRun, save_epoch


class OldSystem(FaultyFiles):
    """It turns out to have no `syncfs`."""

    def _sync_file_system(self, descriptor: int) -> int:
        return errno.ENOSYS


def test_a_system_without_syncfs_saves_and_deletes(tmp_path: Path) -> None:
    files = OldSystem()
    run = NodeRun(tmp_path, files=files, keep=KeepLast(1))
    for epoch in (0, 1):
        save_epoch(run.manager, epoch, {"a": run.workspace})
    run.end()
    assert ("fsync", f"{tmp_path}/a.1") in files.trace
    assert not (tmp_path / "a.0").exists()
    run.check(1)


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
    for name in ("a.1", "a.2", "a.3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "zarr.json").touch()
    dead.run.leave()
    NodeRun(tmp_path, files=Stubborn()).end()
    assert sorted(path.name for path in tmp_path.glob("a.*")) == ["a.1", "a.2"]
    assert "a.1, a.2 could not be deleted; the next run tries again" in caplog.text
