"""What `ls` and `prune` say of the disk, where epochs share the files of what has not changed."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from jobrunner import MultiNodeCheckpointManager
from jobrunner.cli.listing import list_epochs
from jobrunner.cli.maintenance import _plan_prune
from jobrunner.testing import FaultyObjects
from tests.cli.directories import ask, begin, invoke, save

LARGE = 1 << 20


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """Epochs 0 to 3, which share a large array on each of two nodes."""
    manager = begin(tmp_path / "linked")
    save(manager, 0, {"large": np.arange(LARGE / 8)})
    for epoch in (1, 2, 3):
        save(manager, epoch)
        for node in "ab":
            source = tmp_path / "linked" / f"{node}.0" / "large"
            target = tmp_path / "linked" / f"{node}.{epoch}" / "large"
            target.mkdir()
            for chunk in source.iterdir():
                os.link(chunk, target / chunk.name)
    manager.run.end()
    return tmp_path / "linked"


def test_ls_counts_once_what_epochs_share(linked: Path) -> None:
    taken = ask("ls", linked)["disk_nbytes"]
    assert 2 * LARGE <= taken < 3 * LARGE
    assert "with what epochs share counted once." in invoke("ls", linked).stdout


def test_prune_says_what_the_disk_frees(linked: Path) -> None:
    dry = ask("prune", linked, "--keep-last", 1, "--dry-run")
    assert dry["nbytes"] > 2 * LARGE
    assert 0 < dry["freed_nbytes"] < LARGE  # the last epoch still has the large arrays
    assert "; the disk frees " in invoke("prune", linked, "--keep-last", 1).stdout
    assert ask("ls", linked)["disk_nbytes"] >= 2 * LARGE


def test_sizes_in_an_object_store_are_called_logical(runs: Path) -> None:
    files = FaultyObjects("s3://bucket/runs", runs)
    manager = MultiNodeCheckpointManager(files.root, files=files)
    output = list_epochs(manager.directory)
    assert output.data["disk_nbytes"] is None
    assert "Sizes are logical" in output.text
    assert _plan_prune(manager).freed_nbytes is None
