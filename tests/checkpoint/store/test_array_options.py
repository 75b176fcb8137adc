"""How arrays are stored: compressed, in chunks; by default or as the user chose."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from jobrunner import (
    Blob,
    CheckpointCorruptError,
    DefinitionError,
    Job,
    MultiNodeCheckpointManager,
    Node,
    Task,
    epoch_limiter,
)
from jobrunner.checkpoint.opened import store_readers
from jobrunner.checkpoint.storage import DOCUMENT_BYTES
from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.checkpoint.store import layout
from jobrunner.checkpoint.store.chunks import (
    CHUNK_BYTES,
    Grid,
    Zstd,
    compress,
    decode_chunk,
    decompress,
    encode_chunk,
    padding_is_last,
    plan_chunks,
)
from jobrunner.define.array_options import ArrayOptions
from jobrunner.positions import Position
from jobrunner.testing import assert_identical
from jobrunner.workspace.workspace import Workspace
from tests.blobs import Blobs
from tests.checkpoint.test_manager import run_group
from tests.saves import Save

ZSTD = {"name": "zstd", "configuration": {"level": 0, "checksum": False}}


class CountingFiles(PosixFiles):
    """Counts the bytes of chunks that are read."""

    nbytes = 0

    def read_into(self, path: str, target: memoryview, nbytes: int) -> tuple[int, str]:
        size, digest = super().read_into(path, target, nbytes)
        CountingFiles.nbytes += size if "/c" in path else 0
        return size, digest

    def read(self, path: str, most: int = DOCUMENT_BYTES) -> bytes | None:
        data = super().read(path, most)
        CountingFiles.nbytes += len(data or b"") if "/c" in path else 0
        return data


class Rig:
    def __init__(self, path: Path, **options: Any) -> None:
        self.path = path / "runs"
        self.manager = MultiNodeCheckpointManager(self.path, files=CountingFiles(), **options)
        self.manager.run.start(["a"], {})
        self.workspace = Workspace("a")

    def save(
        self, epoch: int, options: Mapping[str, ArrayOptions] | None = None, **blobs: Any
    ) -> Any:
        self.blobs = Blobs(self.workspace)
        self.blobs.update(blobs)
        save = Save(self.manager, Position.of(epoch), options={"a": options or {}})
        save.send()
        receipts = save.write({"a": self.workspace})
        save.commit(receipts)
        return receipts["a"]

    def check(self, epoch: int) -> None:
        """What is loaded, verified, and read by plain Zarr is what was saved."""
        self.manager.verify(epoch)
        again = {"a": Workspace("a")}
        run_group(self.manager.load(epoch), again)
        assert_identical({**self.blobs}, {**Blobs(again["a"])})
        for name, value in self.blobs.items():
            if isinstance(value, np.ndarray):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    read = self.document(epoch, name)[...]
                assert np.array_equal(read, value)

    def document(self, epoch: int, blob: str) -> Any:
        return zarr.open_array(self.path / f"a.{epoch}" / blob, mode="r")

    def stored(self, epoch: int) -> list[Path]:
        return sorted((self.path / f"a.{epoch}").glob("**/c*"))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.manager.run.end()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 2,000 bytes in place of 16 MiB."""

    def plan(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
        return plan_chunks(shape, itemsize, 2_000)

    monkeypatch.setattr(layout, "plan_chunks", plan)


ARRAYS = {
    "rows": np.arange(3_000).reshape(300, 10),
    "fortran": np.asfortranarray(np.arange(3_000).reshape(10, 300)),
    "long rows": np.arange(3_000).reshape(3, 1000),
    "cube": np.arange(4_000.0).reshape(4, 5, 200)[:, ::-1],
    "odd": np.arange(997, dtype="u1").reshape(1, 997),
    "swapped": np.arange(300, dtype=">f4"),
    "small": np.arange(3),
    "none": np.zeros((3, 0)),
    "scalar": np.array(7),
    "texts": np.array([str(i) * 7 for i in range(300)], np.dtypes.StringDType()),
}


@pytest.mark.parametrize(
    "compressors",
    [None, "zstd", ["zstd"], zarr.codecs.ZstdCodec(level=3)],
    ids=["none", "zstd", "list", "codec"],
)
@pytest.mark.usefixtures("small")
def test_compressed_arrays_in_chunks_come_back_and_plain_zarr_reads_them(
    tmp_path: Path, compressors: Any
) -> None:
    rig = Rig(tmp_path, compressors=compressors)
    rig.save(0, **ARRAYS, deep={"x": [np.ones(500), "text"]}, data=bytes(5_000))
    rig.check(0)
    assert rig.document(0, "rows").chunks != rig.document(0, "rows").shape
    names = [c.to_dict()["name"] for c in rig.document(0, "small").compressors]
    assert names == ([] if compressors is None else ["zstd"])
    rig.manager.run.end()


def test_strings_are_not_compressed(tmp_path: Path) -> None:
    rig = Rig(tmp_path, compressors="zstd")
    dtype = np.dtypes.StringDType()
    rig.save(0, short=np.array(["é"] * 9, dtype), long=np.array(["", "é" * 500], dtype))
    rig.check(0)
    assert not any(rig.document(0, name).compressors for name in ("short", "long"))
    rig.manager.run.end()


def test_no_more_is_decompressed_than_expected() -> None:
    for size in (1, 255, 256, 300, 65_791, 65_792, 1 << 20):
        data = compress(b"a" * size, Zstd(1))
        assert decompress(data, size) == b"a" * size
        with pytest.raises(ValueError, match="zstd cannot decompress it"):
            decompress(data, size - 1)


@given(st.integers((CHUNK_BYTES >> 2) + 1, 1 << 26))
def test_arrays_in_chunks_have_little_padding(length: int) -> None:
    (rows,) = plan_chunks((length,), 4)
    assert 4 * rows <= CHUNK_BYTES
    assert -length % rows <= length / 16


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    data=st.data(),
    zstd=st.sampled_from([None, Zstd(1)]),
)
def test_any_chunks_come_back(shape: list[int], data: Any, zstd: Zstd | None) -> None:
    chunk = data.draw(st.tuples(*(st.integers(1, 9) for _ in shape)))
    order = data.draw(st.one_of(st.none(), st.permutations(range(len(shape))).map(tuple)))
    cut = Grid(tuple(shape), chunk, order)
    array = np.arange(np.prod(shape), dtype="u2").reshape(shape)
    found = np.zeros_like(array)
    for number, (corner, _) in enumerate(cut.chunks):
        assert cut.number_at(corner) == number
        stored = b"".join(encode_chunk(array, cut, corner, zstd))
        part = array[cut.part(corner)]
        if zstd is None and padding_is_last(part.shape, chunk):
            assert stored.startswith(part.tobytes())
        whole = decode_chunk(stored, cut, array.dtype, zstd)
        target = found[cut.part(corner)]
        target[...] = whole[tuple(map(slice, target.shape))]
    assert np.array_equal(found, array)


