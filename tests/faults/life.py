"""A run's whole life on storage in which things go wrong, and what must hold after it.

The run takes its directory, saves, retires, rewinds, saves again under other names, saves groups of
epochs, finishes and leaves. Whatever went wrong, what is recorded must be what it was before the step
that went wrong, or what the step was to make of it; every recorded epoch must be whole; and the next
run must go on.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jobrunner import (
    CheckpointError,
    CheckpointWriteError,
    KeepLast,
    MultiNodeCheckpointManager,
    Position,
)
from jobrunner.checkpoint import PosixFiles, SaveQueue, inspect_directory
from jobrunner.checkpoint.store.layout import LEAST_ALIKE
from jobrunner.testing import FaultyFiles, FaultyObjects, assert_identical
from jobrunner.workspace.values import settle
from jobrunner.workspace.workspace import Workspace
from tests.saves import Save

URL = "s3://bucket/k"
NODES = ("a", "b")
STEPS = (
    *("start", "save 0", "save 1", "save 2", "rewind 1", "save 2", "save 3"),
    # Of the second group, epochs 6 and 7 are passed over: the policy would retire them at once.
    *("group 4 5", "group 6 9", "finish 9", "end"),
)
LAST = 9
SAME = np.zeros(PosixFiles.linked_bytes // 8)
"""Is linked to the epoch before, or copied by the store, as it never changes."""

ROWS = LEAST_ALIKE
"""Blobs that are alike, and so many that they are stacked."""

Recorded = tuple[int, ...]
Faulty = FaultyFiles | FaultyObjects


@dataclass(frozen=True)
class Place:
    """A checkpoint directory of files, or of objects in a store that a directory stands for."""

    directory: Path
    is_remote: bool = False

    @property
    def path(self) -> str:
        return URL if self.is_remote else str(self.directory)

    def files(self, *faults: Any) -> Faulty:
        """Storage whose k-th operation goes wrong."""
        if not self.is_remote:
            return FaultyFiles(*faults, sync=False)
        files = FaultyObjects(URL, self.directory, *faults)
        files.linked_bytes = PosixFiles.linked_bytes
        return files

    def manager(self, **options: Any) -> MultiNodeCheckpointManager:
        options.setdefault("files", self.files())
        return MultiNodeCheckpointManager(self.path, **options)

    def recorded(self) -> Recorded:
        return tuple(at.public for at in self.manager().positions())


def blobs(node: str, epoch: int | Position) -> dict[str, Any]:
    at = Position.of(epoch)
    if node == "a":
        rows = {f"row{i}": np.arange(3) + at.epoch + i for i in range(ROWS)}
        return {"w": np.arange(100.0) + at.epoch, "epoch": at.to_json(), **rows}
    return {"epoch": at.to_json(), "same": SAME}


def take_step(manager: MultiNodeCheckpointManager, step: str) -> None:
    """One step, as a runner takes it: a failed save is abandoned, and raised."""
    what, _, number = step.partition(" ")
    if what == "start":
        manager.run.start(NODES, {})
    elif what == "save":
        save(manager, int(number))
    elif what == "group":
        save_group(manager, group(number))
    elif what == "rewind":
        manager.run.rewind(Position(int(number)), "test")
    elif what == "finish":
        manager.run.finish(Position(int(number)))
    else:
        manager.run.end()
    manager.retention.sweeper.drain()


def save(manager: MultiNodeCheckpointManager, epoch: int) -> None:
    save = Save(manager, Position.of(epoch))
    workspaces = {node: Workspace(node) for node in NODES}
    for node in NODES:
        workspaces[node].globals.update(blobs(node, epoch))
    try:
        save.commit(save.write(workspaces))
    except CheckpointWriteError:
        save.abandon()
        raise


def group(ends: str) -> list[int]:
    first, last = map(int, ends.split())
    return list(range(first, last + 1))


def save_group(manager: MultiNodeCheckpointManager, epochs: Sequence[int]) -> None:
    """Capture epochs one after another, write all of them, and record what is whole."""
    run = manager.run
    encoding = run.encoding()
    queue = SaveQueue(encoding)
    workspaces = {node: Workspace(node) for node in NODES}
    for epoch in epochs:
        for node in NODES:
            for name, value in blobs(node, epoch).items():
                workspaces[node].put(name, settle([value]))
        queue.capture(workspaces, at=Position(epoch))
    left = [Position(epoch) for epoch in epochs]
    while left:
        order = run.order({at: {} for at in left}, encoding)
        try:
            committed = run.commit(order, queue.write(workspaces, order=order))
        except CheckpointWriteError:
            run.abandon(order)
            raise
        if committed.problem is not None:
            raise committed.problem
        left = [at for at in left if at > order.at]


def outcomes(step: str, before: Recorded) -> set[Recorded]:
    """What may be recorded once a step has succeeded: retirement may come later."""
    what, _, number = step.partition(" ")
    if what == "save":
        full = tuple(sorted({*before, int(number)}))
        return {full, full[-2:], tuple(e for e in full if e in (1, *full[-2:]))}
    if what == "group":
        return set(group_outcomes(before, group(number)))
    if what == "rewind":
        return {tuple(e for e in before if e <= int(number))}
    return {before}


def group_outcomes(before: Recorded, epochs: Sequence[int]) -> Iterator[Recorded]:
    """What a group may leave: all up to one of its epochs, but for those that are retired.

    What is passed over counts as retired, also if the epochs for whose sake it was are not recorded
    in the end. Two epochs are kept at least, and the one that the run went back to.
    """
    everything = [*before, *epochs]
    for size in range(len(everything) + 1):
        for left in itertools.combinations(everything, size):
            kept = set(left)
            newest = max(left, default=-1)
            is_enough = len(left) >= min(2, len(before)) and kept >= {1} & set(before)
            if newest == epochs[-1]:
                is_enough = is_enough and kept >= set(epochs[-2:])
            if newest in epochs and is_enough:
                yield left


def live(place: Place, files: Faulty, tell: Callable[[str, Recorded], None]) -> None:
    """Take all steps; `tell` hears of each one, and of what was recorded before it."""
    manager = place.manager(keep=KeepLast(2), files=files)
    for step in STEPS:
        before = place.recorded()
        tell(step, before)
        # A save fails by CheckpointWriteError only, which a runner may take for a warning.
        is_save = step.startswith(("save", "group"))
        try:
            take_step(manager, step)
        except CheckpointError as error:
            if is_save and not isinstance(error, CheckpointWriteError):
                raise
            assert place.recorded() in outcomes(step, before) | {before}, step
            if not is_save:
                break
        else:
            assert place.recorded() in outcomes(step, before), step
            if step.startswith("finish"):
                assert place.manager().directory.snapshot().is_done == (LAST in before)
    manager.run.end()


def check_recovery(place: Place, step: str, before: Recorded, files: Faulty | None = None) -> None:
    """Old or new, each epoch whole; and the next run resumes from there, leaving no litter."""
    found = place.recorded()
    assert found in outcomes(step, before) | {before}
    manager = place.manager(files=files or place.files())
    check_epochs(manager)
    manager.run.start(NODES, {})
    assert tuple(manager.epochs()) == found
    save(manager, LAST + 1)
    manager.run.end()
    assert tuple(manager.epochs()) == (*found, LAST + 1)
    check_epochs(manager)
    check_no_litter(manager)


def check_epochs(manager: MultiNodeCheckpointManager) -> None:
    for epoch in manager.epochs():
        manager.verify(epoch)
        checkpoint = manager.open(epoch)
        for node in NODES:
            for name, value in blobs(node, epoch).items():
                assert_identical(value, checkpoint[node].load(name))


def check_no_litter(manager: MultiNodeCheckpointManager) -> None:
    directory = manager.directory
    found = {about.path: about.status for about in inspect_directory(directory)}
    runs = {path.rpartition("/")[2] for path in found if path.startswith("_runs/")}
    # A run whose entry was lost may be a newcomer that still waits: its process, this one, lives.
    assert runs.isdisjoint(entry.run for entry in directory.log.read_entries())
    others = {path for path, status in found.items() if status not in ("live", "aside")}
    assert others == {f"_runs/{run}" for run in runs}
