"""Read an array of a store, or a row of a stack of arrays, and verify each chunk."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import xxhash

from jobrunner.checkpoint.encoding import Array, UnsupportedDtypeError, dtype_from_spec
from jobrunner.checkpoint.storage import Jobs
from jobrunner.checkpoint.store.array_document import File, StoredArray
from jobrunner.checkpoint.store.chunks import (
    Grid,
    decode_chunk,
    decode_texts,
    is_text,
    padding_is_last,
    to_logical,
    to_memory,
    unpack_chunk,
)
from jobrunner.checkpoint.store.damage import VerifiedFiles, damaged_file
from jobrunner.errors import CheckpointError
from jobrunner.names import ROOT_DOCUMENT


class ArrayReader:
    """Reads an array of a store.

    Making one raises if this platform lacks its dtype.
    """

    def __init__(self, files: VerifiedFiles, array: StoredArray) -> None:
        self.array = array
        self.grid = array.grid
        self._files = files
        try:
            self.dtype = dtype_from_spec(array.dtype)
        except UnsupportedDtypeError as error:
            raise CheckpointError(
                f"The array {array.path} in {files.root} is whole, but this platform lacks its "
                f"dtype: {error}. Read it where the dtype exists."
            ) from error

    @property
    def shape(self) -> tuple[int, ...]:
        """In the order of the array's own axes."""
        return tuple(to_logical(self.grid.shape, self.grid.order))

    @property
    def nbytes(self) -> int:
        """How much memory the array takes."""
        return math.prod(self.grid.shape) * self.dtype.itemsize

    def digests(self) -> list[str]:
        """The digests of its chunks."""
        return [digest for _, digest in self.array.files]

    def read(self) -> tuple[Array, Jobs]:
        """Return an array to be filled, and the jobs that fill it."""
        result, data = self._allocate(self.grid.shape)
        jobs: Jobs = []
        for path, corner, file in self.array.chunk_files():
            jobs.append(partial(self._read_chunk_into, path, file, data[self.grid.part(corner)]))
        return result, jobs

    def read_whole(self) -> Array:
        """Read the array."""
        data, jobs = self.read()
        for job in jobs:
            job()
        return data

    def read_slice(self, axis: int, start: int, stop: int) -> tuple[Array, Jobs]:
        """Return a part along an axis, to be filled, and the jobs that fill it from its chunks."""
        shape = list(self.grid.shape)
        along = to_memory(range(len(shape)), self.grid.order).index(axis)
        shape[along] = stop - start
        result, data = self._allocate(shape)
        jobs: Jobs = []
        for path, corner, file in self.array.chunk_files():
            part = list(self.grid.part(corner))
            chunk = part[along]
            low, high = max(chunk.start, start), min(chunk.stop, stop)
            if low >= high:
                continue  # none of the rows is in this chunk
            # Rows `low` to `high` of the array lie in both: counted from the beginning of the part
            # that is read, they are the target; from that of the chunk, what is inside of it.
            part[along] = slice(low - start, high - start)
            inside = [slice(None)] * len(shape)
            inside[along] = slice(low - chunk.start, high - chunk.start)
            target = data[tuple(part)]
            jobs.append(partial(self._read_chunk_into, path, file, target, tuple(inside)))
        return result, jobs

    def _read_chunk_into(
        self, path: str, file: File, target: Array, inside: tuple[slice, ...] = ()
    ) -> None:
        """Read a chunk, or what is `inside` of it, into its place in an array."""
        if not inside and self._begins_with(target):
            # Without a copy.
            memory = memoryview(target.reshape(-1).view(np.uint8).data)
            self._files.read_into(path, memory, file)
            return
        data = self._files.read(path, file)
        with self._decoding(path):
            chunk = decode_chunk(data, self.grid, self.dtype, self.array.zstd)
            # With the ellipses, an array without axes stays one. What is left over is padding.
            wanted: Any = (*inside, ...)
            content: Any = (*map(slice, target.shape), ...)
            target[...] = chunk[wanted][content]

    def _begins_with(self, part: Array) -> bool:
        """Whether the file of a chunk begins with the bytes of its part, as they lie in memory."""
        is_plain = self.array.zstd is None and not is_text(self.dtype)
        is_padded_at_the_end = padding_is_last(part.shape, self.grid.chunk_shape)
        return is_plain and part.flags.c_contiguous and is_padded_at_the_end

    def read_chunk(self, place: Sequence[int]) -> bytes:
        """Read a chunk, not compressed, at coordinates in the order of the array's own axes."""
        corner = to_memory(place, self.grid.order)
        path = f"{self.array.path}/{self.grid.key(corner)}"
        data = self._files.read(path, self.array.files[self.grid.number_at(corner)])
        with self._decoding(path):
            content = unpack_chunk(data, self.grid, self.dtype, self.array.zstd)
            if is_text(self.dtype):
                decode_texts(content)
        return bytes(content)

    def _allocate(self, shape: Sequence[int]) -> tuple[Array, Array]:
        """Return a new array twice: with its own axes, and with axes in memory order."""
        order = self.grid.order
        try:
            if order and order == tuple(range(len(order)))[::-1]:
                # It owns its memory, which the transpose of another array does not.
                result: Array = np.empty(shape[::-1], self.dtype, "F")
                return result, result.T
            data: Array = np.empty(shape, self.dtype)
        except (MemoryError, ValueError) as error:
            raise CheckpointError(
                f"The array {self.array.path} in {self._files.root}, {self.dtype}{list(shape)}, "
                f"does not fit into memory: {error}. Read it where there is more."
            ) from error
        if not order:
            return data, data
        return data.transpose(np.argsort(order)), data

    @contextlib.contextmanager
    def _decoding(self, path: str) -> Iterator[None]:
        """Blame the document if a file that is whole does not decode as it says."""
        try:
            yield
        except ValueError as error:
            document = self._files.path(ROOT_DOCUMENT)
            raise damaged_file(document, f"does not describe {path}: {error}") from error


class RowReader(ArrayReader):
    """Reads a row of a stack as if it were an array of one chunk: the stack is short, and read whole."""

    def __init__(self, files: VerifiedFiles, stack: StoredArray, row: int) -> None:
        super().__init__(files, stack)
        self._stack = ArrayReader(files, stack)
        self._row = row
        shape = self.grid.shape[1:]
        order = self.grid.order
        if order is not None:
            order = tuple(axis - 1 for axis in order[1:])
        self.grid = Grid(shape, shape, order, self.grid.item_axis)

    def digests(self) -> list[str]:
        """The digest that its chunk would have: the same as that of an equal array of its own."""
        return [xxhash.xxh3_128_hexdigest(self.read_chunk(()))]

    def read(self) -> tuple[Array, Jobs]:
        """Return the row, which does not keep the memory of the others; no jobs are left."""
        return self._stack.read_whole()[self._row, ...].copy(order="K"), []

    def read_slice(self, axis: int, start: int, stop: int) -> tuple[Array, Jobs]:
        """Return a part along an axis; no jobs are left."""
        outer = (slice(None),) * axis
        return self.read_whole()[(*outer, slice(start, stop))], []

    def read_chunk(self, place: Sequence[int]) -> bytes:
        """Read the row's bytes."""
        data = self._stack.read_chunk((0,) * len(self._stack.shape))
        nbytes = len(data) // self._stack.shape[0]
        return data[self._row * nbytes : (self._row + 1) * nbytes]
