"""How arrays are stored: compressed, in chunks, in shards; by default or as the user chose."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
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
    JobRunner,
    MultiNodeCheckpointManager,
    Node,
    Task,
    epoch_limiter,
)
from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.checkpoint.store import grid, layout
from jobrunner.checkpoint.store.chunk_bytes import decode_piece, encode_chunk, split_chunk
from jobrunner.checkpoint.store.compression import (
    Gzip,
    GzipSettings,
    Zstd,
    ZstdSettings,
    check_compressors,
    compress,
    decompress,
)
from jobrunner.checkpoint.store.grid import Grid, plan_grid
from jobrunner.define.array_options import ArrayOptions
from jobrunner.testing import assert_identical
from jobrunner.workspace.workspace import Workspace
from tests.blobs import Blobs
from tests.checkpoint.test_manager import run_group


class CountingFiles(PosixFiles):
    """Counts the bytes of chunks that are read."""

    nbytes = 0

    def read_into(self, path: str, target: memoryview | None, nbytes: int) -> tuple[int, int]:
        size, digest = super().read_into(path, target, nbytes)
        CountingFiles.nbytes += size if "/c" in path else 0
        return size, digest

    def read_span(self, path: str, start: int, nbytes: int) -> tuple[int, bytes]:
        size, data = super().read_span(path, start, nbytes)
        CountingFiles.nbytes += len(data) if "/c" in path else 0
        return size, data


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
        begun = self.manager.commits.begin(epoch, array_options={"a": options or {}})
        save = cloudpickle.loads(cloudpickle.dumps(begun))
        receipts = save.write({"a": self.workspace})
        self.manager.commits.commit(save, receipts, {})
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
    """Files of 2,000 bytes and pieces of 200, in place of 64 and 4 MiB."""
    monkeypatch.setattr(grid, "CHUNK_BYTES", 2_000)
    monkeypatch.setattr(grid, "PIECE_BYTES", 200)


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
    [None, "zstd", "blosc", ["gzip"], zarr.codecs.BloscCodec(cname="lz4")],
    ids=["none", "zstd", "blosc", "gzip", "codec"],
)
@pytest.mark.usefixtures("small")
def test_compressed_arrays_in_pieces_come_back_and_plain_zarr_reads_them(
    tmp_path: Path, compressors: Any
) -> None:
    rig = Rig(tmp_path, compressors=compressors)
    rig.save(0, **ARRAYS, deep={"x": [np.ones(500), "text"]}, data=bytes(5_000))
    rig.check(0)
    assert rig.document(0, "rows").shards is not None
    names = [c.to_dict()["name"] for c in rig.document(0, "small").compressors]
    assert names == ([] if compressors is None else [names[0]])
    rig.manager.run.end()


def test_strings_too_long_to_tell_from_a_bomb_are_not_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "TEXT_BYTES", 1_000)
    rig = Rig(tmp_path, compressors="zstd")
    dtype = np.dtypes.StringDType()
    rig.save(0, short=np.array(["é"] * 9, dtype), long=np.array(["", "é" * 500], dtype))
    rig.check(0)
    found = {name: bool(rig.document(0, name).compressors) for name in ("short", "long")}
    assert found == {"short": True, "long": False}
    rig.manager.run.end()


def test_compression_is_deterministic() -> None:
    (about,) = check_compressors(({"name": "gzip", "configuration": {}},), "here")
    compressed = compress(b"data", [about])
    assert compressed[4:8] == bytes(4)  # where gzip has the time
    assert decompress(compressed, [Gzip(GzipSettings(5))], 4) == b"data"


def test_large_arrays_are_files_of_64_mib_in_pieces_of_4() -> None:
    cut = plan_grid((100_000, 1_000, 125), 8, None)  # 100 GB
    assert cut.chunk_shape == (64, 1000, 125)
    assert cut.piece_shape == (4, 1000, 125)
    assert plan_grid((1_000_000,), 8, None).piece_shape is None
    assert plan_grid((1, 2_000_000), 8, None).piece_shape == (1, 1 << 19)
    # A row is longer than a piece.
    assert plan_grid((1000, 1_000_000), 8, None) == Grid(
        (1000, 1_000_000), (8, 1_000_000), (1, 1_000_000), None
    )


@given(st.integers((2 * grid.PIECE_BYTES >> 2) + 1, 1 << 26))
def test_arrays_in_pieces_have_little_padding(length: int) -> None:
    shape = plan_grid((length,), 4, None).piece_shape
    assert shape is not None
    (rows,) = shape
    assert 4 * rows <= grid.PIECE_BYTES
    assert -length % rows <= length / 16
    assert 4 * rows % 4096 == 0


@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    data=st.data(),
    compressors=st.sampled_from([(), [{"name": "zstd", "configuration": {"level": 1}}]]),
)
def test_any_chunks_and_shards_come_back(shape: list[int], data: Any, compressors: Any) -> None:
    pieces = data.draw(st.tuples(*(st.integers(1, 4) for _ in shape)))
    counts = data.draw(st.tuples(*(st.integers(1, 3) for _ in shape)))
    order = data.draw(st.one_of(st.none(), st.permutations(range(len(shape))).map(tuple)))
    chunk = tuple(a * b for a, b in zip(pieces, counts, strict=True))
    cut = Grid(tuple(shape), chunk, data.draw(st.sampled_from([None, pieces])), order)
    array = np.arange(np.prod(shape), dtype="u2").reshape(shape)
    found = np.zeros_like(array)
    memory, zstd = b"", Zstd(ZstdSettings(1, False))
    for corner in cut.corners():
        content = encode_chunk(array, cut, corner, compressors)
        stored = b"".join(map(bytes, content.buffers)) + bytes(content.padding_bytes)
        assert len(stored) == content.size
        memory += stored[: array[cut.part(corner)].nbytes]
        for piece, held in split_chunk(stored, cut, corner, content.pieces or [len(stored)]):
            whole = decode_piece(held, cut, array.dtype, [zstd] if compressors else ())
            target = found[piece.part]
            target[...] = whole[tuple(map(slice, target.shape))]
    assert np.array_equal(found, array)
    if cut.is_memory and not compressors:
        assert memory == array.tobytes()


@pytest.mark.usefixtures("small")
def test_chunks_and_shards_are_those_that_were_asked_for(rig: Rig) -> None:
    asked = {
        "cut": ArrayOptions(chunks=(7, 30)),
        "both": ArrayOptions(({"name": "gzip", "configuration": {}},), (5, 8), (10, 32)),
        "turned": ArrayOptions(chunks=(5, 8), shards=(10, 32)),
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
    assert (rig.document(0, "cut").chunks, rig.document(0, "cut").shards) == ((7, 30), None)
    for name in ("both", "turned"):
        assert (rig.document(0, name).chunks, rig.document(0, name).shards) == ((5, 8), (10, 32))
    assert len(list((rig.path / "a.0" / "cut").glob("c.*"))) == 8 * 4


@pytest.mark.parametrize("name", ["rows", "fortran", "long rows", "cube"])
@pytest.mark.parametrize("compressors", [None, "zstd"])
@pytest.mark.usefixtures("small")
def test_a_part_is_read_by_its_pieces_and_verified(
    tmp_path: Path, name: str, compressors: Any
) -> None:
    rig = Rig(tmp_path, compressors=compressors)
    array = ARRAYS[name]
    rig.save(0, w=array)
    reader = rig.manager.loader.readers(rig.manager.record(0))["a"]
    for axis, length in enumerate(array.shape):
        for start, stop in ((0, length), (length // 3, 2 * length // 3), (1, 1)):
            part = reader.load_slice("w", axis, start, stop)
            assert_identical(part.copy(), array.take(range(start, stop), axis))
    rig.manager.run.end()


def test_a_part_of_a_large_array_reads_little_more_than_the_part(rig: Rig) -> None:
    array = np.arange(4 << 20, dtype="f8").reshape(-1, 256)  # 32 MiB
    rig.save(0, w=array)
    assert len(rig.stored(0)) == 1
    CountingFiles.nbytes = 0
    part = rig.manager.loader.readers(rig.manager.record(0))["a"].load_slice("w", 0, 3_000, 5_000)
    assert np.array_equal(part, array[3_000:5_000])
    assert part.nbytes <= CountingFiles.nbytes <= part.nbytes + 2 * (4 << 20)


def test_plain_zarr_reads_one_piece_of_a_large_file(rig: Rig) -> None:
    array = np.arange(4 << 20, dtype="f8").reshape(-1, 256)
    rig.save(0, w=array)

    class CountingStore(zarr.storage.LocalStore):
        nbytes = 0

        async def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
            found = await super().get(key, *args, **kwargs)
            CountingStore.nbytes += 0 if found is None else len(found)
            return found

    store = CountingStore(rig.path / "a.0" / "w", read_only=True)
    assert np.array_equal(zarr.open_array(store, mode="r")[5_000], array[5_000])
    assert CountingStore.nbytes < 5 << 20


@pytest.mark.parametrize("compressors", [None, "zstd"])
@pytest.mark.usefixtures("small")
def test_every_read_of_a_piece_finds_a_flipped_bit(tmp_path: Path, compressors: Any) -> None:
    rig = Rig(tmp_path, compressors=compressors)
    rig.save(0, w=ARRAYS["rows"])
    file = rig.stored(0)[0]
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    reader = rig.manager.loader.readers(rig.manager.record(0))["a"]
    with pytest.raises(CheckpointCorruptError, match=r"c\.0\.0 is not what was written"):
        reader.load()
    with pytest.raises(CheckpointCorruptError, match=r"c\.0\.0 is not what was written"):
        reader.load_slice("w", 0, 0, 300)
    file.write_bytes(content[:-1])
    with pytest.raises(CheckpointCorruptError, match=r"expected \d+ bytes, found \d+"):
        reader.load_slice("w", 0, 0, 1)
    rig.manager.run.end()


@pytest.mark.parametrize("compressors", [None, "zstd"])
def test_unchanged_pieces_are_linked_with_their_checksums(tmp_path: Path, compressors: Any) -> None:
    rig = Rig(tmp_path, compressors=compressors)
    array = np.random.default_rng(1).random(2 << 20)
    rig.save(0, w=array)
    assert rig.save(1).linked_bytes > 12 << 20
    part = rig.manager.loader.readers(rig.manager.record(1))["a"].load_slice(
        "w", 0, 1_000_000, 1_000_010
    )
    assert np.array_equal(part, array[1_000_000:1_000_010])
    rig.check(1)
    rig.manager.run.end()


def test_a_store_without_newer_features_has_the_older_format(rig: Rig) -> None:
    rig.save(0, w=np.arange(3))
    rig.save(1, {"w": ArrayOptions(chunks=(1,), shards=(2,))})
    formats = [
        rig.manager.loader.readers(rig.manager.record(e))["a"].read_manifest().format
        for e in (0, 1)
    ]
    assert formats == [1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compressors": 3}, r"compressors must be names \('zstd'\) or Zarr codecs"),
        ({"compressors": [["zstd"]]}, "compressors must be names"),
        ({"chunks": 0}, "chunks must be an int >= 1 for each axis"),
        ({"chunks": (2, "x")}, "chunks must be an int >= 1 for each axis"),
        ({"chunks": True}, "chunks must be an int >= 1 for each axis"),
        ({"shards": 4}, "requires chunks"),
        ({"chunks": (2, 3), "shards": (4, 7)}, "a multiple of chunks"),
        ({"chunks": (2, 3), "shards": 4}, "a multiple of chunks"),
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
        ("zstandard", "'zstandard' is none of the compressors that every reader"),
        ("crc32c", "is none of the compressors"),
        ({"name": "zstd", "configuration": {"lever": 3}}, "does not accept the settings"),
        ({"name": "blosc", "configuration": {"cname": "x"}}, "does not accept the settings"),
    ],
)
def test_a_compressor_that_zarr_does_not_know_is_refused_before_anything_runs(
    tmp_path: Path, compressors: Any, message: str
) -> None:
    with pytest.raises(DefinitionError, match=message):
        MultiNodeCheckpointManager(tmp_path, compressors=compressors)
    with Job("j") as job, Node("a"):
        with job.init_group:
            Task(lambda: 0, outputs=Blob("w", compressors=compressors))
        epoch_limiter(job, 1)
    runner = JobRunner(job, MultiNodeCheckpointManager(tmp_path))
    with pytest.raises(DefinitionError, match=f"Blob 'w' of node 'a': .*{message}"):
        runner.plan_resume()


@pytest.mark.parametrize(
    ("value", "found"),
    [(np.zeros(4), "an array of 1 axes"), ({"x": np.zeros((2, 2))}, "1 axes|inside a container")],
)
def test_chunks_that_do_not_fit_the_blob_are_refused_before_epoch_1(
    rig: Rig, value: Any, found: str
) -> None:
    with pytest.raises(DefinitionError, match=f"'a', blob 'w': chunks=.*{found}"):
        rig.save(0, {"w": ArrayOptions(chunks=(2, 2))}, w=value)


def test_a_blob_can_opt_out_of_the_jobs_compression(tmp_path: Path) -> None:
    rig = Rig(tmp_path, compressors="zstd")
    rig.save(0, {"plain": ArrayOptions(())}, plain=np.zeros(10_000), other=np.zeros(10_000))
    sizes = {file.parent.name: file.stat().st_size for file in rig.stored(0)}
    assert sizes["plain"] == 80_000 > 1_000 > sizes["other"]
    rig.check(0)
    rig.manager.run.end()


def test_a_plan_says_how_blobs_are_stored() -> None:
    with Job("j") as job, Node("a"):
        with job.init_group:
            Task(lambda: 0, outputs=Blob("w", chunks=8, compressors="zstd"))
            Task(lambda: 0, outputs="v")
        epoch_limiter(job, 1)
    zstd = {"name": "zstd", "configuration": {}}
    assert job.compile().array_options == {"a": {"w": ArrayOptions((zstd,), (8,))}}
    with Job("k") as job, Node("a"):
        Task(lambda: 0, outputs=Blob("w", chunks=8))
        epoch_limiter(job, 1)
    with pytest.raises(
        DefinitionError, match="with checkpoint options, but .* is not checkpointed"
    ):
        job.compile()
