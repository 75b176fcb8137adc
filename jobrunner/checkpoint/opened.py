"""Open a recorded checkpoint, without a cluster, the job or its code."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, Self

from jobrunner.checkpoint.directory import EpochRecord
from jobrunner.checkpoint.storage import Result
from jobrunner.checkpoint.store import StoreDocument, StoredValue, StoreReader
from jobrunner.define import checked
from jobrunner.errors import BlobNotFoundError, CheckpointNotFoundError
from jobrunner.texts import listed, printable

_MOST_NAMED = 12


class NodeCheckpoint(Mapping[str, Any]):
    """The blobs of one node at one epoch, by name, in the order in which they were saved.

    Arrays are lazy: `zarr.Array` objects, alone or inside their containers. Each chunk that is read
    through them is verified, and damage raises `CheckpointCorruptError`; `load` verifies the whole
    blob.
    """

    def __init__(
        self,
        node: str,
        reader: StoreReader,
        borrowed: Mapping[str, Callable[[], NodeCheckpoint]],
    ) -> None:
        self.node = node
        self.path = reader.root
        self._reader = reader
        self._document = reader.read_document()
        self._borrowed = borrowed  # replicated blobs, which are in other stores

    def __getitem__(self, blob: str) -> Any:
        reader, document = self._find(blob)
        return reader.peek(document, blob)

    def load(self, blob: str) -> Any:
        """Read a blob and verify every byte.

        Raises
        ------
        CheckpointCorruptError
            A file is not what was written.
        BlobNotFoundError
            There is no such blob.
        """
        reader, document = self._find(blob)
        return reader.load([blob], document=document)[blob]

    def stored(self, blob: str) -> StoredValue:
        """Read a blob and verify every byte, but do not decode it."""
        reader, document = self._find(blob)
        return reader.read_stored(document, [blob])[blob]

    def outline(self, blob: str) -> Any:
        """Return the blob with an `ArrayOutline`, shape and dtype, in place of each array."""
        reader, document = self._find(blob)
        return reader.peek(document, blob, outline=True)

    def digest(self, blob: str) -> str:
        """Return a SHA-256 of a blob's values, types and shapes.

        Equal digests mean equal blobs, unless the XXH3 digests (128 bits) of their chunks collide.
        """
        reader, document = self._find(blob)
        return reader.digest(document, blob)

    def _find(self, blob: str) -> tuple[StoreReader, StoreDocument]:
        """The store that has the blob: that of the node which saved it."""
        owner = self._borrowed[blob]() if blob in self._borrowed else self
        if blob not in owner._document.blobs:
            names = ", ".join(map(repr, owner)) or "none"
            raise BlobNotFoundError(f"{owner.path} has no blob {blob!r}. Its blobs are: {names}.")
        return owner._reader, owner._document

    def __iter__(self) -> Iterator[str]:
        return iter([*self._document.blobs, *self._borrowed])

    def __len__(self) -> int:
        return len(self._document.blobs) + len(self._borrowed)

    def __contains__(self, blob: object) -> bool:
        return blob in self._document.blobs or blob in self._borrowed

    def __repr__(self) -> str:
        return printable(f"<NodeCheckpoint {self.path}: {listed(self, _MOST_NAMED)}>", kept="")


class Checkpoint(Mapping[str, NodeCheckpoint]):
    """A recorded epoch: node -> its blobs.

    Attributes
    ----------
    epoch : int or Position
    step : int
        How many steps it contains besides whole epochs.
    record : EpochRecord
        What the log says of it.

    Examples
    --------
    >>> with manager.open(5) as checkpoint:
    ...     checkpoint["server"]["centroids"][:2]
    array([0., 0.])
    """

    def __init__(
        self,
        record: EpochRecord,
        readers: Mapping[str, StoreReader],
        release: Callable[[], object] | None = None,
    ) -> None:
        self.epoch = record.epoch
        self.step = record.at.step
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
        """Read the documents of nodes, many at once on slow storage."""
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
            names = ", ".join(map(repr, self)) or "none"
            raise BlobNotFoundError(f"Epoch {self.epoch} has no node {node!r}. It has {names}.")
        if node not in self._open:
            borrowed: dict[str, Callable[[], NodeCheckpoint]] = {}
            for name, (owner, *others) in self.record.details.replicated.items():
                if node in others and owner in self._readers:
                    borrowed[name] = partial(self.__getitem__, owner)
            self._open[node] = NodeCheckpoint(node, self._readers[node], borrowed)
        return self._open[node]

    @checked
    def array(self, blob: str) -> Any:
        """Return all parts of a partitioned blob as one `dask.array.Array`, a block for each chunk.

        Parameters
        ----------
        blob : str
            Declared with ``Blob(..., partition=axis)``.

        Raises
        ------
        BlobNotFoundError
            No such blob was declared.
        """
        import dask.array  # slow to import, and seldom needed

        partitions = self.record.details.partitions
        if blob not in partitions:
            names = ", ".join(map(repr, partitions)) or "none"
            raise BlobNotFoundError(
                f"Epoch {self.epoch} has no partitioned blob {blob!r}. It has {names}."
            )
        axis, nodes = partitions[blob].axis, partitions[blob].nodes
        parts = list(self._each(lambda node: self[node][blob], nodes))
        arrays = []
        for node, part in zip(nodes, parts, strict=True):
            # Without a name, Dask would pickle the array to make one.
            name = f"{node}-{blob}-{self._readers[node].sha256}"
            arrays.append(dask.array.from_array(part, part.chunks, name=name))
        return dask.array.concatenate(arrays, axis)

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __contains__(self, node: object) -> bool:
        return node in self._readers

    def __repr__(self) -> str:
        nodes = listed(self._readers, _MOST_NAMED)
        return printable(f"<Checkpoint of {self.record.name}: {nodes}>", kept="")
