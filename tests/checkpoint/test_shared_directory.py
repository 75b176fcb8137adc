"""A directory that several users share: rights of files, and of the user who takes it over."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest

from jobrunner import CheckpointWriteError, DefinitionError, MultiNodeCheckpointManager
from tests.cli.directories import save


def write(path: Path) -> dict[int, set[int]]:
    """Save two epochs; returns the rights of all files, and of all directories."""
    manager = MultiNodeCheckpointManager(path)
    manager.run.start(["a", "b"], {})
    try:
        for epoch in range(2):
            save(manager, epoch)
        manager.run.probe()
        found: dict[int, set[int]] = {stat.S_IFREG: set(), stat.S_IFDIR: set()}
        for at in (path, *path.rglob("*")):
            mode = at.stat().st_mode
            found[stat.S_IFMT(mode)].add(stat.S_IMODE(mode))
    finally:
        manager.run.end()
    return found


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_files_have_the_rights_of_the_umask(tmp_path: Path) -> None:
    assert write(tmp_path / "runs") == {stat.S_IFREG: {0o640}, stat.S_IFDIR: {0o750}}


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(
    ("mode", "files", "directories"), [("0664", 0o664, 0o775), (0o600,) * 2 + (0o700,)]
)
def test_files_have_the_rights_that_are_configured(
    mode: object, files: int, directories: int, tmp_path: Path
) -> None:
    with dask.config.set({"jobrunner.checkpoint.mode": mode}):
        found = write(tmp_path / "runs")
    assert found == {stat.S_IFREG: {files}, stat.S_IFDIR: {directories}}


@pytest.mark.usefixtures("umask")
def test_the_group_of_a_shared_directory_is_inherited(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    with dask.config.set({"jobrunner.checkpoint.mode": "0660"}):
        found = write(tmp_path / "runs")
    assert found == {stat.S_IFREG: {0o660}, stat.S_IFDIR: {0o2770}}


@pytest.mark.parametrize("mode", ["0755", "4664", "0464", "rw", "", 664, True, None, 6.0])
def test_other_rights_are_refused(mode: object, tmp_path: Path) -> None:
    with (
        dask.config.set({"jobrunner.checkpoint.mode": mode}),
        pytest.raises(DefinitionError, match=r"jobrunner\.checkpoint\.mode"),
    ):
        MultiNodeCheckpointManager(tmp_path / "runs")


@pytest.mark.parametrize(("mode", "is_public"), [(0o777, True), (0o1777, True), (0o775, False)])
def test_a_directory_that_everybody_may_write_to_is_warned_of(
    mode: int, is_public: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path / "runs")
    (tmp_path / "runs" / "_log").chmod(mode)
    write(tmp_path / "runs")
    warnings = [
        it.getMessage() for it in caplog.records if "Everybody may write" in it.getMessage()
    ]
    assert len(warnings) == is_public
    assert all(f"{tmp_path}/runs/_log (owner " in text for text in warnings)


def test_a_directory_of_another_user_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs"
    write(path)
    assert "Another user" not in caplog.text
    if os.geteuid() == 0:
        os.chown(path / "_log", 54321, -1)
        owner = "54321"
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54321)
        owner = path.owner()
    write(path)
    assert re.search(rf"Another user owns .*{path}/_log \(owner {owner}, ", caplog.text)


@pytest.fixture
def of_another_user() -> Iterator[Path]:
    """A directory that this process may read, and whose log it may not write."""
    shared = Path(tempfile.mkdtemp())
    is_root = os.geteuid() == 0
    try:
        shared.chmod(0o755)
        write(shared / "runs")
        (shared / "runs" / "_log").chmod(0o555)
        if is_root:
            os.seteuid(54321)
        yield shared / "runs"
    finally:
        if is_root:
            os.seteuid(0)
        (shared / "runs" / "_log").chmod(0o755)
        shutil.rmtree(shared)


def test_a_run_that_may_not_write_names_owner_and_rights(of_another_user: Path) -> None:
    manager = MultiNodeCheckpointManager(of_another_user)
    assert manager.epochs() == [0, 1]
    with pytest.raises(CheckpointWriteError, match=r"owner \w+, group \w+, rights dr.x"):
        manager.run.start(["a"], {})


@pytest.fixture
def with_a_store_of_another_user() -> Iterator[Path]:
    """A directory that this process may write, with a store that it may not, which is to be deleted."""
    shared = Path(tempfile.mkdtemp())
    is_root = os.geteuid() == 0
    path = shared / "runs"
    try:
        write(path)
        manager = MultiNodeCheckpointManager(path)
        manager.run.start(["a", "b"], {})
        manager.commits.begin(2)
        manager.run.end()
        (path / "a.2").mkdir()
        (path / "a.2" / "zarr.json").write_bytes(b"{}")
        for at in (shared, path, *path.rglob("*")):
            at.chmod(0o777 if at.is_dir() else 0o666)
        (path / "a.2").chmod(0o555)
        if is_root:
            os.seteuid(54321)
        yield path
    finally:
        if is_root:
            os.seteuid(0)
        (path / "a.2").chmod(0o755)
        shutil.rmtree(shared)


def test_a_store_that_a_run_may_not_delete_is_named_with_owner_and_rights(
    with_a_store_of_another_user: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = MultiNodeCheckpointManager(with_a_store_of_another_user)
    manager.run.start(["a", "b"], {})
    manager.run.end()
    told = [it.getMessage() for it in caplog.records if "could not be deleted" in it.getMessage()]
    assert len(told) == 1
    assert re.search(r"may not write to /.*/a\.2 \(owner \w+, group \w+, rights dr-x", told[0])
    assert manager.epochs() == [0, 1]
