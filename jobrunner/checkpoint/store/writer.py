"""Write stores, each one node at one epoch.

First come directories, chunks and Zarr documents, then the manifest, then the root document;
finally everything is made durable. The record of the epoch holds the manifest's SHA-256, the
manifest the checksums of all files. Chunks that have not changed since an earlier epoch are linked.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
from crc32c import crc32c

from jobrunner.checkpoint.encoding import Array, EncodedBlob, without_padding
from jobrunner.checkpoint.storage import Files, PosixFiles, join_path, run_all
from jobrunner.checkpoint.store.chunk_bytes import (
    HEAD_BYTES,
    ChunkBytes,
    Sums,
    WrittenChunk,
    checksum_chunk,
    encode_chunk,
    encode_texts,
)
from jobrunner.checkpoint.store.layout import (
    PlannedArray,
    StoreLayout,
    group_document,
    lay_out,
    seal,
    to_json,
)
from jobrunner.checkpoint.store.manifest import MANIFEST, MANIFEST_BYTES, ROOT_DOCUMENT, Manifest
from jobrunner.checkpoint.store.stacks import Alike, Rows
from jobrunner.errors import DefinitionError
from jobrunner.texts import get_logger

logger = get_logger(__name__)

LINKED_BYTES = PosixFiles.linked_bytes
"""Shorter chunks are never linked; their sums are not recorded."""

READ_AGAIN_SAVES = 16
"""One save in so many, on average, reads a file and its array before it links the file."""


@dataclass(frozen=True, slots=True)
class FormerStore:
    """A store of the same node at an earlier epoch, whose unchanged chunks can be linked."""

    root: str
    chunks: Mapping[str, WrittenChunk]


def former_store(root: str, manifest: Manifest) -> FormerStore:
    """Return the chunks of a store that can be linked."""
    chunks: dict[str, WrittenChunk] = {}
    for array in manifest.arrays():
        if array.sums is not None:
            pieces = array.pieces or [[]] * len(array.files)
            for (path, (size, crc)), (total, head), spans in zip(
                array.chunk_files(), array.sums, pieces, strict=True
            ):
                chunks[path] = WrittenChunk(size, crc, int(total, 16), head, tuple(spans))
    return FormerStore(root, chunks)


class Receipt(msgspec.Struct, frozen=True):
    """What a worker returns once a node's store is durable."""

    store: str
    manifest: str  # SHA-256
    nbytes: int  # of all files
    seconds: float  # from the start of the worker's save until all its stores were durable
    linked_bytes: int = 0  # how many of `nbytes` are in files shared with the epoch before
    replicas: Mapping[str, str] = {}  # replicated blobs: digests, which all nodes must share
    parts: Mapping[
        str, str
    ] = {}  # partitioned blobs: dtype and shape, but for the length along the axis
    states: tuple[str, ...] = ()  # blobs that contain objects saved by their ``state_dict()``
    classes: tuple[tuple[str, str], ...] = ()  # of the job: name, and what it was `sent_as`


