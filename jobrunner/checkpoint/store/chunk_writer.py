"""Write the chunks of a store, each a file, or link those that have not changed."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jobrunner.checkpoint.encoding import Array
from jobrunner.checkpoint.storage import Files, PosixFiles, join_path
from jobrunner.checkpoint.store.checksums import HEAD_BYTES, Sums, WrittenChunk, checksum_chunk
from jobrunner.checkpoint.store.chunk_bytes import ChunkBytes, encode_chunk
from jobrunner.checkpoint.store.layout import PlannedArray
from jobrunner.checkpoint.store.manifest import Manifest
from jobrunner.checkpoint.store.stacks import Rows

logger = logging.getLogger(__name__)

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


class ChunkWriter:
    """Writes the chunks of the store at `root`, or links those that `former` has unchanged."""

    def __init__(
        self, files: Files, root: str, node: str, epoch: int, former: FormerStore | None
    ) -> None:
        self.written: dict[str, WrittenChunk] = {}  # by path within the store
        self.linked_bytes = 0
        self._files = files
        self._root = root
        self._node = node
        self._epoch = epoch
        self._former = former or FormerStore("", {})

    def write(self, array: PlannedArray, path: str, corner: tuple[int, ...]) -> None:
        """Write or link a chunk; called from several threads at once."""
        data = array.data
        if isinstance(data, Rows):
            data = data.gather()
        if array.is_stack:
            self.written[path] = self._write_stack(array, path, data)
            return
        known = self._former.chunks.get(path)
        if known is not None and known.size < self._files.linked_bytes:
            known = None
        written = None
        if known is not None and array.compressors and array.is_unchanged:
            # To compare it, it would have to be compressed again.
            written = None if self._is_due(path) else self._link(path, known)
        self.written[path] = written or self._link_or_write(
            array, path, encode_chunk(data, array.grid, corner, array.compressors), known
        )

    def _write_stack(self, array: PlannedArray, path: str, data: Array) -> WrittenChunk:
        """Write the one file of a stack, and record the checksum of each row."""
        memory = memoryview(data.reshape(-1).view(np.uint8).data)
        crc = self._files.write(join_path(self._root, path), [memory])
        step = len(memory) // len(data)
        digest = self._files.digest
        array.entry["rows"] = [digest(memory[i : i + step]) for i in range(0, len(memory), step)]
        return WrittenChunk(len(memory), crc, 0, 0)

    def _link_or_write(
        self, array: PlannedArray, path: str, chunk: ChunkBytes, known: WrittenChunk | None
    ) -> WrittenChunk:
        files, target = self._files, join_path(self._root, path)
        size = chunk.size
        if size < LINKED_BYTES and chunk.pieces is None:
            crc = files.write(target, chunk.buffers, chunk.padding_bytes)
            return WrittenChunk(size, crc, 0, 0)
        head = files.digest(memoryview(chunk.buffers[0])[:HEAD_BYTES])
        if known is not None:
            is_due = self._is_due(path)
            is_same = (known.size, known.head) == (size, head) and (
                (array.is_unchanged and not is_due) or checksum_chunk(files, chunk, head) == known
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
                    self._node,
                )
        sums = Sums(chunk)
        crc = files.write(target, chunk.buffers, chunk.padding_bytes, sums.add)
        return WrittenChunk(size, crc, sums.total, head, tuple(sums.pieces))

    def _link(self, path: str, known: WrittenChunk) -> WrittenChunk | None:
        """Link a file of the former store; None if that is impossible."""
        source, target = join_path(self._former.root, path), join_path(self._root, path)
        if not self._files.link(source, target, known.size):
            return None
        self.linked_bytes += known.size
        return known

    def _is_due(self, path: str) -> bool:
        """Whether this save reads array and file before it links the file.

        Depends on name and epoch, so that each file's turn comes under any save policy.
        """
        return not zlib.crc32(f"{path} {self._epoch}".encode()) % READ_AGAIN_SAVES

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
