"""What becomes of a node's blobs together: how they are stored, what they may share, which errors are told."""

from __future__ import annotations

import collections
import random
import uuid
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from jobrunner import CheckpointError, DefinitionError
from jobrunner.checkpoint import digest_blob, encode_blobs
from jobrunner.checkpoint.encoding.codecs import Codec
from jobrunner.checkpoint.store.store_reader import StoreReader
from jobrunner.testing import assert_identical
from tests.checkpoint.encoding import kinds_of_values as kinds
from tests.saves import NodeRun
from tests.stores import decode_forged, write_store


def save(directory: Path, blobs: dict[str, Any], **options: Any) -> StoreReader:
    return write_store(directory, encode_blobs("n", blobs, **options))


class Box:
    """A mutable object."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array


FRACTIONS = Codec(Fraction, Fraction.as_integer_ratio, lambda pair: Fraction(*pair), "fraction")


def test_blobs_that_share_memory_or_mutable_objects_are_refused_by_name() -> None:
    base, names = np.arange(10), ["a"]
    codecs = [Codec(Box, lambda box: box.array.copy(), Box, "box"), FRACTIONS]
    box, half = Box(np.arange(3)), Fraction(1, 2)
    for blobs, told in (
        ({"head": base[:6], "tail": base[5:]}, r"Node 'n'.*'head' and 'tail' share memory"),
        ({"b": base, "d": {"x": base.reshape(2, 5)}}, r"'b' and 'd/x' share memory"),
        ({"one": names, "two": {"deep": names}}, r"'one' and 'two' contain the same list"),
        ({"one": box, "two": [box]}, r"'one' and 'two' contain the same Box"),
    ):
        with pytest.raises(DefinitionError, match=told):
            encode_blobs("n", blobs, codecs)
    encode_blobs("n", {"even": base[::2], "odd": base[1::2], "empty": base[:0], "end": base[10:]})
    encode_blobs("n", {"one": half, "two": [half], "three": [box, box]}, codecs)


class Custom:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and self.value == other.value

    __hash__ = None


def contains_itself() -> list[Any]:
    loop: list[Any] = []
    loop.append({"again": loop})
    return loop


RECORDS = np.array([(1, 2.5)], [("n", ">i4"), ("x", "f8")])
# One of the dtypes that NumPy makes for its own tests, by the means that packages have.
FOREIGN = np._core._multiarray_umath._get_sfloat_dtype()(1.0)
NO_CODEC = "there is no codec for its type. Register a codec.*or pickle it, allow_pickle=True"
REFUSED = [
    *((type("Mine", (cls,), {})(), NO_CODEC) for cls in (dict, list, int, str)),
    *((value, NO_CODEC) for value in (Custom(1), Custom, save, uuid.SafeUUID.safe)),
    *((value, NO_CODEC) for value in (iter([1]), memoryview(b"abc"), random.SystemRandom())),
    ([1, {"a": Custom(1)}], f"item 1/a: .*Custom cannot be saved: {NO_CODEC}"),
    (np.array([1, Custom(1)], object), f"item 1/1: .*{NO_CODEC}"),
    (kinds.Odd(), "it inherits from dict"),
    (kinds.Reduced(), "its class has a __reduce__ of its own"),
    (NamedTuple("Nowhere", [("a", int)])(1), "could not find its class"),
    (collections.defaultdict(lambda: 1), "its default_factory is"),
    (kinds.nested(kinds.Frozen, 500), "containers are nested more than 150 deep"),
    (contains_itself(), "item 0/again: list cannot be saved: it contains itself"),
    (np.ma.masked_array(np.ones((1, 2))), "subclass of ndarray"),
    (RECORDS.view(np.recarray), "subclass of ndarray"),
    (RECORDS[0], "a record may lie in an array"),
    (np.array([(1, "a")], [("i", "i4"), ("o", "O")]), "holds Python objects"),
    (np.array(["a"], np.dtypes.StringDType(na_object=None)), "strings may be missing"),
    (np.zeros((2, 3), "V0"), "have no bytes; save its shape"),
    ([np.zeros((2, 3), [("a", "f4", (0,))])], "have no bytes; save its shape"),
    (np.arange(3.0).view(FOREIGN), "not one of NumPy's own"),
]


@pytest.mark.parametrize(("value", "why"), REFUSED)
def test_a_value_that_would_change_is_refused_by_name(value: Any, why: str) -> None:
    with pytest.raises(DefinitionError, match=rf"Node 'n'.*'x.*{why}"):
        encode_blobs("n", {"x": value})


@pytest.mark.parametrize(
    "value", [[1, 2], np.array(1.0), np.array([1, "a"], object)], ids=["list", "no axes", "objects"]
)
def test_a_part_that_no_other_number_of_nodes_could_load_is_refused(
    value: Any, node_run: NodeRun
) -> None:
    with pytest.raises(DefinitionError, match=r"Node 'a', blob 'p': partition=0 expects an array"):
        node_run.save(0, {"p": value}, partitions={"p": (0, ["a", "b"])})
    assert node_run.manager.epochs() == []


def test_a_digest_depends_on_the_fields_of_records_and_not_on_what_lies_between() -> None:
    dtype = np.dtype({"names": ["a"], "formats": ["<i4"], "offsets": [3], "itemsize": 11})
    digests = set()
    for value in (1, 2):
        for byte in (0, 255):
            records = np.full(2 * dtype.itemsize, byte, np.uint8).view(dtype)
            records["a"] = value
            digests.add((value, digest_blob(encode_blobs("n", {"x": records})["x"])))
    assert len(digests) == len({digest for _, digest in digests}) == 2


def test_a_long_tree_lies_in_a_file_of_its_own(tmp_path: Path) -> None:
    shared = {"step": 1, "losses": [i / 2 for i in range(1000)]}
    values = {
        "words": [f"word {i}" for i in range(20_000)],
        "records": [shared, *({"step": i, "notes": [i]} for i in range(5000)), shared],
    }
    reader = save(tmp_path, values)
    reader.verify()
    loaded = reader.load()
    assert_identical(values, loaded)
    assert loaded["records"][0] is loaded["records"][-1]
    assert (tmp_path / "n.0" / "zarr.json").stat().st_size < 20_000
    assert (tmp_path / "n.0" / "words" / "_tree" / "c.0").stat().st_size > 200_000
    assert reader.peek(reader.read_document(), "words") == values["words"]


def test_a_missing_codec_is_named(tmp_path: Path) -> None:
    reader = save(tmp_path, {"x": Fraction(1, 3)}, codecs=[FRACTIONS])
    with pytest.raises(DefinitionError, match=r"codec 'fraction', which is not registered"):
        reader.load()


def test_a_type_that_this_version_does_not_know_is_refused() -> None:
    with pytest.raises(DefinitionError, match="of kind 'os.path', which this version"):
        decode_forged("os.path", {})


def test_an_error_in_a_codecs_decode_is_not_reported_as_damage(tmp_path: Path) -> None:
    error = KeyError("v")

    def fail(value: object) -> object:
        raise error

    broken = Codec(Fraction, FRACTIONS.encode, fail, FRACTIONS.name)
    reader = save(tmp_path, {"x": Fraction(1, 3)}, codecs=[FRACTIONS])
    with pytest.raises(CheckpointError, match=r"Blob 'x'.*whole, but cannot be decoded") as caught:
        replace(reader, codecs=[broken]).load()
    assert type(caught.value) is CheckpointError
    assert caught.value.__cause__ is error
    assert_identical(replace(reader, codecs=[FRACTIONS]).load(), {"x": Fraction(1, 3)})


def test_a_later_format_is_not_reported_as_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.stores.STORE_FORMAT", 2)
    reader = save(tmp_path, {"x": 1})
    with pytest.raises(CheckpointError, match=r"format 2.*up to 1. Read it with a later") as caught:
        reader.load()
    assert type(caught.value) is CheckpointError


def test_pickles_are_written_and_read_only_when_allowed(tmp_path: Path) -> None:
    big_endian = np.arange(3).astype(">m8[s]")
    value = [Custom(1), {1, 2}, np.ma.masked_array([1, 2], [True, False]), big_endian]
    reader = save(tmp_path, {"x": value}, allow_pickle=True)
    with pytest.raises(DefinitionError, match="allow_pickle=True"):
        reader.load()
    loaded = replace(reader, allow_pickle=True).load()["x"]
    assert loaded[:2] == value[:2]
    assert loaded[2].mask.tolist() == [True, False]
    assert_identical(loaded[3], big_endian)
