"""Checkpoints of format 1 are read."""

from __future__ import annotations

import json
from pathlib import Path

from jobrunner import MultiNodeCheckpointManager
from jobrunner.testing import assert_identical
from tests.golden.make_format_1 import blobs

GOLDEN = Path(__file__).with_name("format_1")


def test_every_value_is_what_it_was() -> None:
    manager = MultiNodeCheckpointManager(GOLDEN)
    manager.verify(0)
    checkpoint = manager.open(0)["a"]
    for name, value in blobs().items():
        assert_identical(value, checkpoint.load(name))
    attributes = json.loads((GOLDEN / "a.0" / "zarr.json").read_text())["attributes"]
    assert attributes["/jobrunner"]["format"] == 1
