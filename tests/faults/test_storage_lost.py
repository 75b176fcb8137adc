"""Disk full, read-only, permission lost: an error at any operation, and storage that stays so."""

from __future__ import annotations

import errno
import itertools
import shutil
from pathlib import Path

import pytest

from jobrunner.testing import FaultyFiles
from tests.faults.test_checkpoint_sweep import (
    check_recovery,
    live,
    recorded,
)
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("quiet")


class LostFiles(FaultyFiles):
    """From the k-th operation on, nothing can be written; reading goes on."""

    def before(self, operation: str, path: str) -> None:
        self.count += 1
        if self.at is not None and self.count >= self.at and operation not in ("open", "list"):
            raise OSError(self.number, "lost", path)


@sampled("every_kth", sample=79, nightly=1)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_storage_that_takes_no_more_loses_nothing_that_was_recorded(
    number: int, every_kth: int, tmp_path: Path
) -> None:
    for cases, k in enumerate(itertools.count(1, every_kth)):
        path = tmp_path / str(k)
        files = LostFiles(k, number=number, sync=False)
        live(path, files, lambda step, before: None)
        if files.count < k:
            print(f"{errno.errorcode[number]}: {cases} of {files.count} operations, 0 losses")
            assert cases > 200 / every_kth
            return
        check_recovery(path, "end", recorded(path))
        shutil.rmtree(path, ignore_errors=True)
