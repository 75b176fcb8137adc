"""A checkpoint directory for the runs of a test."""

from pathlib import Path

import pytest

from jobrunner import MultiNodeCheckpointManager


@pytest.fixture
def manager(tmp_path: Path) -> MultiNodeCheckpointManager:
    """The manager of a new directory."""
    return MultiNodeCheckpointManager(tmp_path / "ckpt")
