"""Faults at every operation while histories grow: no recorded row is lost, changed or doubled."""

from __future__ import annotations

import contextlib
import gc
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from jobrunner import (
    CheckpointError,
    CheckpointWriteError,
    KeepLast,
    MultiNodeCheckpointManager,
    Position,
)
from jobrunner.checkpoint import SaveQueue
from jobrunner.checkpoint.load_plan import choose_sources, plan_load, with_contents
from jobrunner.testing import FaultyFiles, PowerCutError
from jobrunner.workspace import Rows
from jobrunner.workspace.workspace import Workspace
from tests.faults.life import NODES, Place
from tests.faults.power import Disk, TracingFiles, all_kept, all_lost, materialize, some_state
from tests.sampling import sampled

pytestmark = pytest.mark.usefixtures("quiet")

ROWS_OF_A_CHUNK = 6
ROW_BYTES = 2 * np.dtype(float).itemsize


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    module = "jobrunner.checkpoint.history_writer"
    for name in ("_LEAST_BYTES", "_MOST_BYTES"):
        monkeypatch.setattr(f"{module}.{name}", ROW_BYTES * ROWS_OF_A_CHUNK)
    monkeypatch.setattr(f"{module}.PUBLISH_SECONDS", 0)


def rows_of(node: str, epoch: int) -> np.ndarray:
    """What a task puts in an epoch; nothing in some."""
    count = (epoch * 7 + ord(node)) % 5
    return (1000.0 * epoch + np.arange(2.0 * count)).reshape(count, 2) + ord(node)


def expected(node: str, epoch: int) -> np.ndarray:
    """All rows up to an epoch."""
    return np.concatenate([np.empty((0, 2)), *(rows_of(node, e + 1) for e in range(epoch))])


class Sampler:
    """A run, without a cluster, that holds the directory and goes on from the newest epoch."""

    def __init__(self, manager: MultiNodeCheckpointManager) -> None:
        self.manager = manager
        manager.run.start(NODES, {})
        directory = manager.directory
        at = directory.snapshot().latest
        self.epoch = 0 if at is None else at.epoch
        self.workspaces = {node: Workspace(node) for node in NODES}
        for workspace in self.workspaces.values():
            workspace.histories["h"] = Rows("h", extends=True)
        if at is not None:
            record = with_contents(directory, directory.record(at))
            loads = plan_load(directory, record, choose_sources(directory, record), goes_on=True)
            for node, load in loads.items():
                self.workspaces[node].apply(load.update(load.read(), replaces=False))
        self.encoding = replace(manager.run.encoding(), histories=("h",), puts=20)
        self.queue = SaveQueue(self.encoding)
        self.pending: list[Position] = []

    def run_epochs(self, count: int) -> None:
        """Run some epochs, and save them as one group."""
        for _ in range(count):
            self.epoch += 1
            for node, workspace in self.workspaces.items():
                history = workspace.histories["h"]
                workspace.put("h", history.put(rows_of(node, self.epoch), node))
                history.end_run()
            self.queue.capture(self.workspaces, at=Position(self.epoch))
            self.pending.append(Position(self.epoch))
        run = self.manager.run
        while self.pending:
            order = run.order({at: {} for at in self.pending}, self.encoding)
            self.pending = [at for at in self.pending if at > order.at]  # it may be cut
            try:
                committed = run.commit(order, self.queue.write(self.workspaces, order=order))
            except CheckpointWriteError:
                run.abandon(order)
                raise
            if committed.problem is not None:
                raise committed.problem

    def end(self) -> None:
        """Leave the directory."""
        self.queue.close()
        self.manager.run.end()


def live(manager: MultiNodeCheckpointManager) -> None:
    """Two runs of three groups. After a failed save, a run goes on to the next group."""
    for _ in range(2):
        with contextlib.suppress(CheckpointError):
            sampler = Sampler(manager)
            for count in (2, 1, 3):
                with contextlib.suppress(CheckpointError):
                    sampler.run_epochs(count)
            sampler.end()
        manager.run.end()
        manager.retention.sweeper.drain()


