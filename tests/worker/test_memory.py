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


def test_sizes_of_blobs_include_items_of_containers():
    space = Workspace("a", frozenset())
    for name, value in {"x": np.zeros(1000), "y": [np.zeros(500), {"k": np.zeros(250)}]}.items():
        space.put(name, settle([value]))
    space.private["p"] = settle([np.zeros(125)])
    assert 15_000 <= space.nbytes() < 15_300


def test_a_copy_that_does_not_fit_is_refused_before_it_is_made():
    array = np.zeros(KNOWN_BYTES // 8)
    limit = MemoryLimit("tcp://w", lambda: 880 * MIB, 1000 * MIB, 0.9, lambda: {"a": 32 * MIB})
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
