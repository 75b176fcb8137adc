"""One node at one epoch on disk: write a store.

A store is made in this order: directories, chunks and documents, then the manifest, then the
root document, and at last everything is made durable. What is read was verified: the record
holds the manifest's digest, the manifest those of all files.
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

import numpy as np

from jobrunner.checkpoint.encoding import EncodedBlob, without_padding
from jobrunner.checkpoint.storage import PosixFiles, join_path, run_all
from jobrunner.checkpoint.store.checksums import digest_content
from jobrunner.checkpoint.store.chunk_bytes import Content, encode_texts
from jobrunner.checkpoint.store.chunk_writer import LINKED_BYTES, ChunkWriter, FormerStore
from jobrunner.checkpoint.store.layout import (
    MANIFEST,
    ROOT_DOCUMENT,
    PlannedArray,
    StoreLayout,
    lay_out,
)
from jobrunner.checkpoint.store.stacks import Alike
from jobrunner.checkpoint.store.zarr_json import group_document, seal, to_json
from jobrunner.workspace import ArrayPool

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a worker answers once a node's store is durable.

    Attributes
    ----------
    store : str
        Name of the store.
    manifest : str
        SHA-256 of its manifest, in hex.
    nbytes : int
        Size of all its files.
    seconds : float
        From the start of the worker's save until all its stores were durable.
    linked_bytes : int
        Of `nbytes`, what is in files of the epoch before, which it shares.
    replicas : mapping of str to str
        Digests of the node's replicated blobs, which must be those of the other nodes.
    states : tuple of str
        Names of the node's blobs that hold objects saved by their state.
    """

    store: str
    manifest: str
    nbytes: int
    seconds: float
    linked_bytes: int = 0
    replicas: Mapping[str, str] = field(default_factory=dict)
    states: tuple[str, ...] = ()


@dataclass(slots=True)
class _StoreInWriting:
    store: str
    root: str
    about: dict[str, Any]
    layout: StoreLayout
    chunks: ChunkWriter
    documents: dict[str, list[int]] = field(default_factory=dict)


class StoreBatch:
    """Several stores that are written, from several threads, and made durable together.

    Parameters
    ----------
    files : PosixFiles
    directory : str
        Of the checkpoints, an absolute path.
    stores : mapping
        Name of a store -> what its documents say of it (JSON), and its blobs.
    former : mapping, optional
        Name of a store -> the one whose unchanged chunks it may link.
    array_pool : ArrayPool, optional
        Gets what nobody needs once it is written.

    Notes
    -----
    Runs on workers. `write` as often as needed, then `finish`, once. *Safe to retry*: no, names
    are used once.
    """

    def __init__(
        self,
        files: PosixFiles,
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
            about = layout.about
            chunks = ChunkWriter(
                files, root, about.get("node", ""), about.get("epoch", 0), former_one
            )
            self._stores.append(_StoreInWriting(store, root, about, layout, chunks))

    def arrays(self) -> dict[str, list[PlannedArray]]:
        """The arrays of each store; a part may give way to a copy of it until it is written."""
        return {store.store: store.layout.arrays for store in self._stores}

    def write(self, arrays: Collection[PlannedArray] | None = None) -> None:
        """Write some arrays, or all and the documents.

        Raises
        ------
        OSError
            Nothing that is there can be taken for a whole checkpoint.
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
        """Write manifests and roots, and make all durable.

        Returns
        -------
        list of Receipt
            In the order of the stores.

        Raises
        ------
        OSError
        """
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
    """Lets an array go once all its chunks are written: what tasks then change needs no copy."""

    __slots__ = ("_array", "_array_pool", "_left")

    def __init__(self, array: PlannedArray, num_chunks: int, array_pool: ArrayPool | None) -> None:
        self._array = array
        self._array_pool = array_pool
        self._left = list(range(num_chunks))

    def add_chunk(self) -> None:
        """Count one more."""
        if self._left.pop():  # each is taken by one thread, and 0 by the last
            return
        array = self._array
        holder = {array.path: array.data}
        array.data = np.empty(0, array.data.dtype)
        if array.is_sole and self._array_pool is not None:
            self._array_pool.offer(holder)


def write_stores(
    files: PosixFiles,
    directory: str,
    stores: Mapping[str, tuple[Mapping[str, Any], Mapping[str, EncodedBlob | Alike]]],
    former: Mapping[str, FormerStore] | None = None,
) -> list[Receipt]:
    """Write several stores and make them durable; `StoreBatch` documents it."""
    batch = StoreBatch(files, directory, stores, former)
    batch.write()
    return batch.finish()


def _write_chunk(
    store: _StoreInWriting,
    array: PlannedArray,
    path: str,
    corner: tuple[int, ...],
    written: _Written,
) -> None:
    store.chunks.write(array, path, corner)
    written.add_chunk()


def digest_blob(files: PosixFiles, blob: EncodedBlob) -> str:
    """A digest of a blob's value, types and shapes: equal for equal blobs."""
    about = [[str(part.data.dtype), part.data.shape, part.order] for part in blob.parts]
    digests: list[Any] = [files.digest(to_json([blob.tree, about]))]
    for part in blob.parts:
        if isinstance(part.data.dtype, np.dtypes.StringDType):
            digests.append(files.digest(encode_texts(part.data, part.data.size)))
        else:
            data = np.ascontiguousarray(without_padding(part.data))
            memory = memoryview(data.reshape(-1).view(np.uint8).data)
            digests += digest_content(files, Content([memory], 0, None), 0)
    return hashlib.sha256(to_json(digests)).hexdigest()


def _write_document(files: PosixFiles, store: _StoreInWriting, path: str, document: bytes) -> None:
    digest = files.write(join_path(store.root, path), [document])
    store.documents[path] = [len(document), digest]


def _finish_store(files: PosixFiles, store: _StoreInWriting) -> tuple[str, int]:
    """Write manifest and root document; the digest of the one, and the size of all files."""
    layout = store.layout
    for array in layout.arrays:
        chunks = [store.chunks.written[path] for path, _ in array.files()]
        array.entry["files"] = [[chunk.size, chunk.crc] for chunk in chunks]
        if chunks and chunks[0].size >= LINKED_BYTES and not array.is_stack:
            # Hexadecimal: JSON's readers in other languages lose digits of such numbers.
            array.entry["sums"] = [[f"{chunk.total:016x}", chunk.head] for chunk in chunks]
        if array.grid.piece_shape is not None:
            array.entry["pieces"] = [list(map(list, chunk.pieces)) for chunk in chunks]
    # The root's digest is in the manifest, so the manifest can be written before it.
    documents = {path: store.documents[path] for path in layout.documents}
    documents[ROOT_DOCUMENT] = [len(layout.root), files.digest(layout.root)]
    stacks = {"stacks": layout.stacks} if layout.stacks else {}
    about = {**store.about, "blobs": layout.blobs, **stacks, "documents": documents}
    manifest = seal(group_document(about))
    files.write(join_path(store.root, MANIFEST), [manifest])
    files.write(os.path.join(store.root, ROOT_DOCUMENT), [layout.root])
    nbytes = sum(chunk.size for chunk in store.chunks.written.values())
    nbytes += sum(size for size, _ in documents.values())
    return hashlib.sha256(manifest).hexdigest(), nbytes + len(manifest)
