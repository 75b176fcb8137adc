"""Checkpoints in an object store: one life of a directory, one process, and what it refuses."""

from __future__ import annotations

import errno
import importlib.util
import json
import re
import threading
import uuid
from collections.abc import Iterator
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
    CheckpointError,
    CheckpointWriteError,
    CommitConflictError,
    CopyTo,
    DefinitionError,
    KeepBest,
    KeepLast,
    MultiNodeCheckpointManager,
)
from jobrunner import checkpoint as package
from jobrunner.checkpoint import inspect_directory
from jobrunner.checkpoint.log.heartbeat import Patience
from jobrunner.checkpoint.storage.locations import absolute_path
from jobrunner.checkpoint.storage.object_files import ObjectFiles, open_store
from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.cli.command import main
from jobrunner.cli.show import describe_checkpoint, list_epochs
from jobrunner.positions import Position
from jobrunner.testing import FaultyObjects, assert_identical
from jobrunner.workspace.workspace import Workspace
from tests.saves import NodeRun, save_epoch

BIG = 600_000  # items, so that the store copies them
PATH = "s3://bucket/runs/k"
VALUES = {
    "w": np.arange(6.0).reshape(2, 3),
    "fixed": np.arange(float(BIG)),
    "text": np.array(["a", "ü"], np.dtypes.StringDType()),
    "empty": np.zeros((0, 3)),
    "scalar": np.float32(1.5),
    "raw": b"\0\1",
    "nested": {"layer": [np.ones(3), {"k": (1, None)}]},
}


@pytest.fixture
def objects(tmp_path: Path) -> Path:
    """The directory that stands for the store of `run`."""
    return tmp_path / "objects"


def manager_of(objects: Path, **options: Any) -> MultiNodeCheckpointManager:
    options.setdefault("files", FaultyObjects(PATH, objects))
    return MultiNodeCheckpointManager(PATH, **options)


@pytest.fixture
def run(objects: Path) -> Iterator[NodeRun]:
    with dask.config.set({"jobrunner.checkpoint.heartbeat-seconds": 0.2}):
        run = NodeRun(PATH, files=FaultyObjects(PATH, objects))
        run.blobs.update(VALUES)
        yield run
        run.end()


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


def test_no_other_module_reaches_files_by_itself() -> None:
    harmless = "path.join path.dirname path.basename path.abspath path.relpath fspath getpid kill"
    found = {}
    for path in Path(package.__file__).parent.rglob("*.py"):
        called = re.findall(r"(?<![\w.])(os\.[\w.]+|shutil\.\w+)\(", path.read_text())
        found[path.stem] = set(called) - {f"os.{name}" for name in harmless.split()}
    assert len(found.pop("posix")) > 10
    # The system is asked about processes and priorities; that is no checkpoint's business.
    about_processes = {"os.readlink", "os.environ.get", "os.setpriority"}
    assert set().union(*found.values()) <= about_processes, found


def test_loaded_values_are_those_saved(run: NodeRun, objects: Path) -> None:
    run.save(0, {"epoch": 0})
    run.check(0)
    loaded = run.manager.open(0)["a"]
    assert isinstance(loaded["w"], zarr.Array)
    assert loaded["w"][1].tolist() == [3, 4, 5]
    store = zarr.storage.ObjectStore(LocalStore(str(objects)), read_only=True)
    group = zarr.open_group(store, path="a.0", mode="r")  # as any reader does
    assert group["w"][:].tolist() == VALUES["w"].tolist()
    assert group.attrs["epoch"] == 0
    (objects / "a.0/w/zarr.json").unlink()
    loaded.load("w")  # that is for others
    with pytest.raises(CheckpointError, match=r"s3://bucket/runs/k/a\.0/w"):
        run.manager.verify(0)


def test_unchanged_chunks_are_copied_by_the_store(run: NodeRun, objects: Path) -> None:
    assert run.save(0).linked_bytes == 0
    assert run.save(1).linked_bytes == 8 * BIG
    run.manager.verify(1)
    # Each is a store by itself.
    (objects / "a.0/fixed/c.0").unlink()
    run.manager.verify(1)
    with pytest.raises(CheckpointCorruptError, match=r"a\.0/fixed/c\.0 is missing"):
        run.manager.verify(0)
    # Nothing to copy any more: it is written.
    (objects / "a.1/fixed/c.0").write_bytes(b"cut")
    assert run.save(2).linked_bytes == 0
    run.manager.verify(2)


