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
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What became of all cases that are asked for, in one process with little memory."""
    names = [
        it.callspec.params["name"]
        for it in request.session.items
        if hasattr(it, "callspec") and it.path == request.path
    ]
    output = tmp_path_factory.mktemp("strangers") / "found.json"
    with output.open("w") as file:
        subprocess.run(
            [sys.executable, "-m", "tests.checkpoint.strangers", *names],
            cwd=Path(__file__).parents[2],
            stdout=file,
            check=True,
        )
    return json.loads(output.read_text())


@pytest.mark.parametrize("name", CASES)
def test_a_strangers_store_is_read_or_refused(name: str, found: Any) -> None:
    has_run = found[name].pop("ran")
    assert not has_run
    for way, about in found[name].items():
        assert isinstance(about["told"], str | None), (way, about)
        assert about["seconds"] < MOST_SECONDS, (way, about)
        assert about["bytes"] < MOST_BYTES, (way, about)
    told, expected = found[name]["load"]["told"], CASES[name][0]
    assert bool(told) == bool(expected), told
    assert re.search(expected, told or ""), told
