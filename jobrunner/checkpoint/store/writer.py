"""Write stores, each one node at one epoch.

First come directories, chunks and Zarr documents, then the manifest, then the root document;
finally everything is made durable. The record of the epoch holds the manifest's SHA-256, the
manifest the checksums of all files.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from jobrunner.checkpoint.encoding import EncodedBlob, without_padding
from jobrunner.checkpoint.storage import Files, join_path, run_all
from jobrunner.checkpoint.store.checksums import checksum_chunk
from jobrunner.checkpoint.store.chunk_bytes import ChunkBytes, encode_texts
from jobrunner.checkpoint.store.chunk_writer import LINKED_BYTES, ChunkWriter, FormerStore
from jobrunner.checkpoint.store.layout import (
    PlannedArray,
    StoreLayout,
    group_document,
    lay_out,
    seal,
    to_json,
)
from jobrunner.checkpoint.store.manifest import MANIFEST, ROOT_DOCUMENT
from jobrunner.checkpoint.store.stacks import Alike
from jobrunner.workspace import ArrayPool

logger = logging.getLogger(__name__)


class Receipt(msgspec.Struct, frozen=True):
    """What a worker returns once a node's store is durable."""

    store: str
    manifest: str  # SHA-256
    nbytes: int  # of all files
    seconds: float  # from the start of the worker's save until all its stores were durable
    linked_bytes: int = 0  # how many of `nbytes` are in files shared with the epoch before
    replicas: Mapping[str, str] = {}  # replicated blobs: digests, which all nodes must share
    states: tuple[str, ...] = ()  # blobs that contain objects saved by their ``state_dict()``


@dataclass(slots=True)
class _OpenStore:
    store: str
    root: str
    layout: StoreLayout
    chunks: ChunkWriter
    documents: dict[str, list[int]] = field(default_factory=dict)


class StoreBatch:
    """Stores that a worker's threads write, and that are made durable together.

    `stores` gives, by name, their attributes (node, epoch, run, ...) and blobs; `former` the stores
    whose unchanged chunks they may link; `array_pool` receives arrays that are written and not
    needed any more. Call `write` as often as needed, then `finish` once. Not safe to retry: each
    name is used once.
    """

    def __init__(
        self,
        files: Files,
        directory: str,
        stores: Mapping[str, tuple[Mapping[str, Any], Mapping[str, EncodedBlob | Alike]]],
        former: Mapping[str, FormerStore] | None = None,
        array_pool: ArrayPool | None = None,
    ) -> None:
        self._files = files
        self._array_pool = array_pool
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self._is_open = False
        self._seconds = 0.0
        self._stores = []
        for store, (about, blobs) in stores.items():
            root = os.path.join(directory, store)
            layout = lay_out(blobs, about)
            former_one = (former or {}).get(store)
            chunks = ChunkWriter(
                files, root, about.get("node", ""), about.get("epoch", 0), former_one
            )
            self._stores.append(_OpenStore(store, root, layout, chunks))

    def arrays(self) -> dict[str, list[PlannedArray]]:
        """Return the arrays of each store, not yet written."""
        return {store.store: store.layout.arrays for store in self._stores}

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
                        chunks = [it for it in array.files() if it[0] not in store.chunks.written]
                        written = _Written(array, len(chunks), self._array_pool)
                        jobs += (
                            partial(_write_chunk, store, array, *chunk, written) for chunk in chunks
                        )
                if wanted is None:
                    jobs += (
                        partial(_write_document, self._files, store, path, document)
                        for path, document in store.layout.documents.items()
                    )
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
            digests = list(self._files.each(partial(_finish_store, self._files), self._stores))
        seconds = self._seconds + time.perf_counter() - started
        return [
            Receipt(store.store, digest, nbytes, seconds, store.chunks.linked_bytes)
            for store, (digest, nbytes) in zip(self._stores, digests, strict=True)
        ]

    def _open(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        names = [store.store for store in self._stores]
        self._stack.enter_context(self._files.durable(self._directory, names))
        for store in self._stores:
            self._files.make_directory(store.root)
            for name in store.layout.directories:
                self._files.make_directory(join_path(store.root, name))


class _Written:
    """Drops an array once all its chunks are written, so that tasks can change it uncopied."""

    __slots__ = ("_array", "_array_pool", "_left")

    def __init__(self, array: PlannedArray, num_chunks: int, array_pool: ArrayPool | None) -> None:
        self._array = array
        self._array_pool = array_pool
        self._left = list(range(num_chunks))

    def add_chunk(self) -> None:
        if self._left.pop():  # each thread takes one, the last thread 0
            return
        array = self._array
        holder = {array.path: array.data}
        array.data = np.empty(0, array.data.dtype)
        if array.is_sole and self._array_pool is not None:
            self._array_pool.offer(holder)


def _write_chunk(
    store: _OpenStore, array: PlannedArray, path: str, corner: tuple[int, ...], written: _Written
) -> None:
    store.chunks.write(array, path, corner)
    written.add_chunk()


def digest_blob(files: Files, blob: EncodedBlob) -> str:
    """Return a digest of a blob's value, types and shapes, equal for equal blobs."""
    about = [[str(part.data.dtype), part.data.shape, part.order] for part in blob.parts]
    digests: list[Any] = [files.digest(to_json([blob.tree, about]))]
    for part in blob.parts:
        if isinstance(part.data.dtype, np.dtypes.StringDType):
            digests.append(files.digest(encode_texts(part.data, part.data.size)))
        else:
            data = np.ascontiguousarray(without_padding(part.data))
            memory = memoryview(data.reshape(-1).view(np.uint8).data)
            digests += checksum_chunk(files, ChunkBytes([memory], 0, None), 0)
    return hashlib.sha256(to_json(digests)).hexdigest()


def _write_document(files: Files, store: _OpenStore, path: str, document: bytes) -> None:
    digest = files.write(join_path(store.root, path), [document])
    store.documents[path] = [len(document), digest]


def _finish_store(files: Files, store: _OpenStore) -> tuple[str, int]:
    """Write manifest and root document; return the manifest's SHA-256 and the store's size."""
    layout = store.layout
    for array in layout.arrays:
        chunks = [store.chunks.written[path] for path, _ in array.files()]
        array.entry["files"] = [[chunk.size, chunk.crc] for chunk in chunks]
        if chunks and chunks[0].size >= LINKED_BYTES and not array.is_stack:
            # Hexadecimal: JSON readers in other languages lose digits of such numbers.
            array.entry["sums"] = [[f"{chunk.total:016x}", chunk.head] for chunk in chunks]
        if array.grid.piece_shape is not None:
            array.entry["pieces"] = [list(map(list, chunk.pieces)) for chunk in chunks]
    # The manifest is written first, so that a root document proves a complete store.
    documents = {path: store.documents[path] for path in layout.documents}
    documents[ROOT_DOCUMENT] = [len(layout.root), files.digest(layout.root)]
    stacks = [array.entry for array in layout.arrays if array.is_stack]
    about = {
        **layout.about,
        "blobs": layout.blobs,
        **({"stacks": stacks} if stacks else {}),
        "documents": documents,
    }
    manifest = seal(group_document(about))
    files.write(join_path(store.root, MANIFEST), [manifest])
    files.write(os.path.join(store.root, ROOT_DOCUMENT), [layout.root])
    nbytes = sum(chunk.size for chunk in store.chunks.written.values())
    nbytes += sum(size for size, _ in documents.values())
    return hashlib.sha256(manifest).hexdigest(), nbytes + len(manifest)
