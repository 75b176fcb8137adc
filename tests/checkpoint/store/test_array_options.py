"""How arrays are stored: compressed, in chunks; by default or as the user chose."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
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
from jobrunner.checkpoint.store.store_reader import StoreReader
from jobrunner.define.array_options import ArrayOptions
from jobrunner.testing import assert_identical
from tests.saves import NodeRun

ZSTD = {"name": "zstd", "configuration": {"level": 0, "checksum": False}}


def reader_of(run: NodeRun, epoch: int = 0) -> StoreReader:
    return store_readers(run.manager.directory, run.manager.record(epoch))["a"]


def zarr_array(run: NodeRun, blob: str) -> Any:
    return zarr.open_array(run.path / "a.0" / blob, mode="r")


def check(run: NodeRun) -> None:
    """What is loaded, verified, and read by plain Zarr is what was saved."""
    run.check()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # young data types
        for name, value in run.blobs.items():
            if isinstance(value, np.ndarray):
                assert np.array_equal(zarr_array(run, name)[...], value)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 2,000 bytes in place of 16 MiB."""

    def plan(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
        return plan_chunks(shape, itemsize, 2_000)

    monkeypatch.setattr(layout, "plan_chunks", plan)


@pytest.fixture(params=[None, "zstd"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NodeRun]:
    """A run that does not compress, and one that does."""
    run = NodeRun(tmp_path / "k", compressors=request.param)
    yield run
    run.end()


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
    "long texts": np.array(["", "é" * 500], np.dtypes.StringDType()),
}


@pytest.mark.usefixtures("small")
def test_arrays_in_chunks_come_back_and_plain_zarr_reads_them(run: NodeRun) -> None:
    run.save(0, {**ARRAYS, "deep": {"x": [np.ones(500), "text"]}, "data": bytes(5_000)})
    check(run)
    assert zarr_array(run, "rows").chunks != zarr_array(run, "rows").shape
    is_compressed = {name: bool(zarr_array(run, name).compressors) for name in ARRAYS}
    is_chosen = bool(run.manager.run.encoding().default.compressors)
    assert is_compressed == {name: is_chosen and "texts" not in name for name in ARRAYS}


@pytest.mark.usefixtures("small")
def test_a_part_is_read_by_its_chunks_and_verified(run: NodeRun) -> None:
    run.save(0, {name: ARRAYS[name] for name in ("rows", "fortran", "long rows", "cube")})
    reader = reader_of(run)
    for name, array in run.blobs.items():
        for axis, length in enumerate(array.shape):
            for start, stop in ((0, length), (length // 3, 2 * length // 3), (1, 1)):
                part = reader.load_slice(name, axis, start, stop)
                assert_identical(part.copy(), array.take(range(start, stop), axis))
    trace = run.manager.directory.files.trace
    trace.clear()
    reader.load_slice("rows", 0, 0, 10)
    assert len([path for _, path in trace if "/c." in path]) == 1


@pytest.mark.usefixtures("small")
def test_every_read_of_a_chunk_finds_a_flipped_bit(run: NodeRun) -> None:
    run.save(0, {"w": ARRAYS["rows"]})
    file = run.path / "a.0" / "w" / "c.0.0"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    reader = reader_of(run)
    for read in (reader.load, lambda: reader.load_slice("w", 0, 0, 300)):
        with pytest.raises(CheckpointCorruptError, match=r"c\.0\.0 is not what was written"):
            read()
    file.write_bytes(content[:-1])
    with pytest.raises(CheckpointCorruptError, match="bytes"):
        reader.load_slice("w", 0, 0, 1)


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


def test_chunks_are_those_that_were_asked_for(node_run: NodeRun) -> None:
    asked = {"turned": ArrayOptions((ZSTD,), (5, 8)), "words": ArrayOptions(chunks=(3, 2))}
    turned = np.asfortranarray(np.arange(50 * 100.0).reshape(50, 100))
    words = np.array([["a", "bc", "def"]] * 5, np.dtypes.StringDType())
    node_run.save(0, {"turned": turned, "words": words}, options={"a": asked})
    check(node_run)
    assert zarr_array(node_run, "turned").chunks == (5, 8)


@pytest.mark.parametrize(
    ("value", "found"),
    [(np.zeros(4), "an array of 1 axes"), ({"x": np.zeros((2, 2))}, "1 axes|inside a container")],
)
def test_chunks_that_do_not_fit_the_blob_are_refused_before_epoch_1(
    node_run: NodeRun, value: Any, found: str
) -> None:
    with pytest.raises(DefinitionError, match=f"'a', blob 'w': chunks=.*{found}"):
        node_run.save(0, {"w": value}, options={"a": {"w": ArrayOptions(chunks=(2, 2))}})


SETTINGS = "does not accept the settings"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compressors": 3}, r"compressors must be a name \('zstd'\) or a Zarr codec"),
        ({"compressors": ["zstd", "zstd"]}, "expected one compressor"),
        ({"compressors": "blosc"}, "compressed by 'zstd', which every reader of Zarr has"),
        ({"compressors": {"name": "zstd", "configuration": {"lever": 3}}}, SETTINGS),
        ({"compressors": {"name": "zstd", "configuration": {"level": 99}}}, SETTINGS),
        ({"compressors": {"name": "zstd", "configuration": {"checksum": 1}}}, SETTINGS),
        ({"chunks": (2, "x")}, "chunks must be an int >= 1 for each axis"),
        ({"chunks": True}, "chunks must be an int >= 1 for each axis"),
        ({"compressors": "zstd", "transient": True}, "is not saved"),
    ],
)
def test_invalid_array_options_are_refused_before_anything_runs(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(DefinitionError, match=f"Blob 'w'.*{message}"):
        Blob("w", **options)
    if list(options) == ["compressors"]:
        with pytest.raises(DefinitionError, match=message):
            MultiNodeCheckpointManager(tmp_path, **options)


def test_options_of_a_blob_that_is_not_checkpointed_or_has_others_are_refused() -> None:
    with Job("j") as job, Node("a"):
        Task(lambda: 0, outputs=Blob("w", chunks=8))
        epoch_limiter(job, 1)
    with pytest.raises(DefinitionError, match="checkpoint options, but .* is not checkpointed"):
        job.compile()
    with Job("k") as job, Node("a"):
        with job.init_group:
            Task(lambda: 0, outputs=Blob("w", chunks=8))
        Task(lambda w: w, inputs="w", outputs=Blob("w", chunks=4))
        epoch_limiter(job, 1)
    with pytest.raises(DefinitionError, match="Declare them once"):
        job.compile()