@pytest.mark.usefixtures("small")
def test_chunks_are_those_that_were_asked_for(rig: Rig) -> None:
    asked = {
        "cut": ArrayOptions(chunks=(7, 30)),
        "both": ArrayOptions((ZSTD,), (5, 8)),
        "turned": ArrayOptions(chunks=(5, 8)),
        "words": ArrayOptions(chunks=(3, 2)),
    }
    square = np.arange(50 * 100.0).reshape(50, 100)
    rig.save(
        0,
        asked,
        cut=square,
        both=square + 1,
        turned=np.asfortranarray(square),
        words=np.array([["a", "bc", "def"]] * 5, np.dtypes.StringDType()),
    )
    rig.check(0)
    assert rig.document(0, "cut").chunks == (7, 30)
    for name in ("both", "turned"):
        assert rig.document(0, name).chunks == (5, 8)
    assert len(list((rig.path / "a.0" / "cut").glob("c.*"))) == 8 * 4


@pytest.mark.parametrize("name", ["rows", "fortran", "long rows", "cube"])
@pytest.mark.parametrize("compressors", [None, "zstd"])
@pytest.mark.usefixtures("small")
def test_a_part_is_read_by_its_chunks_and_verified(
    tmp_path: Path, name: str, compressors: Any
) -> None:
    rig = Rig(tmp_path, compressors=compressors)
    array = ARRAYS[name]
    rig.save(0, w=array)
    reader = store_readers(rig.manager.directory, rig.manager.record(0))["a"]
    for axis, length in enumerate(array.shape):
        for start, stop in ((0, length), (length // 3, 2 * length // 3), (1, 1)):
            part = reader.load_slice("w", axis, start, stop)
            assert_identical(part.copy(), array.take(range(start, stop), axis))
    rig.manager.run.end()


def test_a_part_of_a_large_array_reads_little_more_than_the_part(rig: Rig) -> None:
    array = np.arange(4 << 20, dtype="f8").reshape(-1, 256)  # 32 MiB
    rig.save(0, w=array)
    assert len(rig.stored(0)) == 2
    CountingFiles.nbytes = 0
    part = store_readers(rig.manager.directory, rig.manager.record(0))["a"].load_slice(
        "w", 0, 3_000, 5_000
    )
    assert np.array_equal(part, array[3_000:5_000])
    assert part.nbytes <= CountingFiles.nbytes <= 16 << 20


@pytest.mark.parametrize("compressors", [None, "zstd"])
@pytest.mark.usefixtures("small")
def test_every_read_of_a_chunk_finds_a_flipped_bit(tmp_path: Path, compressors: Any) -> None:
    rig = Rig(tmp_path, compressors=compressors)
    rig.save(0, w=ARRAYS["rows"])
    file = rig.stored(0)[0]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    reader = store_readers(rig.manager.directory, rig.manager.record(0))["a"]
    with pytest.raises(CheckpointCorruptError, match=r"c\.0\.0 is not what was written"):
        reader.load()
    with pytest.raises(CheckpointCorruptError, match=r"c\.0\.0 is not what was written"):
        reader.load_slice("w", 0, 0, 300)
    file.write_bytes(content[:-1])
    with pytest.raises(
        CheckpointCorruptError, match=r"expected [\d,]+ bytes|is too long|found \d+"
    ):
        reader.load_slice("w", 0, 0, 1)
    rig.manager.run.end()


@pytest.mark.parametrize("compressors", [None, "zstd"])
def test_unchanged_chunks_are_linked_with_their_digests(tmp_path: Path, compressors: Any) -> None:
    rig = Rig(tmp_path, compressors=compressors)
    array = np.random.default_rng(1).random(2 << 20)
    rig.save(0, w=array)
    assert rig.save(1).linked_bytes > 12 << 20
    part = store_readers(rig.manager.directory, rig.manager.record(1))["a"].load_slice(
        "w", 0, 1_000_000, 1_000_010
    )
    assert np.array_equal(part, array[1_000_000:1_000_010])
    rig.check(1)
    rig.manager.run.end()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compressors": 3}, r"compressors must be a name \('zstd'\) or a Zarr codec"),
        ({"compressors": [["zstd"]]}, "compressors must be a name"),
        ({"compressors": ["zstd", "zstd"]}, "expected one compressor"),
        ({"chunks": 0}, "chunks must be an int >= 1 for each axis"),
        ({"chunks": (2, "x")}, "chunks must be an int >= 1 for each axis"),
        ({"chunks": True}, "chunks must be an int >= 1 for each axis"),
        ({"compressors": "zstd", "transient": True}, "is not saved"),
    ],
)
def test_invalid_array_options_are_refused_by_the_blob(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DefinitionError, match=f"Blob 'w'.*{message}"):
        Blob("w", **options)


