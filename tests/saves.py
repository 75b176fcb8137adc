"""Saves epochs one by one, without a job and its workers, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import cloudpickle

from jobrunner import MultiNodeCheckpointManager, Position
from jobrunner.checkpoint import Receipt, SaveQueue, Written
from jobrunner.workspace.workspace import Workspace

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