class StoreBatch:
    """Stores that a worker's threads write, and that are made durable together.

    `stores` gives, by name, their attributes (node, epoch, run, ...) and blobs; `former` the stores
    whose unchanged chunks they may link. Call `write` as often as needed, then `finish` once. Not
    safe to retry: each name is used once.
    """

    def __init__(
        self,
        files: Files,
        directory: str,
        stores: Mapping[str, tuple[Mapping[str, Any], Mapping[str, EncodedBlob | Alike]]],
        former: Mapping[str, FormerStore | None] | None = None,
    ) -> None:
        self._files = files
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self._is_open = False
        self._seconds = 0.0
        self._stores = [
            StoreWriter(files, directory, store, lay_out(blobs, about), (former or {}).get(store))
            for store, (about, blobs) in stores.items()
        ]

    def arrays(self) -> dict[str, list[PlannedArray]]:
        """Return the arrays of each store, not yet written."""
        return {store.name: store.layout.arrays for store in self._stores}

    def write(self, arrays: Collection[PlannedArray] | None = None) -> None:
        """Write some arrays, or by default all and the Zarr documents.

        If it raises OSError, what was written so far is not a checkpoint.
        """
        started = time.perf_counter()
        jobs: list[Callable[[], None]] = []
        nbytes = 0
        wanted = None if arrays is None else {id(array) for array in arrays}
        try:
            self._open()
            for store in self._stores:
                for array in store.layout.arrays:
                    if wanted is None or id(array) in wanted:
                        nbytes += array.data.nbytes
                        chunks = [
                            it for it in array.grid.files(array.path) if it[0] not in store.chunks
                        ]
                        left = list(range(len(chunks)))
                        jobs += (
                            partial(self._write_chunk, store, array, *chunk, left)
                            for chunk in chunks
                        )
                if wanted is None:
                    documents = store.layout.documents.items()
                    jobs += (partial(store.write_document, *document) for document in documents)
            run_all(jobs, self._files.threads, nbytes)
        except BaseException as error:
            self._stack.__exit__(type(error), error, error.__traceback__)
            raise
        self._seconds += time.perf_counter() - started

    def finish(self) -> list[Receipt]:
        """Write manifests and root documents, and make all durable; return a receipt for each."""
        started = time.perf_counter()
        with self._stack:
            self._open()
            digests = list(self._files.each(StoreWriter.finish, self._stores))
        seconds = self._seconds + time.perf_counter() - started
        return [
            Receipt(store.name, digest, nbytes, seconds, store.linked_bytes)
            for store, (digest, nbytes) in zip(self._stores, digests, strict=True)
        ]

    def _open(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        names = [store.name for store in self._stores]
        self._stack.enter_context(self._files.durable(self._directory, names))
        for store in self._stores:
            self._files.make_directory(store.root, store.layout.directories)

    def _write_chunk(
        self,
        store: StoreWriter,
        array: PlannedArray,
        path: str,
        corner: tuple[int, ...],
        left: list[int],
    ) -> None:
        store.write_chunk(array, path, corner)
        if left.pop():  # each thread takes one, the last thread 0
            return
        # Drop the array, so that tasks can change it uncopied.
        array.data = np.empty(0, array.data.dtype)


class StoreWriter:
    """Writes one store, and links the chunks that `former` has unchanged."""

    def __init__(
        self,
        files: Files,
        directory: str,
        name: str,
        layout: StoreLayout,
        former: FormerStore | None,
    ) -> None:
        self.name = name
        self.root = join_path(directory, name)
        self.layout = layout
        self.chunks: dict[str, WrittenChunk] = {}  # by path within the store
        self.linked_bytes = 0
        self._documents: dict[str, list[int]] = {}
        self._files = files
        self._former = former or FormerStore("", {})

    def write_chunk(self, array: PlannedArray, path: str, corner: tuple[int, ...]) -> None:
        """Write or link a chunk; called from several threads at once."""
        data = array.data
        if isinstance(data, Rows):
            data = data.gather()
        if array.is_stack:
            self.chunks[path] = self._write_stack(array, path, data)
            return
        known = self._former.chunks.get(path)
        if known is not None and known.size < self._files.linked_bytes:
            known = None
        written = None
        if known is not None and array.compressors and array.is_unchanged:
            # To compare it, it would have to be compressed again.
            written = None if self._is_due(path) else self._link(path, known)
        self.chunks[path] = written or self._link_or_write(
            array, path, encode_chunk(data, array.grid, corner, array.compressors), known
        )

    def _write_stack(self, array: PlannedArray, path: str, data: Array) -> WrittenChunk:
        """Write the one file of a stack, and record the checksum of each row."""
        memory = memoryview(data.reshape(-1).view(np.uint8).data)
        crc = self._files.write(join_path(self.root, path), [memory])
        step = len(memory) // len(data)
        array.entry["rows"] = [crc32c(memory[i : i + step]) for i in range(0, len(memory), step)]
        return WrittenChunk(len(memory), crc, 0, 0)

    def _link_or_write(
        self, array: PlannedArray, path: str, chunk: ChunkBytes, known: WrittenChunk | None
    ) -> WrittenChunk:
        files, target = self._files, join_path(self.root, path)
        size = chunk.size
        if size < LINKED_BYTES and chunk.pieces is None:
            crc = files.write(target, chunk.buffers, chunk.padding_bytes)
            return WrittenChunk(size, crc, 0, 0)
        head = crc32c(memoryview(chunk.buffers[0])[:HEAD_BYTES])
        if known is not None:
            is_due = self._is_due(path)
            is_same = (known.size, known.head) == (size, head) and (
                (array.is_unchanged and not is_due) or checksum_chunk(chunk, head) == known
            )
            if is_same and (not is_due or self._is_whole(path, known)):
                linked = self._link(path, known)
                if linked is not None:
                    return linked
            elif array.is_unchanged and not is_same:
                logger.warning(
                    "Blob %r of node %r has changed although no task that updates it has run. Its new "
                    "value is saved; name it in the updates= of the task that changes it.",
                    array.blob,
                    self.layout.about["node"],
                )
        sums = Sums(chunk)
        crc = files.write(target, chunk.buffers, chunk.padding_bytes, sums.add)
        return WrittenChunk(size, crc, sums.total, head, tuple(sums.pieces))

    def _link(self, path: str, known: WrittenChunk) -> WrittenChunk | None:
        """Link a file of the former store; None if that is impossible."""
        source, target = join_path(self._former.root, path), join_path(self.root, path)
        if not self._files.link(source, target, known.size):
            return None
        self.linked_bytes += known.size
        return known

    def _is_due(self, path: str) -> bool:
        """Whether this save reads array and file before it links the file.

        Depends on name and epoch, so that each file's turn comes under any save policy.
        """
        return not zlib.crc32(f"{path} {self.layout.about['epoch']}".encode()) % READ_AGAIN_SAVES

    def _is_whole(self, path: str, known: WrittenChunk) -> bool:
        old = join_path(self._former.root, path)
        try:
            found = self._files.read_into(old, None, known.size)
        except OSError as error:
            logger.warning("Cannot read %s: %s. Its data is written again.", old, error)
            return False
        if found != (known.size, known.crc):
            logger.warning("%s is not what was written. Its data is written again.", old)
            return False
        return True

    def write_document(self, path: str, document: bytes) -> None:
        """Write a Zarr document of the store."""
        digest = self._files.write(join_path(self.root, path), [document])
        self._documents[path] = [len(document), digest]

    def finish(self) -> tuple[str, int]:
        """Write manifest and root document; return the manifest's SHA-256 and the store's size."""
        layout = self.layout
        for array in layout.arrays:
            chunks = [self.chunks[path] for path, _ in array.grid.files(array.path)]
            array.entry["files"] = [[chunk.size, chunk.crc] for chunk in chunks]
            if chunks and chunks[0].size >= LINKED_BYTES and not array.is_stack:
                # Hexadecimal: JSON readers in other languages lose digits of such numbers.
                array.entry["sums"] = [[f"{chunk.total:016x}", chunk.head] for chunk in chunks]
            if array.grid.piece_shape is not None:
                array.entry["pieces"] = [list(map(list, chunk.pieces)) for chunk in chunks]
        # The manifest is written first, so that a root document proves a complete store.
        documents = {path: self._documents[path] for path in layout.documents}
        documents[ROOT_DOCUMENT] = [len(layout.root), crc32c(layout.root)]
        stacks = [array.entry for array in layout.arrays if array.is_stack]
        about = {
            **layout.about,
            "blobs": layout.blobs,
            **({"stacks": stacks} if stacks else {}),
            "documents": documents,
        }
        manifest = seal(group_document(about))
        if len(manifest) > MANIFEST_BYTES:
            raise DefinitionError(
                f"Node {about['node']!r}: the manifest of its store would have {len(manifest):,} "
                f"bytes, and {MANIFEST_BYTES:,} is the most that is read. It lists every array and "
                f"every item of containers that are no arrays. Hold large data in arrays, or "
                f"divide the blobs between nodes."
            )
        self._files.write(join_path(self.root, MANIFEST), [manifest])
        self._files.write(join_path(self.root, ROOT_DOCUMENT), [layout.root])
        nbytes = sum(chunk.size for chunk in self.chunks.values())
        nbytes += sum(size for size, _ in documents.values())
        return hashlib.sha256(manifest).hexdigest(), nbytes + len(manifest)


def digest_blob(blob: EncodedBlob) -> str:
    """Return a digest of a blob's value, types and shapes, equal for equal blobs."""
    about = [[str(part.data.dtype), part.data.shape, part.order] for part in blob.parts]
    digests: list[Any] = [crc32c(to_json([blob.tree, about]))]
    for part in blob.parts:
        if isinstance(part.data.dtype, np.dtypes.StringDType):
            digests.append(crc32c(encode_texts(part.data, part.data.size)))
        else:
            data = np.ascontiguousarray(without_padding(part.data))
            memory = memoryview(data.reshape(-1).view(np.uint8).data)
            digests += checksum_chunk(ChunkBytes([memory], 0, None), 0)
    return hashlib.sha256(to_json(digests)).hexdigest()
