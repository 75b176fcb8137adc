"""Any value of the types that can be saved comes back as it was."""

from __future__ import annotations

import collections
import tempfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jobrunner.checkpoint.node_capture import Encoding, encode_node
from jobrunner.checkpoint.store import layout
from jobrunner.testing import assert_identical
from jobrunner.workspace.workspace import Workspace
from tests.sampling import examples
from tests.stores import write_store

TEXTS = st.text(st.characters(exclude_categories=()), max_size=20)
DTYPES = (
    hnp.scalar_dtypes()
    | hnp.unicode_string_dtypes(max_len=5)
    | hnp.byte_string_dtypes(max_len=5)
    | hnp.nested_dtypes(max_itemsize=100)
).filter(lambda dtype: dtype.subdtype is None)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)


@st.composite
def arrays(draw: Any) -> np.ndarray[Any, Any]:
    array = draw(hnp.arrays(draw(DTYPES), draw(SHAPES)))
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    if array.ndim and draw(st.booleans()):
        array = array[draw(hnp.basic_indices(array.shape, allow_ellipsis=False))]
    return np.asarray(array)


KEYS = TEXTS | st.integers() | st.booleans() | st.tuples(st.integers(), TEXTS)
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | TEXTS
    | st.binary(max_size=2000) | arrays() | hnp.arrays(hnp.scalar_dtypes(), 1).map(lambda a: a[0])
    | st.lists(TEXTS, max_size=4).map(lambda texts: np.array(texts, object))
    | st.datetimes() | st.timedeltas() | st.decimals(allow_nan=False) | st.uuids()
    | st.sets(KEYS, max_size=4) | st.frozensets(KEYS, max_size=4)
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(TEXTS, inner, max_size=4).map(collections.OrderedDict)
    ),
    max_leaves=8,
)
NAMES = st.text(st.characters(exclude_characters="/"), min_size=1, max_size=8).filter(
    lambda name: name.isprintable() and name.strip() == name and name not in (".", "..")
)


ALIKE = arrays().map(lambda array: [np.roll(array, i).copy(order="K") for i in range(4)])


@given(
    st.dictionaries(NAMES, VALUES | ALIKE | ALIKE.map(lambda rows: rows * 2), max_size=4),
    st.lists(ALIKE, min_size=1, max_size=3),
    st.integers(1, 3) | st.just(layout.LEAST_ALIKE),
    st.integers(0, 2000),
)
@settings(max_examples=examples(60))
def test_any_blobs_come_back_whether_alike_ones_are_stacked_or_not(
    blobs: dict[str, Any], alike: list[Any], least: int, stack_bytes: int
) -> None:
    workspace = Workspace("n")
    rows = [row for rows in alike for row in rows]
    workspace.globals.update({f"w{i}": row for i, row in enumerate(rows)})
    workspace.globals.update(blobs)
    with tempfile.TemporaryDirectory() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "LEAST_ALIKE", least)
        patch.setattr(layout, "_STACK_BYTES", stack_bytes)
        reader = write_store(path, encode_node(Encoding(), "n", workspace, {}))
        reader.verify()
        assert_identical(workspace.globals, reader.load())
        for name, value in workspace.globals.items():
            assert_identical({name: value}, reader.load([name]))
