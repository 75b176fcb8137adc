"""Memory of what copies have replaced is used again, and nothing that anybody can still reach."""

from __future__ import annotations

import numpy as np
import pytest

from jobrunner.workspace.array_pool import LEAST_BYTES, Spares
from jobrunner.workspace.values import own

LENGTH = LEAST_BYTES // 8


@pytest.fixture
def spares():
    return Spares()


def update(spares, blobs, held):
    """What a task is given to update of an array that something else refers to."""
    held["x"] = blobs["x"]
    return own(blobs, "x", spares.copy)


def test_what_a_copy_has_replaced_takes_the_next_one(spares):
    blobs, held = {"x": np.arange(float(LENGTH))}, {}
    before = blobs["x"].ctypes.data
    assert update(spares, blobs, held).ctypes.data != before
    spares.offer(held)
    assert held == {}
    assert spares.nbytes == LEAST_BYTES
    again = update(spares, blobs, held)
    assert again.ctypes.data == before
    assert again.tolist() == list(range(LENGTH))
    assert spares.nbytes == 0


def test_what_somebody_else_still_has_stays_as_it_is(spares):
    blobs, held = {"x": np.zeros(LENGTH)}, {}
    mine = blobs["x"][:5]
    update(spares, blobs, held)
    spares.offer(held)
    assert spares.nbytes == 0
    update(spares, blobs, held)[:] = 7
    assert mine.tolist() == [0] * 5


def test_what_no_copy_has_replaced_is_not_kept(spares):
    blobs, held = {"x": np.zeros(LENGTH), "y": np.zeros(LENGTH)}, {}
    update(spares, blobs, held)
    other = {"y": blobs.pop("y")}
    spares.offer(other)
    assert spares.nbytes == 0


@pytest.mark.parametrize(
    "other",
    [np.zeros(LENGTH, "f4"), np.zeros((2, LENGTH // 2)), np.zeros((LENGTH // 2, 2)).T],
    ids=["dtype", "shape", "order"],
)
def test_only_what_is_alike_is_used_again(spares, other):
    blobs, held = {"x": np.zeros(LENGTH)}, {}
    update(spares, blobs, held)
    spares.offer(held)
    copy = spares.copy(other, "")
    assert (copy.dtype, copy.shape, copy.strides) == (other.dtype, other.shape, other.strides)
    assert spares.nbytes == LEAST_BYTES
    spares.clear()
    assert spares.nbytes == 0


@pytest.mark.parametrize(
    "array",
    [np.zeros(3), np.full(LENGTH, None), np.zeros((LENGTH, 2))[:, 0]],
    ids=["short", "objects", "scattered"],
)
def test_what_is_not_worth_it_is_just_copied(spares, array):
    copy = spares.copy(array, "")
    assert not np.shares_memory(copy, array)
    spares.offer({"x": array})
    assert spares.nbytes == 0
