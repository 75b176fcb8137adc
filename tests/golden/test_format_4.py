"""What format 4 wrote is read by every later version, ours and plain Zarr."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import zarr

from jobrunner import MultiNodeCheckpointManager
from jobrunner.testing import assert_identical
from jobrunner.workspace.workspace import Workspace
from tests.checkpoint.test_manager import run_group
from tests.golden.make_format_4 import WORDS, blobs, small_floats

GOLDEN = Path(__file__).with_name("format_4")


def test_every_blob_is_what_it_was() -> None:
    manager = MultiNodeCheckpointManager(GOLDEN)
    manager.verify(0)
    checkpoint = manager.open(0)["a"]
    for name, value in blobs().items():
        assert_identical(value, checkpoint.load(name))
        if isinstance(value, np.ndarray) and value.dtype.names is None:
            assert str(checkpoint[name][...].tolist()) == str(value.tolist())
    document = json.loads((GOLDEN / "a.0" / "_manifest" / "zarr.json").read_text())
    assert document["attributes"]["format"] == 4


def test_a_load_restores_it() -> None:
    pytest.importorskip("ml_dtypes")
    workspaces = {"a": Workspace("a")}
    run_group(MultiNodeCheckpointManager(GOLDEN).load(0), workspaces)
    assert_identical({**blobs(), **small_floats()}, workspaces["a"].globals)


def test_plain_zarr_reads_numbers_and_names() -> None:
    group = zarr.open_group(GOLDEN / "a.0", mode="r")
    words = group["words"]
    assert isinstance(words, zarr.Array)
    points = np.asarray(words[...])
    assert np.array_equal(points.view("<U3")[..., 0], WORDS)
    assert words.metadata.to_dict()["dimension_names"] == ("x", "y", "_dim_3")
    assert words.attrs["coordinates"] == "days"
    days = np.asarray(group["days"][...])  # type: ignore[index]
    assert np.array_equal(days.view("M8[D]"), blobs()["days"], equal_nan=True)
