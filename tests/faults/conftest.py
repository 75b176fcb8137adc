"""What the sweeps share."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import dask
import pytest


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Log nothing, and let no heartbeat add operations of its own."""
    caplog.set_level(logging.CRITICAL, "jobrunner")
    with dask.config.set({"jobrunner.checkpoint.heartbeat-seconds": 3600}):
        yield


@pytest.fixture
def without_old_garbage() -> Iterator[None]:
    """Collect, after each "process" that died, only what is younger than the test."""
    gc.freeze()
    yield
    gc.unfreeze()
