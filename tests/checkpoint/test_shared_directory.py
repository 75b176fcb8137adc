"""A directory that several users share: rights of its files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.saves import NodeRun


def write(path: Path) -> dict[int, set[int]]:
    """Save two epochs; returns the rights of all files, and of all directories."""
    run = NodeRun(path)
    for epoch in range(2):
        run.save(epoch, {"w": np.arange(6.0)})
    run.manager.run.probe()
    rights: dict[int, set[int]] = {stat.S_IFREG: set(), stat.S_IFDIR: set()}
    for entry in (path, *path.rglob("*")):
        mode = entry.stat().st_mode
        rights[stat.S_IFMT(mode)].add(stat.S_IMODE(mode))
    run.end()
    return rights


@pytest.fixture
def _umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_umask")
def test_files_have_the_rights_of_the_umask_and_the_group_of_the_directory(tmp_path: Path) -> None:
    assert write(tmp_path / "runs") == {stat.S_IFREG: {0o640}, stat.S_IFDIR: {0o750}}
    tmp_path.chmod(0o2775)
    os.umask(0o007)
    assert write(tmp_path / "shared") == {stat.S_IFREG: {0o660}, stat.S_IFDIR: {0o2770}}


@pytest.mark.parametrize(("mode", "is_public"), [(0o777, True), (0o775, False)])
def test_a_directory_that_everybody_may_write_to_is_warned_of(
    mode: int, is_public: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path)
    (tmp_path / "_log").chmod(mode)
    write(tmp_path)
    assert (f"Everybody may write to {tmp_path}/_log, " in caplog.text) == is_public
    assert caplog.text.count("Everybody") == is_public
