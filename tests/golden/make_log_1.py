"""Made ``log_1/``, a small log of format 1. Not to be run again after a release.

python -m tests.golden.make_log_1 tests/golden/log_1
"""

from __future__ import annotations

import sys
import time

from jobrunner import MultiNodeCheckpointManager
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles
from jobrunner.workspace.workspace import Workspace
from tests.golden.making import anonymize
from tests.saves import save_epoch

LOSS = {"at": 4.5, "text": "Worker w is lost", "resumed": 6.25, "epoch": 0}


def make(path: str) -> None:
    """Save two epochs, as a run that began ten seconds ago."""
    manager = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))
    began = round(time.time() - 10.02, 3)
    manager.run.start(["a"], {"plan": {"job": "golden"}, "began": began})
    spent = {"start": 3.0}
    for epoch in (0, 2):
        workspace = Workspace("a")
        workspace.globals["n"] = epoch
        save_epoch(manager, Position.of(epoch), {"a": workspace}, {"timing": spent})
        spent = {"start": 3.0, "compute": 2.0, "redone": 1.5, "recovery": 1.75, "save_wait": 0.25}
        spent |= {"losses": [LOSS]}
    end = {"start": 3.0, "compute": 2.0, "redone": 1.5, "recovery": 1.75, "save_wait": 0.75}
    manager.run.finish(Position(2))
    manager.run.end({"outcome": "finished", "timing": end})
    anonymize(path)


if __name__ == "__main__":
    make(sys.argv[1])
