"""Every type of blob comes back from disk as it was, and plain Zarr reads the arrays."""

from __future__ import annotations

import collections
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from jobrunner import CheckpointError, DefinitionError
from jobrunner.checkpoint.encoding import encode_blobs
from jobrunner.checkpoint.encoding.codecs import Codec
from jobrunner.checkpoint.encoding.dtypes import dtype_from_spec
from jobrunner.checkpoint.store.store_reader import StoreReader
from jobrunner.testing import assert_identical
from tests.stores import write_store


def save(directory: Path, blobs: dict[str, Any], **options: Any) -> StoreReader:
    return write_store(directory, encode_blobs("n", blobs, **options))


def round_trip(directory: Path, value: Any, **options: Any) -> Any:
    reader = save(directory, {"x": value}, **options)
    reader.verify()
    return replace(reader, **options).load()["x"]


PLAIN_DTYPES = [
    *("?", "b", "B", "<i2", ">i2", "<u4", ">u8", "<f2", ">f4", "<f8", ">c8", "<c16", "S7", "<U9", ">U9"),
    *("V5", "<M8[ns]", ">M8[D]", "M8[25s]", "M8", "<m8[us]", ">m8[3h]"),
]  # fmt: skip
# What Zarr has no type for is there as raw bytes of the same size.
RAW_DTYPES = [
    np.dtype(np.longdouble), np.dtype(np.clongdouble),
    np.dtype([("a", ">f4"), ("b", "<i2")]),
    np.dtype([("a", "<f4", (2, 2)), ("b", [("c", "i1"), ("d", "<U3")])]),
    np.dtype({"names": ["a"], "formats": ["<i4"], "offsets": [3], "itemsize": 11}),
    np.dtype([(("title", "a"), "<i4")]),
]  # fmt: skip
STRUCTURED = [
    np.dtype([("a", "<f4"), ("b", "<i8"), ("c", "<U4"), ("d", "S3"), ("e", "<M8[ns]")]),
]
HOLLOW = [np.dtype("V0"), np.dtype([]), np.dtype([("a", "f4", (0,))])]
SHAPES = [(), (7,), (3, 0, 2), (2, 3, 4)]


