"""One node at one epoch on disk: write a store.

A store is made in this order: directories, chunks and documents, then the manifest, then the
root document, and at last everything is made durable. What is read was verified: the record
holds the manifest's digest, the manifest those of all files.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jobrunner.checkpoint.encoding import EncodedBlob
from jobrunner.checkpoint.files import BLOCK_BYTES, PosixFiles
from jobrunner.checkpoint.layout import (
    FORMAT,
    MANIFEST,
    ROOT_DOCUMENT,
    Chunk,
    PlannedArray,
    StoreLayout,
    chunk_corners,
    chunk_key,
    encode_texts,
    group_document,
    lay_out,
    to_json,
)

THREADS = 2
"""More of them do not write faster; the calling thread is one of them."""

_WORTH_A_THREAD_BYTES = 1 << 20
_WORTH_A_THREAD_JOBS = 64

_GENTLE = 15

LINKED_BYTES = 64 << 10
"""A shorter chunk is written again though it is unchanged: that costs no more than a link."""

HEAD_BYTES = 16 << 10
"""What of a chunk is compared first: most arrays that change at all change there."""


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


class WrittenChunk(NamedTuple):
    """A chunk as a manifest describes it: two chunks of which all this is equal are the same.

    Attributes
    ----------
    size : int
        In bytes, padding included.
    crc : int
        The crc32c of the file.
    total : int
        The sum, modulo 2**64, of the file's 64-bit words: with the crc32c, which finds what a sum
        does not, it leaves a changed chunk no practical chance to pass for an unchanged one.
    head : int
        The crc32c of its first `HEAD_BYTES`.
    """

    size: int
    crc: int
    total: int
    head: int


@dataclass(frozen=True, slots=True)
class FormerStore:
    """A store of the same node at an earlier epoch, whose unchanged chunks can be linked."""

    root: str
    chunks: Mapping[str, WrittenChunk]


@dataclass(slots=True)
class _StoreInWriting:
    store: str
    root: str
    about: dict[str, Any]
    layout: StoreLayout
    former: FormerStore | None
    documents: dict[str, list[int]] = field(default_factory=dict)
    chunks: dict[str, WrittenChunk] = field(default_factory=dict)
    linked_bytes: int = 0


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

    Notes
    -----
    Runs on workers. `write` as often as needed, then `finish`, once. *Safe to retry*: no, names
    are used once.
    """

    def __init__(
        self,
        files: PosixFiles,
        directory: str,
        stores: Mapping[str, tuple[Mapping[str, Any], Mapping[str, EncodedBlob]]],
        former: Mapping[str, FormerStore] | None = None,
    ) -> None:
        self._files = files
        self._directory = directory
        self._stack = contextlib.ExitStack()
        self._is_open = False
        self._seconds = 0.0
        self._stores = []
        for store, (about, blobs) in stores.items():
            full = {"format": FORMAT, **about}
            root = os.path.join(directory, store)
            layout = lay_out(blobs, full)
            self._stores.append(
                _StoreInWriting(store, root, full, layout, (former or {}).get(store))
            )

    def arrays(self) -> Iterator[PlannedArray]:
        """All arrays; a part may be replaced by a copy of it until it is written."""
        for store in self._stores:
            yield from store.layout.arrays

    def write(self, arrays: Collection[PlannedArray] | None = None, threads: int = THREADS) -> None:
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
                        nbytes += array.part.data.nbytes
                        jobs += (
                            partial(_write_chunk, self._files, store, array, chunk)
                            for chunk in array.chunks()
                            if chunk.path not in store.chunks
                        )
                if wanted is None:
                    jobs += (
                        partial(_write_document, self._files, store, path, document)
                        for path, document in store.layout.documents.items()
                    )
            run_all(jobs, threads, nbytes)
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
            digests = [_finish_store(self._files, store) for store in self._stores]
        seconds = self._seconds + time.perf_counter() - started
        return [
            Receipt(store.store, digest, nbytes, seconds, store.linked_bytes)
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


def write_stores(
    files: PosixFiles,
    directory: str,
    stores: Mapping[str, tuple[Mapping[str, Any], Mapping[str, EncodedBlob]]],
    former: Mapping[str, FormerStore] | None = None,
    threads: int = THREADS,
) -> list[Receipt]:
    """Write several stores and make them durable; `StoreBatch` documents it."""
    batch = StoreBatch(files, directory, stores, former)
    batch.write(threads=threads)
    return batch.finish()


def former_store(root: str, manifest: Mapping[str, Any]) -> FormerStore:
    """What of a store can be linked, by its manifest."""
    chunks: dict[str, WrittenChunk] = {}
    for entry in manifest["blobs"].values():
        for array in entry["arrays"]:
            if "sums" not in array:
                continue
            corners = chunk_corners(array["shape"], array["chunk_shape"])
            for corner, (size, crc), (total, head) in zip(
                corners, array["files"], array["sums"], strict=True
            ):
                path = f"{array['path']}/{chunk_key(corner, array['order'])}"
                chunks[path] = WrittenChunk(size, crc, int(total, 16), head)
    return FormerStore(root, chunks)


def _write_chunk(
    files: PosixFiles, store: _StoreInWriting, array: PlannedArray, chunk: Chunk
) -> None:
    index: Any = (*chunk.index, ...)  # without the dots, no axes would give a scalar
    data = array.part.data[index]
    padding_bytes = chunk.padding_bytes
    content: bytes | memoryview
    if isinstance(data.dtype, np.dtypes.StringDType):
        content, padding_bytes = encode_texts(data, math.prod(array.chunk_shape)), 0
    else:
        # A copy only where the array is not contiguous, and of one chunk at a time.
        content = memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
    path = join_path(store.root, chunk.path)
    size = len(content) + padding_bytes
    if size < LINKED_BYTES:
        crc = files.write(path, [content], padding_bytes)
        store.chunks[chunk.path] = WrittenChunk(size, crc, 0, 0)
        return
    head = files.digest(memoryview(content)[:HEAD_BYTES])
    known = store.former.chunks.get(chunk.path) if store.former is not None else None
    if (
        store.former is not None
        and known is not None
        and (known.size, known.head) == (size, head)
        and _digest(files, memoryview(content), padding_bytes, head) == known
        and files.link(join_path(store.former.root, chunk.path), path, size)
    ):
        store.linked_bytes += size
        store.chunks[chunk.path] = known
        return
    words = _WordSum()
    crc = files.write(path, [content], padding_bytes, words.add)
    store.chunks[chunk.path] = WrittenChunk(size, crc, words.total, head)


class _WordSum:
    """Sums the 64-bit words of blocks, modulo 2**64; the zeros that pad a file add nothing."""

    __slots__ = ("total",)

    def __init__(self) -> None:
        self.total = 0

    def add(self, block: memoryview) -> None:
        whole = len(block) & ~7
        total = int(np.add.reduce(np.frombuffer(block[:whole], np.uint64)))
        total += int.from_bytes(block[whole:], "little")
        self.total = (self.total + total) & 0xFFFF_FFFF_FFFF_FFFF


def _digest(files: PosixFiles, content: memoryview, padding_bytes: int, head: int) -> WrittenChunk:
    words, crc = _WordSum(), 0
    for start in range(0, len(content), BLOCK_BYTES):
        block = content[start : start + BLOCK_BYTES]
        crc = files.digest(block, crc)
        words.add(block)
    crc = files.digest_zeros(padding_bytes, crc)
    return WrittenChunk(len(content) + padding_bytes, crc, words.total, head)


def digest_blob(files: PosixFiles, blob: EncodedBlob) -> str:
    """A digest of a blob's value, types and shapes: equal for equal blobs."""
    about = [[str(part.data.dtype), part.data.shape, part.order] for part in blob.parts]
    digests = [files.digest(to_json([blob.tree, about]))]
    for part in blob.parts:
        if isinstance(part.data.dtype, np.dtypes.StringDType):
            digests.append(files.digest(encode_texts(part.data, part.data.size)))
        else:
            content = memoryview(np.ascontiguousarray(part.data).reshape(-1).view(np.uint8).data)
            digests += _digest(files, content, 0, 0)
    return hashlib.sha256(to_json(digests)).hexdigest()


def _write_document(files: PosixFiles, store: _StoreInWriting, path: str, document: bytes) -> None:
    digest = files.write(join_path(store.root, path), [document])
    store.documents[path] = [len(document), digest]


def _finish_store(files: PosixFiles, store: _StoreInWriting) -> tuple[str, int]:
    """Write manifest and root document; the digest of the one, and the size of all files."""
    layout = store.layout
    for array in layout.arrays:
        chunks = [store.chunks[chunk.path] for chunk in array.chunks()]
        array.entry["files"] = [[chunk.size, chunk.crc] for chunk in chunks]
        if chunks and chunks[0].size >= LINKED_BYTES:
            # Hexadecimal: JSON's readers in other languages lose digits of such numbers.
            array.entry["sums"] = [[f"{chunk.total:016x}", chunk.head] for chunk in chunks]
    # The root's digest is in the manifest, so the manifest can be written before it.
    documents = {path: store.documents[path] for path in layout.documents}
    documents[ROOT_DOCUMENT] = [len(layout.root), files.digest(layout.root)]
    about = {**store.about, "blobs": layout.blobs, "documents": documents}
    manifest = group_document(about)
    files.write(join_path(store.root, MANIFEST), [manifest])
    files.write(os.path.join(store.root, ROOT_DOCUMENT), [layout.root])
    nbytes = sum(chunk.size for chunk in store.chunks.values())
    nbytes += sum(size for size, _ in documents.values())
    return hashlib.sha256(manifest).hexdigest(), nbytes + len(manifest)


def run_all(jobs: Iterable[Callable[[], None]], threads: int, nbytes: int) -> None:
    """Call all jobs, from several threads; the first error ends it and is raised.

    Parameters
    ----------
    jobs : iterable of callable
    threads : int
        At most, the calling one included; only one where the work is not worth another.
    nbytes : int
        How much they read or write.
    """
    pending = list(jobs)
    if nbytes < _WORTH_A_THREAD_BYTES and len(pending) < _WORTH_A_THREAD_JOBS:
        threads = 1
    queue = iter(pending)
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for job in queue:  # a list's iterator hands each item out once, to any thread
                if failures:
                    return
                job()
        except BaseException as error:
            failures.append(error)

    helpers = [
        threading.Thread(target=work, name=f"jobrunner-files-{i}", daemon=True)
        for i in range(min(threads, len(pending)) - 1)
    ]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    if failures:
        raise failures[0]


def run_gently(write: Callable[[], None]) -> None:
    """Call `write` in a thread that gives way to others, where the system knows priorities."""
    failures: list[BaseException] = []

    def work() -> None:
        # Only this thread's: Linux keeps them apart, and nobody may raise one again.
        with contextlib.suppress(AttributeError, OSError):
            if sys.platform == "linux":
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _GENTLE)
        try:
            write()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work, name="jobrunner-gentle-files", daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def join_path(root: str, path: str) -> str:
    """Path of a file within a store; manifests write ``/`` on every system."""
    return f"{root}/{path}" if os.sep == "/" else os.path.join(root, *path.split("/"))
