"""A checkpoint directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.directories import begin, save


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Directory 0 to 3, of a run that has ended."""
    manager = begin(tmp_path / "runs")
    for epoch in range(4):
        save(manager, epoch)
    manager.run.end()
    return tmp_path / "runs"