def filled(dtype: Any, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Arbitrary bits where any are allowed, and in every field."""
    dtype = np.dtype(dtype)
    array = np.zeros(shape, dtype)
    if dtype.names:
        for name in dtype.names:
            array[name] = filled(dtype[name].base, array[name].shape)
    elif dtype.kind == "U":
        array[...] = "ß" * (dtype.itemsize // 4)
    elif dtype.kind == "b" or dtype.char in "gG":
        array[...] = np.arange(array.size).reshape(shape) % 3
    elif array.size:
        noise = np.random.default_rng(0).integers(0, 256, array.nbytes, np.uint8)
        array = noise.view(dtype).reshape(shape)
    return array


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "dtype", [*map(np.dtype, PLAIN_DTYPES), *RAW_DTYPES, *STRUCTURED], ids=lambda d: str(d)[:30]
)
def test_an_array_comes_back_as_it_was_and_plain_zarr_reads_it(
    tmp_path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> None:
    array = filled(dtype, shape)
    assert_identical(array, round_trip(tmp_path, array))
    found = read_with_zarr(tmp_path, "x")
    if found.dtype != dtype:  # as the array's attribute says
        found = np.frombuffer(found.astype(found.dtype.newbyteorder(dtype.str[0])).tobytes(), dtype)
    assert_identical(array, found.reshape(shape))


@pytest.mark.parametrize("dtype", HOLLOW, ids=str)
def test_items_of_no_bytes_are_refused(dtype: np.dtype[Any]) -> None:
    with pytest.raises(DefinitionError, match="'x'.*have no bytes; save its shape"):
        encode_blobs("n", {"x": np.zeros((2, 3), dtype)})


def read_with_zarr(directory: Path, path: str) -> np.ndarray[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # young data types
        group = zarr.open_group(str(directory / "n.0"), mode="r")
        found: np.ndarray[Any, Any] = np.asarray(group[path][...])  # type: ignore[index]
    return found


CUBE = np.arange(60, dtype="<i4").reshape(3, 4, 5)
LAYOUTS = {
    "fortran": np.asfortranarray(CUBE),
    "transposed": CUBE.transpose(1, 2, 0),
    "reversed": CUBE[::-1, :, ::-1],
    "strided": CUBE[:, ::2, 1::3],
    "strided and transposed": CUBE.transpose(2, 0, 1)[::2],
    "broadcast": np.broadcast_to(CUBE[0], (3, 4, 5)),
    "read-only": np.frombuffer(bytes(CUBE), "<i4"),
    "one axis of length 1": np.ones((4, 1, 3))[:, :, ::2],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_contiguous_array_comes_back_in_its_memory_order(tmp_path: Path, name: str) -> None:
    array = LAYOUTS[name]
    loaded = round_trip(tmp_path, array)
    assert_identical(array, loaded)
    assert np.array_equal(read_with_zarr(tmp_path, "x"), array)
    assert loaded.flags.writeable
    if name == "transposed":
        assert loaded.strides == array.strides


TEXTS = ["", "a", "é\0x", "longer than anything that would lie inline", "日本"]


@pytest.mark.parametrize(
    "array",
    [
        np.array(TEXTS, np.dtypes.StringDType()),
        np.array("zero axes", np.dtypes.StringDType()),
        np.array([], np.dtypes.StringDType()),
        np.array(TEXTS, object),
        np.asfortranarray(np.array([*TEXTS, "x"], object).reshape(2, 3)),
        np.array([], object),
        np.array("x", object),
        np.array(["lone \ud800", "\0"], object),
        np.array([["a", None], [0.5, ("b", 2**70)]], object),
    ],
    ids=lambda a: f"{a.dtype}-{a.shape}",
)
def test_texts_come_back_as_they_were(tmp_path: Path, array: np.ndarray[Any, Any]) -> None:
    assert_identical(array, round_trip(tmp_path, array))


def test_small_values_are_attributes_that_plain_zarr_reads(tmp_path: Path) -> None:
    save(tmp_path, {"lr": 0.1, "name": "é", "sizes": [1, 2], "none": None, "w": np.ones(2)})
    attributes = zarr.open_group(str(tmp_path / "n.0"), mode="r").attrs.asdict()
    about = attributes.pop("/jobrunner")
    assert attributes == {"lr": 0.1, "name": "é", "sizes": [1, 2], "none": None}
    assert (about["format"], about["node"], about["epoch"], about["run"]) == (1, "n", 0, "r")


def test_nested_containers_are_groups_that_plain_zarr_walks(tmp_path: Path) -> None:
    save(tmp_path, {"params": {"layer": [np.zeros(2), np.ones(3)], "b": np.ones(1), "n": 5}})
    group = zarr.open_group(str(tmp_path / "n.0"), mode="r")
    names = sorted(name for name, _ in group.members(max_depth=None))
    assert names == [
        "params",
        "params/b",
        "params/layer",
        "params/layer/0",
        "params/layer/1",
    ]
    assert group["params/layer/1"][...].tolist() == [1, 1, 1]


def test_blobs_that_share_memory_are_refused_by_name() -> None:
    base = np.arange(10)
    with pytest.raises(DefinitionError, match=r"Node 'n'.*'head' and 'tail' share memory"):
        encode_blobs("n", {"head": base[:6], "tail": base[5:]})
    with pytest.raises(DefinitionError, match=r"'b' and 'd/x' share memory"):
        encode_blobs("n", {"b": base, "d": {"x": base.reshape(2, 5)}})
    names = ["a"]
    with pytest.raises(DefinitionError, match=r"'one' and 'two' contain the same list"):
        encode_blobs("n", {"one": names, "two": {"deep": names}})
    encode_blobs("n", {"even": base[::2], "odd": base[1::2], "empty": base[:0], "end": base[10:]})


def test_all_blobs_are_named_at_once_whatever_is_wrong_with_them() -> None:
    base = np.arange(3)
    blobs = {"keyed": {(1, Custom): 1}} | {f"b{i}": Custom(i) for i in range(100)}
    with pytest.raises(DefinitionError) as caught:
        encode_blobs("n", {**blobs, "one": base, "two": base[1:]})
    lines = str(caught.value).splitlines()
    assert "blob 'keyed', item key 0/1: type cannot be saved" in lines[0]
    assert "blob 'b0': " in lines[1]
    assert ["register_codec" in line for line in lines] == [True] + [False] * 50
    assert lines[50] == "52 more blobs cannot be saved."
    with pytest.raises(DefinitionError, match=r"'b0'.*\n.*'one' and 'two' share memory"):
        encode_blobs("n", {"b0": blobs["b0"], "one": base, "two": base[1:]})


class Custom:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


class MyList(list[int]):
    pass


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (Custom(1), "Custom cannot be saved: there is no codec"),
        ([1, {"a": Custom(1)}], r"item 1/a: .*Custom cannot be saved"),
        (MyList([1]), "MyList cannot be saved"),
        (np.array(["a"]).view(np.char.chararray), "subclass of ndarray"),
        (np.ma.masked_array(np.ones((1, 2))), "subclass of ndarray"),
        (np.array([(1, "a")], [("i", "i4"), ("o", "O")]), "holds Python objects"),
        (np.array(["a"], np.dtypes.StringDType(na_object=None)), "strings may be missing"),
        (collections.defaultdict(lambda: 1), "default_factory is"),
        ({Custom}, "item 0: type cannot be saved"),
        (open, "cannot be saved"),
    ],
    ids=lambda v: str(v)[:30],
)
def test_an_unsupported_value_is_an_error_that_names_the_ways_out(value: Any, why: str) -> None:
    with pytest.raises(DefinitionError, match=why) as caught:
        encode_blobs("trainer:0", {"model": value})
    for words in ("'trainer:0'", "'model'", "transient=True", "allow_pickle=True"):
        assert words in str(caught.value)
    is_refused = re.search(r"numpy.ndarray cannot", str(caught.value))  # by register_codec
    assert ("register_codec(" in str(caught.value)) is (is_refused is None)


def test_a_container_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    where = "blob 'x', item 0/again: list cannot be saved: it contains itself"
    with pytest.raises(DefinitionError, match=where):
        encode_blobs("n", {"x": loop})


FRACTIONS = Codec(Fraction, lambda f: f.as_integer_ratio(), lambda t: Fraction(*t), "fraction")


def test_a_missing_codec_is_named(tmp_path: Path) -> None:
    reader = save(tmp_path, {"x": Fraction(1, 3)}, codecs=[FRACTIONS])
    with pytest.raises(DefinitionError, match=r"codec 'fraction', which is not registered"):
        reader.load()


@pytest.mark.parametrize("error", [KeyError("v"), AttributeError("v"), RuntimeError("no")], ids=str)
def test_an_error_in_a_codecs_decode_is_not_reported_as_damage(
    tmp_path: Path, error: Exception
) -> None:
    def fail(value: object) -> object:
        raise error

    broken = Codec(Fraction, FRACTIONS.encode, fail, FRACTIONS.name)
    reader = save(tmp_path, {"x": Fraction(1, 3)}, codecs=[FRACTIONS])
    with pytest.raises(CheckpointError, match=r"Blob 'x'.*whole, but cannot be decoded") as caught:
        replace(reader, codecs=[broken]).load()
    assert type(caught.value) is CheckpointError
    assert caught.value.__cause__ is error
    assert_identical(replace(reader, codecs=[FRACTIONS]).load(), {"x": Fraction(1, 3)})


def test_a_dtype_that_the_platform_lacks_is_not_reported_as_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lack(spec: str) -> np.dtype[Any]:
        return dtype_from_spec("<f32")

    reader = save(tmp_path, {"x": np.zeros(3)})
    monkeypatch.setattr("jobrunner.checkpoint.store.array_reader.dtype_from_spec", lack)
    with pytest.raises(CheckpointError, match="not understood") as caught:
        reader.load()
    assert type(caught.value) is CheckpointError


def test_a_later_format_is_not_reported_as_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobrunner.checkpoint.store.layout.STORE_FORMAT", 2)
    reader = save(tmp_path, {"x": 1})
    with pytest.raises(CheckpointError, match=r"format 2.*up to 1. Read it with a later") as caught:
        reader.load()
    assert type(caught.value) is CheckpointError


def test_pickles_are_written_and_read_only_when_allowed(tmp_path: Path) -> None:
    value = [Custom(1), {1, 2}, np.ma.masked_array([1, 2], [True, False])]
    reader = save(tmp_path, {"x": value}, allow_pickle=True)
    with pytest.raises(DefinitionError, match="allow_pickle=True"):
        reader.load()
    loaded = replace(reader, allow_pickle=True).load()["x"]
    assert loaded[:2] == value[:2]
    assert loaded[2].mask.tolist() == [True, False]


def test_saving_arrays_imports_neither_zarr_nor_torch() -> None:
    code = (
        "import sys, numpy as np\n"
        "from jobrunner.checkpoint.encoding import encode_blobs\n"
        "import jobrunner.checkpoint\n"
        "encode_blobs('n', {'x': np.ones(3)})\n"
        "print([m for m in ('zarr', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_dtype_of_another_package_is_refused_by_the_blobs_name() -> None:
    # One of those that NumPy makes for its own tests, by the means that packages have.
    dtype = np._core._multiarray_umath._get_sfloat_dtype()(1.0)  # type: ignore[attr-defined]
    array = np.arange(3.0).view(dtype)
    for blobs in ({"w": array}, {"w": {"layers": [array]}}):
        with pytest.raises(DefinitionError, match=r"blob 'w'.*not one of NumPy's own"):
            encode_blobs("n", blobs)


class Box:
    """A mutable object."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array


def test_a_mutable_object_of_a_codec_in_two_blobs_is_refused() -> None:
    codecs = [
        Codec(Box, lambda box: box.array.copy(), Box, "box"),
        Codec(Fraction, Fraction.as_integer_ratio, lambda pair: Fraction(*pair), "fraction"),
    ]
    box, half = Box(np.arange(3)), Fraction(1, 2)
    with pytest.raises(DefinitionError, match=r"'one' and 'two' contain the same Box"):
        encode_blobs("n", {"one": box, "two": [box]}, codecs)
    assert len(encode_blobs("n", {"one": half, "two": [half]}, codecs)) == 2
    assert len(encode_blobs("n", {"one": [box, box]}, codecs)) == 1
