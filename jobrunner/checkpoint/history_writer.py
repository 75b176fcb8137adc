"""Appends to histories, on workers.

All histories of a binding lie in a directory of their own, in which nobody else ever writes. So a
run that was stopped, lost the directory and wakes up harms nothing, and a run that goes back to an
earlier epoch overwrites nothing that a later one needs. It begins with the rows of the loaded epoch:
full chunks are linked, the counted rows of the last one are copied.

Rows are then written in place behind those that count. Nothing reads them there until a record
counts them, and until then a failed write is simply repeated.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash

from jobrunner.checkpoint.encoding import core_type
from jobrunner.checkpoint.storage import Files, join_path
from jobrunner.checkpoint.store import (
    GROUP,
    Grid,
    HistoryMark,
    HistoryReader,
    chain_of,
    describe_array,
    history_root,
    name_chunk,
)
from jobrunner.errors import CheckpointError, CheckpointWriteError
from jobrunner.names import HISTORIES, ROOT_DOCUMENT, BlobKey, escape
from jobrunner.texts import get_logger
from jobrunner.workspace import Rows, Workspace

logger = get_logger(__name__)

PUBLISH_SECONDS = 1.0
"""An array's document is replaced so often at most, as that costs more than to append a row."""

_LEAST_BYTES, _USUAL_BYTES, _MOST_BYTES = 16 << 10, 1 << 20, 4 << 20
"""Of a chunk. It is sparse until it is full."""


class RowCount(NamedTuple):
    """How far a history has come at one position."""

    rows: int
    last: int
    holds: str
    dims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Origin:
    """The history of a loaded epoch, from which a new one goes on."""

    directory: str
    reader: HistoryReader
    digests: list[str]
    tail: bytes

    def rows(self, name: str) -> Rows:
        """The same, for the workspace."""
        mark = self.reader.mark
        rows = Rows(name, mark.extends, self.reader.dtype, tuple(mark.shape), mark.rows)
        rows.last, rows.holds, rows.origin = mark.last, mark.holds, self
        return rows


def find_origin(directory: str, reader: HistoryReader) -> Origin:
    """Read what a new history needs: not its full chunks, which may be damaged.

    Raises CheckpointCorruptError if the newest rows are.
    """
    mark, digests = reader.mark, reader.read_digests()
    tail = b""
    if mark.tail:
        tail = bytes(reader.read_chunk(mark.full_chunks, digests))
    return Origin(directory, reader, digests, tail)


