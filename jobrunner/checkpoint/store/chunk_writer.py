"""Chunks of a store's arrays, each a file: written, or shared with the store before."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jobrunner.checkpoint.storage import PosixFiles, join_path
from jobrunner.checkpoint.store.checksums import HEAD_BYTES, Sums, WrittenChunk, digest_content
from jobrunner.checkpoint.store.chunk_bytes import Content, file_content
from jobrunner.checkpoint.store.layout import PlannedArray, grid_of
from jobrunner.checkpoint.store.stacks import Rows

logger = logging.getLogger(__name__)

LINKED_BYTES = PosixFiles.linked_bytes
"""What tells a shorter chunk from another is not kept: it is never linked."""

READ_AGAIN_SAVES = 16
"""At one save in so many, on average, a file and its array are read before it is shared again."""


@dataclass(frozen=True, slots=True)
class FormerStore:
    """A store of the same node at an earlier epoch, whose unchanged chunks can be linked."""

    root: str
    chunks: Mapping[str, WrittenChunk]


def former_store(root: str, manifest: Mapping[str, Any]) -> FormerStore:
    """What of a store can be linked, by its manifest."""
    chunks: dict[str, WrittenChunk] = {}
    for entry in manifest["blobs"].values():
        for array in entry["arrays"]:
            if "sums" not in array:
                continue
            grid = grid_of(array)
            pieces = array.get("pieces") or [()] * len(array["files"])
            for corner, (size, crc), (total, head), told in zip(
                grid.corners(), array["files"], array["sums"], pieces, strict=True
            ):
                chunks[f"{array['path']}/{grid.key(corner)}"] = WrittenChunk(
                    size, crc, int(total, 16), head, tuple(map(tuple, told))
                )
    return FormerStore(root, chunks)


class ChunkWriter:
    """Writes the chunks of one store.

    Parameters
    ----------
    files : PosixFiles
    root : str
        The store's path.
    node, epoch : str, int
        What it is of.
    former : FormerStore, optional
        Whose unchanged chunks it shares.

    Attributes
    ----------
    written : dict of str to WrittenChunk
        By path within the store.
    linked_bytes : int
        What of them is shared.
    """

    def __init__(
        self, files: PosixFiles, root: str, node: str, epoch: int, former: FormerStore | None
    ) -> None:
        self.written: dict[str, WrittenChunk] = {}
        self.linked_bytes = 0
        self._files = files
        self._root = root
        self._node = node
        self._epoch = epoch
        self._former = former or FormerStore("", {})

    def write(self, array: PlannedArray, path: str, corner: tuple[int, ...]) -> None:
        """Write one, or share it; from several threads at once."""
        data = array.data
        if isinstance(data, Rows):
            data = data.gather()
        if array.is_stack:
            self.written[path] = self._write_stack(array, path, data)
            return
        known = self._former.chunks.get(path)
        if known is not None and known.size < self._files.linked_bytes:
            known = None
        self.written[path] = self._share_blindly(array, path, known) or self._share_or_write(
            array,
            path,
            file_content(data, array.grid, corner, array.compressors),
            known,
        )

    def _write_stack(
        self, array: PlannedArray, path: str, data: np.ndarray[Any, Any]
    ) -> WrittenChunk:
        """Write a stack, which is one file; the manifest says of each row what it is."""
        memory = memoryview(data.reshape(-1).view(np.uint8).data)
        crc = self._files.write(join_path(self._root, path), [memory])
        step = len(memory) // len(data)
        digest = self._files.digest
        array.entry["rows"] = [digest(memory[i : i + step]) for i in range(0, len(memory), step)]
        return WrittenChunk(len(memory), crc, 0, 0)

    def _share_blindly(
        self, array: PlannedArray, path: str, known: WrittenChunk | None
    ) -> WrittenChunk | None:
        """Share what would have to be compressed again to be compared."""
        if known is None or not array.compressors or not array.is_unchanged or self._is_due(path):
            return None
        return self._share(path, known)

    def _share_or_write(
        self, array: PlannedArray, path: str, content: Content, known: WrittenChunk | None
    ) -> WrittenChunk:
        files, target = self._files, join_path(self._root, path)
        if content.size < LINKED_BYTES and content.pieces is None:
            crc = files.write(target, content.buffers, content.padding_bytes)
            return WrittenChunk(content.size, crc, 0, 0)
        head = files.digest(memoryview(content.buffers[0])[:HEAD_BYTES])
        if known is not None:
            is_due = self._is_due(path)
            is_same = (known.size, known.head) == (content.size, head) and (
                (array.is_unchanged and not is_due) or digest_content(files, content, head) == known
            )
            if is_same and (not is_due or self._is_whole(path, known)):
                shared = self._share(path, known)
                if shared is not None:
                    return shared
            elif array.is_unchanged and not is_same:
                logger.warning(
                    "Blob %r of node %r has changed although no task that updates it has run. It "
                    "is saved as it is now; name it in the updates= of the task that changes it.",
                    array.blob,
                    self._node,
                )
        sums = Sums(content)
        crc = files.write(target, content.buffers, content.padding_bytes, sums.add)
        return WrittenChunk(content.size, crc, sums.total, head, tuple(sums.pieces))

    def _share(self, path: str, known: WrittenChunk) -> WrittenChunk | None:
        """Give a file of the store before a second name; None where that cannot be."""
        source, target = join_path(self._former.root, path), join_path(self._root, path)
        if not self._files.link(source, target, known.size):
            return None
        self.linked_bytes += known.size
        return known

    def _is_due(self, path: str) -> bool:
        """Whether memory and file are read before the file is shared once more, as now and then.

        By its name and the epoch, so that it comes to any file's turn whatever the save policy is.
        """
        return not zlib.crc32(f"{path} {self._epoch}".encode()) % READ_AGAIN_SAVES

    def _is_whole(self, path: str, known: WrittenChunk) -> bool:
        """Whether a file of the store before holds what was written to it."""
        old = join_path(self._former.root, path)
        try:
            found = self._files.read_into(old, None, known.size)
        except OSError as error:
            logger.warning("%s cannot be read, and is written anew: %s", old, error)
            return False
        if found != (known.size, known.crc):
            logger.warning("%s is not what was written; the new epoch gets a file of its own.", old)
            return False
        return True
