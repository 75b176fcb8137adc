"""The checkpoint manager of a single node."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from jobrunner.checkpoint.log import MetadataHandler
from jobrunner.checkpoint.manager import ManagerOptions, MultiNodeCheckpointManager
from jobrunner.errors import DefinitionError
from jobrunner.names import check_name


class CheckpointManager(MultiNodeCheckpointManager):
    """Saves and loads one node of a job; otherwise as `MultiNodeCheckpointManager`.

    Parameters
    ----------
    path : str or os.PathLike
    node_name : str
    metadata_handler : MetadataHandler, optional
    **options
        As for `MultiNodeCheckpointManager`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        node_name: str,
        metadata_handler: MetadataHandler | None = None,
        **options: Unpack[ManagerOptions],
    ) -> None:
        super().__init__(path, metadata_handler, **options)
        self.node_name = check_name(node_name, "node")
        self._only_node = node_name

    def start_run(self, nodes: Sequence[str], info: Mapping[str, Any]) -> None:
        """See `MultiNodeCheckpointManager.start_run`; the nodes must be this one."""
        if tuple(nodes) != (self.node_name,):
            raise DefinitionError(
                f"A CheckpointManager saves one node, {self.node_name!r} here, and the job "
                f"checkpoints {', '.join(map(repr, nodes)) or 'none'}. Use a "
                f"MultiNodeCheckpointManager, or Job(nodes_to_checkpoint=[...])."
            )
        super().start_run(nodes, info)

    def get_ckpt_db_name(self, node: str | None, epoch: int) -> str:
        """See `CheckpointDirectory.get_ckpt_db_name`; None stands for the manager's node."""
        return super().get_ckpt_db_name(self.node_name if node is None else node, epoch)
