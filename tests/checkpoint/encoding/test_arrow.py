"""Arrow arrays and tables come back as they were, without pickle."""

from __future__ import annotations

import decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobrunner import CheckpointError, DefinitionError
from jobrunner.checkpoint import Decoder, encode_blobs
from tests.sampling import examples
from tests.stores import write_store, written_and_read

pa = pytest.importorskip("pyarrow")

INTEGERS = st.integers(0, 100)
LEAVES: list[tuple[Any, Any]] = [
    (pa.int8(), INTEGERS), (pa.uint64(), INTEGERS), (pa.float16(), st.floats(width=16).map(np.float16)),
    (pa.float64(), st.floats()), (pa.bool_(), st.booleans()), (pa.null(), st.none()),
    (pa.string(), st.text(max_size=4)), (pa.large_string(), st.text(max_size=4)),
    (pa.binary(), st.binary(max_size=4)), (pa.large_binary(), st.binary(max_size=4)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.date32(), INTEGERS), (pa.date64(), INTEGERS.map(lambda day: day * 86_400_000)),
    (pa.time32("ms"), INTEGERS), (pa.time64("ns"), INTEGERS), (pa.duration("us"), INTEGERS),
    (pa.timestamp("s"), INTEGERS), (pa.timestamp("ns", "Europe/Paris"), INTEGERS),
    (pa.decimal128(9, 2), INTEGERS.map(lambda i: decimal.Decimal(i).scaleb(-2))),
    (pa.decimal256(40, 0), INTEGERS.map(decimal.Decimal)),
    (pa.month_day_nano_interval(), INTEGERS.map(lambda i: (i, i + 1, i + 2))),
    (pa.dictionary(pa.int16(), pa.string(), ordered=True), st.text(max_size=2)),
]  # fmt: skip


def nested(inner: Any) -> Any:
    def lists(kind: Any, items: Any, cls: Any) -> Any:
        return cls(kind), st.lists(items | st.none(), max_size=3)

    return st.one_of(
        inner.map(lambda it: lists(*it, pa.list_)),
        inner.map(lambda it: lists(*it, pa.large_list)),
        inner.map(lambda it: (pa.list_(it[0], 2), st.lists(it[1], min_size=2, max_size=2))),
        st.tuples(inner, inner).map(
            lambda two: (
                pa.struct(
                    [pa.field("a", two[0][0]), pa.field("b", two[1][0], metadata={"k": "v"})]
                ),
                st.fixed_dictionaries({"a": two[0][1], "b": two[1][1]}),
            )
        ),
    )


KINDS = st.recursive(st.sampled_from(LEAVES), nested, max_leaves=3)


@st.composite
def arrays(draw: Any, kind: Any, items: Any, length: int) -> Any:
    around = draw(st.integers(0, 2))
    found = draw(
        st.lists(items | st.none(), min_size=length + 2 * around, max_size=length + 2 * around)
    )
    if pa.types.is_dictionary(kind):
        return pa.array(found, pa.string()).dictionary_encode().cast(kind)[around : around + length]
    return pa.array(found, kind)[around : around + length]


def assert_same(expected: Any, found: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, pa.Table | pa.RecordBatch):
        assert found.schema.equals(expected.schema, check_metadata=True)
        assert expected.num_rows == found.num_rows
        for one, other in zip(expected.columns, found.columns, strict=True):
            assert_same(one, other)
    elif isinstance(expected, pa.ChunkedArray):
        assert found.type == expected.type
        for one, other in zip(expected.chunks, found.chunks, strict=True):
            assert_same(one, other)
    else:
        assert found.type.equals(expected.type, check_metadata=True)
        assert repr(found.to_pylist()) == repr(expected.to_pylist())  # NaN is equal too
        assert found.null_count == expected.null_count


@given(st.data())
@settings(max_examples=examples(25))
def test_any_array_comes_back_as_it_was(data: Any) -> None:
    kind, items = data.draw(KINDS)
    lengths = data.draw(st.lists(st.integers(0, 4), max_size=2))
    chunks = [data.draw(arrays(kind, items, length)) for length in lengths]
    column = pa.chunked_array(chunks, type=kind)
    table = pa.table({"x": column, "y": column}).replace_schema_metadata({"k": b"\xff"})
    found = written_and_read([*chunks, column, table])
    for one, other in zip([*chunks, column, table], found, strict=True):
        assert_same(one, other)


