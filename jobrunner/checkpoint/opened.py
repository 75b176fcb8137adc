"""Open a recorded checkpoint, without a cluster, the job or its code."""

from __future__ import annotations

import contextlib
import os
import platform
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from jobrunner.checkpoint.directory import Directory, EpochRecord
from jobrunner.checkpoint.encoding import REGISTERED_CODECS
from jobrunner.checkpoint.log import NodeContents
from jobrunner.checkpoint.storage import Files
from jobrunner.checkpoint.store import StoreDocument, StoredValue, StoreReader, verify_stores
from jobrunner.define import Natural, checked
from jobrunner.errors import BlobNotFoundError, CheckpointError, CheckpointNotFoundError
from jobrunner.joined import (
    CHUNK_BYTES,
    FrameType,
    concatenate_frames,
    cut,
    join_arrays,
    join_frames,
    type_of_frame,
)
from jobrunner.positions import Position
from jobrunner.texts import listed, printable

if TYPE_CHECKING:
    from dask.array import Array
    from dask.dataframe import DataFrame

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
        owners: Mapping[str, str],
        nodes: Mapping[str, NodeCheckpoint],
    ) -> None:
        self.node = node
        self.path = reader.root
        self._reader = reader
        self._document = reader.read_document()
        self._owners = owners  # of replicated blobs, which are in other stores
        self._nodes = nodes
        self._names = [*self._document.names, *owners]

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
        return reader.outline(document, blob)

    def digest(self, blob: str) -> str:
        """Return a SHA-256 of a blob's values, types and shapes.

        Equal digests mean equal blobs, unless the XXH3 digests (128 bits) of their chunks collide.
        """
        reader, document = self._find(blob)
        return reader.digest(document, blob)

    def _find(self, blob: str) -> tuple[StoreReader, StoreDocument]:
        """The store that has the blob: that of the node which saved it."""
        owner = self._nodes[self._owners[blob]] if blob in self._owners else self
        if blob not in owner._document.names:
            names = listed(map(repr, owner))
            raise BlobNotFoundError(f"{owner.path} has no blob {blob!r}. Its blobs are: {names}.")
        return owner._reader, owner._document

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, blob: object) -> bool:
        return blob in self._names

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
        files: Files,
        release: Callable[[], object] | None = None,
    ) -> None:
        self.epoch = record.epoch
        self.step = record.at.step
        self.record = record
        self._readers = readers
        self._files = files
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
        list(self._files.each(self.__getitem__, nodes))

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that were saved."""
        return tuple(self._readers)

    @property
    def _place(self) -> str:
        """Which epoch of which directory this is, as the end of a phrase; "" without nodes."""
        directories = {reader.directory for reader in self._readers.values()}
        return "".join(f" at epoch {self.epoch} of {directory}" for directory in directories)

    def __getitem__(self, node: str) -> NodeCheckpoint:
        if node not in self._readers:
            names = listed(map(repr, self))
            raise BlobNotFoundError(f"Epoch {self.epoch} has no node {node!r}. It has {names}.")
        if node not in self._open:
            owners = {}
            for name, (owner, *replicas) in self.record.details.replicated.items():
                if node in replicas and owner in self._readers:
                    owners[name] = owner
            self._open[node] = NodeCheckpoint(node, self._readers[node], owners, self)
        return self._open[node]

    @checked
    def array(
        self, blob: str, nodes: Collection[str] | None = None, axis: Natural | None = None
    ) -> Array:
        """Return a blob of several nodes as one lazy `dask.array.Array`; needs no cluster.

        Parameters
        ----------
        blob : str
            Its values are arrays or numbers of one dtype.
        nodes : collection of str, optional
            By default all that saved the blob.
        axis : int, optional
            Join the values along this axis. By default the parts of a partitioned blob along its
            axis, and other values, which must have one shape, along a new first axis.

        Returns
        -------
        dask.array.Array
            Computing a part of it reads, and verifies, only that part. Neighbours make up chunks of at
            most 64 MiB; a larger value has the chunks in which it is stored.

        Raises
        ------
        BlobNotFoundError
            A node has no such blob.
        DefinitionError
            The values differ in dtype or shape; the message names the first two.
        """
        from dask.base import tokenize  # slow to import, and seldom needed
        from dask.delayed import delayed

        from jobrunner.checkpoint.epoch_axis import (  # it opens records
            EpochChunk,
            EpochValue,
            find_type,
        )

        partition = self.record.details.partitions.get(blob)
        if axis is None and partition is not None:
            axis = partition.axis
        parts = {}
        for node, reader, document in self._find_nodes(blob, nodes):
            kind = find_type(reader, document, blob)
            parts[node] = EpochValue(self.epoch, node, reader, kind)  # type: ignore[arg-type]  # `cut` refuses None
        types = {node: part.type for node, part in parts.items()}
        pieces: list[tuple[list[str], Any]] = []
        for chunk in cut(blob, types, axis, self._place):
            first = parts[chunk[0]]
            if first.type.nbytes > CHUNK_BYTES:
                pieces.append((chunk, self._open_large(first.node, blob, axis)))
                continue
            row = [parts[node] for node in chunk]
            name = f"{blob}-{tokenize([part.reader.identity for part in row], axis)}"
            read = delayed(EpochChunk.read)(EpochChunk(blob, [row], axis), dask_key_name=name)
            pieces.append((chunk, read[0]))
        return join_arrays(types, axis, pieces)

    @checked
    def frame(self, blob: str, nodes: Collection[str] | None = None) -> DataFrame:
        """Return a blob of several nodes, data frames or series, as one lazy `dask.dataframe.DataFrame`.

        Parameters
        ----------
        blob, nodes
            As of `array`; the values must have the same columns and dtypes.

        Returns
        -------
        dask.dataframe.DataFrame
            A partition has neighbours up to 64 MiB, or one larger value. Divisions are unknown.

        Raises
        ------
        BlobNotFoundError
            A node has no such blob.
        DefinitionError
            A value is no data frame. If values differ, the tasks that read them raise it; the
            message names the first two.
        """
        from dask.delayed import delayed  # slow to import, and seldom needed

        owners = self._find_nodes(blob, nodes)
        readers: dict[str, StoreReader] = {}
        types: dict[str, FrameType | None] = {}
        first, kind = "", None
        for node, reader, document in owners:
            if not first:
                first, kind = node, type_of_frame(self[node].load(blob))
            readers[node], types[node] = reader, kind
            if kind is not None:
                # What the documents say of sizes is enough to make chunks.
                types[node] = kind._replace(nbytes=document.nbytes_of(blob))
        frames = []
        for chunk in cut(blob, types, None, self._place):
            read = FrameChunk(blob, {node: readers[node] for node in chunk}, first, types[first])
            frames.append(delayed(FrameChunk.read)(read))
        return join_frames(types, frames)

    def _open_large(self, node: str, blob: str, axis: int | None) -> Array:
        """Open an array in the chunks in which it is stored."""
        import dask.array

        array = self[node][blob]
        # Without a name, Dask would pickle the array to make one.
        name = f"{node}-{blob}-{self._readers[node].sha256}"
        opened: Array = dask.array.from_array(array, array.chunks, name=name)
        return opened if axis is not None else opened[None]

    def _find_nodes(
        self, blob: str, nodes: Collection[str] | None
    ) -> list[tuple[str, StoreReader, StoreDocument]]:
        """Nodes, by default all that have a blob, with the store that has it."""
        if nodes is None:
            partition = self.record.details.partitions.get(blob)
            nodes = self.nodes if partition is None else partition.nodes
            self.read_ahead(nodes)
            nodes = [node for node in nodes if blob in self[node]]
        self.read_ahead(nodes)
        return [(node, *self[node]._find(blob)) for node in nodes]

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __contains__(self, node: object) -> bool:
        return node in self._readers

    def __repr__(self) -> str:
        nodes = listed(self._readers, _MOST_NAMED)
        return printable(f"<Checkpoint of {self.record.name}: {nodes}>", kept="")


class FrameChunk:
    """Reads a blob of some nodes, data frames, which must be like that of the first of all nodes."""

    # Not a dataclass: Dask would search all its fields for collections.
    def __init__(
        self, blob: str, readers: Mapping[str, StoreReader], first: str, kind: FrameType | None
    ) -> None:
        self.blob = blob
        self.readers = readers
        self.first = first
        self.kind = kind

    def read(self) -> Any:
        """Read and verify the values, and join them."""
        frames = {}
        for node, reader in self.readers.items():
            frames[node] = reader.load([self.blob])[self.blob]
            cut(self.blob, {self.first: self.kind, node: type_of_frame(frames[node])}, None)
        return concatenate_frames([*frames.values()])


def store_readers(directory: Directory, record: EpochRecord) -> dict[str, StoreReader]:
    """The readers of a recorded epoch's stores, by node."""
    if not record.stores and directory.only_node is not None:
        raise CheckpointNotFoundError(
            f"Epoch {record.at} of {directory.path} has no store of node {directory.only_node!r}. "
            f"Name a checkpointed node, or use a MultiNodeCheckpointManager."
        )
    codecs = tuple(REGISTERED_CODECS.values())
    readers = {}
    for node, store in record.stores.items():
        readers[node] = StoreReader(
            directory.files,
            directory.path,
            store.name,
            store.sha256,
            record.histories,
            codecs,
            directory.allow_pickle,
        )
    return readers


def verify_record(directory: Directory, record: EpochRecord) -> None:
    """Read every byte of the epoch of a record."""
    with directory.reading(record.at):
        verify_stores(directory.files, list(store_readers(directory, record).values()))


def open_record(
    directory: Directory, record: EpochRecord, release: Callable[[], object] | None = None
) -> Checkpoint:
    """Open the epoch of a record; `release` is called when the checkpoint is closed."""
    readers = store_readers(directory, record)
    return Checkpoint(record, readers, directory.files, release)


def open_pinned(directory: Directory, epoch: Position) -> Checkpoint:
    """Open an epoch that stays pinned until the checkpoint is closed."""
    label = f"opened by process {os.getpid()} on {platform.node()}, {uuid.uuid4().hex[:8]}"
    directory.pin(epoch, label)
    release = partial(directory.unpin, epoch, label)
    try:
        return open_record(directory, directory.record(epoch), release)
    except BaseException:
        with contextlib.suppress(CheckpointError):
            release()
        raise


def contents_of_store(reader: StoreReader) -> NodeContents:
    """What the log says of a store, from the store itself."""
    entry = reader.read_document().entry
    return NodeContents([*entry.blobs, *entry.histories], entry.states, entry.classes)
