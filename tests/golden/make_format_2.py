"""Made ``format_2/``, which every later version must read. Not to be run again: make format_3.

python tests/golden/make_format_2.py tests/golden/format_2

What is new against format 1: arrays that are compressed, that are cut into pieces, and objects
that were saved by their state.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from jobrunner import MultiNodeCheckpointManager
from jobrunner.checkpoint.log.handler import decode_entry, encode_entry
from jobrunner.define.array_options import ArrayOptions
from jobrunner.workspace.workspace import Workspace

STORAGE = {
    "zstd": ArrayOptions(({"name": "zstd", "configuration": {"level": 3}},)),
    "blosc": ArrayOptions(({"name": "blosc", "configuration": {}},)),
    "gzip": ArrayOptions(({"name": "gzip", "configuration": {}},)),
    "pieces": ArrayOptions(chunks=(2, 3), shards=(4, 6)),
    "both": ArrayOptions(({"name": "zstd", "configuration": {}},), (2, 3), (4, 6)),
    "turned": ArrayOptions((), (2, 3), (4, 6)),
    "words": ArrayOptions(None, (2,), (4,)),
    "chunks": ArrayOptions(chunks=(3, 4)),
}


class Optimizer:
    """Has a state."""

    def __init__(self) -> None:
        self.state = {"velocity": np.arange(3.0), "steps": 7}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def blobs() -> dict[str, Any]:
    """What the node had."""
    table = np.arange(70, dtype="<f8").reshape(7, 10)
    return {
        **{name: table + i for i, name in enumerate(STORAGE) if name not in ("turned", "words")},
        "turned": np.asfortranarray(table),
        "words": np.array(["é", "", "日本", "a", "b"], np.dtypes.StringDType()),
    }


def main(path: str) -> None:
    """Save one epoch of one node."""
    manager = MultiNodeCheckpointManager(path)
    manager.run.start(["a"], {})
    save = manager.commits.begin(0, array_options={"a": STORAGE})
    workspace = Workspace("a")
    workspace.globals.update(blobs(), optimizer=Optimizer())
    manager.commits.commit(save, save.write({"a": workspace}), {})
    manager.run.end()
    # Which machine and process made it is nobody's business.
    entry = Path(path, "_log", "0000000000.json")
    run = dict(decode_entry(entry.read_bytes(), 0, str(entry)))
    run["process"] = {"host": "example", "boot": "", "namespace": "", "pid": 1, "started": "0"}
    entry.write_bytes(encode_entry(run))


if __name__ == "__main__":
    main(sys.argv[1])
