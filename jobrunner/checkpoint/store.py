"""One node at one epoch on disk: write a store.

A store is made in this order: directories, chunks and documents, then the manifest, then the
root document, and at last everything is made durable. What is read was verified: the record
holds the manifest's digest, the manifest those of all files.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding import EncodedBlob
from jobrunner.checkpoint.files import PosixFiles
from jobrunner.checkpoint.layout import (
    FORMAT,
    MANIFEST,
    ROOT_DOCUMENT,
    Chunk,
    PlannedArray,
    StoreLayout,
    encode_texts,
    group_document,
    lay_out,
)

THREADS = 2
"""More of them do not write faster; the calling thread is one of them."""

_WORTH_A_THREAD_BYTES = 1 << 20
_WORTH_A_THREAD_JOBS = 64


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
    """

    store: str
    manifest: str
    nbytes: int
    seconds: float


@dataclass(slots=True)
class _StoreInWriting:
    store: str
    root: str
    about: dict[str, Any]
    layout: StoreLayout
    documents: dict[str, list[int]] = field(default_factory=dict)
    chunks: dict[str, list[int]] = field(default_factory=dict)


def write_stores(
    files: PosixFiles,
    directory: str,
    stores: Mapping[str, tuple[Mapping[str, Any], Mapping[str, EncodedBlob]]],
    threads: int = THREADS,
) -> list[Receipt]:
    """Write several stores, from several threads, and make them durable together.

    Parameters
    ----------
    files : PosixFiles
    directory : str
        Of the checkpoints, an absolute path.
    stores : mapping
        Name of a store -> what its documents say of it (JSON), and its blobs.
    threads : int

    Returns
    -------
    list of Receipt
        In the order of `stores`.

    Raises
    ------
    OSError
        Nothing that is there can be taken for a whole checkpoint.

    Notes
    -----
    Runs on workers, in a thread. *Safe to retry*: no, names are used once.
    """
    started = time.perf_counter()
    in_writing = []
    for store, (about, blobs) in stores.items():
        full = {"format": FORMAT, **about}
        root = os.path.join(directory, store)
        in_writing.append(_StoreInWriting(store, root, full, lay_out(blobs, full)))
    with files.durable(directory, list(stores)):
        for one in in_writing:
            files.make_directory(one.root)
            for name in one.layout.directories:
                files.make_directory(join_path(one.root, name))
        arrays = (array for one in in_writing for array in one.layout.arrays)
        run_all(
            (job for one in in_writing for job in _write_jobs(files, one)),
            threads,
            sum(array.part.data.nbytes for array in arrays),
        )
        digests = [_finish_store(files, one) for one in in_writing]
    seconds = time.perf_counter() - started
    return [
        Receipt(one.store, digest, nbytes, seconds)
        for one, (digest, nbytes) in zip(in_writing, digests, strict=True)
    ]


def _write_jobs(files: PosixFiles, store: _StoreInWriting) -> Iterable[Callable[[], None]]:
    for array in store.layout.arrays:
        for chunk in array.chunks():
            yield partial(_write_chunk, files, store, array, chunk)
    for path, document in store.layout.documents.items():
        yield partial(_write_document, files, store, path, document)


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
    digest = files.write(join_path(store.root, chunk.path), [content], padding_bytes)
    store.chunks[chunk.path] = [len(content) + padding_bytes, digest]


def _write_document(files: PosixFiles, store: _StoreInWriting, path: str, document: bytes) -> None:
    digest = files.write(join_path(store.root, path), [document])
    store.documents[path] = [len(document), digest]


def _finish_store(files: PosixFiles, store: _StoreInWriting) -> tuple[str, int]:
    """Write manifest and root document; the digest of the one, and the size of all files."""
    layout = store.layout
    for array in layout.arrays:
        array.entry["files"] = [store.chunks[chunk.path] for chunk in array.chunks()]
    # The root's digest is in the manifest, so the manifest can be written before it.
    documents = {path: store.documents[path] for path in layout.documents}
    documents[ROOT_DOCUMENT] = [len(layout.root), files.digest(layout.root)]
    about = {**store.about, "blobs": layout.blobs, "documents": documents}
    manifest = group_document(about)
    files.write(join_path(store.root, MANIFEST), [manifest])
    files.write(os.path.join(store.root, ROOT_DOCUMENT), [layout.root])
    nbytes = sum(size for size, _ in (*store.chunks.values(), *documents.values()))
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


def join_path(root: str, path: str) -> str:
    """Path of a file within a store; manifests write ``/`` on every system."""
    return f"{root}/{path}" if os.sep == "/" else os.path.join(root, *path.split("/"))
