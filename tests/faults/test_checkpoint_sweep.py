"""A fault at every single operation of a run's life: what is recorded is whole, before and after.

The run takes its directory, saves, retires, rewinds, saves again under other names, saves groups of
epochs, finishes and leaves. Its k-th operation on the file system goes wrong, for k = 1, 2, ... until one run ends
untouched. After each, what is recorded must be what it was before the step that went wrong, or
what the step was to make of it; every recorded epoch must be whole; and the next run must go on.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import dask
import numpy as np
import pytest

from jobrunner import CheckpointError, CheckpointWriteError, KeepLast, MultiNodeCheckpointManager
from jobrunner.checkpoint import CommitEntry, PosixFiles, SaveQueue
from jobrunner.checkpoint.log.entries import RunEntry
from jobrunner.checkpoint.store.layout import LEAST_ALIKE
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles, PowerCutError, assert_identical
from jobrunner.workspace.values import settle
from jobrunner.workspace.workspace import Workspace
from tests.sampling import sampled
from tests.saves import Save

pytestmark = pytest.mark.usefixtures("quiet")

NODES = ("a", "b")
STEPS = (
    *("start", "save 0", "save 1", "save 2", "rewind 1", "save 2", "save 3"),
    # Of the second group, epochs 6 and 7 are passed over: the policy would retire them at once.
    *("group 4 5", "group 6 9", "finish 9", "end"),
)
LAST = 9
SAME = np.zeros(PosixFiles.linked_bytes // 8)
"""Is linked to the epoch before, as it never changes."""

ROWS = LEAST_ALIKE
"""Blobs that are alike, and so many that they are stacked."""

Recorded = tuple[int, ...]


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


def recorded(path: Path) -> Recorded:
    return tuple(at.public for at in MultiNodeCheckpointManager(path).positions())


def live(
    path: Path, files: FaultyFiles, tell: Callable[[str, Recorded], None]
) -> MultiNodeCheckpointManager:
    """Take all steps; `tell` hears of each one, and of what was recorded before it."""
    manager = MultiNodeCheckpointManager(path, keep=KeepLast(2), files=files)
    for step in STEPS:
        before = recorded(path)
        tell(step, before)
        # A save fails by CheckpointWriteError only, which a runner may take for a warning.
        is_save = step.startswith(("save", "group"))
        try:
            take_step(manager, step)
        except CheckpointError as error:
            if is_save and not isinstance(error, CheckpointWriteError):
                raise
            assert recorded(path) in outcomes(step, before) | {before}, step
            if not is_save:
                break
        else:
            assert recorded(path) in outcomes(step, before), step
            if step.startswith("finish"):
                is_done = MultiNodeCheckpointManager(path).directory.snapshot().is_done
                assert is_done == (LAST in before)
    manager.run.end()
    return manager


def check_recovery(
    path: Path, step: str, before: Recorded, files: FaultyFiles | None = None
) -> None:
    """Old or new, each epoch whole; and the next run resumes from there, leaving no litter."""
    found = recorded(path)
    assert found in outcomes(step, before) | {before}
    manager = MultiNodeCheckpointManager(path, files=files or FaultyFiles(sync=False))
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
            assert Path(manager.get_ckpt_db_name(node, epoch), "zarr.json").exists()


def check_no_litter(manager: MultiNodeCheckpointManager) -> None:
    root = Path(manager.path)
    live_stores = {
        about.name for epoch in manager.epochs() for about in manager.record(epoch).stores.values()
    }
    aside = {
        store.name
        for entry in manager.directory.log.read_entries()
        if isinstance(entry, CommitEntry)
        for record in entry.records
        for store in (record.stores or {}).values()
    }
    for store in root.iterdir():
        if store.name not in live_stores | {"_log", "_runs"}:
            # Set aside by the rewind, which deletes nothing.
            assert store.name in aside, store
    # A run whose entry was lost may be a newcomer that still waits: its process, this one, lives.
    known = {
        entry.run for entry in manager.directory.log.read_entries() if isinstance(entry, RunEntry)
    }
    assert not known & {trace.name for trace in (root / "_runs").iterdir()}
    assert all(entry.suffix == ".json" for entry in (root / "_log").iterdir())


def sweep(tmp_path: Path, how: Literal["fail", "die"], every_kth: int) -> int:
    """Return how many operations the last life had, in which nothing went wrong."""
    for cases, k in enumerate(itertools.count(1, every_kth)):
        path = tmp_path / str(k)
        files = FaultyFiles(k, how, sync=False)
        told: list[tuple[str, Recorded]] = []
        with contextlib.suppress(PowerCutError):
            live(path, files, lambda step, before, told=told: told.append((step, before)))  # type: ignore[misc]
        if how == "die":
            gc.collect()  # the process is gone, and with it the manager and its heartbeat
        if files.count < k:
            print(f"{how}: {cases} of {files.count} operations, 0 losses")
            return files.count
        # A step that failed may have been followed by others that did not.
        step, before = told[-1] if how == "die" else ("end", recorded(path))
        check_recovery(path, step, before)
        shutil.rmtree(path)
    raise AssertionError("not reached")


def test_one_operation_fails_and_those_after_it_succeed() -> None:
    files = FaultyFiles(at=2)
    files.before("write", "a")
    with pytest.raises(OSError, match="b"):
        files.before("write", "b")
    files.before("write", "c")
    assert files.trace == [("write", "a"), ("write", "b"), ("write", "c")]


def test_after_a_power_cut_no_operation_succeeds() -> None:
    files = FaultyFiles(at=2, how="die")
    files.before("write", "a")
    for path in "bc":
        with pytest.raises(PowerCutError, match=path):
            files.before("write", path)


@sampled("every_kth", sample=31, nightly=1)
def test_an_error_at_any_operation_leaves_the_old_state_or_the_new(
    every_kth: int, tmp_path: Path
) -> None:
    assert sweep(tmp_path, "fail", every_kth) > 200


@sampled("every_kth", sample=31, nightly=1)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_power_cut_at_any_operation_leaves_the_old_state_or_the_new(
    every_kth: int, tmp_path: Path
) -> None:
    assert sweep(tmp_path, "die", every_kth) > 200


class LostFiles(FaultyFiles):
    """From the k-th operation on, nothing can be written; reading goes on."""

    def before(self, operation: str, path: str) -> None:
        self.count += 1
        if self.at is not None and self.count >= self.at and operation not in ("open", "list"):
            raise OSError(self.number, "lost", path)


@sampled(
    "every_kth, numbers",
    sample=(79, [errno.ENOSPC]),
    nightly=(1, [errno.ENOSPC, errno.EROFS, errno.EACCES]),
)
def test_storage_that_takes_no_more_loses_nothing_that_was_recorded(
    every_kth: int, numbers: list[int], tmp_path: Path
) -> None:
    for number in numbers:
        for k in itertools.count(1, every_kth):
            path = tmp_path / f"{number} {k}"
            files = LostFiles(k, number=number, sync=False)
            live(path, files, lambda step, before: None)
            check_recovery(path, "end", recorded(path))
            shutil.rmtree(path, ignore_errors=True)
            if files.count < k:
                assert k > 200
                break


@pytest.mark.nightly
def test_sigkill_at_any_operation_leaves_the_old_state_or_the_new(tmp_path: Path) -> None:
    """Real processes, each killed at its k-th operation."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    cases = json.loads(done.stdout)
    assert len(cases) > 200
    for k, step, before in cases:
        check_recovery(tmp_path / str(k), step, tuple(before))
        shutil.rmtree(tmp_path / str(k))
    print(f"SIGKILL: {len(cases)} operations, 0 losses")


def _tell(descriptor: int, step: str, before: Recorded) -> None:
    os.write(descriptor, json.dumps([step, before]).encode() + b"\n")


def _kill_at_every_operation(directory: Path) -> list[Any]:
    """Let a forked process live until its k-th operation, for each k."""
    cases = []
    for k in itertools.count(1):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            files = FaultyFiles(k, "kill", sync=False)
            live(directory / str(k), files, partial(_tell, writer))
            os._exit(0)
        os.close(writer)
        _, status = os.waitpid(child, 0)
        with open(reader) as lines:
            told = [json.loads(line) for line in lines]
        if status == 0:
            return cases
        if not os.WIFSIGNALED(status):
            raise RuntimeError(f"case {k} ended with status {status} and not by SIGKILL")
        cases.append([k, *told[-1]])
    return cases


if __name__ == "__main__":
    with dask.config.set({"jobrunner.checkpoint.heartbeat-seconds": 3600}):
        sys.stdout.write(json.dumps(_kill_at_every_operation(Path(sys.argv[1]))))
