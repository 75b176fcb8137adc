"""Read and verify the files of a store, and arrays from them, whole or in part."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
from crc32c import crc32c

from jobrunner.checkpoint.encoding import Array, UnsupportedDtypeError, dtype_from_spec
from jobrunner.checkpoint.storage import Files, join_path
from jobrunner.checkpoint.store.chunk_bytes import decode_piece, split_chunk
from jobrunner.checkpoint.store.grid import Piece, to_logical
from jobrunner.checkpoint.store.manifest import ADVICE, MANIFEST, ArrayEntry, File, Row
from jobrunner.errors import CheckpointCorruptError, CheckpointError

WantedRow = tuple[list[Any], int, Row]
"""A list, the index in it of an array to be read, and its place."""

Jobs = list[Callable[[], None]]
"""Work that several threads may do in any order."""

_WHOLE_STACK = 8
"""A stack is read as a whole if at least one of so many of its rows is wanted."""


@dataclass(frozen=True, slots=True)
class VerifiedFiles:
    """Reads files of the store at `root` whose sizes and checksums are known.

    All methods raise `CheckpointCorruptError` if a file is missing or is not what was written, and
    `CheckpointError` if it cannot be read.
    """

    files: Files
    root: str

    def read(self, name: str, file: File) -> bytes:
        """Read a file."""
        path = join_path(self.root, name)
        with self.reading(path):
            data = self.files.read(path)
        _compare(path, file, (len(data), crc32c(data)))
        return data

    def read_into(self, name: str, target: memoryview | None, file: File) -> None:
        """Read a file into memory; None: only verify it."""
        path = join_path(self.root, name)
        with self.reading(path):
            found = self.files.read_into(path, target, file[0])
        _compare(path, file, found)

    def read_span(self, name: str, size: int, start: int, span: File) -> bytes:
        """Read part of a file of `size` bytes; `span` is length and checksum of the part."""
        path = join_path(self.root, name)
        with self.reading(path):
            found_size, data = self.files.read_span(path, start, span[0])
        if found_size != size:
            _compare(path, (size, 0), (found_size, 0))
        _compare(path, span, (len(data), crc32c(data)))
        return data

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Turn OSErrors about a file into checkpoint errors."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise CheckpointCorruptError(
                f"{path} is missing: expected a file that the checkpoint lists, found: "
                f"{error.strerror}. {ADVICE}",
                path=path,
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {type(error).__name__}: {error}. This does not "
                f"mean that the file is damaged: repair the storage and read again."
            ) from error


def _compare(path: str, expected: File, found: File) -> None:
    if found[0] != expected[0]:
        problem = f"expected {expected[0]} bytes, found {found[0]}"
    elif found[1] != expected[1]:
        problem = f"expected crc32c {expected[1]:08x}, found {found[1]:08x}"
    else:
        return
    raise CheckpointCorruptError(f"{path} is not what was written: {problem}. {ADVICE}", path=path)


class StoredArray:
    """An array in the files of a store; making one raises if this platform lacks its dtype."""

    def __init__(self, files: VerifiedFiles, array: ArrayEntry | Row) -> None:
        self._files = files
        self._row = array if isinstance(array, Row) else None
        self._entry = entry = array.alone() if isinstance(array, Row) else array
        self._grid = entry.grid
        self._compressors = msgspec.to_builtins(entry.compressors) if entry.compressors else ()
        try:
            self.dtype = dtype_from_spec(entry.dtype)
        except UnsupportedDtypeError as error:
            raise CheckpointError(
                f"The array {entry.path} in {files.root} is whole, but this platform lacks its "
                f"dtype: {error}. Read it where the dtype exists."
            ) from error

    @property
    def shape(self) -> tuple[int, ...]:
        """In the order of the array's own axes."""
        return tuple(to_logical(self._entry.shape, self._entry.order))

    def read(self) -> tuple[Array, Jobs]:
        """Return an array to be filled, and the jobs that fill it."""
        shape, order = self._entry.shape, self._entry.order
        if order and order == tuple(range(len(shape)))[::-1]:
            result = np.empty(shape[::-1], self.dtype, order="F")  # owns its memory
            data = result.T
        else:
            data = np.empty(shape, self.dtype)
            result = data.transpose(np.argsort(order)) if order else data
        # Files in memory order are read into their place, all others by way of a buffer.
        flat = None
        if (
            data.size
            and self._grid.is_memory
            and not self._compressors
            and not isinstance(self.dtype, np.dtypes.StringDType)
        ):
            flat = memoryview(data.reshape(-1).view(np.uint8).data)
        if self._row is not None and flat is not None:
            return result, [partial(self._read_row, flat)]
        jobs: Jobs = []
        start = 0
        places = self._grid.files(self._entry.path)
        for (path, corner), file in zip(places, self._entry.files, strict=True):
            if flat is None:
                jobs.append(partial(self._read_file, path, file, corner, data))
                continue
            stop = start + data[(*self._grid.part(corner), ...)].nbytes
            jobs.append(partial(self._files.read_into, path, flat[start:stop], file))
            start = stop
        return result, jobs

    def read_slice(self, axis: int, start: int, stop: int) -> tuple[Array, Jobs]:
        """Return a part along an axis, to be filled, and the jobs that fill it from its pieces."""
        grid, entry = self._grid, self._entry
        along = axis if grid.order is None else grid.order.index(axis)
        shape = list(grid.shape)
        shape[along] = stop - start
        data: Array = np.empty(shape, self.dtype)
        jobs: Jobs = []
        pieces = entry.pieces or [[file] for file in entry.files]
        places = grid.files(entry.path)
        for (path, corner), (size, _), spans in zip(places, entry.files, pieces, strict=True):
            position = 0
            for piece, span in zip(grid.pieces(corner), spans, strict=True):
                held = piece.part[along]
                low, high = max(held.start, start), min(held.stop, stop)
                if low < high:
                    inside = [slice(None)] * len(shape)
                    inside[along] = slice(low - held.start, high - held.start)
                    into = [*piece.part]
                    into[along] = slice(low - start, high - start)
                    where = self._row.span() if self._row else (path, size, position)
                    read = partial(self._files.read_span, *where, span)
                    target = data[tuple(into)]
                    jobs.append(partial(self._read_piece, read, piece, tuple(inside), target))
                position += span[0]
        return data.transpose(np.argsort(grid.order)) if grid.order else data, jobs

    def read_alone(self) -> bytes:
        """Read the row of a stack as the one chunk that it would be by itself."""
        assert self._row is not None
        return self._files.read_span(*self._row.span(), self._entry.files[0])

    def _read_row(self, target: memoryview) -> None:
        target[:] = self.read_alone()

    def _read_file(self, path: str, file: File, corner: tuple[int, ...], data: Array) -> None:
        chunk = self._files.read(path, file)
        with self._decoding():
            for piece, encoded in split_chunk(chunk, self._grid, corner):
                data[(*piece.part, ...)] = self._decode(encoded, piece)

    def _read_piece(
        self, read: Callable[[], bytes], piece: Piece, inside: tuple[slice, ...], target: Array
    ) -> None:
        encoded = read()
        with self._decoding():
            target[...] = self._decode(encoded, piece)[inside]

    def _decode(self, encoded: bytes, piece: Piece) -> Array:
        return decode_piece(encoded, piece, self._grid.stored_shape, self.dtype, self._compressors)

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        """Blame the manifest if a file that is whole does not decode as it says."""
        try:
            yield
        except ValueError as error:
            path = join_path(self._files.root, MANIFEST)
            raise CheckpointCorruptError(
                f"{path} does not describe the files of the array {self._entry.path}: {error}. "
                f"{ADVICE}",
                path=path,
            ) from error


def read_rows(files: VerifiedFiles, wanted: Sequence[WantedRow]) -> Jobs:
    """Return the jobs that read rows of one stack, or the whole stack if many of them are wanted."""
    stack = wanted[0][2].stack
    if len(wanted) * _WHOLE_STACK >= stack.shape[0]:
        return [partial(_split_stack, files, stack, wanted)]
    jobs: Jobs = []
    for found, i, row in wanted:
        found[i], row_jobs = StoredArray(files, row).read()
        jobs += row_jobs
    return jobs


def _split_stack(files: VerifiedFiles, stack: ArrayEntry, wanted: Sequence[WantedRow]) -> None:
    data, jobs = StoredArray(files, stack).read()
    for job in jobs:
        job()
    for found, i, row in wanted:
        found[i] = data[row.number, ...].copy(order="K")
