"""What the sweeps share."""

from __future__ import annotations

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
