"""Made ``format_3/``, which every later version must read. Not to be run again: make format_4.

python tests/golden/make_format_3.py tests/golden/format_3

What is new against format 2: short arrays of which many are alike are rows of one array.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from jobrunner import MultiNodeCheckpointManager
from jobrunner.checkpoint.log.handler import decode_entry, encode_entry
from jobrunner.workspace.workspace import Workspace

COUNT = 70


def blobs() -> dict[str, Any]:
    """What the node had."""
    table = np.arange(6.0).reshape(2, 3)
    return {
        "step": 7,
        **{f"row{i}": table + i for i in range(COUNT)},
        **{f"turned{i}": np.asfortranarray(table - i) for i in range(COUNT)},
        "params": [{"w": np.full(3, i, ">i2"), "b": np.array(i)} for i in range(COUNT)],
        "days": {f"d{i}": np.array([i, i + 1], "M8[D]") for i in range(COUNT)},
        "alone": np.arange(5),
    }


def main(path: str) -> None:
    """Save one epoch of one node."""
    manager = MultiNodeCheckpointManager(path)
    manager.run.start(["a"], {})
    save = manager.commits.begin(0)
    workspace = Workspace("a")
    workspace.globals.update(blobs())
    manager.commits.commit(save, save.write({"a": workspace}), {})
    manager.run.end()
    # Which machine and process made it is nobody's business.
    entry = Path(path, "_log", "0000000000.json")
    run = dict(decode_entry(entry.read_bytes(), 0, str(entry)))
    run["process"] = {"host": "example", "boot": "", "namespace": "", "pid": 1, "started": "0"}
    entry.write_bytes(encode_entry(run))


if __name__ == "__main__":
    main(sys.argv[1])
