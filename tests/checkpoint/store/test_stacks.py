"""Many short arrays that are alike are rows of one Zarr array; loading hides it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from jobrunner import DefinitionError, MultiNodeCheckpointManager
from jobrunner.checkpoint.store.document import ROOT_DOCUMENT, StoreDocument
from jobrunner.checkpoint.store.layout import LEAST_ALIKE
from jobrunner.checkpoint.store.layout import STACKED_BYTES as MOST_BYTES
from jobrunner.define.array_options import ArrayOptions
from jobrunner.positions import Position
from jobrunner.testing import assert_identical
from jobrunner.workspace.workspace import Workspace
from tests.blobs import Blobs
from tests.checkpoint.store.test_array_options import CountingFiles
from tests.checkpoint.test_manager import run_group
from tests.saves import save_epoch

MANY = LEAST_ALIKE + 10


def many(array: np.ndarray[Any, Any], count: int = MANY) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays like this one, each with its own memory and values."""
    made = {}
    for i in range(count):
        made[f"w{i}"] = array.copy(order="K")
        made[f"w{i}"][...] = np.roll(array, i)
        if array.dtype.kind in "iufc":
            made[f"w{i}"] += made[f"w{i}"].dtype.type(i)
    return made


def is_row(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.flags.c_contiguous


class Rig:
    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path / "k"
        self.manager = MultiNodeCheckpointManager(self.path, files=CountingFiles(), **options)
        self.manager.run.start(["a"], {})
        self.workspace = Workspace("a")
        self.blobs = self.workspace.globals

    def save(self, epoch: int = 0, **options: Any) -> None:
        save_epoch(self.manager, Position.of(epoch), {"a": self.workspace}, **options)

    def check(self, epoch: int = 0) -> None:
        """What is loaded is what was saved, in its order."""
        self.manager.verify(epoch)
        again = {"a": Workspace("a")}
        run_group(self.manager.load(epoch), again)
        assert list(again["a"].globals) == list(self.blobs)
        assert_identical({**Blobs(self.workspace)}, {**Blobs(again["a"])})
        # One that lives on does not keep the others' memory.
        assert all(array.base is None for array in again["a"].globals.values() if is_row(array))

    def stacks(self, epoch: int = 0) -> list[list[int]]:
        """The shapes of the stacks."""
        root = json.loads((self.path / f"a.{epoch}" / ROOT_DOCUMENT).read_bytes())
        described = root["consolidated_metadata"]["metadata"]
        stacks = root["attributes"]["/jobrunner"].get("stacks", ())
        return [described[stack["path"]]["shape"] for stack in stacks]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.manager.run.end()


def test_alike_arrays_are_rows_of_one_and_plain_zarr_reads_them(rig: Rig) -> None:
    arrays = many(np.arange(12.0).reshape(3, 4))
    rig.blobs.update(first=1, **arrays, lone=np.arange(5.0))
    rig.save()
    rig.check()
    assert rig.stacks() == [[MANY, 3, 4]]
    group = zarr.open_group(str(rig.path / "a.0"), mode="r")
    stack = group["_stacks/0"]
    assert isinstance(stack, zarr.Array)
    assert stack.attrs["names"] == list(arrays)
    assert np.array_equal(np.asarray(stack[...]), np.stack(list(arrays.values())))
    assert np.array_equal(np.asarray(group["lone"][...]), np.arange(5.0))  # type: ignore[index]
    assert sum(path.is_file() for path in (rig.path / "a.0").glob("**/*")) == 6


def test_arrays_of_another_shape_or_dtype_are_not_alike(rig: Rig) -> None:
    for name, like in {
        "a": np.zeros((2, 3)),
        "b": np.zeros((3, 2)),
        "c": np.zeros((2, 3), int),
    }.items():
        rig.blobs.update({f"{name}{key}": value for key, value in many(like).items()})
    rig.save()
    rig.check()
    assert sorted(rig.stacks()) == [[MANY, 2, 3], [MANY, 2, 3], [MANY, 3, 2]]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">f4").reshape(2, 3),
        np.arange(6, dtype=np.longdouble),
        np.array(7.0),
        np.array([[True, False]]),
        np.array(["a", "längerer"]),
        np.array([b"a", b"bcd"]),
        np.array(["2026-11-22", "NaT"], "M8[D]"),
        np.array([1, 2], "m8[25s]"),
        np.arange(3).view("M8"),
        np.arange(4, dtype=np.complex64),
        np.arange(24).reshape(2, 3, 4).transpose(1, 2, 0),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.zeros(MOST_BYTES, np.uint8),
    ],
    ids=lambda array: f"{array.dtype.str}{array.shape}{array.strides}",
)
def test_alike_arrays_come_back_as_they_were(rig: Rig, array: np.ndarray[Any, Any]) -> None:
    rig.blobs.update(many(array))
    rig.save()
    rig.check()
    assert sum(rows for rows, *_ in rig.stacks()) == MANY
    with rig.manager.open(0) as checkpoint:
        for name in ("w0", f"w{MANY - 1}"):
            assert_identical(rig.blobs[name], checkpoint["a"].load(name))
            lazy = checkpoint["a"][name]
            assert isinstance(lazy, zarr.Array)
            found = np.asarray(lazy[...])
            found = found.view(array.dtype) if found.dtype.kind == "V" else found
            assert found.shape == array.shape
            assert found.astype(array.dtype).tobytes() == rig.blobs[name].tobytes()
            assert checkpoint["a"].outline(name).shape == array.shape
            assert lazy.attrs["/jobrunner"]["dtype"] == array.dtype.str  # type: ignore[index, call-overload]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(MOST_BYTES + 1, np.uint8),
        np.zeros((3, 0)),
        np.array(["a", "b"], np.dtypes.StringDType()),
        np.zeros(2, [("a", "i4"), ("b", ">f8")]),
        np.zeros(2, "V5"),
        np.arange(20)[::2],
    ],
    ids=["long", "empty", "texts", "records", "void", "steps"],
)
def test_an_array_that_cannot_be_a_row_is_stored_by_itself(
    rig: Rig, array: np.ndarray[Any, Any]
) -> None:
    # A slice with steps must be made anew: a copy of it has none.
    made = [
        np.repeat(array, 2)[::2] if array.strides == (16,) else array.copy() for _ in range(MANY)
    ]
    rig.blobs.update({f"w{i}": value for i, value in enumerate(made)})
    rig.save()
    rig.check()
    assert rig.stacks() == []


