"""One life of a directory in an object store, without a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from jobrunner import CheckpointError, MultiNodeCheckpointManager
from jobrunner.checkpoint.storage.object_files import ObjectFiles
from jobrunner.positions import Position
from jobrunner.testing import assert_identical
from jobrunner.workspace.workspace import Workspace
from tests.saves import Save

SAME = np.zeros(ObjectFiles.linked_bytes // 8)
"""Is copied by the store."""


def blobs(epoch: int) -> dict[str, Any]:
    return {"w": np.arange(10.0) + epoch, "epoch": epoch, "same": SAME}


def save(manager: MultiNodeCheckpointManager, epoch: int) -> None:
    save = Save(manager, Position.of(epoch))
    workspace = Workspace("a")
    workspace.globals.update(blobs(epoch))
    try:
        save.commit(save.write({"a": workspace}))
    except CheckpointError:
        save.abandon()
        raise
    manager.retention.sweeper.drain()


def live(manager: MultiNodeCheckpointManager, tell: Callable[[int], object]) -> None:
    """Save epochs 0 and 1, of which the last one stays, and leave; tells which have succeeded."""
    manager.run.start(["a"], {})
    try:
        for epoch in range(2):
            with contextlib.suppress(CheckpointError):
                save(manager, epoch)
                tell(epoch)
    finally:
        manager.run.end()


def go_on(manager: MultiNodeCheckpointManager) -> None:
    """The next run: it saves epoch 9, and nothing is left that no epoch has."""
    found = manager.epochs()
    check(manager)
    manager.run.start(["a"], {})
    save(manager, 9)
    manager.run.end()
    assert manager.epochs() == [*found, 9]
    check(manager)
    stores = {f"a.{epoch}" for epoch in manager.epochs()}
    keys = [key for key, _ in manager.directory.files.walk(manager.path)]
    left = {key.partition("/")[0].partition(".r")[0] for key in keys}
    assert left - {"_log", "_runs"} == stores


def check(manager: MultiNodeCheckpointManager) -> None:
    for epoch in manager.epochs():
        manager.verify(epoch)
        for name, value in blobs(epoch).items():
            assert_identical(value, manager.open(epoch)["a"].load(name))
