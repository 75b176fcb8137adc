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
from pathlib import Path
from typing import Any, Literal

import pytest

from jobrunner import CheckpointError, KeepLast, MultiNodeCheckpointManager
from jobrunner.testing import FaultyObjects, PowerCutError
from tests.faults.object_life import go_on, live
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("quiet")

URL = "s3://bucket/k"


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
