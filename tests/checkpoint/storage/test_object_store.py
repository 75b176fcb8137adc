"""Checkpoints in an object store: what it copies, what is refused, commands, requests at once."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import dask
import numpy as np
import pytest
import zarr
from click.testing import CliRunner, Result
from obstore.store import LocalStore

from jobrunner import (
    CheckpointCorruptError,
    CheckpointWriteError,
    CopyTo,
    DefinitionError,
    KeepLast,
    MultiNodeCheckpointManager,
)
from jobrunner.checkpoint import inspect_directory
from jobrunner.checkpoint.storage import object_files
from jobrunner.checkpoint.storage.object_files import ObjectFiles, open_store
from jobrunner.checkpoint.storage.parallel import run_all
from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.cli.command import main
from jobrunner.cli.show import describe_checkpoint
from jobrunner.positions import Position
from jobrunner.testing import FaultyObjects, assert_identical
from jobrunner.workspace.workspace import Workspace
from tests.object_servers import S3Server
from tests.saves import NodeRun, save_epoch

BIG = 600_000  # items, so that the store copies them
PATH = "s3://bucket/runs/k"
VALUES = {
    "w": np.arange(6.0).reshape(2, 3),
    "fixed": np.arange(float(BIG)),
    "text": np.array(["a", "ü"], np.dtypes.StringDType()),
    "empty": np.zeros((0, 3)),
    "nested": {"layer": [np.ones(3), {"k": (1, None)}]},
}


@pytest.fixture
def objects(tmp_path: Path) -> Path:
    """The directory that stands for a store."""
    return tmp_path / "objects"


@pytest.fixture
def memory() -> str:
    """A URL in memory, with epochs 0 and 1."""
    url = f"memory://{uuid.uuid4().hex}"
    run = NodeRun(url, files=ObjectFiles(url))
    for epoch in (0, 1):
        run.save(epoch, {**VALUES, "epoch": epoch})
    run.end()
    return url


def invoke(*args: object) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args])


def test_unchanged_chunks_are_copied_by_the_store(objects: Path) -> None:
    run = NodeRun(PATH, files=FaultyObjects(PATH, objects))
    assert run.save(0, VALUES).linked_bytes == 0
    assert run.save(1).linked_bytes == 8 * BIG
    run.check(1)
    # Each is a store by itself.
    (objects / "a.0/fixed/c.0").unlink()
    run.manager.verify(1)
    with pytest.raises(CheckpointCorruptError, match=r"a\.0/fixed/c\.0 is missing"):
        run.manager.verify(0)
    # Nothing to copy any more: it is written.
    (objects / "a.1/fixed/c.0").write_bytes(b"cut")
    assert run.save(2).linked_bytes == 0
    run.manager.verify(2)
    run.end()


def test_a_request_that_is_made_again_after_its_answer_was_lost_counts_once(objects: Path) -> None:
    class Twice(FaultyObjects):
        def _create(self, path: str, data: bytes) -> None:
            super()._create(path, data)
            super()._create(path, data)

        def _replace(self, path: str, data: bytes, version: Any) -> None:
            super()._replace(path, data, version)
            super()._replace(path, data, version)

    files, path = Twice(PATH, objects), f"{PATH}/x"
    files.prove_creation(PATH)
    files.prove_appending(PATH)
    assert files.create(path, b"mine")
    assert files.create(path, b"mine")
    assert not files.create(path, b"theirs")
    files.write_at(path, 4, [b" too"], 8)
    assert files.read(path) == b"mine too"


def test_a_store_that_drops_connections_is_asked_again_for_the_time_configured(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_files, "_LONGEST_PAUSE_SECONDS", 0.05)
    files = ObjectFiles(f"{s3.url}/k")
    files.put(f"{files.root}/x", b"x")
    s3.drops = 12
    assert files.list_names(files.root) == ["x"]
    s3.drops = 10**6
    started = time.monotonic()
    with (
        dask.config.set({"jobrunner.checkpoint.retry-seconds": 0.2}),
        pytest.raises(OSError, match=r"retry_timeout: ?200ms"),
    ):
        ObjectFiles(f"{s3.url}/other").list_names(f"{s3.url}/other")
    assert time.monotonic() - started < 10


def test_a_store_that_replaces_any_object_is_refused(objects: Path) -> None:
    class Careless(FaultyObjects):
        def _create(self, path: str, data: bytes) -> None:
            self.put(path, data)

        def _replace(self, path: str, data: bytes, version: Any) -> None:
            self.put(path, data)

    files = Careless(PATH, objects)
    with pytest.raises(CheckpointWriteError, match="conditional put"):
        MultiNodeCheckpointManager(PATH, files=files).run.start(["a"], {})
    assert not (objects / "_log").exists()
    assert list(objects.rglob("heartbeat")) == []
    with pytest.raises(OSError, match="If-Match is missing"):
        files.prove_appending(f"{PATH}/_runs")


def test_errors_of_the_store_are_oserrors_that_name_the_object(tmp_path: Path) -> None:
    files = FaultyObjects("s3://b", tmp_path)
    broken = ObjectFiles("s3://b", lambda _: LocalStore(str(tmp_path / "none")))
    for call, path, message in (
        (files.remove_file, "s3://b/no", "no such object"),
        (files.read, "s3://other/x", "is not below s3://b"),
        (broken.read, "s3://b/x", "Unable to canonicalize"),
    ):
        with pytest.raises(OSError, match=message) as caught:
            call(path)
        assert caught.value.filename == path


def test_a_url_is_a_path() -> None:
    for url, path in (
        ("s3://bucket/runs/k/", "s3://bucket/runs/k"),
        ("az://container/a:0", "az://container/a:0"),
        ("memory:///a", "memory://a"),
    ):
        assert MultiNodeCheckpointManager(url).path == path


FORM = "expected .*bucket/name/name"


@pytest.mark.parametrize(
    ("url", "files", "message"),
    [
        *((url, None, FORM) for url in ("s3://", "s3://b//x", "s3://b/../c", "gs://b/%41")),
        ("s3://b/a b", None, FORM),
        ("http://host/x", None, r"s3://, gs://, az://, memory://.*not in http"),
        ("s3://b/x", PosixFiles(), r"files=PosixFiles cannot access s3://b/x"),
        ("runs", ObjectFiles("s3://b"), "files=ObjectFiles cannot access"),
    ],
)
def test_a_url_that_cannot_be_a_directory_is_refused(url: str, files: Any, message: str) -> None:
    with pytest.raises(DefinitionError, match=message):
        MultiNodeCheckpointManager(url, files=files)


def test_without_obstore_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DefinitionError, match=r"pip install 'dask-jobrunner\[object\]'"):
        MultiNodeCheckpointManager("s3://b/x")


def test_commands_read_a_url_and_copy_to_a_directory_and_back(memory: str, tmp_path: Path) -> None:
    listed = json.loads(invoke("ls", memory, "--json").stdout)
    assert [epoch["epoch"] for epoch in listed["epochs"]] == [0, 1]
    assert "4.58 MiB" in invoke("info", memory, 1).stdout
    assert "epoch" in invoke("diff", f"{memory}@0", "@1").stdout
    back = f"memory://{uuid.uuid4().hex}"
    for command in (
        *(["verify", memory], ["fsck", memory]),
        *(["copy", memory, 1, tmp_path / "here"], ["copy", tmp_path / "here", 1, back]),
    ):
        assert invoke(*command).exit_code == 0
    assert "There is no directory 'memory://nothing'" in invoke("ls", "memory://nothing").stderr
    for path in (tmp_path / "here", back):
        manager = MultiNodeCheckpointManager(path)
        manager.verify(1)
        assert_identical(VALUES["fixed"], manager.open(1)["a"].load("fixed"))
    again = MultiNodeCheckpointManager(tmp_path / "new", load_path=back)
    assert again.origin.snapshot().epochs == [Position(1)]


def test_stores_are_uploaded(memory: str, tmp_path: Path) -> None:
    manager = MultiNodeCheckpointManager(memory)
    url = f"memory://{uuid.uuid4().hex}"
    for target in (str(tmp_path / "copies"), url):
        for _ in range(2):  # again: what is there is replaced
            for task in CopyTo(target).build(1, manager).tasks():
                task.fn()
    for store in (tmp_path / "copies", zarr.storage.ObjectStore(open_store(url))):
        assert zarr.open_group(store, path="a.1", mode="r").attrs["epoch"] == 1
    with pytest.raises(DefinitionError, match="into that same directory"):
        CopyTo(f"{memory}/below").build(1, manager)


# --- requests that are made at once

NODES = [f"n{i}" for i in range(8)]


class Gate(FaultyObjects):
    """Lets requests of a kind go on only when `count` of them are waiting."""

    wanted = ""
    pattern = ""

    def expect(self, operation: str, pattern: str, count: int = len(NODES)) -> None:
        self.wanted, self.pattern = operation, pattern
        self._barrier = threading.Barrier(count)
        self.passed = 0

    def before(self, operation: str, path: str) -> None:
        super().before(operation, path)
        if operation == self.wanted and re.search(self.pattern, path):
            self._barrier.wait(timeout=20)
            with self._lock:
                self.passed += 1


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate("s3://bucket/k", tmp_path / "objects")


def save_nodes(manager: MultiNodeCheckpointManager, epoch: int) -> None:
    workspaces = {node: Workspace(node) for node in NODES}
    for workspace in workspaces.values():
        workspace.globals.update(fixed=VALUES["fixed"], epoch=epoch)
    save_epoch(manager, epoch, workspaces)


def write_log(gate: Gate, epochs: int) -> None:
    manager = MultiNodeCheckpointManager(gate.root, files=gate)
    manager.run.start([], {})
    for epoch in range(epochs):
        save_epoch(manager, epoch)
    manager.run.end()


def test_requests_for_all_nodes_run_at_once(gate: Gate) -> None:
    manager = MultiNodeCheckpointManager(gate.root, files=gate, keep=KeepLast(1))
    manager.run.start(NODES, {})
    save_nodes(manager, 0)
    gate.expect("put", r"\.\d+/zarr.json")
    save_nodes(manager, 1)
    assert gate.passed == 8
    gate.expect("copy", r"zarr\.json$")  # hidden, and then deleted
    assert manager.retention.sweeper.drain()
    assert gate.passed % 8 == 0
    manager.run.end()
    gate.expect("get", r"\.\d+/zarr.json")
    describe_checkpoint(manager.directory, Position(1))
    assert gate.passed == 8
    assert {finding.status for finding in inspect_directory(manager.directory)} == {"live"}
    gate.expect("get", r"\.\d+/zarr.json", 4)
    manager.verify(1)
    assert gate.passed == 8


def test_work_far_away_is_shared_by_threads_and_its_first_error_is_raised() -> None:
    met = threading.Barrier(ObjectFiles.threads, timeout=30)
    run_all([met.wait] * ObjectFiles.threads, ObjectFiles.threads, 0)
    with pytest.raises(ZeroDivisionError):
        run_all([lambda: 1 // 0, met.abort], ObjectFiles.threads, 0)


def test_of_a_long_log_many_entries_are_read_at_once(gate: Gate) -> None:
    write_log(gate, 9)
    gate.expect("get", r"_log/00000000(0[6-9]|1[0-3])\.json")  # after two and four
    assert MultiNodeCheckpointManager(gate.root, files=gate).epochs() == list(range(9))
    assert gate.passed == 8


def test_an_entry_that_is_missing_among_those_read_at_once_is_named(gate: Gate) -> None:
    write_log(gate, 4)
    for removed, message in ((3, r": expected .*0003\.json"), (4, ", although")):
        gate.remove_file(f"{gate.root}/_log/000000000{removed}.json")
        with pytest.raises(CheckpointCorruptError, match=rf"Entry 3 .* is missing{message}"):
            MultiNodeCheckpointManager(gate.root, files=gate).epochs()
