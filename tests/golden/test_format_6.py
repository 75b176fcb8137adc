"""The columns that format 6 brought are read by every later version."""

from __future__ import annotations

import json
from pathlib import Path

from jobrunner import MultiNodeCheckpointManager
from tests.checkpoint.encoding.kinds_of_values import describe
from tests.golden.make_format_6 import blobs

GOLDEN = Path(__file__).with_name("format_6")


def test_every_value_is_what_it_was() -> None:
    manager = MultiNodeCheckpointManager(GOLDEN)
    manager.verify(0)
    assert describe(manager.open(0)["a"]["buffers"]) == describe(blobs()["buffers"])
    assert (
        json.loads((GOLDEN / "a.0" / "_manifest" / "zarr.json").read_text())["attributes"]["format"]
        == 6
    )
