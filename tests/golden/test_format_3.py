"""What format 3 wrote is read by every later version, ours and plain Zarr."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import zarr

from jobrunner import MultiNodeCheckpointManager
from jobrunner.testing import assert_identical
from jobrunner.workspace.workspace import Workspace
from tests.checkpoint.test_manager import run_group
from tests.golden.make_format_3 import COUNT, blobs

GOLDEN = Path(__file__).with_name("format_3")


def test_every_blob_is_what_it_was() -> None:
    manager = MultiNodeCheckpointManager(GOLDEN)
    manager.verify(0)
    workspaces = {"a": Workspace("a")}
    run_group(manager.load(0), workspaces)
    assert_identical(blobs(), workspaces["a"].globals)
    checkpoint = manager.open(0)["a"]
    for name, value in blobs().items():
        assert_identical(value, checkpoint.load(name))


def test_plain_zarr_reads_the_rows() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group = zarr.open_group(str(GOLDEN / "a.0"), mode="r")
        found = {}
        for _, stack in group["_stacks"].arrays():  # type: ignore[union-attr]
            found |= dict(zip(stack.attrs["names"], np.asarray(stack[...]), strict=True))
        assert len(found) == 5 * COUNT
        for i in range(COUNT):
            assert np.array_equal(found[f"row{i}"], blobs()[f"row{i}"])
            assert np.array_equal(found[f"turned{i}"], blobs()[f"turned{i}"])
            assert np.array_equal(found[f"params/{i}/w"], blobs()["params"][i]["w"])
            assert np.array_equal(found[f"days/d{i}"], blobs()["days"][f"d{i}"])
        assert np.array_equal(np.asarray(group["alone"][...]), blobs()["alone"])  # type: ignore[index]
