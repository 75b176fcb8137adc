"""A fault at every single request of a run's life in an object store.

As `test_checkpoint_sweep` does with files: for k = 1, 2, ... (every day, only some k) the k-th request goes wrong,
until one life ends untouched. What is recorded afterwards is what was before, or what was to be; it is
whole; and the next run resumes from it.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from jobrunner import CheckpointError, KeepLast, MultiNodeCheckpointManager
from jobrunner.checkpoint.storage.object_files import ObjectFiles
from jobrunner.positions import Position
from jobrunner.testing import FaultyObjects, PowerCutError, assert_identical
from jobrunner.workspace.workspace import Workspace
from tests.sampling import sampled
from tests.saves import Save

pytestmark = pytest.mark.usefixtures("quiet")

URL = "s3://bucket/k"

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


def manager_of(objects: Path, **options: Any) -> MultiNodeCheckpointManager:
    options.setdefault("files", FaultyObjects(URL, objects))
    return MultiNodeCheckpointManager(URL, **options)


@sampled("every_kth", sample=13, nightly=1)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["fail", "die"])
def test_a_fault_at_any_request_leaves_the_old_state_or_the_new(
    tmp_path: Path, how: Literal["fail", "die"], every_kth: int
) -> None:
    for k in itertools.count(1, every_kth):
        objects = tmp_path / str(k)
        files = FaultyObjects(URL, objects, k, how)
        told: list[int] = []
        with contextlib.suppress(PowerCutError, CheckpointError):
            live(manager_of(objects, files=files, keep=KeepLast(1)), told.append)
        if how == "die":
            gc.collect()  # the process is gone, and with it the manager and its heartbeat
        if files.count < k:
            print(f"{how}: {files.count} requests, 0 losses")
            assert files.count > 50
            return
        found = tuple(manager_of(objects).epochs())
        # The one that went wrong may be recorded all the same, and have retired the one before;
        # else nothing that was told is missing.
        assert max(found, default=-1) >= max(told, default=-1), (k, told, found)
        assert set(found) <= {0, 1}, (k, told, found)
        go_on(manager_of(objects))
        shutil.rmtree(objects)
