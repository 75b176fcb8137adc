"""What the sweeps share."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Log nothing, and let no heartbeat add operations of its own."""
    caplog.set_level(logging.CRITICAL, "jobrunner")
    with dask.config.set({"jobrunner.checkpoint.heartbeat-seconds": 3600}):
        yield


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """In memory if that is possible: sweeps write a good deal, and none of it need last."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else tmp_path
    with tempfile.TemporaryDirectory(dir=memory) as directory:
        yield Path(directory)
