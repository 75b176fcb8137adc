"""Read an array of a store, or a row of a stack of arrays, at once or lazily; verify each chunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xxhash

from jobrunner.checkpoint.encoding import Array, UnsupportedDtypeError, dtype_from_spec
from jobrunner.checkpoint.storage import run_all
from jobrunner.checkpoint.store.array_document import File, StoredArray
from jobrunner.checkpoint.store.chunks import (
    decode_chunk,
    is_text,
    padding_is_last,
    to_logical,
)
from jobrunner.checkpoint.store.damage import VerifiedFiles, damage
from jobrunner.errors import CheckpointError
from jobrunner.names import ROOT_DOCUMENT

Jobs = list[Callable[[], object]]
"""Work that several threads may do in any order."""

Ranges = Sequence[tuple[int, int]]
"""Start and stop along each of an array's own axes."""

_PLAIN_INDICES = (int, slice, type(...))


class ArrayReader:
    """Reads an array of a store, or a row of a stack; making one raises if its dtype is lacking."""

    def __init__(self, files: VerifiedFiles, array: StoredArray, row: int | None = None) -> None:
        self.array = array
        self.grid = array.grid
        self._files = files
        self._row = row
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
        return self._own_axes(self.grid.shape)

    def _own_axes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        logical = to_logical(sizes, self.grid.order)
        return tuple(logical if self._row is None else logical[1:])

    def open(self) -> LazyArray:
        """Return the array, to be read as it is used."""
        path = self._files.path(self.array.path)
        chunks = self._own_axes(self.grid.chunk_shape)
        return LazyArray(path, self.shape, self.dtype, chunks, self.read_now)

    @property
    def nbytes(self) -> int:
        """How much memory the array takes."""
        return math.prod(self.grid.shape) * self.dtype.itemsize

    def describe(self) -> list[Any]:
        """Return what is equal for equal arrays; for a row, what it would be for an array by itself."""
        grid = self.grid
        if self._row is None:
            digests = [digest for _, digest in self.array.files]
            return [self.array.dtype, grid.shape, grid.chunk_shape, grid.order, digests]
        data = self.read_whole()
        order = None
        if grid.order is not None:
            order = [axis - 1 for axis in grid.order[1:]]
            data = data.transpose(order)
        digest = xxhash.xxh3_128_hexdigest(data.tobytes())
        return [self.array.dtype, data.shape, data.shape, order, [digest]]

    def read(self) -> tuple[Array, Jobs]:
        """Return an array to be filled, and the jobs that fill it."""
        return self.read_part([(0, length) for length in self.shape])

    def read_whole(self) -> Array:
        """Read the array; a row does not keep the memory of the others."""
        return self.read_now([(0, length) for length in self.shape])

    def read_now(self, ranges: Ranges) -> Array:
        """Read a part of the array."""
        data, jobs = self.read_part(ranges)
        run_all(jobs, self._files.files.threads, data.nbytes)
        return data

    def read_part(self, ranges: Ranges) -> tuple[Array, Jobs]:
        """Return a part of the array, to be filled, and the jobs that fill it from its chunks."""
        if self._row is not None:
            ranges = [(self._row, self._row + 1), *ranges]
        ranges = [ranges[axis] for axis in self.grid.order or range(len(ranges))]
        result, data = self._allocate([stop - start for start, stop in ranges])
        jobs: Jobs = []
        for path, corner, file in self.array.chunk_files():
            target: list[Any] = [...]  # so that an array without axes stays one
            inside: list[Any] = [...]
            is_wanted = True
            for axis, (start, stop) in enumerate(ranges):
                chunk = self.grid.part(corner)[axis]
                low, high = max(chunk.start, start), min(chunk.stop, stop)
                target.insert(axis, slice(low - start, high - start))
                inside.insert(axis, slice(low - chunk.start, high - chunk.start))
                is_wanted = is_wanted and low < high
            if is_wanted:
                place = data[tuple(target)]
                jobs.append(partial(self._read_chunk_into, path, file, place, tuple(inside)))
        return result if self._row is None else result[0], jobs

    def _read_chunk_into(
        self, path: str, file: File, target: Array, inside: tuple[Any, ...]
    ) -> None:
        """Read what is `inside` of a chunk into its place in an array."""
        begins_with_it = not any(piece.start for piece in inside[:-1])
        if begins_with_it and self._begins_with(target):
            # Without a copy.
            memory = memoryview(target.reshape(-1).view(np.uint8).data)
            self._files.read_into(path, memory, file)
            return
        data = self._files.read(path, file)
        try:
            target[...] = decode_chunk(data, self.grid, self.dtype, self.array.zstd)[inside]
        except ValueError as error:  # the file is whole, so it is the document
            document = self._files.path(ROOT_DOCUMENT)
            raise damage(document, f"does not describe {path}: {error}") from error

    def _begins_with(self, part: Array) -> bool:
        """Whether the file of a chunk begins with the bytes of its part, as they lie in memory."""
        is_plain = self.array.zstd is None and not is_text(self.dtype)
        is_padded_at_the_end = padding_is_last(part.shape, self.grid.chunk_shape)
        return is_plain and part.flags.c_contiguous and is_padded_at_the_end

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
        return data.transpose(np.argsort(order)) if order else data, data


@dataclass(frozen=True, slots=True, eq=False)
class LazyArray:
    """An array in a checkpoint: each part that is asked for by an index is read then, and verified.

    Slices and numbers read the chunks that they touch; any other index reads the whole array.
    `chunks` is the shape of a chunk; `path` is that of the array's directory.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]
    read: Callable[[Ranges], Array]

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        keys = list(index) if isinstance(index, tuple) else [index]
        if not all(type(key) in _PLAIN_INDICES or isinstance(key, np.integer) for key in keys):
            return self.read([(0, length) for length in self.shape])[index]
        if ... not in keys:
            keys.append(...)
        i = keys.index(...)
        keys[i : i + 1] = [slice(None)] * (self.ndim + 1 - len(keys))
        if len(keys) != self.ndim:
            raise IndexError(f"{self.path} has {self.ndim} axes, and the index {index!r} more.")
        ranges = []
        inside: list[Any] = []
        for key, length in zip(keys, self.shape, strict=True):
            chosen: Any = range(length)[key]
            if isinstance(chosen, int):
                ranges.append((chosen, chosen + 1))
                inside.append(0)
            else:
                ends = sorted((chosen[0], chosen[-1])) if chosen else [0, -1]
                ranges.append((ends[0], ends[1] + 1))
                inside.append(slice(None, None, chosen.step))
        return self.read(ranges)[tuple(inside)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        array: Array = np.asarray(self[...], dtype)
        return array

    def __repr__(self) -> str:
        return f"{self.dtype}[{' x '.join(map(str, self.shape))}]"
