"""Open a recorded checkpoint, without a cluster, the job or its code."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Self

import msgspec

from jobrunner.checkpoint.storage import Result
from jobrunner.checkpoint.store.manifest import Row
from jobrunner.checkpoint.store.partitioned import PartitionedArray
from jobrunner.checkpoint.store.reader import StoreReader
from jobrunner.errors import BlobNotFoundError, CheckpointNotFoundError


class NodeCheckpoint(Mapping[str, Any]):
    """The blobs of one node at one epoch, by name, in the order in which they were saved.

    Arrays are lazy: `zarr.Array` objects, alone or inside their containers. What is read through
    them is not verified; `load` verifies.
    """

    def __init__(
        self,
        node: str,
        reader: StoreReader,
        borrowed: Mapping[str, NodeCheckpoint],
    ) -> None:
        self.node = node
        self.path = reader.root
        self._reader = reader
        self._manifest = reader.read_manifest()
        self._borrowed = borrowed  # replicated blobs, which are in other stores

    def __getitem__(self, blob: str) -> Any:
        own = self._owner(blob)
        return own._reader.peek(own._manifest, blob)

    def load(self, blob: str) -> Any:
        """Read a blob and verify every byte.

        Raises
        ------
        CheckpointCorruptError
            A file is not what was written.
        BlobNotFoundError
            There is no such blob.
        """
        own = self._owner(blob)
        return own._reader.load([blob], manifest=own._manifest)[blob]

    def outline(self, blob: str) -> Any:
        """Return the blob with an `ArrayOutline`, shape and dtype, in place of each array."""
        own = self._owner(blob)
        return own._reader.peek(own._manifest, blob, outline=True)

    def digest(self, blob: str) -> str:
        """Return a SHA-256 of a blob's values, types and shapes.

        Equal digests mean equal blobs, unless the CRC-32C of their chunks collide.
        """
        found = self._owner(blob)._manifest.blob(blob)
        entries = [array.alone() if isinstance(array, Row) else array for array in found.arrays]
        # The same for a row of a stack as for an array of its own.
        arrays = [{**msgspec.to_builtins(it), "path": None, "within": None} for it in entries]
        text = json.dumps([found.tree, arrays], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def _owner(self, blob: str) -> NodeCheckpoint:
        """Return the checkpoint of the node that saved the blob."""
        if blob in self._borrowed:
            return self._borrowed[blob]._owner(blob)
        if blob not in self._manifest.blobs:
            there = ", ".join(map(repr, self)) or "none"
            raise BlobNotFoundError(f"{self.path} has no blob {blob!r}. Its blobs are: {there}.")
        return self

    def __iter__(self) -> Iterator[str]:
        return iter([*self._manifest.blobs, *self._borrowed])

    def __len__(self) -> int:
        return len(self._manifest.blobs) + len(self._borrowed)

    def __contains__(self, blob: object) -> bool:
        return blob in self._manifest.blobs or blob in self._borrowed

    def __repr__(self) -> str:
        return f"<NodeCheckpoint {self.path}: {', '.join(self)}>"


class Checkpoint(Mapping[str, NodeCheckpoint]):
    """A recorded epoch: node -> its blobs.

    Attributes
    ----------
    epoch : int
    record : mapping
        Its entry in the log.

    Examples
    --------
    ::

        checkpoint = MultiNodeCheckpointManager("runs/kmeans").open(5)
        checkpoint["server"]["centroids"][:10]
    """

    def __init__(
        self,
        epoch: int,
        record: Mapping[str, Any],
        readers: Mapping[str, StoreReader],
        release: Callable[[], object] | None = None,
    ) -> None:
        self.epoch = epoch
        self.record = record
        self._readers = readers
        self._release = release
        self._open: dict[str, NodeCheckpoint] = {}

    def close(self) -> None:
        """Remove the pin of ``open(epoch, pin=True)``; may be called again."""
        release, self._release = self._release, None
        if release is not None:
            with contextlib.suppress(CheckpointNotFoundError):  # the epoch, and its pin, are gone
                release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def read_ahead(self, nodes: Collection[str]) -> None:
        """Read the manifests of nodes, many at once on slow storage."""
        list(self._each(self.__getitem__, nodes))

    def _each(self, call: Callable[[str], Result], nodes: Collection[str]) -> Iterator[Result]:
        for reader in self._readers.values():
            return reader.files.each(call, nodes)
        return map(call, nodes)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that were saved."""
        return tuple(self._readers)

    def __getitem__(self, node: str) -> NodeCheckpoint:
        if node not in self._readers:
            there = ", ".join(map(repr, self)) or "none"
            raise BlobNotFoundError(f"Epoch {self.epoch} has no node {node!r}. It has {there}.")
        if node not in self._open:
            replicated = self.record["details"].get("replicated", {})
            self._open[node] = NodeCheckpoint(
                node,
                self._readers[node],
                {
                    name: self[owner]
                    for name, (owner, *others) in replicated.items()
                    if node in others and owner in self._readers
                },
            )
        return self._open[node]

    def array(self, blob: str) -> PartitionedArray:
        """Return all parts of a partitioned blob as one lazy array.

        Parameters
        ----------
        blob : str
            Declared with ``Blob(..., partition=axis)``.

        Raises
        ------
        BlobNotFoundError
            No such blob was declared.
        """
        partitions = self.record["details"].get("partitions", {})
        if blob not in partitions:
            there = ", ".join(map(repr, partitions)) or "none"
            raise BlobNotFoundError(
                f"Epoch {self.epoch} has no partitioned blob {blob!r}. It has {there}."
            )
        about = partitions[blob]
        parts = list(self._each(lambda node: self[node][blob], about["nodes"]))
        return PartitionedArray(blob, about["axis"], parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __contains__(self, node: object) -> bool:
        return node in self._readers

    def __repr__(self) -> str:
        return f"<Checkpoint of epoch {self.epoch}: {', '.join(self._readers)}>"
