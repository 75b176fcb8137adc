"""Replaced arrays are reused for copies, unless something still refers to them."""

from __future__ import annotations

import numpy as np
import pytest

from jobrunner.workspace.array_pool import LEAST_BYTES, ArrayPool
from jobrunner.workspace.values import own

LENGTH = LEAST_BYTES // 8


@pytest.fixture
def array_pool():
    return ArrayPool()


def update(array_pool, blobs, held):
    """What a task is given to update of an array that something else refers to."""
    held["x"] = blobs["x"]
    return own(blobs, "x", array_pool.copy)


def test_a_replaced_array_is_filled_with_the_next_copy(array_pool):
    blobs, held = {"x": np.arange(float(LENGTH))}, {}
    before = blobs["x"].ctypes.data
    assert update(array_pool, blobs, held).ctypes.data != before
    array_pool.offer(held)
    assert held == {}
    assert array_pool.nbytes == LEAST_BYTES
    again = update(array_pool, blobs, held)
    assert again.ctypes.data == before
    assert again.tolist() == list(range(LENGTH))
    assert array_pool.nbytes == 0


def test_an_array_that_something_refers_to_is_not_reused(array_pool):
    blobs, held = {"x": np.zeros(LENGTH)}, {}
    mine = blobs["x"][:5]
    update(array_pool, blobs, held)
    array_pool.offer(held)
    assert array_pool.nbytes == 0
    update(array_pool, blobs, held)[:] = 7
    assert mine.tolist() == [0] * 5


def test_an_array_that_no_copy_has_replaced_is_not_taken(array_pool):
    blobs, held = {"x": np.zeros(LENGTH), "y": np.zeros(LENGTH)}, {}
    update(array_pool, blobs, held)
    other = {"y": blobs.pop("y")}
    array_pool.offer(other)
    assert array_pool.nbytes == 0


@pytest.mark.parametrize(
    "other",
    [np.zeros(LENGTH, "f4"), np.zeros((2, LENGTH // 2)), np.zeros((LENGTH // 2, 2)).T],
    ids=["dtype", "shape", "order"],
)
def test_only_an_array_of_the_same_form_is_reused(array_pool, other):
    blobs, held = {"x": np.zeros(LENGTH)}, {}
    update(array_pool, blobs, held)
    array_pool.offer(held)
    copy = array_pool.copy(other, "")
    assert (copy.dtype, copy.shape, copy.strides) == (other.dtype, other.shape, other.strides)
    assert array_pool.nbytes == LEAST_BYTES
    array_pool.clear()
    assert array_pool.nbytes == 0


@pytest.mark.parametrize(
    "array",
    [np.zeros(3), np.full(LENGTH, None), np.zeros((LENGTH, 2))[:, 0]],
    ids=["short", "objects", "scattered"],
)
def test_small_and_unusual_arrays_are_just_copied(array_pool, array):
    copy = array_pool.copy(array, "")
    assert not np.shares_memory(copy, array)
    array_pool.offer({"x": array})
    assert array_pool.nbytes == 0


def test_a_copy_keeps_the_alignment_of_records(array_pool):
    packed = np.dtype([("a", "i1"), ("_", "V7"), ("b", "i8")])[["a", "b"]]
    aligned = np.dtype([("a", "i1"), ("b", "i8")], align=True)
    assert packed == aligned  # which NumPy does not tell apart
    blobs, held = {"x": np.zeros(LENGTH, packed)}, {}
    update(array_pool, blobs, held)
    array_pool.offer(held)
    blobs, held = {"x": np.zeros(LENGTH, aligned)}, {}
    assert update(array_pool, blobs, held).dtype.isalignedstruct
