"""What format 2 wrote is read by every later version, ours and plain Zarr."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import zarr

from jobrunner import MultiNodeCheckpointManager
from jobrunner.checkpoint import load_waiting_states
from jobrunner.testing import assert_identical
from jobrunner.workspace.workspace import Workspace
from tests.checkpoint.test_manager import run_group
from tests.golden.make_format_2 import Optimizer, blobs

GOLDEN = Path(__file__).with_name("format_2")


def test_every_blob_is_what_it_was() -> None:
    manager = MultiNodeCheckpointManager(GOLDEN)
    manager.verify(0)
    checkpoint = manager.open(0)["a"]
    assert_identical({name: checkpoint.load(name) for name in blobs()}, blobs())
    assert_identical(checkpoint.load("optimizer"), Optimizer().state)


def test_a_state_is_loaded() -> None:
    workspaces = {"a": Workspace("a")}
    run_group(
        MultiNodeCheckpointManager(GOLDEN).loader.load(0, anew={"a": ["optimizer"]}), workspaces
    )
    made = Optimizer()
    made.state = {}
    workspaces["a"].globals["optimizer"] = made
    load_waiting_states(workspaces)
    assert_identical(made.state, Optimizer().state)


def test_plain_zarr_reads_the_arrays() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group = zarr.open_group(str(GOLDEN / "a.0"), mode="r")
        for name, value in blobs().items():
            array = group[name]
            assert isinstance(array, zarr.Array)
            assert np.array_equal(np.asarray(array[...]), value)
