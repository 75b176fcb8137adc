"""What is made durable as stores are hidden and deleted, and when."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from jobrunner.checkpoint.log.state import Claim
from jobrunner.checkpoint.retention import Sweeper
from jobrunner.checkpoint.storage.posix import PosixFiles


class TracedFiles(PosixFiles):
    """Files where `syncfs` ends with `number`, or is not known at all where that is None."""

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.trace: list[tuple[str, str]] = []

    @property
    def has_syncfs(self) -> bool:
        return self.number is not None

    def _sync_file_system(self, descriptor: int) -> int:
        assert self.number is not None
        return self.number

    def before(self, operation: str, path: str) -> None:
        if operation in ("rename", "fsync", "syncfs", "unlink"):
            self.trace.append((operation, Path(path).name))


def sweep(files: TracedFiles, path: Path) -> list[tuple[str, str]]:
    """Hide and delete two stores, one after the other."""
    sweeper = Sweeper(files, str(path))
    for epoch in range(2):
        (path / f"a.{epoch}").mkdir()
        (path / f"a.{epoch}" / "zarr.json").touch()
        sweeper.add(Claim(epoch, 0), "delete", [f"a.{epoch}"])
        assert sweeper.drain(60)
    assert not list(path.iterdir())
    return files.trace


def test_the_first_chore_syncs_names_in_the_store_only_and_the_next_one_what_was_deleted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "k"
    path.mkdir()
    assert sweep(TracedFiles(None), path) == [
        ("rename", "zarr.json"),
        ("fsync", "a.0"),
        ("unlink", "zarr.retired.json"),
        ("rename", "zarr.json"),
        ("fsync", "k"),  # a.0 is gone for good
        ("fsync", "a.1"),
        ("unlink", "zarr.retired.json"),
    ]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP])
def test_where_syncfs_is_refused_a_store_is_hidden_for_good_before_it_is_deleted(
    number: int, tmp_path: Path
) -> None:
    trace = sweep(TracedFiles(number), tmp_path)
    for epoch in range(2):
        deleted = [i for i, (operation, _) in enumerate(trace) if operation == "unlink"][epoch]
        assert ("fsync", f"a.{epoch}") in trace[:deleted]


def test_one_syncfs_is_all_where_it_can_be_had(tmp_path: Path) -> None:
    assert [operation for operation, _ in sweep(TracedFiles(0), tmp_path)] == [
        "rename",
        "syncfs",
        "unlink",
    ] * 2


def test_what_was_renamed_and_not_made_durable_is_made_so_before_it_is_deleted(
    tmp_path: Path,
) -> None:
    """Whoever renamed it was killed before the fsync that follows."""
    (tmp_path / "a.0").mkdir()
    (tmp_path / "a.0" / "zarr.retired.json").touch()
    files = TracedFiles(None)
    sweeper = Sweeper(files, str(tmp_path))
    sweeper.add(Claim(0, 0), "delete", ["a.0"])
    assert sweeper.drain(60)
    assert files.trace == [
        ("rename", "zarr.json"),
        ("fsync", "a.0"),
        ("unlink", "zarr.retired.json"),
    ]
