"""What is sent to the workers to save, or to find out whether all can be saved."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobrunner.checkpoint.blobs import encode_blobs
from jobrunner.checkpoint.codecs import Codec
from jobrunner.checkpoint.encoding import EncodedBlob
from jobrunner.checkpoint.files import PosixFiles
from jobrunner.checkpoint.records import Claim
from jobrunner.checkpoint.store import Receipt, write_stores
from jobrunner.errors import CheckpointWriteError
from jobrunner.workspace import Workspace


@dataclass(frozen=True, slots=True)
class BlobCheck:
    """Finds out whether the blobs of nodes can be saved; called once on each worker.

    Notes
    -----
    Runs on workers, in a thread; picklable. Touches no storage.
    """

    nodes: frozenset[str]
    codecs: Sequence[Codec] = ()
    allow_pickle: bool = False

    def __call__(self, workspaces: Mapping[str, Workspace]) -> None:
        """Raise what `encode` raises."""
        self.encode(workspaces)

    def encode(self, workspaces: Mapping[str, Workspace]) -> dict[str, dict[str, EncodedBlob]]:
        """Encode all that a save writes of each node: its global blobs but the transient ones.

        Raises
        ------
        DefinitionError
            A blob cannot be encoded; names it and the ways out.
        """
        return {
            node: encode_blobs(
                node,
                {
                    name: value
                    for name, value in workspace.globals.items()
                    if name not in workspace.transient
                },
                self.codecs,
                allow_pickle=self.allow_pickle,
            )
            for node, workspace in workspaces.items()
            if node in self.nodes
        }


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Writes the stores of a worker's nodes; called once on each worker.

    Parameters
    ----------
    path : str
        The checkpoint directory, absolute.
    run : str
    claim : Claim
    stores : mapping of str to str
        Node -> name of its store.
    check : BlobCheck
    files : PosixFiles

    Notes
    -----
    Runs on workers, in a thread; picklable. *Atomicity*: the epoch exists once the manager has
    committed it, and not before. *Safe to retry*: no; begin again.
    """

    path: str
    run: str
    claim: Claim
    stores: Mapping[str, str]
    check: BlobCheck
    files: PosixFiles

    @property
    def epoch(self) -> int:
        """The epoch that is saved."""
        return self.claim.epoch

    def __call__(self, workspaces: Mapping[str, Workspace]) -> dict[str, Receipt]:
        """Write, make durable, and give a receipt for each node.

        Raises
        ------
        DefinitionError
            A blob cannot be encoded; nothing was written.
        CheckpointWriteError
            The storage failed.
        """
        # All of it before anything is written: what cannot be saved is no fault of the storage.
        encoded = self.check.encode(workspaces)
        stores: dict[str, tuple[dict[str, Any], dict[str, EncodedBlob]]] = {
            self.stores[node]: ({"node": node, "epoch": self.epoch, "run": self.run}, blobs)
            for node, blobs in encoded.items()
        }
        try:
            receipts = write_stores(self.files, self.path, stores)
        except OSError as error:
            where = error.filename or os.path.join(self.path, next(iter(stores), ""))
            raise CheckpointWriteError(
                f"Epoch {self.epoch} of {', '.join(encoded)} could not be written: {where}: "
                f"{type(error).__name__}: {error.strerror or error}. What was recorded before "
                f"still is; mend the storage and save again."
            ) from error
        return dict(zip(encoded, receipts, strict=True))
