"""Ends of runs that use too much memory, and copies that do not fit."""

import numpy as np
import pytest

from jobrunner.errors import ExecutionError
from jobrunner.worker.memory import (
    KNOWN_BYTES,
    MemoryLimit,
)
from jobrunner.workspace import BEFORE_COPY, Workspace, settle

MIB = 1 << 20


class Process:
    """A process whose memory and time a test sets."""

    def __init__(self, used_mib=0, limit_mib=1000, share=0.9, sizes=dict):
        self.used_mib = used_mib
        self.limit = MemoryLimit(
            "tcp://w",
            used_bytes=lambda: self.used_mib * MIB,
            limit_bytes=limit_mib * MIB,
            share=share,
            sizes=sizes,
        )


def test_sizes_of_blobs_include_items_of_containers():
    space = Workspace("a", frozenset())
    for name, value in {"x": np.zeros(1000), "y": [np.zeros(500), {"k": np.zeros(250)}]}.items():
        space.put(name, settle([value]))
    space.private["p"] = settle([np.zeros(125)])
    assert 15_000 <= space.nbytes() < 15_300


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
