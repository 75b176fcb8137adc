"""Saves epochs one by one, without a job and its workers, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle

from jobrunner import MultiNodeCheckpointManager, Position, TaskGroup
from jobrunner.checkpoint import Receipt, SaveQueue, Written
from jobrunner.testing import FaultyFiles, assert_identical
from jobrunner.workspace.workspace import BlobUpdate, Workspace
from tests.blobs import Blobs

Receipts = Mapping[str, Receipt]
"""By node."""


class Save:
    """A save of one epoch that has begun."""

    def __init__(
        self,
        manager: MultiNodeCheckpointManager,
        epoch: Any,
        details: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.at = Position.of(epoch)
        self.run = manager.run
        self.encoding = replace(manager.run.encoding(), **options)
        self.order = manager.run.order({self.at: details or {}}, self.encoding)
        self.sent = self.order
        self.queue = SaveQueue(self.encoding)

    @property
    def stores(self) -> Mapping[str, str]:
        """Node -> name of its store."""
        return self.order.stores[self.at]

    def send(self) -> None:
        """Go on with what reaches a worker."""
        self.sent, encoding = cloudpickle.loads(cloudpickle.dumps((self.order, self.encoding)))
        self.queue = SaveQueue(encoding)

    def write(self, workspaces: Mapping[str, Workspace]) -> Receipts:
        """Write the workspaces as they are now."""
        return self.queue.save(workspaces, order=self.sent).receipts[0]

    def capture(self, workspaces: Mapping[str, Workspace]) -> None:
        """Capture the workspaces as they are now."""
        self.queue.capture(workspaces, at=self.at)

    def write_captured(self, workspaces: Mapping[str, Workspace]) -> Receipts:
        """Write what was captured."""
        return self.queue.write(workspaces, order=self.sent).receipts[0]

    def commit(self, receipts: Receipts) -> None:
        """Record the epoch."""
        self.run.commit(self.order, Written([dict(receipts)]))

    def abandon(self) -> None:
        """Give the epoch up."""
        self.run.abandon(self.order)


def save_epoch(
    manager: MultiNodeCheckpointManager,
    epoch: Any,
    workspaces: Mapping[str, Workspace] | None = None,
    details: Mapping[str, Any] | None = None,
    **options: Any,
) -> None:
    """Save an epoch, of a run without nodes if there are no workspaces."""
    save = Save(manager, epoch, details, **options)
    save.commit({} if workspaces is None else save.write(workspaces))


class NodeRun:
    """A run of one node, "a", whose blobs the test sets; it saves at once and cleans up."""

    def __init__(self, path: Path | str, **options: Any) -> None:
        options.setdefault("files", FaultyFiles(sync=False))
        self.path = path
        self.manager = MultiNodeCheckpointManager(path, **options)
        self.manager.run.start(["a"], {})
        self.workspace = Workspace("a")
        self.blobs = Blobs(self.workspace)

    def save(
        self, epoch: Any = 0, blobs: Mapping[str, Any] | None = None, **options: Any
    ) -> Receipt:
        """Save the blobs, some of which are set first; `options` are those of the encoding."""
        self.blobs.update(blobs or {})
        save = Save(self.manager, epoch, **options)
        save.send()
        receipts = save.write({"a": self.workspace})
        save.commit(receipts)
        self.manager.retention.sweeper.drain()
        return receipts["a"]

    def check(self, epoch: Any = 0) -> None:
        """Expect that the epoch is whole, and loads as the blobs that are set, in their order."""
        self.manager.verify(epoch)
        again = {"a": Workspace("a")}
        run_group(self.manager.load(epoch), again)
        assert_identical(dict(self.blobs), dict(Blobs(again["a"])))

    def end(self) -> None:
        """Leave the directory."""
        self.manager.run.end()


def run_group(group: TaskGroup, workspaces: Mapping[str, Workspace]) -> None:
    """Run a group's tasks one after another, as a session would, with private blobs."""
    private: dict[str, dict[str, Any]] = {node: {} for node in workspaces}
    for task in group.tasks():
        node = task.node.name
        blobs = {**workspaces[node].globals, **private[node]}
        result = task.fn(*(blobs[blob.name] for blob in task.inputs))
        if isinstance(result, BlobUpdate):
            workspaces[node].apply(result)
        elif task.output_blobs:
            (blob,) = task.output_blobs
            private[node][blob.name] = result
