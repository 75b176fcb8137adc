"""Write stores, each one node at one epoch.

First come directories, chunks and the Zarr documents of arrays, then the root document, which has
size and digest of each chunk; finally everything is made durable. The record of the epoch has the
SHA-256 of the root document. Chunks that have not changed since an earlier epoch are linked.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import xxhash

from jobrunner.checkpoint.encoding import EncodedBlob, without_padding
from jobrunner.checkpoint.storage import BLOCK_BYTES, Files, PosixFiles, join_path, run_all
from jobrunner.checkpoint.store.array_document import File
from jobrunner.checkpoint.store.chunks import encode_chunk, encode_texts, is_text
from jobrunner.checkpoint.store.document import (
    DOCUMENT_MOST_BYTES,
    StoreDocument,
    encode_json,
)
from jobrunner.checkpoint.store.layout import PlannedArray, Rows, StoreLayout, lay_out
from jobrunner.errors import DefinitionError
from jobrunner.names import ROOT_DOCUMENT
from jobrunner.texts import get_logger

logger = get_logger(__name__)

LINKED_BYTES = PosixFiles.linked_bytes
"""Shorter chunks are never linked."""

READ_AGAIN_SAVES = 16
"""One save in so many, on average, reads a file and its array before it links the file."""


@dataclass(frozen=True, slots=True)
class Former:
    """A store of the same node at an earlier epoch, whose unchanged chunks can be linked."""

    root: str
    files: Mapping[str, File]  # by path within the store

    @classmethod
    def of(cls, root: str, document: StoreDocument) -> Former:
        """The store with this document."""
        return cls(root, document.files())


class Receipt(msgspec.Struct, frozen=True):
    """What a worker returns once a node's store is durable."""

    store: str
    sha256: str  # of the root document
    nbytes: int  # of all files
    seconds: float = 0.0  # that the worker took for the store; a group shares what it costs
    linked_bytes: int = 0  # how many of `nbytes` are in files shared with the epoch before
    replicas: Mapping[str, str] = {}  # replicated blobs: digests, which all nodes must share
    parts: Mapping[
        str, str
    ] = {}  # partitioned blobs: dtype and shape, but for the length along the axis
    lengths: Mapping[str, int] = {}  # partitioned arrays: length of the part along the axis
    blobs: Mapping[str, tuple[str, ...]] = {}  # blobs of the store: names of the job's classes
    states: tuple[str, ...] = ()  # blobs that contain objects saved by their ``state_dict()``
    classes: tuple[tuple[str, str], ...] = ()  # of the job: name, and what it was `sent_as`


class StoreBatch:
    """Stores that a worker's threads write together; whoever calls makes them durable.

    `stores` gives, by name, what the document says of the store (node, epoch, run, ...), and its
    blobs; `former` the stores whose unchanged chunks they may link. Call `write` once, then `finish`
    once. Not safe to retry: each name is used once.
    """

    def __init__(
        self,
        files: Files,
        directory: str,
        stores: Mapping[str, tuple[Mapping[str, Any], Mapping[str, EncodedBlob]]],
        former: Mapping[str, Former | None] | None = None,
    ) -> None:
        self._files = files
        self._stores = [
            _StoreWriter(files, directory, store, lay_out(blobs, about), (former or {}).get(store))
            for store, (about, blobs) in stores.items()
        ]

    def arrays(self) -> dict[str, list[PlannedArray]]:
        """Return the arrays of each store, not yet written."""
        return {store.name: store.layout.arrays for store in self._stores}

    def write(self) -> None:
        """Write all arrays and the Zarr documents.

        If it raises OSError, what was written so far is not a checkpoint.
        """
        jobs: list[Callable[[], object]] = []
        nbytes = 0
        for store in self._stores:
            self._files.make_directory(store.root)
            for path in store.layout.documents:
                self._files.make_directory(join_path(store.root, path))
            for array in store.layout.arrays:
                nbytes += array.data.nbytes
                jobs += self._chunk_jobs(store, array)
            jobs += store.document_jobs()
        run_all(jobs, self._files.threads, nbytes)

    def _chunk_jobs(self, store: _StoreWriter, array: PlannedArray) -> list[Callable[[], object]]:
        corners = list(array.grid.corners())
        array.files += [(0, "")] * len(corners)
        left = list(range(len(corners)))

        def write(i: int) -> None:
            array.files[i] = store.write_chunk(array, corners[i])
            if left.pop():  # each thread takes one, the last thread 0
                return
            # Drop the array, so that tasks can change it uncopied.
            array.data = np.empty(0, array.data.dtype)

        return [partial(write, i) for i in range(len(corners))]

    def finish(self) -> list[Receipt]:
        """Write the root documents; return a receipt for each store, not yet whole."""
        written = list(self._files.each(_StoreWriter.finish, self._stores))
        return [
            Receipt(store.name, digest, nbytes, linked_bytes=store.linked_bytes)
            for store, (digest, nbytes) in zip(self._stores, written, strict=True)
        ]

    def as_former(self) -> dict[str, Former]:
        """The stores, once they are written, as those that later ones may link to; by name."""
        return {store.name: store.as_former() for store in self._stores}


