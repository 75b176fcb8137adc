"""A fault at every operation of prune, restore, copy, and of a run that follows a killed one.

After each, every epoch that was recorded is recorded and whole (but for those that were to be
pruned), the same command succeeds, and nothing stray or damaged is left.
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

from jobrunner import CheckpointError, KeepLast, Position
from jobrunner.checkpoint import Directory, copy_epoch, inspect_directory, restore_epoch
from jobrunner.testing import PowerCutError
from tests.faults.life import NODES, Faulty, Place, check_epochs, save
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("quiet")


def prune(place: Place, files: Faulty) -> None:
    manager = place.manager(keep=KeepLast(1), files=files)
    manager.run.start([], {})
    try:
        manager.retention.retire()
    finally:
        manager.run.end()


def restore(place: Place, files: Faulty) -> None:
    if 3 not in place.recorded():
        restore_epoch(Directory(place.path, files=files), Position(3))


def copy(place: Place, files: Faulty) -> None:
    if 1 not in copied(place).recorded():
        copy_epoch(Directory(place.path, files=files), Position(1), copied(place).path)


def copied(place: Place) -> Place:
    """Where the command copies to: beside the directory that holds all of these."""
    parent = place.directory.parent
    return Place(parent.with_name(f"{parent.name}-copies") / place.directory.name)


def resume(place: Place, files: Faulty) -> None:
    """Go on where a killed run has left a save half done, and stores to be deleted."""
    manager = place.manager(keep=KeepLast(3), files=files)
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


def stray(place: Place) -> list[str]:
    found = inspect_directory(Directory(place.path))
    return [about.path for about in found if about.status not in ("live", "aside")]


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Epochs 0 to 2; 3 set aside; and 4 half saved, where the run has died."""
    place = Place(tmp_path_factory.mktemp("left") / "k")
    files = place.files()
    manager = place.manager(files=files)
    manager.run.start(NODES, {})
    for epoch in range(4):
        save(manager, epoch)
    manager.run.rewind(Position(2), "test")
    files.at, files.how = files.count + 20, "die"
    with pytest.raises(PowerCutError):
        save(manager, 4)
    del manager
    gc.collect()
    assert place.recorded() == (0, 1, 2)
    assert stray(place)
    return place.directory


def check(command: Callable[[Place, Faulty], None], place: Place) -> None:
    """Nothing recorded is lost, the command can be repeated, and nothing stray is left."""
    assert place.recorded() in COMMANDS[command]
    check_epochs(place.manager())
    command(place, place.files())
    leave = place.manager()
    leave.run.start([], {})  # cleans up, also where the command had nothing left to do
    leave.run.end()
    assert place.recorded() in COMMANDS[command]
    check_epochs(place.manager())
    if command is copy:
        assert copied(place).recorded() == (1,)
        check_epochs(copied(place).manager())
        shutil.rmtree(copied(place).directory)
    assert stray(place) == []
    shutil.rmtree(place.directory)


@sampled("every_kth", sample=37, nightly=1)
@pytest.mark.parametrize("how", ["fail", "die"])
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_whatever_goes_wrong_nothing_recorded_is_lost_and_the_command_can_be_repeated(
    command: Callable[[Place, Faulty], None],
    how: Literal["fail", "die"],
    every_kth: int,
    left: Path,
    tmp_path: Path,
) -> None:
    for k in itertools.count(1, every_kth):
        place = Place(Path(shutil.copytree(left, tmp_path / str(k))))
        files = place.files(k, how)
        with contextlib.suppress(PowerCutError, CheckpointError):
            command(place, files)
        if how == "die":
            gc.collect()  # the process is gone, and with it the manager and its heartbeat
        check(command, place)
        if files.count < k:
            print(f"{command.__name__}, {how}: {files.count} operations, 0 losses")
            assert files.count > 30
            return
