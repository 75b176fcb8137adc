"""Write stores, each one node at one epoch.

First come directories, chunks and the Zarr documents of arrays, then the root document, which has
size and digest of each chunk; whoever calls makes everything durable. The record of the epoch has the
SHA-256 of the root document. Chunks that have not changed since an earlier epoch are linked.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from jobrunner.checkpoint.encoding import EncodedBlob, without_padding
from jobrunner.checkpoint.storage import Buffers, Files, Jobs, join_path, run_all
from jobrunner.checkpoint.store.array_document import File
from jobrunner.checkpoint.store.chunks import encode_chunk, encode_texts, is_text
from jobrunner.checkpoint.store.damage import VerifiedFiles
from jobrunner.checkpoint.store.document import DOCUMENT_MOST_BYTES, write_document
from jobrunner.checkpoint.store.layout import PlannedArray, StoreLayout
from jobrunner.errors import CheckpointError, DefinitionError
from jobrunner.names import ROOT_DOCUMENT
from jobrunner.texts import get_logger

logger = get_logger(__name__)

READ_AGAIN_SAVES = 16
"""One save in so many, on average, reads a file and its array before it links the file."""


class Former(NamedTuple):
    """A store of the same node at an earlier epoch, whose unchanged chunks can be linked."""

    root: str
    files: Mapping[str, File]  # those long enough to be linked, by path within the store


NO_STORE = Former("", {})


class StoreWriter:
    """Writes the store at `root`; not safe to retry, as a name is used once.

    `former` is the store whose unchanged chunks it links. If it raises OSError, what was written so
    far is not a checkpoint.
    """

    def __init__(
        self, files: Files, root: str, layout: StoreLayout, former: Former = NO_STORE
    ) -> None:
        self.arrays = layout.arrays
        self.nbytes = sum(array.data.nbytes for array in layout.arrays)
        self.linked: list[int] = []  # bytes of each linked chunk; appended to by any thread
        self.sha256 = ""  # of the root document, once that is written
        self._layout = layout
        self._files = files
        self._root = root
        self._former = former

    def prepare(self) -> Jobs:
        """Make the directories; return jobs that write all else but the root document."""
        jobs: Jobs = []
        self._files.make_directory(self._root)
        for path, document in self._layout.documents.items():
            self._files.make_directory(join_path(self._root, path))
            jobs.append(partial(self._write, f"{path}/{ROOT_DOCUMENT}", [document]))
        for array in self.arrays:
            num_chunks = array.grid.num_chunks
            array.files += [(0, "")] * num_chunks
            unwritten = list(range(num_chunks))
            for i in range(num_chunks):
                jobs.append(partial(self._write_chunk, array, i, unwritten))
        return jobs

    def _write(self, path: str, buffers: Buffers) -> str:
        return self._files.write(join_path(self._root, path), buffers)

    def _write_chunk(self, array: PlannedArray, i: int, unwritten: list[int]) -> None:
        """Write or link a chunk; whoever takes the last number of `unwritten` drops the array."""
        corner, key = array.grid.chunks[i]
        array.files[i] = self._write_or_link(array, f"{array.path}/{key}", corner)
        unwritten.pop()
        if not unwritten:
            array.drop()

    def _write_or_link(self, array: PlannedArray, path: str, corner: tuple[int, ...]) -> File:
        former = self._former.files.get(path)
        # An array that no task has updated is linked unread. But if its file in the former store is
        # damaged, so are all epochs that link to it, one after another. So now and then array and
        # file are both read: if the file is no longer what was written, the array is written anew,
        # and the epochs from then on are whole.
        is_due = former is not None and self._is_due(path)
        if former is not None and array.is_unchanged and not is_due and self._link(path, former):
            return former
        buffers = encode_chunk(array.data, array.grid, corner, array.zstd)
        size = sum(map(len, buffers))
        if former is not None and former == (size, _digest(buffers)):
            is_whole = not is_due or self._is_whole(path, former)
            if is_whole and self._link(path, former):
                return former
        return size, self._write(path, buffers)

    def _link(self, path: str, file: File) -> bool:
        """Link a file of the former store; False if that is impossible."""
        source, target = join_path(self._former.root, path), join_path(self._root, path)
        if not self._files.link(source, target, file[0]):
            return False
        self.linked.append(file[0])
        return True

    def _is_due(self, path: str) -> bool:
        """Whether this save reads array and file before it links the file.

        Depends on name and epoch, so that each file's turn comes under any save policy.
        """
        text = f"{path} {self._layout.entry.epoch}"
        return zlib.crc32(text.encode()) % READ_AGAIN_SAVES == 0

    def _is_whole(self, path: str, file: File) -> bool:
        try:
            VerifiedFiles(self._files, self._former.root).verify(path, file)
        except CheckpointError as error:
            logger.warning("%s Its data is written again.", error.without_advice())
            return False
        return True

    def finish(self) -> None:
        """Write the root document, after all else."""
        layout = self._layout
        document = write_document(layout.entry, layout.attributes, layout.documents)
        if len(document) > DOCUMENT_MOST_BYTES:
            raise DefinitionError(
                f"Node {layout.entry.node!r}: the document of its store would have "
                f"{len(document):,} bytes, and {DOCUMENT_MOST_BYTES:,} is the most that is read. It "
                f"lists every array and every item of containers that are no arrays. Hold large "
                f"data in arrays, or divide the blobs between nodes."
            )
        # It comes last, so that it proves a complete store.
        self._write(ROOT_DOCUMENT, [document])
        self.sha256 = hashlib.sha256(document).hexdigest()
        self.nbytes = len(document) + sum(map(len, layout.documents.values()))
        for array in self.arrays:
            self.nbytes += sum(size for size, _ in array.files)

    def long_files(self) -> dict[str, File]:
        """The files that are long enough for a later store to link them, by path."""
        files: dict[str, File] = {}
        for array in self.arrays:
            for (_, key), file in zip(array.grid.chunks, array.files, strict=True):
                if file[0] >= self._files.linked_bytes:
                    files[f"{array.path}/{key}"] = file
        return files


def write_stores(files: Files, writers: Sequence[StoreWriter]) -> None:
    """Write stores together, with as many threads as pay."""
    jobs: Jobs = []
    for writer in writers:
        jobs += writer.prepare()
    run_all(jobs, files.threads, sum(writer.nbytes for writer in writers))
    list(files.each(StoreWriter.finish, writers))


def _digest(buffers: Buffers) -> str:
    """Return the digest that a file of these bytes would have."""
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


def digest_blob(blob: EncodedBlob) -> str:
    """Return a digest of a blob's value, types and shapes, equal for equal blobs."""
    arrays = [[str(part.data.dtype), part.data.shape, part.order] for part in blob.parts]
    digest = hashlib.sha256(msgspec.json.encode([blob.tree, arrays]))
    for part in blob.parts:
        if is_text(part.data.dtype):
            digest.update(encode_texts(part.data, part.data.size))
        else:
            data = np.ascontiguousarray(without_padding(part.data))
            memory = memoryview(data.reshape(-1).view(np.uint8).data)
            digest.update(_digest([memory]).encode())
    return digest.hexdigest()
