"""Logs that a stranger made as costly as entries may be: everything ends soon, in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.log.shapes import SHAPES

MOST_SECONDS, MOST_BYTES = 2, 256 << 20
"""Of processor time of each command, and of memory."""


@pytest.mark.nightly
@pytest.mark.parametrize("shape", SHAPES)
def test_a_log_as_costly_as_may_be_is_read_soon(shape: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint.log.shapes", shape],
        cwd=Path(__file__).parents[3],
        check=True,
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)[shape]
    assert len(found) > 20
    assert {
        name: about
        for name, about in found.items()
        if about["bad"] or about["seconds"] > MOST_SECONDS or about["bytes"] > MOST_BYTES
    } == {}
