"""What format 1 wrote is read by every later version, ours and plain Zarr."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import zarr

from jobrunner import MultiNodeCheckpointManager
from jobrunner.testing import assert_identical
from jobrunner.workspace.workspace import Workspace
from tests.golden.make_format_1 import NODES, blobs

GOLDEN = Path(__file__).with_name("format_1")


def test_the_log_says_what_it_said() -> None:
    manager = MultiNodeCheckpointManager(GOLDEN)
    assert (manager.epochs(), manager.recorded.is_done()) == ([2, 3], True)
    record = manager.record(3)
    assert record["stores"]["trainer_0"]["store"] == "trainer_0.3.r1"
    assert math.isnan(record["details"]["metrics"]["loss"])
    assert manager.recorded.run_info(3) == {"plan": {"job": "golden"}}
    assert manager.get_ckpt_db_name("server", 0) == str(GOLDEN / "server.0.r1")
    assert manager.get_ckpt_db_name("server", 4) == str(GOLDEN / "server.4")


@pytest.mark.parametrize("epoch", [2, 3])
@pytest.mark.parametrize("node", NODES)
def test_every_blob_is_what_it_was(epoch: int, node: str) -> None:
    manager = MultiNodeCheckpointManager(GOLDEN)
    manager.verify(epoch)
    checkpoint = manager.open(epoch)[node]
    assert_identical(blobs(node, epoch), {name: checkpoint.load(name) for name in checkpoint})


def test_plain_zarr_reads_the_arrays() -> None:
    group = zarr.open_group(str(GOLDEN / "server.2"), mode="r")
    for name in ("w", "fortran", "transposed", "big_endian", "no_axes", "flags"):
        array = group[name]
        assert isinstance(array, zarr.Array)
        assert np.array_equal(
            np.asarray(array[...]), blobs("server", 2)[name], equal_nan=name == "big_endian"
        )


def test_a_run_goes_on_from_it(tmp_path: Path) -> None:
    path = shutil.copytree(GOLDEN, tmp_path / "copy")
    manager = MultiNodeCheckpointManager(path)
    manager.run.start(NODES, {})
    save = manager.commits.begin(4)
    manager.commits.commit(save, save.write({node: Workspace(node) for node in NODES}), {})
    manager.run.end()
    assert manager.epochs() == [2, 3, 4]
    manager.verify(2)
