"""What is asked of an object store, asked of servers that speak as S3's, Google's and Azure's do."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from jobrunner import CheckpointWriteError, KeepLast, MultiNodeCheckpointManager
from jobrunner.checkpoint.storage.object_store import ObjectFiles
from jobrunner.testing import FaultyObjects

sys.path.insert(0, str(Path(__file__).parents[2] / "faults"))
from object_life import go_on, live
from object_servers import AzureServer, GoogleServer, S3Server

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


@pytest.fixture(params=["files", "memory", "s3", "gs", "az"])
def files(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectFiles]:
    if request.param == "files":
        yield FaultyObjects("s3://bucket/runs/k", tmp_path / "objects")
        return
    if request.param == "memory":
        yield ObjectFiles(f"memory://{uuid.uuid4().hex}")
        return
    with contextlib.closing(start(request.param, tmp_path)) as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield ObjectFiles(f"{server.url}/runs/k")


def test_what_is_put_is_read(files: ObjectFiles) -> None:
    path = f"{files.root}/d/x"
    assert files.write(path, [b"abc", b"", b"de"], 3) == files.digest(b"abcde\0\0\0")
    assert files.read(path) == b"abcde\0\0\0"
    files.overwrite(path, bytes(range(100)))
    assert files.read(path) == bytes(range(100))
    assert files.read_span(path, 7, 5) == (100, bytes(range(7, 12)))
    assert files.read_span(path, 95, 10) == (100, bytes(range(95, 100)))
    assert files.read_span(path, 100, 5) == (100, b"")
    target = bytearray(100)
    digest = files.digest(bytes(range(100)))
    assert files.read_into(path, memoryview(target), 100) == (100, digest)
    assert target == bytes(range(100))
    assert files.read_into(path, None, 99) == (100, 0)
    files.write(f"{files.root}/d/empty", [])
    assert files.read(f"{files.root}/d/empty") == b""
    assert abs(files.modified_seconds(path) - time.time()) < 600


def test_what_is_not_there_is_told(files: ObjectFiles) -> None:
    path = f"{files.root}/no"
    for call in (files.read, files.modified_seconds):
        with pytest.raises(FileNotFoundError) as caught:
            call(path)
        assert caught.value.filename == path
    assert files.read_if_there(path) is None
    assert not files.is_taken(path)
    assert not files.is_directory(files.root)
    assert files.list_names(path) == []
    files.remove_tree(path)
    with pytest.raises(FileNotFoundError):
        files.rename(path, f"{files.root}/other")
    with pytest.raises(OSError, match="no"):
        files.locate(path)
    with contextlib.suppress(FileNotFoundError):
        files.remove_file(path)


def test_of_many_who_create_an_object_one_succeeds(files: ObjectFiles) -> None:
    files.prove_creation(f"{files.root}/_runs")
    path = f"{files.root}/_log/1"
    won = []

    def create(i: int) -> None:
        if files.create_whole(path, b"%d" % i, ""):
            won.append(b"%d" % i)

    threads = [threading.Thread(target=create, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [files.read(path)]
    assert files.create_whole(path, won[0], "")  # asked again, as after an answer that was lost


def test_names_of_every_kind_are_listed_copied_and_removed(files: ObjectFiles) -> None:
    root = f"{files.root}/names"
    for name in NAMES:
        files.write(f"{root}/{name}/zarr.json", [name.encode()])
    assert sorted(files.list_names(root)) == sorted(NAMES)
    assert sorted(files.walk(root)) == sorted(
        (f"{name}/zarr.json", len(name.encode())) for name in NAMES
    )
    assert files.is_taken(f"{root}/a:0.1")
    assert not files.is_taken(f"{root}/a:0.")
    for name in NAMES:
        source, target = f"{root}/{name}/zarr.json", f"{root}/{name}/c"
        assert files.link(source, target, len(name.encode()))
        assert not files.link(source, f"{target}2", 99)
        assert not files.is_taken(f"{target}2")
        files.rename(target, f"{target}3")
        assert not files.is_taken(target)
        assert files.read(f"{target}3") == name.encode()
    assert not files.link(f"{root}/no", f"{root}/target", 1)
    files.remove_tree(f"{root}/a:0.1")
    assert sorted(files.list_names(root)) == sorted(NAMES[1:])
    files.remove_tree(root)
    assert not files.is_taken(root)


def test_long_objects_are_put_in_parts(files: ObjectFiles) -> None:
    path, data = f"{files.root}/long", np.random.default_rng(0).bytes(17 << 20)
    digest = files.write(path, [data[:7], memoryview(data)[7:]])
    assert files.read_into(path, None, len(data)) == (len(data), digest)
    assert files.link(path, f"{path}.2", len(data))
    assert files.read(f"{path}.2") == data


@pytest.mark.parametrize(
    "files",
    [
        "files",
        "memory",
        "s3",
        *(pytest.param(name, marks=pytest.mark.nightly) for name in ("gs", "az")),
    ],
    indirect=True,
)
def test_more_objects_than_are_listed_at_once(files: ObjectFiles) -> None:
    paths = [f"{files.root}/many/{i}/x" for i in range(1003)]
    assert list(files.each(lambda path: files.write(path, [b"1"]), paths)) == 1003 * [
        files.digest(b"1")
    ]
    assert len(files.list_names(f"{files.root}/many")) == 1003
    files.remove_tree(f"{files.root}/many")
    assert not files.is_taken(f"{files.root}/many")


def test_a_directory_is_written_pruned_and_gone_on_with(files: ObjectFiles) -> None:
    told: list[int] = []

    def manager(**options: Any) -> MultiNodeCheckpointManager:
        return MultiNodeCheckpointManager(files.root, files=files, **options)

    live(manager(keep=KeepLast(1)), told.append)
    assert told == [0, 1]
    assert manager().epochs() == [1]
    go_on(manager())
    array = manager().open(9)["a"]["w"]
    assert isinstance(array, zarr.Array)
    assert array[3] == 12


def test_a_bucket_that_is_not_there_is_named(files: ObjectFiles) -> None:
    if isinstance(files, FaultyObjects) or files.root.startswith("memory"):
        pytest.skip("has no buckets")
    scheme = files.root.partition("://")[0]
    manager = MultiNodeCheckpointManager(f"{scheme}://nowhere-at-all/k")
    with pytest.raises(CheckpointWriteError, match=r"no such bucket or container.*nowhere-at-all"):
        manager.run.start(["a"], {})
