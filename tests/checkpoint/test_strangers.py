"""Whatever a stranger's store holds is read or refused: soon, in little memory, and no code runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.strangers import CASES

MOST_SECONDS, MOST_BYTES = 2, 256 << 20


@pytest.fixture(scope="module")
def ends() -> Any:
    """What became of all cases, in one process with little memory."""
    command = [sys.executable, "-m", "tests.checkpoint.strangers"]
    root = Path(__file__).parents[2]
    return json.loads(subprocess.run(command, cwd=root, stdout=subprocess.PIPE, check=True).stdout)


@pytest.mark.parametrize("name", CASES)
def test_a_strangers_store_is_read_or_refused(name: str, ends: Any) -> None:
    has_run = ends[name].pop("ran")
    assert not has_run
    for way, end in ends[name].items():
        assert isinstance(end["told"], str | None), (way, end)
        assert end["seconds"] < MOST_SECONDS, (way, end)
        assert end["bytes"] < MOST_BYTES, (way, end)
    told, expected = ends[name]["load"]["told"], CASES[name][0]
    assert bool(told) == bool(expected), told
    assert re.search(expected, told or ""), told
