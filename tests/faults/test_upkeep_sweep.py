"""A fault at every operation of prune, restore, copy, and of a run that follows a killed one.

The k-th operation fails, or all from the k-th on do, for k = 1, 2, ... until the command ends
untouched (every third k, or each with ``FAULTS=thorough``). After each, every epoch that was recorded is recorded and whole (but for those that were
to be pruned), the same command succeeds, and nothing stray or damaged is left.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from jobrunner import CheckpointError, DefinitionError, KeepLast, MultiNodeCheckpointManager
from jobrunner.checkpoint import CheckpointDirectory, copy_epoch, inspect_directory, restore_epoch
from jobrunner.testing import FaultyFiles, PowerCutError
from tests.faults.test_checkpoint_sweep import (  # noqa: F401  # a fixture for here as well
    NODES,
    _quiet,
    check_epochs,
    recorded,
    save,
)
from tests.faults.thorough import EVERY_KTH


def prune(path: Path, files: FaultyFiles) -> None:
    manager = MultiNodeCheckpointManager(path, keep=KeepLast(1), files=files)
    manager.start_run([], {})
    try:
        manager.retire()
    finally:
        manager.end_run()


def restore(path: Path, files: FaultyFiles) -> None:
    if 3 not in recorded(path):
        restore_epoch(CheckpointDirectory(path, None, allow_pickle=False, files=files), 3)


def copy(path: Path, files: FaultyFiles) -> None:
    if 1 not in recorded(path / "copy"):
        directory = CheckpointDirectory(path, None, allow_pickle=False, files=files)
        copy_epoch(directory, 1, str(path / "copy"))


def resume(path: Path, files: FaultyFiles) -> None:
    """Go on where a killed run has left a save half done, and stores to be deleted."""
    manager = MultiNodeCheckpointManager(path, keep=KeepLast(3), files=files)
    manager.start_run(NODES, {})
    try:
        manager.rewind(1, "resume")
        save(manager, 2)
    finally:
        manager.end_run()


COMMANDS = {
    prune: {(0, 1, 2), (2,)},
    restore: {(0, 1, 2), (0, 1, 2, 3)},
    copy: {(0, 1, 2)},
    resume: {(0, 1, 2), (0, 1)},
}
"""What may be recorded after each, whatever happens."""


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Epochs 0 to 2; 3 set aside; 4 half saved by a run that was killed."""
    path = tmp_path_factory.mktemp("left") / "k"
    files = FaultyFiles(sync=False)
    manager = MultiNodeCheckpointManager(path, files=files)
    manager.start_run(NODES, {})
    for epoch in range(4):
        save(manager, epoch)
    manager.rewind(2, "test")
    files.at, files.how = files.count + 20, "die"
    with pytest.raises(PowerCutError):
        save(manager, 4)
    del manager
    gc.collect()
    assert recorded(path) == (0, 1, 2)
    assert any(finding.status == "pending" for finding in inspect(path))
    return path


def inspect(path: Path) -> list[object]:
    return list(inspect_directory(CheckpointDirectory(path, None, allow_pickle=False, files=None)))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fail", "die"])
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_goes_wrong_nothing_recorded_is_lost_and_the_command_can_be_repeated(
    command: Callable[[Path, FaultyFiles], None],
    how: Literal["fail", "die"],
    left: Path,
    tmp_path: Path,
) -> None:
    for k in itertools.count(1, EVERY_KTH):
        path = Path(shutil.copytree(left, tmp_path / str(k)))
        files = FaultyFiles(k, how, sync=False)
        with contextlib.suppress(PowerCutError, CheckpointError):
            command(path, files)
        if how == "die":
            gc.collect()  # the process is gone, and with it the manager and its heartbeat
        assert recorded(path) in COMMANDS[command], k
        check_epochs(MultiNodeCheckpointManager(path))
        command(path, FaultyFiles(sync=False))
        leave = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False))
        leave.start_run([], {})  # cleans up, also where the command had nothing left to do
        leave.end_run()
        assert recorded(path) in COMMANDS[command], k
        check_epochs(MultiNodeCheckpointManager(path))
        if command is copy:
            assert recorded(path / "copy") == (1,)
            check_epochs(MultiNodeCheckpointManager(path / "copy"))
            shutil.rmtree(path / "copy")
        odd = [f for f in inspect(path) if f.status not in ("live", "aside")]  # type: ignore[attr-defined]
        assert odd == [], k
        shutil.rmtree(path)
        if files.count < k:
            print(f"{command.__name__}: {files.count} operations, 0 losses")
            assert k > 30
            return
    raise DefinitionError("not reached")
