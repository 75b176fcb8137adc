"""A directory that several users share: rights of its files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobrunner import MultiNodeCheckpointManager
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
def test_the_group_of_a_shared_directory_is_inherited(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    os.umask(0o007)
    found = write(tmp_path / "runs")
    assert found == {stat.S_IFREG: {0o660}, stat.S_IFDIR: {0o2770}}


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
    assert all(f"write to {tmp_path}/runs/_log, " in text for text in warnings)
