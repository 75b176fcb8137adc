"""What the tests of checkpoints share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.saves import NodeRun


@pytest.fixture
def node_run(tmp_path: Path) -> Iterator[NodeRun]:
    """A run of one node, which has saved nothing."""
    run = NodeRun(tmp_path / "k")
    yield run
    run.end()
