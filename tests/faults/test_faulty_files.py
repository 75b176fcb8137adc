"""Of a file system that fails on purpose, one operation fails, or all from one on."""

from __future__ import annotations

import pytest

from jobrunner.testing import FaultyFiles, PowerCutError


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
