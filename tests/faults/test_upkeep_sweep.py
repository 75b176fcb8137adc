"""A fault at every operation of prune, restore, copy, and of a run that follows a killed one.

The k-th operation fails, or all from the k-th on do, for k = 1, 2,
... until the command ends untouched (every day, only some k). After each,
every epoch that was recorded is recorded and whole (but for those that were to be pruned), the same
command succeeds, and nothing stray or damaged is left.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from jobrunner import CheckpointError, KeepLast, MultiNodeCheckpointManager
from jobrunner.checkpoint import Directory, copy_epoch, inspect_directory, restore_epoch
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles, PowerCutError
from tests.faults.test_checkpoint_sweep import (
    NODES,
    check_epochs,
    recorded,
    save,
)
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("quiet")


def prune(path: Path, files: FaultyFiles) -> None:
    manager = MultiNodeCheckpointManager(path, keep=KeepLast(1), files=files)
    manager.run.start([], {})
    try:
        manager.retention.retire()
    finally:
        manager.run.end()


def restore(path: Path, files: FaultyFiles) -> None:
    if 3 not in recorded(path):
        restore_epoch(Directory(path, files=files), Position(3))


def copy(path: Path, files: FaultyFiles) -> None:
    if 1 not in recorded(copied(path)):
        directory = Directory(path, files=files)
        copy_epoch(directory, Position(1), str(copied(path)))


def copied(path: Path) -> Path:
    """Where the command copies to: beside the directory that holds all of these."""
    return path.parent.with_name(f"{path.parent.name}-copies") / path.name


def resume(path: Path, files: FaultyFiles) -> None:
    """Go on where a killed run has left a save half done, and stores to be deleted."""
    manager = MultiNodeCheckpointManager(path, keep=KeepLast(3), files=files)
    manager.run.start(NODES, {})
    try:
        manager.run.rewind(Position(1), "resume")
        save(manager, 2)
    finally:
        manager.run.end()


COMMANDS = {
    prune: {(0, 1, 2), (2,)},
    restore: {(0, 1, 2), (0, 1, 2, 3)},
    copy: {(0, 1, 2)},
    resume: {(0, 1, 2), (0, 1)},
}
"""What may be recorded after each, whatever happens."""


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Epochs 0 to 2; 3 set aside; and 4 half saved, where the run has died."""
    path = tmp_path_factory.mktemp("left") / "k"
    files = FaultyFiles(sync=False)
    manager = MultiNodeCheckpointManager(path, files=files)
    manager.run.start(NODES, {})
    for epoch in range(4):
        save(manager, epoch)
    manager.run.rewind(Position(2), "test")
    files.at, files.how = files.count + 20, "die"
    with pytest.raises(PowerCutError):
        save(manager, 4)
    del manager
    gc.collect()
    assert recorded(path) == (0, 1, 2)
    assert any(finding.status == "pending" for finding in inspect(path))
    return path


def inspect(path: Path) -> list[Any]:
    return list(inspect_directory(Directory(path)))


def check(command: Callable[[Path, FaultyFiles], None], path: Path) -> None:
    """Nothing recorded is lost, the command can be repeated, and nothing stray is left."""
    assert recorded(path) in COMMANDS[command]
    check_epochs(MultiNodeCheckpointManager(path))
    command(path, FaultyFiles(sync=False))
    leave = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))
    leave.run.start([], {})  # cleans up, also where the command had nothing left to do
    leave.run.end()
    assert recorded(path) in COMMANDS[command]
    check_epochs(MultiNodeCheckpointManager(path))
    if command is copy:
        assert recorded(copied(path)) == (1,)
        check_epochs(MultiNodeCheckpointManager(copied(path)))
        shutil.rmtree(copied(path))
    assert [f for f in inspect(path) if f.status not in ("live", "aside")] == []
    shutil.rmtree(path)


@sampled("every_kth", sample=37, nightly=1)
@pytest.mark.parametrize("how", ["fail", "die"])
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_goes_wrong_nothing_recorded_is_lost_and_the_command_can_be_repeated(
    command: Callable[[Path, FaultyFiles], None],
    how: Literal["fail", "die"],
    every_kth: int,
    left: Path,
    tmp_path: Path,
) -> None:
    for k in itertools.count(1, every_kth):
        path = Path(shutil.copytree(left, tmp_path / str(k)))
        files = FaultyFiles(k, how, sync=False)
        with contextlib.suppress(PowerCutError, CheckpointError):
            command(path, files)
        if how == "die":
            gc.collect()  # the process is gone, and with it the manager and its heartbeat
        check(command, path)
        if files.count < k:
            print(f"{command.__name__}, {how}: {files.count} operations, 0 losses")
            assert files.count > 30
            return


class UnlistedFiles(FaultyFiles):
    """No directory can be listed but those of the log and of runs."""

    def before(self, operation: str, path: str) -> None:
        if operation == "list" and not path.endswith(("_log", "_runs")):
            raise OSError(errno.EIO, "lost", path)
        super().before(operation, path)


def test_what_cannot_be_listed_is_an_error_of_the_checkpoint(left: Path) -> None:
    with pytest.raises(CheckpointError, match=str(left)):
        restore(left, UnlistedFiles(sync=False))
