"""A fault at every single request of a run's life in an object store.

As `test_checkpoint_sweep` does with files: for k = 1, 2, ... the k-th request goes wrong, until one
life ends untouched. What is recorded afterwards is what was before, or what was to be; it is
whole; and the next run goes on from it.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import dask
import numpy as np
import pytest

from jobrunner import CheckpointError, KeepLast, MultiNodeCheckpointManager
from jobrunner.checkpoint.store import LINKED_BYTES
from jobrunner.testing import FaultyObjects, PowerCutError, assert_identical
from jobrunner.workspace import Workspace

URL = "s3://bucket/k"
SAME = np.zeros(LINKED_BYTES // 8)

Recorded = tuple[int, ...]


def blobs(epoch: int) -> dict[str, Any]:
    return {"w": np.arange(10.0) + epoch, "epoch": epoch, "same": SAME}


def manager_of(objects: Path, **options: Any) -> MultiNodeCheckpointManager:
    options.setdefault("files", FaultyObjects(URL, objects))
    return MultiNodeCheckpointManager(URL, **options)


def save(manager: MultiNodeCheckpointManager, epoch: int) -> None:
    order = manager.begin(epoch)
    workspace = Workspace("a")
    workspace.globals.update(blobs(epoch))
    try:
        manager.commit(order, order({"a": workspace}), {})
    except CheckpointError:
        manager.abandon(order)
        raise
    manager.settle()


def live(manager: MultiNodeCheckpointManager, told: list[int]) -> None:
    """Save epochs 0 and 1, of which the last one stays, and leave; `told` are those that succeeded."""
    manager.start_run(["a"], {})
    try:
        for epoch in range(2):
            with contextlib.suppress(CheckpointError):
                save(manager, epoch)
                told.append(epoch)
    finally:
        manager.end_run()


def check(manager: MultiNodeCheckpointManager) -> None:
    for epoch in manager.epochs():
        manager.verify(epoch)
        for name, value in blobs(epoch).items():
            assert_identical(value, manager.open(epoch)["a"].load(name))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.CRITICAL, "jobrunner")
    with dask.config.set({"jobrunner.checkpoint.heartbeat-seconds": 3600}):
        yield


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["fail", "die"])
def test_a_fault_at_any_request_leaves_the_old_state_or_the_new(
    tmp_path: Path, how: Literal["fail", "die"]
) -> None:
    for k in itertools.count(1):
        objects = tmp_path / str(k)
        files = FaultyObjects(URL, objects, k, how)
        told: list[int] = []
        with contextlib.suppress(PowerCutError, CheckpointError):
            live(manager_of(objects, files=files, keep=KeepLast(1)), told)
        if how == "die":
            gc.collect()  # the process is gone, and with it the manager and its heartbeat
        if files.count < k:
            print(f"{how}: {files.count} requests, 0 losses")
            assert k > 50
            return
        found = tuple(manager_of(objects).epochs())
        # The one that went wrong may be recorded all the same; nothing that was told is missing.
        assert set(told[-1:]) <= set(found) <= {0, 1}, (k, told, found)
        manager = manager_of(objects)
        check(manager)
        manager.start_run(["a"], {})
        save(manager, 9)
        manager.end_run()
        assert tuple(manager.epochs()) == (*found, 9)
        check(manager)
        stores = {f"a.{epoch}" for epoch in manager.epochs()}
        keys = [key for key, _ in manager.files.walk(URL)]
        left = {key.partition("/")[0].partition(".r")[0] for key in keys}
        assert left - {"_log", "_runs"} == stores, k
        shutil.rmtree(objects)
