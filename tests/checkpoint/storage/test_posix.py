"""What the file system is asked, where it does not answer."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from jobrunner.checkpoint.storage.posix import PosixFiles


class FsyncFiles(PosixFiles):
    """Where there is no syncfs."""

    has_syncfs = False


@pytest.fixture
def unlistable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in which one lies that cannot be listed, as on a disk that fails."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c.0").write_bytes(b"0")
    scandir = os.scandir

    def fail(path: Any) -> Any:
        if path == str(tmp_path / "a" / "b"):
            raise OSError(errno.EIO, "disk is broken", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    return tmp_path


def test_an_unlistable_directory_does_not_count_as_durable(unlistable: Path) -> None:
    with (
        pytest.raises(OSError, match="disk is broken"),
        FsyncFiles().making_durable(str(unlistable), ["a"]),
    ):
        pass


def test_walk_skips_files_that_disappear(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(b"0")
    found = PosixFiles().walk(str(tmp_path))
    (first, _) = next(found)
    for name in {"a", "b"} - {first}:
        (tmp_path / name).unlink()
    assert list(found) == []


def test_what_the_system_has_not_written_at_once_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    PosixFiles().write(str(tmp_path / "file"), [b"0123456789" * 3])
    assert (tmp_path / "file").read_bytes() == b"0123456789" * 3


class Busy(PosixFiles):
    """Where another process writes into a directory that is being removed."""

    def before(self, operation: str, path: str) -> None:
        if operation == "rmdir":
            Path(path, "late").touch()


def test_an_error_below_a_directory_names_the_whole_path(unlistable: Path) -> None:
    broken = str(unlistable / "a" / "b")
    with pytest.raises(OSError, match="disk is broken") as listed:
        list(PosixFiles().walk(str(unlistable)))
    assert listed.value.filename == broken
    (unlistable / "c" / "d").mkdir(parents=True)
    with pytest.raises(OSError, match="not empty") as removed:
        Busy().remove_tree(str(unlistable / "c"))
    assert removed.value.filename == str(unlistable / "c" / "d")


def test_a_file_system_without_links_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: str, target: str, **_: Any) -> None:
        raise OSError(errno.EPERM, "no links", source, None, target)

    monkeypatch.setattr(os, "link", fail)
    (tmp_path / "_log").mkdir()
    files = PosixFiles()
    files.bind(str(tmp_path))
    path = str(tmp_path / "_log" / "0.json")
    with pytest.raises(OSError, match="has no hard links") as error:
        files.create(path, b"0")
    assert (error.value.filename, error.value.filename2) == (path, None)
    assert str(error.value).endswith(f"{path!r}")
