"""SciPy's sparse arrays and matrices come back as they were, without pickle."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobrunner import CheckpointError, DefinitionError
from jobrunner.checkpoint import Unmade, encode_blobs
from jobrunner.testing import assert_identical
from tests.stores import decode_forged, write_store, written_and_read

sparse = pytest.importorskip("scipy.sparse")

PARTS = ("data", "indices", "indptr", "offsets", "coords")


def assert_same(expected: Any, found: Any) -> None:
    assert type(found) is type(expected)
    assert (found.shape, found.dtype, found.nnz) == (expected.shape, expected.dtype, expected.nnz)
    for name in PARTS:
        assert_identical(getattr(expected, name, None), getattr(found, name, None), name)


def with_long_indices() -> Any:
    matrix = sparse.csr_array(np.eye(3))
    matrix.indices, matrix.indptr = matrix.indices.astype("i8"), matrix.indptr.astype("i8")
    return matrix


def with_spare_items() -> Any:
    matrix = sparse.csr_array((np.ones(5), np.arange(5), np.array([0, 2, 3])), shape=(2, 5))
    matrix.data, matrix.indices = np.ones(9), np.arange(9)
    return matrix


UNUSUAL = [
    with_long_indices(),
    with_spare_items(),
    sparse.csr_array((np.ones(2), np.array([2, 0]), np.array([0, 2])), shape=(1, 3)),  # not sorted
    sparse.coo_array((np.ones(2), (np.array([1, 1]), np.array([0, 0]))), shape=(2, 2)),  # twice
    sparse.bsr_array(np.arange(24.0).reshape(4, 6), blocksize=(2, 3)),
    sparse.coo_array(np.arange(8).reshape(2, 2, 2)),
    sparse.csr_array(np.array([0.0, 1, 0, 2])),
    sparse.csc_matrix((0, 3), dtype="f4"),
]


def test_sparse_matrices_come_back_as_they_were() -> None:
    dense = np.array([[0, 1, 1], [0, 0, 0]])
    formats, dtypes = ("csr", "csc", "bsr", "coo", "dia"), ("f8", "f4", "c16", "i2", "u8", "?")
    plain = [
        getattr(sparse, f"{form}_{kind}")(dense.astype(dtype))
        for form, kind, dtype in itertools.product(formats, ("array", "matrix"), dtypes)
    ]
    saved = [*plain, *UNUSUAL]
    for expected, found in zip(saved, written_and_read(saved), strict=True):
        assert_same(expected, found)


def test_what_would_be_lost_is_refused_by_name() -> None:
    with pytest.raises(DefinitionError, match=r"its format is 'lil'; save value.tocsr\(\)"):
        encode_blobs("n", {"a": sparse.lil_array((2, 2))})

    class Mine(sparse.csr_array):
        pass

    with pytest.raises(DefinitionError, match="there is no codec for its type"):
        encode_blobs("n", {"a": Mine(np.eye(2))})


FORGED = [
    {"format": "csr", "indices": np.array([0, 9]), "indptr": np.array([0, 1, 2])},
    {"format": "csr", "indices": np.array([0, -1]), "indptr": np.array([0, 1, 2])},
    {"format": "csr", "indices": np.array([0, 1]), "indptr": np.array([0, 1, 9])},
    {"format": "csr", "indices": np.array([0, 1]), "indptr": np.array([0, 2, 1])},
    {"format": "csr", "indices": np.array([0, 1]), "indptr": np.array([-1, 1, 2])},
    {"format": "csr", "indices": np.array([0.0, 1]), "indptr": np.array([0, 1, 2])},
    {"format": "csr", "indices": np.array([0]), "indptr": np.array([0, 1, 2])},
    {"format": "csr", "shape": [1 << 60, 2], "indices": np.array([0, 1]), "indptr": np.arange(3)},
    {"format": "coo", "coords": [np.array([0, 9]), np.array([0, 1])]},
    {"format": "dia", "offsets": np.array([0, 1])},
    {"format": "_sputils", "offsets": 1},
    {"format": "csr"},
    {},
]


@pytest.mark.parametrize("parts", FORGED)
def test_forged_indices_are_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="scipy cannot make scipy.sparse.sparray of it"):
        decode_forged("scipy.sparse.sparray", {"shape": [2, 2], "data": np.ones(2), **parts})


def test_without_the_library_an_error_names_it_and_lazy_reads_give_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = write_store(tmp_path, encode_blobs("n", {"x": [sparse.csr_array(np.eye(2))]}))
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(
        DefinitionError, match=r"contains scipy.sparse.sparray, but scipy .*pip install scipy"
    ):
        reader.load()
    (unmade,) = reader.peek(reader.read_document(), "x")
    assert isinstance(unmade, Unmade)
    assert_identical(np.ones(2), unmade.parts["data"])
