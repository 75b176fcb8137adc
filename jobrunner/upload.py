"""What happens to the last checkpoint after the last epoch: copies of it elsewhere."""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from jobrunner.errors import CheckpointWriteError, DefinitionError
from jobrunner.node import Node
from jobrunner.task import Task, TaskGroup

if TYPE_CHECKING:
    from jobrunner.checkpoint import MultiNodeCheckpointManager


class UploadTaskGroupBuilder(Protocol):
    """Makes the task group that runs after the last epoch, before the download group."""

    def build(self, epoch: int, manager: MultiNodeCheckpointManager) -> TaskGroup:
        """Tasks that take the stores of `epoch` elsewhere.

        Parameters
        ----------
        epoch : int
            The last epoch that is recorded.
        manager : MultiNodeCheckpointManager
            ``manager.record(epoch)["stores"]`` names the nodes;
            ``manager.get_ckpt_db_name(node, epoch)`` is where a node's store lies.
        """


class CopyTo:
    """Copy each node's store of the last epoch to a directory, on the node itself.

    Parameters
    ----------
    path : str or os.PathLike
        A directory that the workers can write; made if it is not there. A store there of the
        same name is replaced; until its copy is whole no Zarr reader opens it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        text = os.fspath(path)
        if not text or "://" in text:
            raise DefinitionError(f"CopyTo takes the path of a directory; got {text!r}.")
        self.path = Path(text).absolute()

    def build(self, epoch: int, manager: MultiNodeCheckpointManager) -> TaskGroup:
        """One task for each node of the checkpoint.

        Raises
        ------
        DefinitionError
            The copies would go into the checkpoint directory itself.
        """
        here = os.path.realpath(manager.path)
        if os.path.commonpath([here, os.path.realpath(self.path)]) == here:
            raise DefinitionError(
                f"CopyTo({str(self.path)!r}) would copy the stores of {manager.path} into that "
                f"very directory, over themselves. Name another one."
            )
        with TaskGroup() as group:
            for node in manager.record(epoch)["stores"]:
                source = Path(manager.get_ckpt_db_name(node, epoch))
                copy = functools.partial(_copy_store, str(source), str(self.path / source.name))
                Task(copy, name="copy store", node=Node(node))
        return group


def _copy_store(source: str, target: str) -> None:
    # Without its root document no reader takes a directory for a store: it goes first and comes last.
    root = "zarr.json"
    try:
        if os.path.exists(target) and os.path.samefile(source, target):
            raise CheckpointWriteError(
                f"The store {source!r} and its copy {target!r} are one directory; nothing was "
                f"touched. Let CopyTo name a directory of its own."
            )
        if os.path.lexists(target):
            Path(target, root).unlink(missing_ok=True)
            shutil.rmtree(target)
        shutil.copytree(
            source, target, ignore=lambda at, _: {root} if Path(at) == Path(source) else set()
        )
        shutil.copyfile(Path(source, root), Path(target, f"{root}.partial"))
        Path(target, f"{root}.partial").replace(Path(target, root))
    except OSError as error:
        raise CheckpointWriteError(
            f"Could not copy the store {source!r} to {target!r}: {error}. The checkpoint itself "
            f"is recorded; mend the target and run the job again to repeat the copy."
        ) from error