def test_of_two_runs_that_are_alive_the_second_is_refused(run: NodeRun, objects: Path) -> None:
    rival = manager_of(objects)
    rival.run.patience = Patience(0.1, wait=lambda _: None)
    with pytest.raises(CommitConflictError, match="alive"):
        rival.run.start(["a"], {})
    taker = manager_of(objects, take_over=True)
    taker.run.start(["a"], {})
    with pytest.raises(CommitConflictError, match="taken over s3://bucket/runs/k"):
        run.save(0)
    taker.run.end()


def test_a_lost_reply_is_resolved_by_reading_back(objects: Path) -> None:
    class Deaf(FaultyObjects):
        def _create(self, path: str, data: bytes) -> None:
            super()._create(path, data)
            if data not in (b"first", b"second"):
                raise OSError(errno.EIO, "no answer", path)

    manager = manager_of(objects, files=Deaf(PATH, objects))
    manager.run.start(["a"], {})
    assert Deaf(PATH, objects).create(f"{PATH}/x", b"mine")
    assert Deaf(PATH, objects).create(f"{PATH}/x", b"mine")
    assert not Deaf(PATH, objects).create(f"{PATH}/x", b"theirs")
    manager.run.end()
    numbers = [entry.number for entry in manager.directory.log.read_entries()]
    assert numbers == [0, 1]  # run and end, once each


def test_a_store_without_conditional_creation_is_refused(objects: Path) -> None:
    class Careless(FaultyObjects):
        def _create(self, path: str, data: bytes) -> None:
            self.put(path, data)

    manager = manager_of(objects, files=Careless(PATH, objects))
    with pytest.raises(CheckpointWriteError, match="conditional put"):
        manager.run.start(["a"], {})
    assert not (objects / "_log").exists()
    assert list(objects.rglob("heartbeat")) == []


def test_errors_of_the_store_are_oserrors_that_name_the_object(tmp_path: Path) -> None:
    files = FaultyObjects("s3://b", tmp_path)
    with pytest.raises(FileNotFoundError) as caught:
        files.remove_file("s3://b/no")
    assert caught.value.filename == "s3://b/no"
    with pytest.raises(OSError, match="is not below s3://b"):
        files.read("s3://other/x")
    closed = ObjectFiles("s3://b", lambda _: LocalStore(str(tmp_path / "none")))
    with pytest.raises(OSError, match="Unable to canonicalize") as failed:
        closed.read("s3://b/x")
    assert failed.value.filename == "s3://b/x"


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("s3://bucket/runs/k/", "s3://bucket/runs/k"),
        ("az://container/a:0", "az://container/a:0"),
        ("memory:///a", "memory://a"),
    ],
)
def test_a_url_is_a_path(given: str, path: str) -> None:
    assert absolute_path(given) == path
    assert MultiNodeCheckpointManager(given).path == path


@pytest.mark.parametrize(
    "url",
    ["s3://", "s3://b//x", "s3://b/../c", "s3://b/a b", "s3://b/x?versionId=1", "gs://b/%41"],
)
def test_a_url_of_other_form_is_refused(url: str) -> None:
    with pytest.raises(DefinitionError, match=r"bucket/name/name"):
        MultiNodeCheckpointManager(url)


def test_other_schemes_and_files_that_do_not_reach_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DefinitionError, match=r"s3://, gs://, az://, memory://.*not in http"):
        MultiNodeCheckpointManager("http://host/x")
    with pytest.raises(DefinitionError, match=r"files=PosixFiles cannot access s3://b/x"):
        MultiNodeCheckpointManager("s3://b/x", files=PosixFiles())
    with pytest.raises(DefinitionError, match="files=FaultyObjects cannot access"):
        MultiNodeCheckpointManager(tmp_path, files=FaultyObjects("s3://b", tmp_path))


