"""Damage to any file of an epoch is found before a blob of it reaches a workspace."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jobrunner import (
    CheckpointCorruptError,
    CheckpointError,
    JobRunner,
    MultiNodeCheckpointManager,
    Session,
)
from jobrunner.checkpoint.store.chunks import plan_chunks
from jobrunner.checkpoint.store.layout import LEAST_ALIKE
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles
from jobrunner.workspace.workspace import Workspace
from tests.jobs import Listener, counter
from tests.sampling import sampled
from tests.saves import save_epoch

BLOBS = {
    "w": np.arange(3000.0).reshape(300, 10),
    "texts": np.array(["a", "", "long " * 20], np.dtypes.StringDType()),
    "params": {"layers": [np.ones(5), np.zeros((2, 2))], "name": "n"},
    "fortran": np.asfortranarray(np.arange(50).reshape(5, 10)),
    "bytes": bytes(3000),
    "lr": 0.1,
    **{f"row{i}": np.arange(3) + i for i in range(LEAST_ALIKE)},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of two nodes, each of several chunks."""
    path = tmp_path_factory.mktemp("saved") / "k"
    manager = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))
    manager.run.start(["a", "b"], {})
    workspaces = {node: Workspace(node) for node in "ab"}
    for workspace in workspaces.values():
        workspace.globals.update(BLOBS)
    with pytest.MonkeyPatch.context() as patch:
        short = partial(plan_chunks, limit=8000)
        patch.setattr("jobrunner.checkpoint.store.layout.plan_chunks", short)
        for epoch in (0, 1):
            save_epoch(manager, Position(epoch), workspaces)
    manager.run.end()
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def damages(content: bytes, count: int) -> Iterator[bytes]:
    """Flipped bits, cuts, and an addition."""
    draw = random.Random(0)
    bits = {0, 8 * len(content) - 1, *(draw.randrange(8 * len(content)) for _ in range(count))}
    for bit in bits:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)
    lengths = {0, len(content) // 2, len(content) - 1}
    lengths |= {draw.randrange(len(content)) for _ in range(count // 10)}
    for length in lengths:
        yield content[:length]
    yield content + b"\0"


def loads(path: Path) -> Iterator[Callable[[], object]]:
    """The ways to load node ``a`` at epoch 1 whole."""
    manager = MultiNodeCheckpointManager(path)
    for options in ({}, {"blobs": {"a": list(BLOBS)}}):
        group = manager.load(1, **options)
        yield lambda group=group: [task.fn() for task in group.tasks() if "read" in task.name]


def expect_found(path: Path, file: Path) -> None:
    # The store's document says the same as those of its arrays: a load does not need these.
    is_repeated = file.name == "zarr.json" and file.parent.name != "a.1"
    reads = [lambda: MultiNodeCheckpointManager(path).verify(1)]
    if is_repeated:
        for load in loads(path):
            load()
    else:
        reads += loads(path)
    for read in reads:
        with pytest.raises(CheckpointCorruptError, match=r"expected") as caught:
            read()
        assert str(file) in str(caught.value)


@sampled("count", sample=2, nightly=500)
def test_any_damage_to_a_file_of_a_store_is_found(count: int, copy: Path) -> None:
    files = sorted(file for file in copy.glob("a.1/**/*") if file.is_file())
    for file in files:
        content = file.read_bytes()
        for damaged in damages(content, count):
            file.write_bytes(damaged)
            expect_found(copy, file)
        file.unlink()
        expect_found(copy, file)
        file.mkdir()
        expect_found(copy, file)
        MultiNodeCheckpointManager(copy).verify(0)  # the epoch before is as good as ever
        file.rmdir()
        file.write_bytes(content)


def test_a_store_that_cannot_be_read_is_not_called_damaged(saved: Path) -> None:
    manager = MultiNodeCheckpointManager(saved)
    manager.directory.files = FaultyFiles(at=3)
    with pytest.raises(CheckpointError, match="does not mean that the file is damaged") as caught:
        manager.verify(1)
    assert not isinstance(caught.value, CheckpointCorruptError)


def test_a_damaged_newest_epoch_is_never_resumed_from_in_silence(
    inproc_session: Session, tmp_path: Path
) -> None:
    manager = MultiNodeCheckpointManager(tmp_path / "k")
    JobRunner(counter(3), manager).run(inproc_session)
    for epoch in (2, 3):
        document = Path(manager.get_ckpt_db_name("a", epoch), "zarr.json")
        document.write_bytes(next(damages(document.read_bytes(), 0)))
    with pytest.raises(CheckpointCorruptError, match="zarr.json"):
        JobRunner(counter(5), manager, 3).run(inproc_session)
    listener = Listener()
    result = JobRunner(counter(5), manager, callbacks=[listener]).run(inproc_session)
    assert (result.resumed_from, result.epoch) == (1, 5)
    assert "Epoch 3 of" in listener.warnings[0]
    assert "Epoch 2 of" in listener.warnings[1]
