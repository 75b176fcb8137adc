"""A run that is taken over while it starts does nothing to the run that has come after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobrunner import CommitConflictError, MultiNodeCheckpointManager
from jobrunner.checkpoint import FileMetadataHandler
from jobrunner.checkpoint.log.entries import Entry
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles
from jobrunner.workspace.workspace import Workspace
from tests.saves import Save


def test_a_run_that_is_taken_over_at_once_deletes_nothing_of_its_successor(tmp_path: Path) -> None:
    files = FaultyFiles(sync=False)
    workspace = Workspace("a")
    workspace.globals["w"] = 1
    second = MultiNodeCheckpointManager(tmp_path, take_over=True, files=files)

    class Overtaken(FileMetadataHandler):
        """Between this run's first entry and the answer to it, another takes over and saves."""

        def append(self, entry: Entry) -> bool:
            is_kept = super().append(entry)
            second.run.start(["a"], {})
            self.save = Save(second, Position(0))
            self.receipts = self.save.write({"a": workspace})
            return is_kept

    handler = Overtaken(files)
    first = MultiNodeCheckpointManager(tmp_path, handler, files=files)
    with pytest.raises(CommitConflictError):
        first.run.start(["a"], {})
    first.retention.sweeper.drain()
    handler.save.commit(handler.receipts)
    second.verify(0)
    second.run.end()
    first.run.end()
    assert MultiNodeCheckpointManager(tmp_path).epochs() == [0]
