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

import pytest

from jobrunner.testing import FaultyFiles, PowerCutError
from tests.faults.life import Place, Recorded, check_recovery, live
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("quiet")


def test_one_operation_fails_and_after_a_power_cut_all_do() -> None:
    failing, dead = FaultyFiles(at=2), FaultyFiles(at=2, how="die")
    for files, error in ((failing, OSError), (dead, PowerCutError)):
        files.before("write", "a")
        with pytest.raises(error, match="b"):
            files.before("write", "b")
    failing.before("write", "c")
    with pytest.raises(PowerCutError, match="c"):
        dead.before("write", "c")
    assert failing.trace == [("write", "a"), ("write", "b"), ("write", "c")]


class FullFiles(FaultyFiles):
    """From the k-th operation on, nothing can be written; reading goes on."""

    def before(self, operation: str, path: str) -> None:
        self.count += 1
        if self.at is not None and self.count >= self.at and operation not in ("open", "list"):
            raise OSError(errno.ENOSPC, "full", path)


@sampled("every_kth", sample=61, nightly=1)
@pytest.mark.parametrize(
    ("where", "how"),
    [*itertools.product(("files", "objects"), ("fail", "die")), ("files", "is full")],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_at_any_operation_leaves_the_old_state_or_the_new(
    every_kth: int, where: str, how: str, tmp_path: Path
) -> None:
    for k in itertools.count(1, every_kth):
        place = Place(tmp_path / str(k), is_remote=where == "objects")
        files = FullFiles(k, sync=False) if how == "is full" else place.files(k, how)
        told: list[tuple[str, Recorded]] = []
        with contextlib.suppress(PowerCutError):
            live(place, files, lambda step, before, told=told: told.append((step, before)))
        if how == "die":
            gc.collect()  # the process is gone, and with it the manager and its heartbeat
        # A step that failed may have been followed by others that did not.
        step, before = told[-1] if how == "die" else ("end", place.recorded())
        check_recovery(place, step, before)
        shutil.rmtree(place.directory)
        if files.count < k:
            print(f"{how}: {files.count} operations, 0 losses")
            assert files.count > 200
            return
