"""A sampler without a cluster, whose every row is known: for faults while histories grow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jobrunner import CheckpointWriteError, MultiNodeCheckpointManager, Position
from jobrunner.checkpoint import SaveQueue
from jobrunner.checkpoint.load_plan import choose_sources, plan_load, with_contents
from jobrunner.workspace import Rows
from jobrunner.workspace.workspace import Workspace

NODES = ("a", "b")
ROWS_OF_A_CHUNK = 6


def rows_of(node: str, epoch: int) -> np.ndarray:
    """What a task puts in an epoch; nothing in some."""
    count = (epoch * 7 + ord(node)) % 5
    return (1000.0 * epoch + np.arange(2.0 * count)).reshape(count, 2) + ord(node)


def expected(node: str, epoch: int) -> np.ndarray:
    """All rows up to an epoch."""
    return np.concatenate([np.empty((0, 2)), *(rows_of(node, e + 1) for e in range(epoch))])


class Sampler:
    """A run that holds the directory, and goes on from a recorded epoch, by default the newest."""

    def __init__(self, manager: MultiNodeCheckpointManager, at: Position | None = None) -> None:
        self.manager = manager
        manager.run.start(NODES, {})
        directory = manager.directory
        at = at or directory.snapshot().latest
        self.epoch = 0 if at is None else at.epoch
        self.workspaces = {node: Workspace(node) for node in NODES}
        for workspace in self.workspaces.values():
            workspace.histories["h"] = Rows("h", extends=True)
        if at is not None:
            record = with_contents(directory, directory.record(at))
            loads = plan_load(directory, record, choose_sources(directory, record), goes_on=True)
            for node, load in loads.items():
                self.workspaces[node].apply(load.update(load.read(), replaces=False))
            manager.run.rewind(at, "it was asked for")
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


def check_epoch(manager: MultiNodeCheckpointManager, epoch: int) -> None:
    """Expect that each row up to a recorded epoch is there once."""
    for node in NODES:
        rows = manager.history_of("h", nodes=[node], epoch=epoch)
        rows = rows.compute(scheduler="synchronous")[0]
        assert np.array_equal(rows, expected(node, epoch)), (epoch, node)
        last = manager.open(epoch)[node].load("h")
        assert np.array_equal(last, rows_of(node, epoch)), (epoch, node)
    manager.verify(epoch)