@pytest.mark.parametrize(
    ("compressors", "message"),
    [
        ("blosc", "compressed by 'zstd', which every reader of Zarr has, not by 'blosc'"),
        ({"name": "zstd", "configuration": {"lever": 3}}, "does not accept the settings"),
        ({"name": "zstd", "configuration": {"level": 99}}, "does not accept the settings"),
        ({"name": "zstd", "configuration": {"checksum": 1}}, "does not accept the settings"),
    ],
)
def test_another_compressor_is_refused_before_anything_runs(
    tmp_path: Path, compressors: Any, message: str
) -> None:
    with pytest.raises(DefinitionError, match=message):
        MultiNodeCheckpointManager(tmp_path, compressors=compressors)
    with pytest.raises(DefinitionError, match=f"Blob 'w': .*{message}"):
        Blob("w", compressors=compressors)


@pytest.mark.parametrize(
    ("value", "found"),
    [(np.zeros(4), "an array of 1 axes"), ({"x": np.zeros((2, 2))}, "1 axes|inside a container")],
)
def test_chunks_that_do_not_fit_the_blob_are_refused_before_epoch_1(
    rig: Rig, value: Any, found: str
) -> None:
    with pytest.raises(DefinitionError, match=f"'a', blob 'w': chunks=.*{found}"):
        rig.save(0, {"w": ArrayOptions(chunks=(2, 2))}, w=value)


def test_a_plan_says_how_blobs_are_stored() -> None:
    with Job("j") as job, Node("a"):
        with job.init_group:
            Task(lambda: 0, outputs=Blob("w", chunks=8, compressors="zstd"))
            Task(lambda: 0, outputs="v")
        epoch_limiter(job, 1)
    assert job.compile().array_options == {"a": {"w": ArrayOptions((ZSTD,), (8,))}}
    with Job("k") as job, Node("a"):
        Task(lambda: 0, outputs=Blob("w", chunks=8))
        epoch_limiter(job, 1)
    with pytest.raises(
        DefinitionError, match="with checkpoint options, but .* is not checkpointed"
    ):
        job.compile()
