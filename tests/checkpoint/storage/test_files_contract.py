"""The contract of `Files`: a file system, and object stores of S3's, Google's and Azure's kind."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import shutil
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from xxhash import xxh3_128_hexdigest

from jobrunner import (
    CheckpointCorruptError,
    CheckpointWriteError,
    KeepLast,
    MultiNodeCheckpointManager,
)
from jobrunner.checkpoint import Files
from jobrunner.checkpoint.storage.locations import files_of
from jobrunner.checkpoint.storage.object_files import ObjectFiles
from jobrunner.testing import FaultyObjects
from tests.object_servers import AzureServer, GoogleServer, S3Server
from tests.saves import NodeRun

NAMES = ["a:0.1", "%63", "a%25b", "w~!$&'()*+,;=@-", "ü", "a b"]


def start(scheme: str, tmp_path: Path) -> Any:
    if scheme == "az":
        program = shutil.which("azurite-blob")
        if program is None:
            pytest.skip("Azurite is not on the PATH: npm install azurite")
        return AzureServer(program)
    if importlib.util.find_spec("moto") is None:
        pytest.skip("moto is not installed: pip install 'dask-jobrunner[test]'")
    return S3Server() if scheme == "s3" else GoogleServer(tmp_path)


@dataclass
class Place:
    """Storage, and a directory in it that does not exist yet."""

    files: Files
    root: str

    def write(self, name: str, buffers: Sequence[bytes]) -> str:
        path = f"{self.root}/{name}"
        self.files.make_directories(os.path.dirname(path))
        return self.files.write(path, buffers)


SERVERS = ["s3", "gs", pytest.param("az", marks=pytest.mark.nightly)]


@pytest.fixture(params=["posix", "objects", "memory", *SERVERS])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """Files; objects in a directory, in memory, or in a server of this scheme."""
    if request.param == "posix":
        root = str(tmp_path / "k")
        yield Place(files_of(root), root)
    elif request.param == "objects":
        root = "s3://bucket/runs/k"
        yield Place(FaultyObjects(root, tmp_path / "objects"), root)
    elif request.param == "memory":
        root = f"memory://{uuid.uuid4().hex}"
        yield Place(ObjectFiles(root), root)
    else:
        with contextlib.closing(start(request.param, tmp_path)) as server:
            for name, value in server.environment.items():
                monkeypatch.setenv(name, value)
            root = f"{server.url}/runs/k"
            yield Place(ObjectFiles(root), root)


def test_written_bytes_are_read_back(place: Place) -> None:
    files, root = place.files, place.root
    path = f"{root}/d/x"
    assert place.write("d/x", [b"abc", b"", b"de"]) == xxh3_128_hexdigest(b"abcde")
    assert files.read(path) == b"abcde"
    assert files.is_writable(root)
    files.put(path, bytes(range(100)), durable=True)
    assert files.list_names(f"{root}/d") == ["x"]
    target = bytearray(100)
    digest = xxh3_128_hexdigest(bytes(range(100)))
    assert files.read_into(path, memoryview(target), 100) == (100, digest)
    assert target == bytes(range(100))
    assert files.read_into(path, memoryview(b""), 99) == (100, "")
    place.write("d/empty", [])
    assert files.read(f"{root}/d/empty") == b""


def test_a_document_that_is_too_long_is_not_read(place: Place) -> None:
    files, path = place.files, f"{place.root}/d/x"
    place.write("d/x", [b"abc"])
    assert files.read(path, 3) == b"abc"
    with pytest.raises(CheckpointCorruptError, match="/d/x is too long: it has 3 bytes") as caught:
        files.read(path, 2)
    assert caught.value.path == path


def test_missing_files_are_reported(place: Place) -> None:
    files, root = place.files, place.root
    path = f"{root}/no"
    assert files.read(path) is None
    assert not files.is_taken(path)
    assert not files.is_directory(root)
    assert files.list_names(path) == []
    files.remove_tree(path)
    with contextlib.suppress(FileNotFoundError):
        files.remove_file(path)


def test_of_many_writers_that_create_an_object_one_succeeds(place: Place) -> None:
    files, root = place.files, place.root
    files.make_directories(f"{root}/_runs")
    files.prove_creation(f"{root}/_runs")
    path = f"{root}/_log/1"
    files.make_directories(os.path.dirname(path))
    contents = [b"%d" % i for i in range(16)]
    with ThreadPoolExecutor(len(contents)) as pool:
        created = list(pool.map(partial(files.create, path), contents))
    assert created.count(True) == 1
    winner = contents[created.index(True)]
    assert files.read(path) == winner
    assert files.create(path, winner)  # asked again, as after an answer that was lost
    assert sorted(files.list_names(f"{root}/_log")) == ["1"]


def test_parts_are_appended_to_a_file(place: Place) -> None:
    files, path = place.files, f"{place.root}/d/x"
    files.make_directories(f"{place.root}/d")
    files.prove_appending(f"{place.root}/d")
    for _ in range(2):  # again, as after an answer that was lost
        files.write_at(path, 0, [b"ab", memoryview(b"c")], 8)
        assert files.read(path) == b"abc" + bytes(5)
    files.write_at(path, 3, [b"de"], 8)
    assert files.read(path) == b"abcde" + bytes(3)
    files.write_at(path, 2, [b"CDEF"], 8)  # again, with what has come since
    assert files.read(path) == b"abCDEF" + bytes(2)


def test_a_part_that_arrives_late_takes_nothing_away(s3: S3Server) -> None:
    root = f"{s3.url}/runs/k"

    class Late(ObjectFiles):
        """Somebody else's part arrives before its own."""

        def before(self, operation: str, path: str) -> None:
            if operation == "put":
                ObjectFiles(root).write_at(f"{root}/x", 2, [b"cd"], 4)

    ObjectFiles(root).write_at(f"{root}/x", 0, [b"ab"], 4)
    with pytest.raises(FileExistsError, match="another object is there now"):
        Late(root).write_at(f"{root}/x", 2, [b"c"], 4)
    assert ObjectFiles(root).read(f"{root}/x") == b"abcd"


