"""Lazy arrays give what NumPy would, and read no more chunks than they need."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobrunner.checkpoint import encode_blobs
from jobrunner.errors import CheckpointCorruptError
from tests.stores import write_store

ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "cubes": np.arange(60.0).reshape(3, 4, 5),
    "turned": np.asfortranarray(np.arange(20).reshape(4, 5)),
    "texts": np.array(["a", "längerer", ""], np.dtypes.StringDType()),
    "days": np.array(["2026-11-22", "2026-11-23", "2026-11-24"], "M8[D]"),
    **{f"row{i}": np.asfortranarray(np.arange(i, i + 12).reshape(3, 4)) for i in range(70)},
}
INDICES = [
    *(..., (), 0, -1, np.int64(2), slice(None, None, -1), slice(2, 1), slice(-2, 9)),
    *((..., slice(1, None, 2)), (None, slice(1)), [2, 0]),
]


@pytest.mark.parametrize("name", ["cubes", "turned", "texts", "days", "row5"])
def test_every_index_gives_what_numpy_gives(tmp_path: Path, name: str) -> None:
    reader = write_store(tmp_path, encode_blobs("n", ARRAYS))
    array = ARRAYS[name]
    lazy = pickle.loads(pickle.dumps(reader.peek(reader.read_document(), name)))
    assert (lazy.shape, lazy.dtype, lazy.ndim) == (array.shape, array.dtype, array.ndim)
    for index in INDICES:
        np.testing.assert_array_equal(lazy[index], array[index], strict=True)
    np.testing.assert_array_equal(np.asarray(lazy), array)
    with pytest.raises(IndexError):
        lazy[9]
    with pytest.raises(IndexError, match="axes"):
        lazy[(0,) * (array.ndim + 1)]


def test_only_the_chunks_that_an_index_touches_are_read(tmp_path: Path) -> None:
    array = np.arange(5_000_000)
    reader = write_store(tmp_path, encode_blobs("n", {"w": array}))
    lazy = reader.peek(reader.read_document(), "w")
    assert len(lazy) > lazy.chunks[0]
    (tmp_path / "n.0" / "w" / "c.0").write_bytes(b"")
    assert lazy[-1] == array[-1]
    with pytest.raises(CheckpointCorruptError, match="found 0"):
        lazy[:1]
