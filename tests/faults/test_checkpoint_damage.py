"""Damage to any file of an epoch is found before a blob of it reaches a workspace."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from jobrunner import CheckpointCorruptError, CheckpointError, MultiNodeCheckpointManager
from jobrunner.checkpoint.store.chunks import plan_chunks
from jobrunner.checkpoint.store.layout import LEAST_ALIKE
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles
from jobrunner.workspace.workspace import Workspace
from tests.sampling import sampled
from tests.saves import Save

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
    for epoch in (0, 1):
        workspaces = {node: Workspace(node) for node in "ab"}
        for workspace in workspaces.values():
            workspace.globals.update(BLOBS)
        save = Save(manager, Position.of(epoch))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "jobrunner.checkpoint.store.layout.plan_chunks", partial(plan_chunks, limit=8000)
            )
            save.commit(save.write(workspaces))
    manager.run.end()
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def stored_files(path: Path) -> list[Path]:
    return sorted(file for file in path.glob("a.1/**/*") if file.is_file())


def is_repeated(file: Path) -> bool:
    """Whether the store's document says the same: a load does not need it."""
    return file.name == "zarr.json" and file.parent.name != "a.1"


def loads(path: Path) -> Iterator[Callable[[], object]]:
    """All ways to read node ``a`` at epoch 1 whole."""
    manager = MultiNodeCheckpointManager(path)
    yield lambda: manager.verify(1)
    yield lambda: [task.fn() for task in manager.load(1).tasks() if "read" in task.name]
    yield lambda: [
        task.fn()
        for task in manager.load(1, blobs={"a": list(BLOBS)}).tasks()
        if "read" in task.name
    ]


def expect_found(path: Path, file: Path | None, what: str, *, loads_anyway: bool = False) -> None:
    verify, *others = loads(path)
    for load in (verify,) if loads_anyway else (verify, *others):
        with pytest.raises(CheckpointCorruptError) as caught:
            load()
        assert str(file or path / "a.1") in str(caught.value), what
        assert "expected" in str(caught.value), what
    if loads_anyway:
        for load in others:
            load()


@sampled("flips_a_file", sample=2, nightly=500)
def test_any_flipped_bit_is_found(flips_a_file: int, copy: Path) -> None:
    draw = random.Random(0)
    count = 0
    for file in stored_files(copy):
        content = file.read_bytes()
        bits = {
            0,
            8 * len(content) - 1,
            *(draw.randrange(8 * len(content)) for _ in range(flips_a_file)),
        }
        for bit in bits:
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            file.write_bytes(flipped)
            expect_found(copy, file, f"bit {bit} of {file}", loads_anyway=is_repeated(file))
            count += 1
        file.write_bytes(content)
    print(f"{count} flipped bits of {len(stored_files(copy))} files, all found")


@sampled("cuts_a_file", sample=0, nightly=50)
def test_any_cut_and_any_addition_is_found(cuts_a_file: int, copy: Path) -> None:
    draw = random.Random(0)
    count = 0
    for file in stored_files(copy):
        content = file.read_bytes()
        lengths = {0, len(content) - 1, len(content) // 2}
        lengths |= {draw.randrange(len(content)) for _ in range(cuts_a_file)}
        for damaged in (*(content[:length] for length in lengths), content + b"\0"):
            file.write_bytes(damaged)
            what = f"{file}: {len(damaged)} of {len(content)} bytes"
            expect_found(copy, file, what, loads_anyway=is_repeated(file))
            count += 1
        file.write_bytes(content)
    print(f"{count} cuts and additions, all found")


def test_any_removal_is_found(copy: Path) -> None:
    for file in stored_files(copy):
        content = file.read_bytes()
        file.unlink()
        expect_found(copy, file, f"without {file}", loads_anyway=is_repeated(file))
        file.mkdir()
        expect_found(copy, file, f"{file} as a directory", loads_anyway=is_repeated(file))
        MultiNodeCheckpointManager(copy).verify(0)  # the epoch before is as good as ever
        file.rmdir()
        file.write_bytes(content)


def test_a_store_that_cannot_be_read_is_not_called_damaged(saved: Path) -> None:
    manager = MultiNodeCheckpointManager(saved)
    files = FaultyFiles()
    files.at = 3
    manager.directory.files = files
    with pytest.raises(CheckpointError, match="does not mean that the file is damaged") as caught:
        manager.verify(1)
    assert not isinstance(caught.value, CheckpointCorruptError)


# --- the log


def test_any_damage_to_the_log_is_found_and_nothing_is_taken_for_nothing(copy: Path) -> None:
    draw = random.Random(0)
    for file in (copy / "_log").iterdir():
        content = file.read_bytes()
        flipped = bytearray(content)
        for at in draw.sample(range(len(content)), 2):
            flipped[at] ^= 1 << draw.randrange(8)
        for damaged in (b"", content[:-1], bytes(flipped), content + b"x"):
            file.write_bytes(damaged)
            manager = MultiNodeCheckpointManager(copy)
            for read in (manager.epochs, manager.latest, manager.directory.snapshot):
                with pytest.raises(CheckpointCorruptError, match=file.name):
                    read()
        file.write_bytes(content)