def test_names_of_every_kind_are_listed_copied_and_removed(place: Place) -> None:
    files, root = place.files, place.root
    root = f"{root}/names"
    for name in NAMES:
        place.write(f"names/{name}/zarr.json", [name.encode()])
    assert sorted(files.list_names(root)) == sorted(NAMES)
    sizes = {f"{name}/zarr.json": len(name.encode()) for name in NAMES}
    assert dict(files.walk(root)) == sizes
    assert files.is_taken(f"{root}/a:0.1")
    assert not files.is_taken(f"{root}/a:0.")
    for name in NAMES:
        source, target = f"{root}/{name}/zarr.json", f"{root}/{name}/c"
        assert files.link(source, target, len(name.encode()))
        assert not files.link(source, f"{target}2", 99)
        assert not files.is_taken(f"{target}2")
        assert files.read(target) == name.encode()
    assert not files.link(f"{root}/no", f"{root}/target", 1)
    files.remove_tree(f"{root}/a:0.1")
    assert sorted(files.list_names(root)) == sorted(NAMES[1:])
    files.remove_tree(root)
    assert not files.is_taken(root)


def test_pickled_files_write_durably(place: Place) -> None:
    files, root = pickle.loads(pickle.dumps(place.files)), place.root
    assert files.reaches(root)
    place.write("before", [b"0"])
    with files.making_durable(root, ["a"]):
        place.write("a/b", [b"1"])
        files.sync_path(f"{root}/a/b")
    assert sorted(files.list_names(root)) == ["a", "before"]
    assert files.is_directory(f"{root}/a")


def test_a_directory_is_written_pruned_and_resumed_from(place: Place) -> None:
    files, root = place.files, place.root
    same = np.zeros(ObjectFiles.linked_bytes // 8)  # is linked, or copied by the store
    for first in (0, 2):
        run = NodeRun(root, files=files, keep=KeepLast(1))
        for epoch in (first, first + 1):
            run.save(epoch, {"w": np.arange(10.0) + epoch, "same": same})
        run.end()
        assert run.manager.epochs() == [first + 1]
        run.check(first + 1)
    array = MultiNodeCheckpointManager(root, files=files).open(3)["a"]["w"]
    assert isinstance(array, zarr.Array)
    assert array[3] == 6


@pytest.mark.parametrize("place", SERVERS, indirect=True)
def test_a_bucket_that_is_not_there_is_named(place: Place) -> None:
    scheme = place.root.partition("://")[0]
    what = "container" if scheme == "az" else "bucket"
    manager = MultiNodeCheckpointManager(f"{scheme}://nowhere-at-all/k")
    with pytest.raises(CheckpointWriteError, match=f"there is no {what} 'nowhere-at-all'"):
        manager.run.start(["a"], {})
