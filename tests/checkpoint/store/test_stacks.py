"""Many short arrays that are alike are rows of one Zarr array; loading hides it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import zarr

from jobrunner.checkpoint.store.document import ROOT_DOCUMENT, StoreDocument
from jobrunner.checkpoint.store.layout import LEAST_ALIKE
from jobrunner.checkpoint.store.layout import STACKED_BYTES as MOST_BYTES
from jobrunner.define.array_options import ArrayOptions
from jobrunner.testing import assert_identical
from tests.saves import NodeRun

MANY = LEAST_ALIKE + 10


def many(array: np.ndarray[Any, Any], count: int = MANY) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays like this one, each with its own memory and values."""
    made = {f"w{i}": np.roll(array, i).copy(order="K") for i in range(count)}
    if array.dtype.kind in "iufc":
        for i, one in enumerate(made.values()):
            one += array.dtype.type(i)
    return made


def save(run: NodeRun, blobs: dict[str, Any], epoch: int = 0, **options: Any) -> None:
    """Save these blobs, and check what is loaded: no array keeps the memory of others."""
    run.save(epoch, blobs, **options)
    run.check(epoch)
    for name, value in run.manager.open(epoch)._readers["a"].load().items():
        if isinstance(value, np.ndarray) and value.flags.c_contiguous:
            assert value.base is None, name


def stacks(run: NodeRun, epoch: int = 0) -> list[list[int]]:
    """The shapes of the stacks."""
    root = json.loads((run.path / f"a.{epoch}" / ROOT_DOCUMENT).read_bytes())
    described = root["consolidated_metadata"]["metadata"]
    stacks = root["attributes"]["/jobrunner"].get("stacks", ())
    return [described[stack["path"]]["shape"] for stack in stacks]


def test_alike_arrays_are_rows_of_one_and_plain_zarr_reads_them(node_run: NodeRun) -> None:
    arrays = many(np.arange(12.0).reshape(3, 4))
    save(node_run, {"first": 1, **arrays, "lone": np.arange(5.0)})
    assert stacks(node_run) == [[MANY, 3, 4]]
    group: Any = zarr.open_group(str(node_run.path / "a.0"), mode="r")
    stack = group["_stacks/0"]
    assert stack.attrs["names"] == list(arrays)
    assert np.array_equal(np.asarray(stack[...]), np.stack(list(arrays.values())))
    assert np.array_equal(np.asarray(group["lone"][...]), np.arange(5.0))
    assert sum(path.is_file() for path in (node_run.path / "a.0").glob("**/*")) == 6
    data = (node_run.path / "a.0" / ROOT_DOCUMENT).read_bytes()
    assert StoreDocument(data, "a.0").nbytes_of("w0") == 96


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.arange(6, dtype=np.longdouble),
        np.array(7.0),
        np.array(["a", "längerer"]),
        np.array(["2026-11-22", "NaT"], "M8[D]"),
        np.arange(3).view("M8"),
        np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0),
        np.zeros(MOST_BYTES, np.uint8),
    ],
    ids=lambda array: f"{array.dtype.str}{array.shape}{array.strides}",
)
def test_alike_arrays_come_back_as_they_were(
    node_run: NodeRun, array: np.ndarray[Any, Any]
) -> None:
    save(node_run, many(array))
    assert sum(rows for rows, *_ in stacks(node_run)) == MANY
    with node_run.manager.open(0) as checkpoint:
        for name in ("w0", f"w{MANY - 1}"):
            assert_identical(node_run.blobs[name], checkpoint["a"].load(name))
            lazy: Any = checkpoint["a"][name]
            assert isinstance(lazy, zarr.Array)
            found = np.asarray(lazy[...])
            found = found.view(array.dtype) if found.dtype.kind == "V" else found
            assert found.shape == array.shape
            assert found.astype(array.dtype).tobytes() == node_run.blobs[name].tobytes()
            assert checkpoint["a"].outline(name).shape == array.shape
            assert lazy.attrs["/jobrunner"]["dtype"] == array.dtype.str


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(MOST_BYTES + 1, np.uint8),
        np.zeros((3, 0)),
        np.array(["a", "b"], np.dtypes.StringDType()),
        np.zeros(2, [("a", "i4"), ("b", ">f8")]),
    ],
    ids=["long", "empty", "texts", "records"],
)
def test_an_array_that_cannot_be_a_row_is_stored_by_itself(
    node_run: NodeRun, array: np.ndarray[Any, Any]
) -> None:
    save(node_run, {f"w{i}": array.copy() for i in range(MANY)})
    assert stacks(node_run) == []


def test_each_shape_and_dtype_has_stacks_of_its_own_of_at_most_a_megabyte(
    node_run: NodeRun,
) -> None:
    layers = [{"w": np.full((2, 2), i), "b": np.full(3, float(i))} for i in range(MANY)]
    params = {"layers": layers, "scale": np.arange(7), "name": "n"}
    save(node_run, {"params": params, **many(np.zeros(5000), 90)})
    assert stacks(node_run) == [[MANY, 2, 2], [MANY, 3], *([26, 5000],) * 3, [12, 5000]]
    group: Any = zarr.open_group(str(node_run.path / "a.0"), mode="r")
    assert group["_stacks/0"].attrs["names"][1] == "params/layers/1/w"
    assert np.array_equal(np.asarray(group["params/scale"][...]), np.arange(7))


def test_a_row_is_read_in_part_and_has_the_digest_of_an_array_by_itself(node_run: NodeRun) -> None:
    save(node_run, many(np.asfortranarray(np.arange(6).reshape(2, 3))))
    (reader,) = node_run.manager.open(0)._readers.values()
    assert reader.axis_length("w3", 1) == 3
    assert np.array_equal(reader.load_slice("w3", 1, 1, 3), node_run.blobs["w3"][:, 1:])
    for name in list(node_run.blobs)[10:]:
        del node_run.blobs[name]
    save(node_run, {}, epoch=1)
    assert (len(stacks(node_run, 0)), len(stacks(node_run, 1))) == (1, 0)
    with node_run.manager.open(0) as one, node_run.manager.open(1) as other:
        assert one["a"].digest("w5") == other["a"].digest("w5")
        assert one["a"].digest("w5") != other["a"].digest("w6")


def test_blobs_with_array_options_are_not_stacked(node_run: NodeRun) -> None:
    storage = {f"w{i}": ArrayOptions(chunks=(10,)) for i in range(MANY)}
    save(node_run, many(np.arange(100), 2 * MANY), options={"a": storage})
    assert stacks(node_run) == [[MANY, 100]]
    assert len(list((node_run.path / "a.0" / "w1").glob("c.*"))) == 10
