"""After the last epoch: copy the last checkpoint elsewhere, download, exit."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Protocol

from jobrunner.checkpoint import (
    Files,
    MultiNodeCheckpointManager,
    StoreReader,
    absolute_path,
    copy_files,
    copy_root,
    files_beside,
    is_url,
    make_groups,
)
from jobrunner.define import Node, Rule, Task, TaskGroup, checked
from jobrunner.errors import CheckpointWriteError, DefinitionError
from jobrunner.names import ROOT_DOCUMENT


class UploadTaskGroupBuilder(Protocol):
    """Makes the task group that runs after the last epoch, before the download group."""

    def build(self, epoch: int, manager: MultiNodeCheckpointManager) -> TaskGroup:
        """Make the tasks that copy the stores of `epoch` elsewhere.

        Parameters
        ----------
        epoch : int
            The last recorded epoch.
        manager : MultiNodeCheckpointManager
            ``manager.record(epoch).stores`` names the nodes;
            ``manager.get_ckpt_db_name(node, epoch)`` is the path of a node's store.
        """


BUILDER = Rule(
    "an object with a method build(epoch, manager), such as CopyTo(path)",
    lambda value: callable(getattr(value, "build", None)) and not isinstance(value, type),
)


class CopyTo:
    """Copy each node's store of the last epoch elsewhere, with its histories, on its own worker.

    Parameters
    ----------
    path : str or os.PathLike
        A directory, or its URL, that the workers can write to; created if missing. A store of the
        same name is replaced, and no Zarr reader opens it until the copy is complete and durable,
        also after a power loss.

    Notes
    -----
    Verifies every byte. Copies two files of a store at a time, or eight if either side is an object
    store, and reads each into memory; a file has at most 64 MiB, and most are smaller.
    """

    @checked
    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = absolute_path(path)

    def check(self, manager: MultiNodeCheckpointManager) -> None:
        """Raise `DefinitionError` if `path` is in the checkpoint directory."""
        if _is_inside(self.path, manager.path):
            raise DefinitionError(
                f"CopyTo({self.path!r}) would copy the stores of {manager.path} into that "
                f"same directory, over themselves. Choose another directory."
            )

    def build(self, epoch: int, manager: MultiNodeCheckpointManager) -> TaskGroup:
        """Make one task for each node of the checkpoint; raises what `check` does."""
        self.check(manager)
        files = manager.directory.files
        target_files = files_beside(self.path, files)
        record = manager.record(epoch)
        # Not where they lie here: other epochs that were copied there may have that name.
        histories = f"{record.at.epoch}.0" if record.histories else ""
        with TaskGroup() as group:
            for node, store in record.stores.items():
                source = StoreReader(
                    files, manager.path, store.name, store.sha256, record.histories
                )
                copy = replace(source, files=target_files, directory=self.path, histories=histories)
                Task(partial(_copy_store, source, copy), name="copy store", node=Node(node))
        return group


def _is_inside(path: str, directory: str) -> bool:
    if is_url(path) or is_url(directory):
        return f"{path}/".startswith(f"{directory}/")
    outer = os.path.realpath(directory)
    return os.path.commonpath([outer, os.path.realpath(path)]) == outer


def _remove(files: Files, root: str) -> None:
    """Remove a store or a history, if it is there. Zarr opens it by its document: remove that first."""
    document = os.path.join(root, ROOT_DOCUMENT)
    if files.is_taken(root):
        if files.is_taken(document):
            files.remove_file(document)
            files.sync_path(root)
        files.remove_tree(root)


def _copy_store(source: StoreReader, target: StoreReader) -> None:
    files, directory = target.files, target.directory
    try:
        both = os.path.exists(source.root) and os.path.exists(target.root)
        if both and os.path.samefile(source.root, target.root):
            raise CheckpointWriteError(
                f"The store {source.root!r} and its copy {target.root!r} are the same directory; "
                f"nothing was changed. Give CopyTo a directory of its own."
            )
        document = source.read_document()  # nothing is removed for a damaged store
        blobs = document.entry.histories
        roots = [target.root, *(target.history(document, blob).root for blob in blobs)]
        for root in roots:
            _remove(files, root)
        files.make_directories(directory)
        make_groups(files, directory, target.histories, blobs)
        written = [root.removeprefix(f"{directory}/") for root in roots]
        with files.making_durable(directory, written):
            copy_files([(source, target)])
        copy_root(source, target, durable=True)
    except OSError as error:
        raise CheckpointWriteError(
            f"Could not copy the store {source.root!r} to {target.root!r}: {error}. The checkpoint "
            f"itself is recorded. Repair the target and run the job again to repeat the copy."
        ) from error