def test_a_slice_of_a_batch_is_saved_without_the_rest() -> None:
    batch = pa.record_batch({"n": list(range(9999)), "text": ["é"] * 9999})
    blob = encode_blobs("n", {"x": batch[1:3]})["x"]
    assert sum(part.data.nbytes for part in blob.parts) < 200
    assert_same(batch[1:3], written_and_read(batch[1:3]))


def test_blobs_may_share_memory_of_arrow_which_cannot_change(tmp_path: Path) -> None:
    array = pa.array(np.arange(5.0))
    blobs = {"a": array, "b": array, "c": [array[1:]]}
    found = write_store(tmp_path, encode_blobs("n", blobs)).load()
    assert found == blobs


class Tagged(pa.ExtensionType):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(pa.int32(), "tests.tagged")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: Any, serialized: bytes) -> Any:
        raise AssertionError("code ran because of a name in a checkpoint")


NOT_EXACT = [
    (pa.ExtensionArray.from_storage(Tagged(), pa.array([1], pa.int32())), "an extension type"),
    (pa.array(["a"], pa.string_view()), "no codec for the Arrow type string_view"),
    (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8())), "no codec for the Arrow type map"),
    (pa.table({"a": [1]}).select([]), "rows but no columns"),
    (pa.Array.from_buffers(pa.date64(), 1, [None, pa.py_buffer(b"1234567\0")]), "it is not valid"),
]


@pytest.mark.parametrize(("value", "why"), NOT_EXACT)
def test_what_is_not_exact_is_refused_by_name(value: Any, why: str) -> None:
    with pytest.raises(DefinitionError, match=why):
        encode_blobs("n", {"x": [value]})


def decode_forged(name: str, parts: dict[str, Any]) -> Any:
    blob = encode_blobs("n", {"x": parts})["x"]
    node = {"$": name, "of": blob.tree}
    return Decoder(lambda i: blob.parts[i].data, where="Blob 'x'").decode(node)


def test_an_extension_type_in_a_checkpoint_calls_no_class() -> None:
    pa.register_extension_type(Tagged())
    try:
        schema = bytes(pa.schema([("x", Tagged())]).serialize())
        with pytest.raises(CheckpointError, match="has an extension type"):
            decode_forged("pyarrow.Table", {"schema": schema, "columns": []})
    finally:
        pa.unregister_extension_type("tests.tagged")


def type_bytes(kind: Any) -> bytes:
    return bytes(pa.schema([("", kind)]).serialize())


def forged(length: int, *buffers: Any, children: Any = ()) -> dict[str, Any]:
    return {"length": length, "buffers": list(buffers), "children": list(children)}


TEXT = np.array([0, 1], "i4").view("u1")
FORGED = [
    (pa.int64(), forged(9, None, np.zeros(16, "u1"))),
    (pa.int64(), forged(-1, None, np.zeros(16, "u1"))),
    (pa.int64(), forged(2, None, None)),
    (pa.int64(), forged(2, np.zeros(16, "u1"))),
    (pa.int64(), forged(90, np.ones(1, "u1"), np.zeros(720, "u1"))),
    (pa.int64(), forged(1, None, np.array(["address"], object))),
    (pa.string(), forged(1, None, np.array([0, 99], "i4").view("u1"), np.zeros(2, "u1"))),
    (pa.string(), forged(9, None, TEXT, np.zeros(2, "u1"))),
    (pa.string(), forged(1, None, TEXT, np.full(1, 255, "u1"))),
    (
        pa.list_(pa.int8()),
        forged(
            1,
            None,
            np.array([0, 99], "i4").view("u1"),
            children=[forged(1, None, np.zeros(1, "u1"))],
        ),
    ),
    (
        pa.dictionary(pa.int8(), pa.int8()),
        {
            "indices": forged(1, None, np.array([5], "u1")),
            "dictionary": forged(1, None, np.zeros(1, "u1")),
        },
    ),
    (pa.string_view(), forged(1)),
    (
        pa.struct([("a", pa.int8())]),
        forged(3, None, children=[forged(1, None, np.zeros(1, "u1"))]),
    ),
]


@pytest.mark.parametrize(("kind", "parts"), FORGED)
def test_forged_buffers_are_refused(kind: Any, parts: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="pyarrow cannot make pyarrow.Array of it"):
        decode_forged("pyarrow.Array", {"schema": type_bytes(kind), "columns": [[parts]]})


def test_a_forged_schema_is_refused() -> None:
    good = type_bytes(pa.int8())
    for data in (b"", b"x" * 100, good[:-9], good[:20] + b"\xff" * 8 + good[28:]):
        with pytest.raises(CheckpointError, match="pyarrow cannot make"):
            decode_forged("pyarrow.Table", {"schema": data, "columns": [[]]})