def check(manager: MultiNodeCheckpointManager) -> int:
    """Expect each row up to a recorded epoch once; return the newest epoch."""
    for epoch in manager.epochs():
        for node in NODES:
            rows = manager.history_of("h", nodes=[node], epoch=epoch)
            rows = rows.compute(scheduler="synchronous")[0]
            assert np.array_equal(rows, expected(node, epoch)), (epoch, node)
            last = manager.open(epoch)[node].load("h")
            assert np.array_equal(last, rows_of(node, epoch)), (epoch, node)
        manager.verify(epoch)
    return manager.latest() or 0


def go_on(manager: MultiNodeCheckpointManager) -> int:
    """The next run goes on from what is recorded; return the newest epoch."""
    before = check(manager)
    sampler = Sampler(manager)
    sampler.run_epochs(2)
    sampler.end()
    assert check(manager) == before + 2
    return before


@pytest.mark.parametrize("is_remote", [False, True], ids=["files", "objects"])
@pytest.mark.parametrize("how", ["fail", "die"])
@sampled("every", sample=173, nightly=1)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_at_any_operation_loses_no_row(
    every: int, how: Literal["fail", "die"], is_remote: bool, tmp_path: Path
) -> None:
    for k in itertools.count(1, every):
        place = Place(tmp_path / str(k), is_remote)
        files = place.files(k, how)
        manager = place.manager(keep=KeepLast(3), files=files, take_over=True)
        with contextlib.suppress(PowerCutError):
            live(manager)
        if how == "die":
            del manager
            gc.collect()  # the process is gone, and with it the manager and its heartbeat
        newest = go_on(place.manager())
        if files.count < k:
            assert newest == 12
            return


class OvertakenFiles(FaultyFiles):
    """At an operation, the process stops for as long as another has the directory."""

    def __init__(self, moment: str | int, overtake: Callable[[], object]) -> None:
        super().__init__(sync=False)
        self.moment, self.overtake, self.is_over = moment, overtake, False

    def before(self, operation: str, path: str) -> None:
        self.count += 1
        is_now = self.moment in (self.count, f"{operation} {path.rpartition('/')[2]}")
        if is_now and not self.is_over:
            self.is_over = True
            self.overtake()


# Every day, while it looks for leftovers that it may delete; nightly, at any operation.
@sampled("moments", sample=["list _histories"], nightly=itertools.count(1))
def test_a_run_that_goes_on_after_it_was_taken_over_changes_no_row_of_its_successor(
    moments: Iterable[str | int], tmp_path: Path
) -> None:
    for moment in moments:
        place = Place(tmp_path / str(moment))
        go_on(place.manager())
        successor = partial(place.manager, take_over=True)
        files = OvertakenFiles(moment, lambda successor=successor: go_on(successor()))
        live(place.manager(keep=KeepLast(3), files=files, take_over=True))
        go_on(successor())
        if not files.is_over:
            assert moment == files.count + 1
            return


@sampled("every", sample=100, nightly=2)
def test_a_power_loss_at_any_moment_loses_no_recorded_row(every: int, tmp_path: Path) -> None:
    path = tmp_path / "k"
    files = TracingFiles()
    live(MultiNodeCheckpointManager(path, keep=KeepLast(2), files=files))
    assert check(MultiNodeCheckpointManager(path)) == 12
    draw = random.Random(0)
    disk = Disk(str(tmp_path))
    newest = 0
    for i, operation in enumerate(files.trace):
        disk.apply(operation)
        if draw.randrange(every) and i < len(files.trace) - 1:
            continue
        trees = [all_lost(disk), all_kept(disk), some_state(disk, draw)]
        for j, tree in enumerate(trees):
            left = tree.get("k")
            if isinstance(left, dict):
                target = tmp_path / f"{i}-{j}"
                materialize(left, target)
                newest = max(newest, check(MultiNodeCheckpointManager(target)))
    assert newest == 12