class _StoreWriter:
    """Writes one store, and links the chunks that `former` has unchanged."""

    def __init__(
        self,
        files: Files,
        directory: str,
        name: str,
        layout: StoreLayout,
        former: Former | None,
    ) -> None:
        self.name = name
        self.root = join_path(directory, name)
        self.layout = layout
        self.linked_bytes = 0
        self._document_bytes = 0
        self._storage = files
        self._former = former or Former("", {})

    def write_chunk(self, array: PlannedArray, corner: tuple[int, ...]) -> File:
        """Write or link a chunk; called from several threads at once."""
        path = f"{array.path}/{array.grid.key(corner)}"
        former = self._former.files.get(path)
        if former is not None and former[0] < self._storage.linked_bytes:
            former = None
        # Now and then array and file are read all the same, lest damage lives on in every epoch.
        is_due = former is not None and self._is_due(path)
        if former is not None and array.is_unchanged and not is_due and self._link(path, former):
            return former
        data = array.data.gather() if isinstance(array.data, Rows) else array.data
        buffers = encode_chunk(data, array.grid, corner, array.zstd)
        if former is not None and sum(map(len, buffers)) == former[0]:
            if _digest(buffers) == former[1]:
                is_whole = not is_due or self._is_whole(path, former)
                if is_whole and self._link(path, former):
                    return former
            elif array.is_unchanged:
                self._warn_of_change(array.blob)
        return self._write(path, buffers)

    def _write(self, path: str, buffers: Sequence[bytes | memoryview]) -> File:
        digest = self._storage.write(join_path(self.root, path), buffers)
        return sum(map(len, buffers)), digest

    def _link(self, path: str, file: File) -> bool:
        """Link a file of the former store; False if that is impossible."""
        source, target = join_path(self._former.root, path), join_path(self.root, path)
        if not self._storage.link(source, target, file[0]):
            return False
        self.linked_bytes += file[0]
        return True

    def _is_due(self, path: str) -> bool:
        """Whether this save reads array and file before it links the file.

        Depends on name and epoch, so that each file's turn comes under any save policy.
        """
        return (
            not zlib.crc32(f"{path} {self.layout.described['epoch']}".encode()) % READ_AGAIN_SAVES
        )

    def _is_whole(self, path: str, file: File) -> bool:
        source = join_path(self._former.root, path)
        try:
            present = self._storage.read_into(source, memoryview(b""), file[0])
        except OSError as error:
            logger.warning("Cannot read %s: %s. Its data is written again.", source, error)
            return False
        if present != file:
            logger.warning("%s is not what was written. Its data is written again.", source)
            return False
        return True

    def _warn_of_change(self, blob: str) -> None:
        logger.warning(
            "Blob %r of node %r has changed although no task that updates it has run. Its new "
            "value is saved; name it in the updates= of the task that changes it.",
            blob,
            self.layout.described["node"],
        )

    def document_jobs(self) -> list[Callable[[], object]]:
        """Return the jobs that write the Zarr documents of arrays and groups."""
        jobs: list[Callable[[], object]] = []
        for path, document in self.layout.documents.items():
            self._document_bytes += len(document)
            jobs.append(partial(self._write, f"{path}/{ROOT_DOCUMENT}", [document]))
        return jobs

    def as_former(self) -> Former:
        """The store, once it is written, as one that a later one may link to."""
        files: dict[str, File] = {}
        for array in self.layout.arrays:
            keys = map(array.grid.key, array.grid.corners())
            for key, file in zip(keys, array.files, strict=True):
                files[f"{array.path}/{key}"] = file
        return Former(self.root, files)

    def finish(self) -> tuple[str, int]:
        """Write the root document; return its SHA-256 and the store's size."""
        document = self.layout.write_document()
        if len(document) > DOCUMENT_MOST_BYTES:
            raise DefinitionError(
                f"Node {self.layout.described['node']!r}: the document of its store would have "
                f"{len(document):,} bytes, and {DOCUMENT_MOST_BYTES:,} is the most that is read. It "
                f"lists every array and every item of containers that are no arrays. Hold large "
                f"data in arrays, or divide the blobs between nodes."
            )
        # The root document comes last, so that it proves a complete store.
        self._storage.write(join_path(self.root, ROOT_DOCUMENT), [document])
        nbytes = sum(size for array in self.layout.arrays for size, _ in array.files)
        nbytes += self._document_bytes + len(document)
        return hashlib.sha256(document).hexdigest(), nbytes


def _digest(buffers: Sequence[bytes | memoryview]) -> str:
    """Return the digest that a file of these bytes would have."""
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        view = memoryview(buffer)
        for start in range(0, len(view), BLOCK_BYTES):
            digest.update(view[start : start + BLOCK_BYTES])
    return digest.hexdigest()


def digest_blob(blob: EncodedBlob) -> str:
    """Return a digest of a blob's value, types and shapes, equal for equal blobs."""
    about = [[str(part.data.dtype), part.data.shape, part.order] for part in blob.parts]
    digest = hashlib.sha256(encode_json([blob.tree, about]))
    for part in blob.parts:
        if is_text(part.data.dtype):
            digest.update(encode_texts(part.data, part.data.size))
        else:
            data = np.ascontiguousarray(without_padding(part.data))
            memory = memoryview(data.reshape(-1).view(np.uint8).data)
            digest.update(_digest([memory]).encode())
    return digest.hexdigest()