def test_arrays_within_a_blob_are_stacked_too(rig: Rig) -> None:
    layers = [{"w": np.full((2, 2), i), "b": np.full(3, float(i))} for i in range(MANY)]
    rig.blobs.update(params={"layers": layers, "scale": np.arange(7), "name": "n"}, n=1)
    rig.save()
    rig.check()
    assert rig.stacks() == [[MANY, 2, 2], [MANY, 3]]
    group = zarr.open_group(str(rig.path / "a.0"), mode="r")
    assert group["_stacks/0"].attrs["names"][1] == "params/layers/1/w"  # type: ignore[index]
    assert np.array_equal(np.asarray(group["params/scale"][...]), np.arange(7))  # type: ignore[index]


def test_long_stacks_are_cut_at_a_megabyte(rig: Rig) -> None:
    rig.blobs.update(many(np.zeros(5000), 90))
    rig.save()
    rig.check()
    assert rig.stacks() == [[26, 5000], [26, 5000], [26, 5000], [12, 5000]]


def test_a_row_can_be_part_of_a_partitioned_array(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.blobs.update(many(np.arange(10.0)))
    rig.save()
    (reader,) = rig.manager.open(0)._readers.values()
    assert reader.axis_length("w3", 0) == 10
    assert np.array_equal(reader.load_slice("w3", 0, 2, 5), rig.blobs["w3"][2:5])
    rig.manager.run.end()


def test_the_digest_of_a_row_is_that_of_an_array_by_itself(rig: Rig) -> None:
    rig.blobs.update(many(np.asfortranarray(np.arange(6).reshape(2, 3))))
    rig.save(0)
    for name in list(rig.blobs)[10:]:
        del rig.blobs[name]
    rig.save(1)
    assert (len(rig.stacks(0)), len(rig.stacks(1))) == (1, 0)
    with rig.manager.open(0) as one, rig.manager.open(1) as other:
        assert one["a"].digest("w5") == other["a"].digest("w5")
        assert one["a"].digest("w5") != other["a"].digest("w6")


def test_overlapping_views_that_are_alike_are_refused(rig: Rig) -> None:
    memory = np.arange(4.0 * MANY)
    rig.blobs.update({f"w{i}": memory[3 * i : 3 * i + 4] for i in range(MANY)})
    with pytest.raises(DefinitionError, match="share memory"):
        rig.save()
    rig.blobs.update({f"w{i}": memory[4 * i : 4 * i + 4] for i in range(MANY)})
    rig.save(1)
    rig.check(1)
    assert rig.stacks(1) == [[MANY, 4]]


@pytest.mark.parametrize("count", [2, MANY])
def test_blobs_with_array_options_are_not_stacked(rig: Rig, count: int) -> None:
    rig.blobs.update(many(np.arange(100), 2 * MANY))
    storage = {f"w{i}": ArrayOptions(chunks=(10,)) for i in range(count)}
    rig.save(options={"a": storage})
    rig.check()
    assert rig.stacks() == [[2 * MANY - count, 100]]
    assert len(list((rig.path / "a.0" / "w1").glob("c.*"))) == 10


def test_a_row_has_the_size_of_a_row(rig: Rig) -> None:
    rig.blobs.update(many(np.ones(4)))
    rig.save()
    data = (rig.path / "a.0" / ROOT_DOCUMENT).read_bytes()
    assert StoreDocument(data, "a.0").nbytes_of("w0") == 32
