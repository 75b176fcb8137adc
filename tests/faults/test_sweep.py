"""A fault at every single operation of a run's life: what is recorded is whole, before and after.

The k-th operation goes wrong, for k = 1, 2, ... until one life ends untouched; every day, only some k.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import shutil
from pathlib import Path
from typing import Literal

import pytest

from jobrunner.testing import FaultyFiles, PowerCutError
from tests.faults.life import Place, Recorded, check_recovery, live
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("quiet")


def test_one_operation_fails_and_those_after_it_succeed() -> None:
    files = FaultyFiles(at=2)
    files.before("write", "a")
    with pytest.raises(OSError, match="b"):
        files.before("write", "b")
    files.before("write", "c")
    assert files.trace == [("write", "a"), ("write", "b"), ("write", "c")]


def test_after_a_power_cut_no_operation_succeeds() -> None:
    files = FaultyFiles(at=2, how="die")
    files.before("write", "a")
    for path in "bc":
        with pytest.raises(PowerCutError, match=path):
            files.before("write", path)


@sampled("every_kth", sample=61, nightly=1)
@pytest.mark.parametrize("how", ["fail", "die"])
@pytest.mark.parametrize("is_remote", [False, True], ids=["files", "objects"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_at_any_operation_leaves_the_old_state_or_the_new(
    every_kth: int, how: Literal["fail", "die"], is_remote: bool, tmp_path: Path
) -> None:
    for k in itertools.count(1, every_kth):
        place = Place(tmp_path / str(k), is_remote)
        files = place.files(k, how)
        told: list[tuple[str, Recorded]] = []
        with contextlib.suppress(PowerCutError):
            live(place, files, lambda step, before, told=told: told.append((step, before)))
        if how == "die":
            gc.collect()  # the process is gone, and with it the manager and its heartbeat
        if files.count < k:
            print(f"{how}: {files.count} operations, 0 losses")
            assert files.count > 200
            return
        # A step that failed may have been followed by others that did not.
        step, before = told[-1] if how == "die" else ("end", place.recorded())
        check_recovery(place, step, before)
        shutil.rmtree(place.directory)


class LostFiles(FaultyFiles):
    """From the k-th operation on, nothing can be written; reading goes on."""

    def before(self, operation: str, path: str) -> None:
        self.count += 1
        if self.at is not None and self.count >= self.at and operation not in ("open", "list"):
            raise OSError(self.number, "lost", path)


@sampled("every_kth", sample=79, nightly=1)
def test_storage_that_takes_no_more_loses_nothing_that_was_recorded(
    every_kth: int, tmp_path: Path
) -> None:
    for k in itertools.count(1, every_kth):
        place = Place(tmp_path / str(k))
        files = LostFiles(k, number=errno.ENOSPC, sync=False)
        live(place, files, lambda step, before: None)
        check_recovery(place, "end", place.recorded())
        shutil.rmtree(place.directory, ignore_errors=True)
        if files.count < k:
            assert k > 200
            return
