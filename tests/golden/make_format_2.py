"""Made ``format_2/``, which every later version must read. Not to be run again: make format_3.

python -m tests.golden.make_format_2 tests/golden/format_2

What is new against format 1: arrays that are compressed, that are cut into pieces, and objects
that were saved by their state.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from jobrunner.define.array_options import ArrayOptions
from tests.golden.making import save

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


if __name__ == "__main__":
    save(sys.argv[1], {**blobs(), "optimizer": Optimizer()}, STORAGE)