class HistoryWriter:
    """Appends the rows of one history to the array at `root`."""

    def __init__(
        self, files: Files, directory: str, root: str, node: str, rows: Rows, puts: int | None
    ) -> None:
        assert rows.dtype is not None
        self.files = files
        self._directory, self._root, self._node = directory, root, node
        self._rows = rows
        self._dims: Sequence[str] = ()
        self._row_bytes = rows.dtype.itemsize * math.prod(rows.shape)
        self._count = 0
        self._digests: list[str] = []  # of full chunks
        self._tail = xxhash.xxh3_128()  # of the rows after them
        self._unwritten: list[tuple[int, int, memoryview]] = []  # since the last flush
        self._durable: tuple[int, int] | None = None  # rows and full chunks at the last flush
        self._has_tried = False  # to make the directory
        self._published = -1  # rows that other readers see
        origin: Origin | None = rows.origin
        if origin is None:
            whole_bytes = _USUAL_BYTES
            if puts is not None:
                whole_bytes = puts * max(1, rows.last or 0) * self._row_bytes
            chunk_bytes = min(max(whole_bytes, _LEAST_BYTES), _MOST_BYTES, files.appended_bytes)
            self._chunk_rows = max(1, chunk_bytes // self._row_bytes)
        else:
            self._chunk_rows = origin.reader.mark.chunk_rows
            self._digests += origin.digests
            self._count = len(origin.digests) * self._chunk_rows
            self._take(memoryview(origin.tail))

    def advance(self, at: RowCount) -> HistoryMark:
        """Take rows up to a position; returns its mark."""
        for rows in self._rows.take(at.rows):
            self._take(rows.reshape(-1).view(np.uint8).data)
        if self._count != at.rows:
            raise CheckpointWriteError(
                f"{self._root} would have {self._count} rows, expected {at.rows}. Resume the job."
            )
        assert self._rows.dtype is not None
        self._dims = name_axes(self._node, at.dims, extends=self._rows.extends)
        return HistoryMark(
            dtype=self._rows.dtype.str,
            shape=list(self._rows.shape),
            chunk_rows=self._chunk_rows,
            rows=at.rows,
            last=at.last,
            holds=at.holds,  # type: ignore[arg-type]
            extends=self._rows.extends,
            dims=list(at.dims),
            chain=chain_of(self._digests),
            tail=self._tail.hexdigest() if at.rows % self._chunk_rows else "",
        )

    def _take(self, data: memoryview) -> None:
        chunk_bytes = self._chunk_rows * self._row_bytes
        while len(data):
            start = self._count % self._chunk_rows * self._row_bytes
            part, data = data[: chunk_bytes - start], data[chunk_bytes - start :]
            self._unwritten.append((len(self._digests), start, part))
            self._tail.update(part)
            self._count += len(part) // self._row_bytes
            if start + len(part) == chunk_bytes:
                self._digests.append(self._tail.hexdigest())
                self._tail = xxhash.xxh3_128()

    def jobs(self) -> Iterator[Callable[[], object]]:
        """What writes all that was taken since the last `settle`, in any order.

        The caller flushes it, and calls `settle`. If the flush fails, the system may have lost any of
        it, and does not say so again. So the next jobs write all of it once more, at the same places.
        """
        if self._durable is None:
            self._make_directory()
            origin: Origin | None = self._rows.origin
            if origin is not None:
                for number in range(len(origin.digests)):
                    yield partial(self._take_over, number)
        written: dict[int, tuple[int, list[memoryview]]] = {}
        for chunk, start, part in self._unwritten:
            written.setdefault(chunk, (start, []))[1].append(part)
        nbytes = self._chunk_rows * self._row_bytes
        for chunk, (start, parts) in written.items():
            path = join_path(self._root, name_chunk(chunk, self._rows.shape))
            yield partial(self.files.write_at, path, start, parts, nbytes)

    def _make_directory(self) -> None:
        try:
            self.files.make_directory(self._root)
        except FileExistsError:
            # What this writer has not made is nothing to delete.
            if not self._has_tried:
                raise
            self.files.remove_tree(self._root)
            self.files.make_directory(self._root)
        self._has_tried = True

    def _take_over(self, number: int) -> None:
        """Link or copy a full chunk of the loaded epoch."""
        origin: Origin = self._rows.origin
        name, nbytes = name_chunk(number, self._rows.shape), origin.reader.mark.chunk_bytes
        source, target = join_path(origin.reader.root, name), join_path(self._root, name)
        if origin.directory == self._directory and self.files.link(source, target, nbytes):
            return
        # As it is: `verify` finds damage, but here it must not end the run.
        data = origin.reader.files.read(source, nbytes)
        if data is None or len(data) != nbytes:
            raise CheckpointWriteError(
                f"{source} is gone or cut: expected {nbytes} bytes, a chunk of a history that "
                f"this run goes on with. Restore the file from a copy, or resume from an "
                f"earlier epoch."
            )
        self.files.write(target, [data])

    def settle(self) -> None:
        """Note that what was written is durable."""
        self._unwritten = []
        self._durable = self._count, len(self._digests)

    def publish(self) -> None:
        """Replace the array's document, so that all readers see the rows that are durable."""
        if self._durable is None or self._durable[0] == self._published:
            return
        count, chunks = self._durable
        assert self._rows.dtype is not None
        shape = (count, *self._rows.shape)
        digests = self._digests[:chunks]
        document = describe_history(self._dims, self._rows.dtype, shape, self._chunk_rows, digests)
        self.files.put(join_path(self._root, ROOT_DOCUMENT), document)
        self._published = count


def name_axes(node: str, dims: Sequence[str], *, extends: bool) -> list[str]:
    """The names of the axes of a history, from those of its values, if they have any."""
    # Histories of a group differ in length while a run writes, so each has an axis of its own.
    if extends and dims:
        return [f"{node} {dims[0]}", *dims[1:]]
    return [f"{node} row", *dims]


def describe_history(
    dims: Sequence[str],
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    chunk_rows: int,
    digests: list[str],
) -> bytes:
    """The Zarr document of a history; of the names of its axes, the last ones may be missing."""
    grid = Grid(shape, (chunk_rows, *shape[1:]), None)
    core = core_type(dtype)
    # Where rows are missing, a reader shall not see numbers.
    fill = {"f": "NaN", "c": ["NaN", "NaN"]}.get(dtype.kind, core.fill)
    described = describe_array(dtype, grid, "history", dims=dims, core=core._replace(fill=fill))
    document = msgspec.json.decode(described)
    document["attributes"]["digests"] = digests
    return msgspec.json.encode(document)


class HistoryWriters:
    """The histories of a worker's nodes, in one binding. One thread at a time uses it."""

    def __init__(self, puts: int | None) -> None:
        self._puts = puts  # values that a whole run puts in a history; None: unknown
        self._writers: dict[BlobKey, HistoryWriter] = {}
        self._publishing = threading.Lock()
        self._published = 0.0
        self._timer: threading.Timer | None = None

    def advance(
        self,
        files: Files,
        path: str,
        histories: str,
        workspace: Workspace,
        counts: Mapping[str, RowCount],
    ) -> dict[str, HistoryMark]:
        """Take the rows of a node up to one position; returns the marks for its store."""
        marks = {}
        for name, at in counts.items():
            key = workspace.node, name
            if key not in self._writers:
                root = history_root(path, histories, name, workspace.node)
                rows = workspace.histories[name]
                self._writers[key] = HistoryWriter(
                    files, path, root, workspace.node, rows, self._puts
                )
            marks[name] = self._writers[key].advance(at)
        return marks

    def write(self, files: Files) -> None:
        """Write all that was taken; durable once the caller has flushed it."""
        jobs = chain.from_iterable(writer.jobs() for writer in self._writers.values())
        for _ in files.each(lambda write: write(), jobs):
            pass

    def settle(self) -> None:
        """Note that what was written is durable, and let other readers see it."""
        if not self._writers:
            return
        for writer in self._writers.values():
            writer.settle()
        seconds_left = self._published + PUBLISH_SECONDS - time.monotonic()
        if seconds_left <= 0:
            self.publish()
        elif self._timer is None:
            self._timer = threading.Timer(seconds_left, self.publish)
            self._timer.daemon = True
            self._timer.start()

    def publish(self) -> None:
        """Let other readers see what is durable."""
        with self._publishing:
            self._timer = None
            self._published = time.monotonic()
            writers = list(self._writers.values())
            if not writers:
                return
            try:
                for _ in writers[0].files.each(HistoryWriter.publish, writers):
                    pass
            except FileNotFoundError:
                pass  # the directory was deleted: nobody needs it any more
            except (OSError, CheckpointError) as error:
                # The rows are there. Only other readers of Zarr do not see them yet.
                logger.warning("A history's document cannot be replaced: %s", error)

    def close(self) -> None:
        """Publish what is left, and stop."""
        timer = self._timer
        if timer is not None:
            timer.cancel()
        self.publish()


def make_groups(files: Files, directory: str, histories: str, blobs: Iterable[str]) -> None:
    """Make the groups in which workers create the arrays of a binding, one for each blob."""
    for blob in blobs:
        root = join_path(directory, f"{HISTORIES}/{histories}/{escape(blob)}")
        files.make_directories(root)
        files.put(join_path(root, ROOT_DOCUMENT), GROUP, durable=True)


def copy_chunks(source: HistoryReader, target: HistoryReader) -> Iterator[Callable[[], None]]:
    """What copies the rows that a mark counts, and verifies them, in any order."""
    mark, digests = source.mark, source.read_digests()

    def copy(number: int) -> None:
        path = join_path(target.root, name_chunk(number, mark.shape))
        target.files.write_at(path, 0, [source.read_chunk(number, digests)], mark.chunk_bytes)

    target.files.make_directory(target.root)
    for number in range(mark.chunks):
        yield partial(copy, number)


def publish_copy(source: HistoryReader, target: HistoryReader, node: str, *, durable: bool) -> None:
    """Let Zarr open a copy, once its chunks are there."""
    mark, digests = source.mark, source.read_digests()
    shape = (mark.rows, *mark.shape)
    dims = name_axes(node, mark.dims, extends=mark.extends)
    document = describe_history(dims, source.dtype, shape, mark.chunk_rows, digests)
    target.files.put(join_path(target.root, ROOT_DOCUMENT), document, durable=durable)
