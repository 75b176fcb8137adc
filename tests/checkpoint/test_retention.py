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
from jobrunner.workspace.workspace import Workspace
from tests.saves import save_epoch


class TracedFiles(PosixFiles):
    """Files whose `syncfs` returns `number`; None: the system has no `syncfs`."""

    def __init__(self, number: int | None) -> None:
        super().__init__()
        self.number = number
        self.trace: list[tuple[str, str]] = []

    @property
    def has_syncfs(self) -> bool:
        return self.number is not None

    def _sync_file_system(self, descriptor: int) -> int:
        return self.number

    def before(self, operation: str, path: str) -> None:
        if operation in ("rename", "fsync", "syncfs", "unlink"):
            self.trace.append((operation, Path(path).name))


def sweep(files: TracedFiles, path: Path) -> list[tuple[str, str]]:
    """Delete two stores together, then one more."""
    sweeper = Sweeper(files, str(path))
    for stores in (["a.0", "a.1"], ["a.2"]):
        for store in stores:
            (path / store).mkdir()
            (path / store / "zarr.json").touch()
            (path / store / "c.0").touch()
        sweeper.add(stores)
        assert sweeper.drain(60)
    assert not list(path.iterdir())
    return files.trace


@pytest.mark.parametrize("number", [None, errno.ENOSYS])
def test_without_syncfs_a_root_document_is_deleted_durably_before_the_rest(
    number: int | None, tmp_path: Path
) -> None:
    trace = sweep(TracedFiles(number), tmp_path)
    for epoch in range(3):
        deleted = [i for i, step in enumerate(trace) if step == ("unlink", "c.0")][epoch]
        assert ("fsync", f"a.{epoch}") in trace[:deleted]


def test_one_syncfs_is_enough_for_all_stores_if_the_system_has_it(tmp_path: Path) -> None:
    steps = [operation for operation, _ in sweep(TracedFiles(0), tmp_path)]
    # The documents of two stores are deleted, durably, and then the rest; so is the third store.
    two_stores = ["unlink", "unlink", "syncfs", "unlink", "unlink"]
    assert steps == [*two_stores, "unlink", "syncfs", "unlink"]


def test_an_earlier_removal_is_made_durable_before_the_store_is_deleted(
    tmp_path: Path,
) -> None:
    """A process removed the document and died before the fsync."""
    (tmp_path / "a.0").mkdir()
    (tmp_path / "a.0" / "c.0").touch()
    files = TracedFiles(None)
    sweeper = Sweeper(files, str(tmp_path))
    sweeper.add(["a.0"])
    assert sweeper.drain(60)
    assert files.trace == [("unlink", "zarr.json"), ("fsync", "a.0"), ("unlink", "c.0")]


class KeepOdd(KeepAll):
    def retires(self, saved: Sequence[SavedEpoch]) -> list[Position]:
        return [row.at for row in saved if row.epoch % 2 == 0]


def test_a_policy_that_derives_from_keep_all_is_asked(tmp_path: Path) -> None:
    manager = MultiNodeCheckpointManager(tmp_path, keep=KeepOdd())
    manager.run.start(["a"], {})
    for epoch in range(4):
        save_epoch(manager, Position.of(epoch), {"a": Workspace("a")})
    manager.run.end()
    assert manager.epochs() == [1, 3]


def test_a_leftover_that_cannot_be_deleted_hinders_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Stubborn(PosixFiles):
        def remove_file(self, path: str) -> None:
            if "/a.1/" in path:
                raise PermissionError(path)
            super().remove_file(path)

        def remove_tree(self, path: str) -> None:
            if path.endswith("/a.2"):
                raise PermissionError(path)
            super().remove_tree(path)

    dead = MultiNodeCheckpointManager(tmp_path)
    dead.run.start(["a"], {})
    dead.directory.log.claim(Position(3), [])
    for name in ("a.1", "a.2", "a.3", "b.2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "zarr.json").touch()
    dead.run.leave()
    manager = MultiNodeCheckpointManager(tmp_path, files=Stubborn(), take_over=True)
    manager.run.start(["a"], {})
    manager.run.end()
    # No run of this log had a node "b": what looks like a store of it is somebody else's.
    assert sorted(path.name for path in tmp_path.glob("?.*")) == ["a.1", "a.2", "b.2"]
    assert "a.1, a.2 could not be deleted; the next run tries again" in caplog.text
