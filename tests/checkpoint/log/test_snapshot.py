"""A snapshot: the log, read once."""

from __future__ import annotations

from pathlib import Path

from jobrunner import MultiNodeCheckpointManager
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles
from jobrunner.workspace.workspace import Workspace
from tests.saves import save_epoch


def test_later_entries_do_not_change_a_snapshot(tmp_path: Path) -> None:
    manager = MultiNodeCheckpointManager(tmp_path, files=FaultyFiles(sync=False))
    directory, workspaces = manager.directory, {"a": Workspace("a")}
    manager.run.start(["a"], {"note": "first"})
    save_epoch(manager, Position(1), workspaces, {"metrics": {"loss": 1}})
    before = directory.snapshot()
    save_epoch(manager, Position(2), workspaces)
    manager.pin(2, "best")
    after = directory.snapshot()
    assert (before.epochs, before.latest, before.pins) == ([Position(1)], Position(1), {})
    assert (after.epochs, after.latest) == ([Position(1), Position(2)], Position(2))
    assert after.pins == {Position(2): ("best",)}
    record = directory.record(Position(1), before)
    assert (record.at, record.details.metrics) == (Position(1), {"loss": 1})
    assert directory.info_of(record.run_number)["note"] == "first"
    assert directory.info_of(None) == {}
