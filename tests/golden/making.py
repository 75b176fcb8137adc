"""What the scripts that made the checkpoints of earlier versions share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jobrunner import MultiNodeCheckpointManager
from jobrunner.checkpoint.log.handler import decode_entry, encode_entry
from jobrunner.define.array_options import ArrayOptions
from jobrunner.positions import Position
from jobrunner.workspace.workspace import Workspace
from tests.saves import save_epoch


def save(
    path: str, blobs: Mapping[str, Any], options: Mapping[str, ArrayOptions] | None = None
) -> None:
    """Save one epoch of one node."""
    manager = MultiNodeCheckpointManager(path, allow_pickle=True)
    manager.run.start(["a"], {})
    workspace = Workspace("a")
    workspace.globals.update(blobs)
    save_epoch(manager, Position(0), {"a": workspace}, options={"a": options or {}})
    manager.run.end()
    anonymize(path)


def anonymize(path: str) -> None:
    """Which machine and process made it is nobody's business."""
    entry = Path(path, "_log", "0000000000.json")
    run = dict(decode_entry(entry.read_bytes(), 0, str(entry)))
    run["process"] = {"host": "example", "boot": "", "namespace": "", "pid": 1, "started": "0"}
    entry.write_bytes(encode_entry(run))
