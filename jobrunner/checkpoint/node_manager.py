"""The checkpoint manager of a single node."""

from __future__ import annotations

import os
from typing import TypedDict, Unpack

from jobrunner.checkpoint.history import Metadata
from jobrunner.checkpoint.keep_policies import RetentionPolicy
from jobrunner.checkpoint.log import MetadataHandler, Patience
from jobrunner.checkpoint.manager import MultiNodeCheckpointManager
from jobrunner.checkpoint.save_policies import SavePolicy
from jobrunner.checkpoint.storage import Files
from jobrunner.define import checked
from jobrunner.names import check_name
from jobrunner.positions import EpochLike


class ManagerOptions(TypedDict, total=False):
    """The keywords of `MultiNodeCheckpointManager`, which documents them."""

    save: SavePolicy | None
    keep: RetentionPolicy | None
    asynchronous: bool
    budget_bytes: int | None
    delete_on_success: bool
    load_path: str | os.PathLike[str] | None
    compressors: object
    allow_pickle: bool
    take_over: bool
    save_on_failure: bool
    metadata: Metadata | None
    files: Files | None
    patience: Patience | None


class CheckpointManager(MultiNodeCheckpointManager):
    """Saves and loads the node `node_name` of a job; otherwise as `MultiNodeCheckpointManager`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        node_name: str,
        metadata_handler: MetadataHandler | None = None,
        **options: Unpack[ManagerOptions],
    ) -> None:
        super().__init__(path, metadata_handler, **options)
        self.node_name = self.directory.only_node = check_name(node_name, "node")

    @checked
    def get_ckpt_db_name(self, node: str | None, epoch: EpochLike) -> str:
        """As `MultiNodeCheckpointManager.get_ckpt_db_name`; None means the manager's node."""
        return super().get_ckpt_db_name(self.node_name if node is None else node, epoch)
