"""What the file system is asked, where it does not answer."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobrunner import CheckpointCorruptError
from jobrunner.checkpoint.storage.locations import files_of
from jobrunner.checkpoint.storage.posix import PosixFiles


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


def test_a_directory_that_cannot_be_listed_is_named_and_not_taken_for_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = str(tmp_path / "a" / "b")
    PosixFiles().make_directories(broken)
    scandir = os.scandir

    def fail(path: Any) -> Any:
        if path == broken:
            raise OSError(errno.EIO, "disk is broken", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", fail)
    monkeypatch.setattr(PosixFiles, "has_syncfs", False)
    with pytest.raises(OSError, match="disk is broken") as listed:
        list(PosixFiles().walk(str(tmp_path)))
    assert listed.value.filename == broken
    with (
        pytest.raises(OSError, match="disk is broken"),
        PosixFiles().making_durable(str(tmp_path), ["a"]),
    ):
        pass


def test_a_file_system_without_links_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: str, target: str, **_: Any) -> None:
        raise OSError(errno.EPERM, "no links", source, None, target)

    monkeypatch.setattr(os, "link", fail)
    path = str(tmp_path / "0.json")
    with pytest.raises(OSError, match="has no hard links") as error:
        files_of(str(tmp_path)).create(path, b"0")
    assert (error.value.filename, error.value.filename2) == (path, None)


def test_no_link_is_followed(tmp_path: Path) -> None:
    root = tmp_path / "k"
    files = files_of(str(root))
    outside = tmp_path / "outside"
    (outside / "b").mkdir(parents=True)
    (outside / "x").write_bytes(b"1")
    before = {at: at.lstat() for at in outside.rglob("*")}
    files.make_directories(f"{root}/real")
    files.write(f"{root}/real/x", [b"2"])
    targets = {"directory": outside, "file": outside / "x", "dangling": "no", "put": outside / "x"}
    for name, target in targets.items():
        (root / name).symlink_to(target)
    files.put(f"{root}/put", b"3")  # replaces the link itself
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        *((files.read, (path,)) for path in ("file", "directory/x", "directory/../real/x")),
        *((files.write, (path, [b""])) for path in ("directory/new", "dangling")),
        (files.put, ("directory/x", b"")),
        (files.create, ("directory/new", b"")),
        (files.make_directory, ("directory/new",)),
        (files.link, ("real/x", "directory/new", 1)),
        *((files.remove_tree, (path,)) for path in ("directory", "directory/b", "dangling")),
        (files.remove_file, ("directory/x",)),
        (files.list_names, ("directory",)),
        (files.is_taken, ("directory/x",)),
    ]
    for call, (path, *others) in calls:
        paths = [f"{root}/{it}" if isinstance(it, str) else it for it in (path, *others)]
        with pytest.raises((CheckpointCorruptError, FileExistsError)):
            call(*paths)
    assert not files.link(f"{root}/file", f"{root}/linked", 1)
    assert not files.is_taken(f"{root}/linked")
    assert not files.is_directory(f"{root}/directory")
    assert files.is_taken(f"{root}/dangling")
    assert dict(files.walk(str(root))) == {
        **dict.fromkeys(("directory", "file", "dangling"), -1),
        **dict.fromkeys(("real/x", "put"), 1),
    }
    files.remove_tree(str(root))
    assert {at: at.lstat() for at in outside.rglob("*")} == before


def test_a_tree_that_is_too_deep_is_refused(tmp_path: Path) -> None:
    files, root = PosixFiles(), str(tmp_path)
    files.make_directories("/".join([root, *"d" * 200]))
    for call in (files.walk, files.remove_tree):
        with pytest.raises(CheckpointCorruptError, match="nested"):
            list(call(root) or ())


def test_a_directory_is_made_once(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    PosixFiles().make_directory(path)
    with pytest.raises(FileExistsError, match="'$") as caught:
        PosixFiles().make_directory(path)
    assert caught.value.filename == path
    assert PosixFiles().is_writable(path)
    assert not PosixFiles().is_writable(f"{path}/missing")