def test_without_obstore_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DefinitionError, match=r"pip install 'dask-jobrunner\[object\]'"):
        MultiNodeCheckpointManager("s3://b/x")


# --- commands


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
    missing = invoke("ls", "memory://nothing")
    assert missing.exit_code != 0
    assert "There is no directory 'memory://nothing'" in missing.stderr
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

    def expect(self, operation: str, pattern: str, count: int = len(NODES)) -> None:
        self._wanted = operation, re.compile(pattern)
        self._barrier = threading.Barrier(count)
        self.passed = 0

    def before(self, operation: str, path: str) -> None:
        super().before(operation, path)
        wanted, pattern = getattr(self, "_wanted", (None, re.compile("")))
        if operation == wanted and pattern.search(path):
            self._barrier.wait(timeout=20)
            with self._lock:
                self.passed += 1

    def __reduce__(self) -> tuple[object, ...]:
        return (Gate, (self.root, self._directory))


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate("s3://bucket/k", tmp_path / "objects")


def save_nodes(manager: MultiNodeCheckpointManager, *epochs: int) -> None:
    workspaces = {node: Workspace(node) for node in NODES}
    for epoch in epochs:
        for workspace in workspaces.values():
            workspace.globals.update(fixed=VALUES["fixed"], epoch=epoch)
        save_epoch(manager, epoch, workspaces, {"metrics": {"loss": epoch}})


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
    gate.expect("get", r"\.\d+/zarr.json")
    manager.load(1, blobs={node: ["epoch"] for node in NODES})
    assert gate.passed == 0  # the log says what a load needs to know
    manager.run.end()
    list_epochs(manager.directory)
    describe_checkpoint(manager.directory, Position(1))
    assert gate.passed == 8
    assert {finding.status for finding in inspect_directory(manager.directory)} == {"live"}
    assert gate.passed == 8
    gate.expect("get", r"\.\d+/zarr.json", 4)
    manager.verify(1)
    assert gate.passed == 8


def test_of_a_long_log_many_entries_are_read_at_once(gate: Gate) -> None:
    manager = MultiNodeCheckpointManager(gate.root, files=gate)
    manager.run.start(NODES, {})
    save_nodes(manager, *range(9))
    manager.run.end()
    gate.expect("get", r"_log/00000000(0[6-9]|1[0-3])\.json")  # after two and four
    again = MultiNodeCheckpointManager(gate.root, files=gate, keep=KeepBest("loss", mode="max"))
    assert again.epochs() == list(range(9))
    assert gate.passed == 8
    gate.expect("get", "nothing")
    commits = "|".join(f"{number:02}" for number in again.directory.snapshot().recorded.values())
    gate.expect("get", rf"_log/00000000({commits})\.json", 9)
    assert again.retention.retirable() == [Position(epoch) for epoch in range(8)]
    assert gate.passed == 9


def test_an_entry_that_is_missing_among_those_read_at_once_is_named(gate: Gate) -> None:
    manager = MultiNodeCheckpointManager(gate.root, files=gate)
    manager.run.start(NODES, {})
    save_nodes(manager, *range(4))
    manager.run.end()
    gate.remove_file(f"{gate.root}/_log/0000000003.json")
    with pytest.raises(
        CheckpointCorruptError, match=r"Entry 3 .* is missing: expected .*0003\.json"
    ):
        MultiNodeCheckpointManager(gate.root, files=gate).epochs()
    gate.remove_file(f"{gate.root}/_log/0000000004.json")
    with pytest.raises(CheckpointCorruptError, match=r"Entry 3 .* is missing, although"):
        MultiNodeCheckpointManager(gate.root, files=gate).epochs()


def test_calls_at_once_keep_their_order_and_end_with_the_first_that_fails(gate: Gate) -> None:
    def square(i: int) -> int:
        if i in (100, 101):
            raise OSError(errno.EIO, str(i))
        return i * i

    assert list(gate.each(square, range(99))) == [i * i for i in range(99)]
    with pytest.raises(OSError, match="100"):
        list(gate.each(square, range(1000)))
    assert list(gate.each(square, [])) == []
    asked: list[int] = []
    assert next(PosixFiles().each(asked.append, range(9))) is None
    assert asked == [0]  # nothing that was not asked for
