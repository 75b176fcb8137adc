"""SciPy's sparse arrays and matrices come back as they were, without pickle."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jobrunner import CheckpointError, DefinitionError
from jobrunner.checkpoint import Unmade, encode_blobs
from jobrunner.testing import assert_identical
from tests.sampling import examples
from tests.stores import decode_forged, write_store, written_and_read

sparse = pytest.importorskip("scipy.sparse")

FORMATS = ("csr", "csc", "bsr", "coo", "dia")
PARTS = ("data", "indices", "indptr", "offsets", "coords")


def assert_same(expected: Any, found: Any) -> None:
    assert type(found) is type(expected)
    assert (found.shape, found.dtype, found.nnz) == (expected.shape, expected.dtype, expected.nnz)
    for name in PARTS:
        assert_identical(getattr(expected, name, None), getattr(found, name, None), name)


@st.composite
def matrices(draw: Any) -> Any:
    dtype = draw(st.sampled_from(["f8", "f4", "c16", "i2", "u8", "?"]))
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    dense = draw(hnp.arrays(dtype, shape, elements=st.integers(0, 1)))
    cls = getattr(sparse, draw(st.sampled_from(["csr", "coo"])) + "_array")
    matrix = cls(dense)
    if matrix.format == "coo" and draw(st.booleans()):  # with an item twice
        twice = [np.concatenate([part, part]) for part in (matrix.data, *matrix.coords)]
        matrix = cls((twice[0], tuple(twice[1:])), shape=shape)
    kind = draw(st.sampled_from(["array", "matrix"]))
    form = draw(st.sampled_from(FORMATS))
    return getattr(sparse, f"{form}_{kind}")(matrix)


@given(matrices())
@settings(max_examples=examples(25))
def test_any_sparse_matrix_comes_back_as_it_was(matrix: Any) -> None:
    assert_same(matrix, written_and_read(matrix))


def with_long_indices() -> Any:
    matrix = sparse.csr_array(np.eye(3))
    matrix.indices, matrix.indptr = matrix.indices.astype("i8"), matrix.indptr.astype("i8")
    return matrix


def with_spare_items() -> Any:
    matrix = sparse.csr_array((np.ones(5), np.arange(5), np.array([0, 2, 3])), shape=(2, 5))
    matrix.data, matrix.indices = np.ones(9), np.arange(9)
    return matrix


UNUSUAL = {
    "long indices": with_long_indices,
    "spare items": with_spare_items,
    "unsorted": lambda: sparse.csr_array(
        (np.ones(2), np.array([2, 0]), np.array([0, 2])), shape=(1, 3)
    ),
    "blocks": lambda: sparse.bsr_array(np.arange(24.0).reshape(4, 6), blocksize=(2, 3)),
    "three axes": lambda: sparse.coo_array(np.arange(8).reshape(2, 2, 2)),
    "one axis": lambda: sparse.csr_array(np.array([0.0, 1, 0, 2])),
    "empty": lambda: sparse.csc_matrix((0, 3), dtype="f4"),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_ones_come_back_as_they_were(name: str) -> None:
    matrix = UNUSUAL[name]()
    assert_same(matrix, written_and_read(matrix))


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
    manifest = reader.read_document()
    outline = reader.outline(manifest, "x")
    assert repr(outline).startswith(
        "[scipy.sparse.sparray({'format': 'csr', 'shape': [2, 2], 'data'"
    )
    assert "'indices': int32[2]" in repr(outline)
    assert_same(sparse.csr_array(np.eye(2)), reader.peek(manifest, "x")[0])
    monkeypatch.setitem(sys.modules, "scipy.sparse", None)
    with pytest.raises(
        DefinitionError, match=r"contains scipy.sparse.sparray, but scipy .*pip install scipy"
    ):
        reader.load()
    (parts,) = reader.peek(manifest, "x")
    assert isinstance(parts, Unmade)
    assert_identical(np.ones(2), parts.parts["data"])
