"""The checkpoint manager of a single node."""

from __future__ import annotations

import os
from typing import Any

from jobrunner.checkpoint.log import MetadataHandler
from jobrunner.checkpoint.manager import MultiNodeCheckpointManager
from jobrunner.define import checked
from jobrunner.names import check_name
from jobrunner.positions import EpochLike


class CheckpointManager(MultiNodeCheckpointManager):
    """Saves and loads the node `node_name` of a job; otherwise as `MultiNodeCheckpointManager`.

    `options` are the keywords of that class.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        node_name: str,
        metadata_handler: MetadataHandler | None = None,
        **options: Any,
    ) -> None:
        super().__init__(path, metadata_handler, **options)
        self.node_name = self.directory.only_node = check_name(node_name, "node")

    @checked
    def get_ckpt_db_name(self, node: str | None, epoch: EpochLike) -> str:
        """As `MultiNodeCheckpointManager.get_ckpt_db_name`; None means the manager's node."""
        return super().get_ckpt_db_name(self.node_name if node is None else node, epoch)
