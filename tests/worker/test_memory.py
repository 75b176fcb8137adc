"""Ends of runs that use too much memory, and copies that do not fit."""

import numpy as np
import pytest

from jobrunner.errors import ExecutionError
from jobrunner.worker.memory import (
    FASTEST_LOOK_SECONDS,
    KNOWN_BYTES,
    SLOWEST_LOOK_SECONDS,
    MemoryLimit,
)
from jobrunner.workspace import BEFORE_COPY, Workspace, capture, settle

MIB = 1 << 20


class Process:
    """A process whose memory and time a test sets."""

    def __init__(self, used_mib=0, limit_mib=1000, share=0.9, sizes=dict):
        self.used_mib, self.seconds = used_mib, 0.0
        self.limit = MemoryLimit(
            "tcp://w",
            used_bytes=lambda: self.used_mib * MIB,
            limit_bytes=limit_mib * MIB,
            share=share,
            sizes=sizes,
            clock=lambda: self.seconds,
        )

    def grow(self, used_mib, seconds):
        self.used_mib, self.seconds = used_mib, self.seconds + seconds
        return self.limit.look()


def test_sizes_of_blobs_include_items_of_containers():
    space = Workspace("a", frozenset())
    for name, value in {"x": np.zeros(1000), "y": [np.zeros(500), {"k": np.zeros(250)}]}.items():
        space.put(name, settle([value]))
    space.private["p"] = settle([np.zeros(125)])
    assert 15_000 <= space.nbytes() < 15_300


def test_memory_that_blobs_and_retained_values_share_counts_once():
    space = Workspace("a", frozenset())
    space.put("x", settle([[np.zeros(1000)]]))
    space.retained["epoch"] = {
        ("t", 0): capture(space.globals["x"]),
        ("t", 1): settle([np.zeros(10)]),
    }
    assert 8_080 <= space.nbytes() < 8_400


def test_the_error_names_the_largest_nodes_the_limit_and_what_to_do():
    sizes = {f"n{i}": 0 for i in range(12)} | {"n7": 8 * MIB}
    text = str(Process(95, 100, sizes=lambda: sizes).limit.error())
    assert (
        "tcp://w is about to exceed its memory limit: it uses 95.00 MiB of its limit of 100.00 MiB"
        in text
    )
    assert "ends at 90%" in text
    assert "12 nodes take 8.00 MiB: 'n7' 8.00 MiB" in text
    assert "and 2 more" in text
    assert "more workers" in text


@pytest.mark.parametrize(("limit_mib", "share"), [(0, 0.9), (100, 0.0)])
def test_without_a_limit_or_a_share_everything_fits(limit_mib, share):
    limit = Process(1000, limit_mib, share).limit
    assert not limit.is_limited
    limit.require(1 << 40, "it")


def test_the_faster_memory_grows_the_sooner_is_the_next_look():
    process = Process(0)
    assert process.grow(10, 1.0) == SLOWEST_LOOK_SECONDS  # 890 left, at 10 a second
    assert process.grow(500, 0.1) == pytest.approx(400 / 4900 / 2)
    assert process.grow(899, 0.1) == FASTEST_LOOK_SECONDS
    assert not process.limit.is_over
    process.grow(901, 0.1)
    assert process.limit.is_over
    assert process.grow(300, 0.1) == SLOWEST_LOOK_SECONDS
    assert not process.limit.is_over


def test_a_copy_that_does_not_fit_is_refused_before_it_is_made():
    array = np.zeros(KNOWN_BYTES // 8)
    limit = Process(880, sizes=lambda: {"a": 32 * MIB}).limit
    token = BEFORE_COPY.set(limit.require)
    try:
        with pytest.raises(
            ExecutionError,
            match=r"A copy of an array that a task returned .* takes 32.00 MiB",
        ):
            settle([array])
        assert settle([array[1:]]).flags.owndata  # smaller than what is known to be fresh
    finally:
        BEFORE_COPY.reset(token)
    assert settle([array]) is not array  # where nobody looks


def test_a_copy_that_fits_is_made_in_the_same_order():
    array = np.asfortranarray(np.arange(2 * KNOWN_BYTES // 16.0).reshape(2, -1))
    token = BEFORE_COPY.set(Process(100).limit.require)
    try:
        copy = settle([array])
    finally:
        BEFORE_COPY.reset(token)
    assert copy is not array
    assert copy.flags.f_contiguous
    assert np.array_equal(copy, array)
