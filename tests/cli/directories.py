"""Checkpoint directories to run commands on, and a way to run them."""

import json

import numpy as np
from click.testing import CliRunner

from jobrunner import MultiNodeCheckpointManager
from jobrunner.checkpoint.log.log_writer import STATE_INTERVAL
from jobrunner.checkpoint.storage.posix import PosixFiles
from jobrunner.cli.command import main
from jobrunner.positions import Position
from jobrunner.testing import FaultyFiles
from jobrunner.workspace.workspace import Workspace
from tests.saves import save_epoch


def invoke(*args):
    return CliRunner().invoke(main, [str(arg) for arg in args])


def ask(*args):
    return json.loads(invoke(*args, "--json").stdout)


def begin(path, **options):
    manager = MultiNodeCheckpointManager(path, files=FaultyFiles(sync=False), **options)
    manager.run.start(["a", "b"], {"plan": {"job": "p"}})
    return manager


def save(manager, epoch, extra=None):
    workspaces = {node: Workspace(node) for node in "ab"}
    for workspace in workspaces.values():
        workspace.globals.update(w=np.arange(6.0), step=epoch, **(extra or {}))
    loss = {0: 3.0, 1: 1.0, 2: float("nan")}.get(epoch, 2.0)
    save_epoch(manager, Position.of(epoch), workspaces, {"metrics": {"loss": loss}})
    manager.retention.sweeper.drain()


def recorded(path):
    return MultiNodeCheckpointManager(path).epochs()


def lengthen_log(path):
    """Append entries until one has the full state: readers need none of those before it."""
    manager = MultiNodeCheckpointManager(path)
    for _ in range(STATE_INTERVAL // 2):
        manager.pin(3)
        manager.unpin(3)


class PrunedMeanwhile(PosixFiles):
    """Epochs are pruned at the n-th operation on a path that contains `at`."""

    def __init__(self, path, at, count=1):
        super().__init__()
        self.path, self.at, self.left = path, at, count

    def before(self, operation, path):
        self.left -= self.at in path
        if self.at in path and self.left == 0:
            assert invoke("prune", self.path, "--keep-last", 2).exit_code == 0
