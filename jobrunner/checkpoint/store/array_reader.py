"""Read and verify the files of a store, and arrays from them, whole or in part."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from crc32c import crc32c

from jobrunner.checkpoint.encoding import Array, UnsupportedDtypeError, dtype_from_spec
from jobrunner.checkpoint.storage import Files, join_path
from jobrunner.checkpoint.store.chunk_bytes import (
    decode_piece,
    decode_texts,
    split_chunk,
    unpack_piece,
)
from jobrunner.checkpoint.store.grid import Piece, to_logical
from jobrunner.checkpoint.store.manifest import ADVICE, MANIFEST, ArrayEntry, File, Row
from jobrunner.errors import CheckpointCorruptError, CheckpointError

WantedRow = tuple[list[Any], int, Row]
"""A list, the index in it of an array to be read, and its place."""

Jobs = list[Callable[[], None]]
"""Work that several threads may do in any order."""

_CHECKED_FIRST_BYTES = 4 << 20
"""If so much is in each file of an array, their sizes are looked at before the memory is taken."""

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
        return self.read_span(name, file[0], 0, file)

    def check_size(self, name: str, file: File) -> None:
        """Check that a file has its size, without reading it."""
        path = join_path(self.root, name)
        with self.reading(path):
            size, _ = self.files.read_span(path, 0, 0)
        if size != file[0]:
            _compare(path, file, (size, 0))

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
        """Turn errors about a file into checkpoint errors."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise CheckpointCorruptError(
                f"{path} is missing: expected a file that the checkpoint lists, found: "
                f"{error.strerror}. {ADVICE}",
                path=path,
            ) from None
        except CheckpointError:
            raise
        except MemoryError as error:
            raise CheckpointError(
                f"{path} does not fit into memory. Read it where there is more."
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

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return math.prod(self._entry.shape) * self.dtype.itemsize

    def read(self) -> tuple[Array, Jobs]:
        """Return an array to be filled, and the jobs that fill it.

        Its files have their sizes, unless it is short.
        """
        shape, order, files = self._entry.shape, self._entry.order, self._entry.files
        if self._row is None and self.nbytes >= _CHECKED_FIRST_BYTES * max(1, len(files)):
            for path, file in self._entry.chunk_files():
                self._files.check_size(path, file)
        if order and order == tuple(range(len(shape)))[::-1]:
            result = self._allocate(shape[::-1], "F")  # owns its memory
            data = result.T
        else:
            data = self._allocate(shape)
            result = data.transpose(np.argsort(order)) if order else data
        # Files in memory order are read into their place, all others by way of a buffer.
        flat = None
        if (
            data.size
            and self._grid.is_memory
            and not self._entry.compressors
            and not isinstance(self.dtype, np.dtypes.StringDType)
        ):
            flat = memoryview(data.reshape(-1).view(np.uint8).data)
        if self._row is not None and flat is not None:
            return result, [partial(self._read_row, flat)]
        jobs: Jobs = []
        start = 0
        places = self._grid.files(self._entry.path)
        pieces = self._entry.pieces or [[file] for file in files]
        for (path, corner), file, spans in zip(places, files, pieces, strict=True):
            if flat is None:
                jobs.append(partial(self._read_file, path, file, corner, spans, data))
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
        data = self._allocate(shape)
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

    def read_piece(self, at: Sequence[int]) -> bytes:
        """Read the bytes of the piece at these coordinates, not compressed; rows have only one.

        `at` are in the order of the array's own axes.
        """
        if self._row is not None:
            return self.read_alone()
        entry = self._entry
        corner, number, place = self._grid.locate(
            [at[i] for i in entry.order] if entry.order else at
        )
        spans = entry.pieces[number] if entry.pieces else [entry.files[number]]
        start = sum(size for size, _ in spans[:place])
        path = f"{entry.path}/{self._grid.key(corner)}"
        data = self._files.read_span(path, entry.files[number][0], start, spans[place])
        with self._decoding():
            data = unpack_piece(data, self._grid, self.dtype, entry.compressors)
            if isinstance(self.dtype, np.dtypes.StringDType):
                decode_texts(data)
        return data

    def _allocate(self, shape: Sequence[int], order: Literal["C", "F"] = "C") -> Array:
        try:
            return np.empty(shape, self.dtype, order)
        except MemoryError as error:
            raise CheckpointError(
                f"The array {self._entry.path} in {self._files.root}, {self.dtype}{list(shape)}, "
                f"does not fit into memory: {error}. Read it where there is more."
            ) from error

    def _read_file(
        self,
        path: str,
        file: File,
        corner: tuple[int, ...],
        spans: Sequence[File],
        data: Array,
    ) -> None:
        chunk = self._files.read(path, file)
        with self._decoding():
            lengths = (length for length, _ in spans)
            for piece, encoded in split_chunk(chunk, self._grid, corner, lengths):
                data[(*piece.part, ...)] = self._decode(encoded, piece)

    def _read_piece(
        self, read: Callable[[], bytes], piece: Piece, inside: tuple[slice, ...], target: Array
    ) -> None:
        encoded = read()
        with self._decoding():
            target[...] = self._decode(encoded, piece)[inside]

    def _decode(self, encoded: bytes, piece: Piece) -> Array:
        whole = decode_piece(encoded, self._grid, self.dtype, self._entry.compressors)
        return whole[tuple(slice(part.stop - part.start) for part in piece.part)]

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
