"""Made ``format_1/``, a small checkpoint of each kind of array, and ``log_1/``, a small log.

``python -m tests.golden.make DIRECTORY`` makes them anew: not to be run again after a release.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from jobrunner import MultiNodeCheckpointManager
from jobrunner.checkpoint.log.handler import decode_entry, encode_entry
from jobrunner.define.array_options import ArrayOptions
from jobrunner.positions import Position
from jobrunner.workspace.workspace import Workspace
from tests.saves import save_epoch

ZSTD = {"name": "zstd", "configuration": {"level": 1, "checksum": False}}
OPTIONS = {"pressed": ArrayOptions((ZSTD,)), "cut": ArrayOptions(chunks=(2, 5))}
LOSS = {"at": 4.5, "text": "Worker w is lost", "resumed": 6.25, "epoch": 0}
SPENT = {"start": 3.0, "compute": 2.0, "redone": 1.5, "recovery": 1.75, "save_wait": 0.25}
LAST_SAVE_WAIT = 0.75  # by the end of the run


def blobs() -> dict[str, Any]:
    """What the node of the checkpoint had."""
    table = np.arange(12.0).reshape(3, 4)
    return {
        "table": table,
        "turned": np.asfortranarray(table),
        "pressed": np.zeros(1000),
        "cut": np.arange(35, dtype=">i2").reshape(5, 7),
        "words": np.array(["a", "längerer"]),
        "texts": np.array(["", "längerer"], np.dtypes.StringDType()),
        "nothing": np.zeros((0, 3)),
        "plain": {"n": 3, "x": 0.1, "names": ["a", None, True], "layers": [table[0] + 1]},
        "rows": {f"p{i}": np.full(3, i) for i in range(64)},
    }


def make_checkpoint(path: Path) -> None:
    """Save one epoch of one node."""
    manager = MultiNodeCheckpointManager(path)
    manager.run.start(["a"], {})
    workspace = Workspace("a")
    workspace.globals.update(blobs())
    save_epoch(manager, Position(0), {"a": workspace}, options={"a": OPTIONS})
    manager.run.end()
    anonymize(path)


def make_log(path: Path) -> None:
    """Save two epochs, as a run that began ten seconds ago."""
    manager = MultiNodeCheckpointManager(path)
    began = round(time.time() - 10.02, 3)
    manager.run.start(["a"], {"plan": {"job": "golden"}, "began": began})
    for epoch, spent in ((0, {"start": 3.0}), (2, {**SPENT, "losses": [LOSS]})):
        workspace = Workspace("a")
        workspace.globals["n"] = epoch
        save_epoch(manager, Position(epoch), {"a": workspace}, {"timing": spent})
    manager.run.finish(Position(2))
    manager.run.end({"outcome": "finished", "timing": {**SPENT, "save_wait": LAST_SAVE_WAIT}})
    anonymize(path)


def anonymize(path: Path) -> None:
    """Which machine and process made it is nobody's business."""
    entry = path / "_log" / "0000000000.json"
    run = dict(decode_entry(entry.read_bytes(), 0, str(entry)))
    run["process"] = {"host": "example", "boot": "", "namespace": "", "pid": 1, "started": "0"}
    entry.write_bytes(encode_entry(run))


if __name__ == "__main__":
    make_checkpoint(Path(sys.argv[1], "format_1"))
    make_log(Path(sys.argv[1], "log_1"))
