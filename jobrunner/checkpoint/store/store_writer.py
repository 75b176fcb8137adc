"""Write stores, each one node at one epoch.

First come directories, chunks and the Zarr documents of arrays, then the root document, which has
size and digest of each chunk; finally everything is made durable. The record of the epoch has the
SHA-256 of the root document. Chunks that have not changed since an earlier epoch are linked.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import xxhash

from jobrunner.checkpoint.encoding import EncodedBlob, without_padding
from jobrunner.checkpoint.storage import (
    NO_CONTENT,
    Buffers,
    Content,
    Files,
    PosixFiles,
    join_path,
    run_all,
)
from jobrunner.checkpoint.store.array_document import GROUP, File
from jobrunner.checkpoint.store.chunks import encode_chunk, encode_texts, is_text
from jobrunner.checkpoint.store.damage import ADVICE, VerifiedFiles
from jobrunner.checkpoint.store.document import (
    DOCUMENT_MOST_BYTES,
    StoreDocument,
    encode_json,
)
from jobrunner.checkpoint.store.layout import PlannedArray, Rows, StoreLayout, lay_out
from jobrunner.errors import CheckpointError, DefinitionError
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
        self._stores: list[_StoreWriter] = []
        for name, (described, blobs) in stores.items():
            last = (former or {}).get(name) or Former("", {})
            root = join_path(directory, name)
            self._stores.append(_StoreWriter(files, name, root, lay_out(blobs, described), last))

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
            nbytes += sum(array.data.nbytes for array in store.layout.arrays)
            jobs += store.begin()
        run_all(jobs, self._files.threads, nbytes)

    def finish(self) -> list[Receipt]:
        """Write the root documents; return a receipt for each store, not yet whole."""
        return list(self._files.each(_StoreWriter.finish, self._stores))

    def as_former(self) -> dict[str, Former]:
        """The stores, once they are written, as those that later ones may link to; by name."""
        return {store.name: store.as_former() for store in self._stores}


class _StoreWriter:
    """Writes one store, and links the chunks that `former` has unchanged."""

    def __init__(
        self, files: Files, name: str, root: str, layout: StoreLayout, former: Former
    ) -> None:
        self.name = name
        self.layout = layout
        self._root = root
        self._files = files
        self._former = former
        self._linked: list[int] = []  # bytes of each linked chunk; appended to by any thread

    def begin(self) -> list[Callable[[], object]]:
        """Make directories; return the jobs that write all but the root document, in any order."""
        self._files.make_directory(self._root)
        for path, document in self.layout.documents.items():
            if document == GROUP:
                self._make_directory(path)
        jobs: list[Callable[[], object]] = []
        for array in self.layout.arrays:
            corners = list(array.grid.corners())
            array.files += [(0, "")] * len(corners)
            if len(corners) == 1:
                jobs.append(partial(self._write_single, array, corners[0]))
                continue
            self._make_directory(array.path)
            unwritten = list(range(len(corners)))
            for i, corner in enumerate(corners):
                jobs.append(partial(self._write_one_of_many, array, i, corner, unwritten))
        return jobs

    def _make_directory(self, path: str, chunks: Content = NO_CONTENT) -> list[str]:
        """Make the directory of an array or group, with its document; returns digests of chunks."""
        content = {ROOT_DOCUMENT: [self.layout.documents[path]], **chunks}
        return self._files.make_directory(join_path(self._root, path), content)[1:]

    def _write_single(self, array: PlannedArray, corner: tuple[int, ...]) -> None:
        """Write or link an array that has one chunk."""
        key = array.grid.key(corner)
        if self._linkable(f"{array.path}/{key}") is None:
            # One call makes the directory and both files.
            buffers = self._encode(array, corner)
            (digest,) = self._make_directory(array.path, {key: buffers})
            array.files[0] = _size(buffers), digest
        else:
            self._make_directory(array.path)
            array.files[0] = self.write_chunk(array, corner)
        array.drop()

    def _write_one_of_many(
        self, array: PlannedArray, i: int, corner: tuple[int, ...], unwritten: list[int]
    ) -> None:
        """Write or link a chunk; whoever takes the last number of `unwritten` drops the array."""
        array.files[i] = self.write_chunk(array, corner)
        if unwritten.pop() == 0:
            array.drop()

    def write_chunk(self, array: PlannedArray, corner: tuple[int, ...]) -> File:
        """Write or link a chunk; called from several threads at once."""
        path = f"{array.path}/{array.grid.key(corner)}"
        former = self._linkable(path)
        # An array that no task has updated is linked unread. But if its file in the former store is
        # damaged, so are all epochs that link to it, one after another. So now and then array and
        # file are both read: if the file is no longer what was written, the array is written anew,
        # and the epochs from then on are whole.
        is_due = former is not None and self._is_due(path)
        if former is not None and array.is_unchanged and not is_due and self._link(path, former):
            return former
        buffers = self._encode(array, corner)
        if former is not None and _size(buffers) == former[0]:
            if _digest(buffers) == former[1]:
                is_whole = not is_due or self._is_whole(path, former)
                if is_whole and self._link(path, former):
                    return former
            elif array.is_unchanged:
                self._warn_of_change(array.blob)
        digest = self._files.write(join_path(self._root, path), buffers)
        return _size(buffers), digest

    def _linkable(self, path: str) -> File | None:
        """The file of the former store at a path, if it is long enough that a link pays."""
        file = self._former.files.get(path)
        return None if file is None or file[0] < self._files.linked_bytes else file

    def _encode(self, array: PlannedArray, corner: tuple[int, ...]) -> list[bytes | memoryview]:
        data = array.data.gather() if isinstance(array.data, Rows) else array.data
        return encode_chunk(data, array.grid, corner, array.zstd)

    def _link(self, path: str, file: File) -> bool:
        """Link a file of the former store; False if that is impossible."""
        source, target = join_path(self._former.root, path), join_path(self._root, path)
        if not self._files.link(source, target, file[0]):
            return False
        self._linked.append(file[0])
        return True

    def _is_due(self, path: str) -> bool:
        """Whether this save reads array and file before it links the file.

        Depends on name and epoch, so that each file's turn comes under any save policy.
        """
        text = f"{path} {self.layout.described['epoch']}"
        return zlib.crc32(text.encode()) % READ_AGAIN_SAVES == 0

    def _is_whole(self, path: str, file: File) -> bool:
        try:
            VerifiedFiles(self._files, self._former.root).verify(path, file)
        except CheckpointError as error:
            logger.warning("%sIts data is written again.", str(error).removesuffix(ADVICE))
            return False
        return True

    def _warn_of_change(self, blob: str) -> None:
        logger.warning(
            "Blob %r of node %r has changed although no task that updates it has run. Its new "
            "value is saved; name it in the updates= of the task that changes it.",
            blob,
            self.layout.described["node"],
        )

    def finish(self) -> Receipt:
        """Write the root document."""
        document = self.layout.write_document()
        if len(document) > DOCUMENT_MOST_BYTES:
            raise DefinitionError(
                f"Node {self.layout.described['node']!r}: the document of its store would have "
                f"{len(document):,} bytes, and {DOCUMENT_MOST_BYTES:,} is the most that is read. It "
                f"lists every array and every item of containers that are no arrays. Hold large "
                f"data in arrays, or divide the blobs between nodes."
            )
        # The root document comes last, so that it proves a complete store.
        self._files.write(join_path(self._root, ROOT_DOCUMENT), [document])
        nbytes = len(document) + sum(map(len, self.layout.documents.values()))
        for array in self.layout.arrays:
            nbytes += sum(size for size, _ in array.files)
        digest = hashlib.sha256(document).hexdigest()
        return Receipt(self.name, digest, nbytes, linked_bytes=sum(self._linked))

    def as_former(self) -> Former:
        """The store, once it is written, as one that a later one may link to."""
        files: dict[str, File] = {}
        for array in self.layout.arrays:
            for corner, file in zip(array.grid.corners(), array.files, strict=True):
                if file[0] >= self._files.linked_bytes:
                    files[f"{array.path}/{array.grid.key(corner)}"] = file
        return Former(self._root, files)


def _size(buffers: Buffers) -> int:
    return sum(map(len, buffers))


def _digest(buffers: Buffers) -> str:
    """Return the digest that a file of these bytes would have."""
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def digest_blob(blob: EncodedBlob) -> str:
    """Return a digest of a blob's value, types and shapes, equal for equal blobs."""
    arrays = [[str(part.data.dtype), part.data.shape, part.order] for part in blob.parts]
    digest = hashlib.sha256(encode_json([blob.tree, arrays]))
    for part in blob.parts:
        if is_text(part.data.dtype):
            digest.update(encode_texts(part.data, part.data.size))
        else:
            data = np.ascontiguousarray(without_padding(part.data))
            memory = memoryview(data.reshape(-1).view(np.uint8).data)
            digest.update(_digest([memory]).encode())
    return digest.hexdigest()
