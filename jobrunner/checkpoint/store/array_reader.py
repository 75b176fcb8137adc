"""An array of a store, all of it or a part along an axis, out of the pieces that its files hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding import dtype_from_spec
from jobrunner.checkpoint.store.chunk_bytes import decode_piece, split_content
from jobrunner.checkpoint.store.grid import Piece
from jobrunner.checkpoint.store.layout import grid_of
from jobrunner.checkpoint.store.verified_files import VerifiedFiles

Jobs = list[Callable[[], None]]
"""What is left to do, in any order and in several threads."""

_WORTH_THE_STACK = 8
"""Of a stack of which less than one row in so many is wanted, only those are read."""


class StoredArray:
    """An array in the files of a store.

    Parameters
    ----------
    entry : mapping
        What the manifest says of it.
    """

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self._entry = entry
        self._grid = grid_of(entry)
        self.dtype = dtype_from_spec(entry["dtype"])

    @property
    def shape(self) -> tuple[int, ...]:
        """As users have it."""
        return logical_shape(self._entry)

    def read(self, files: VerifiedFiles) -> tuple[Any, Jobs]:
        """An array to be filled, and the jobs that fill it."""
        shape, order = tuple(self._entry["shape"]), self._entry["order"]
        if order and list(order) == list(range(len(shape)))[::-1]:
            result = np.empty(shape[::-1], self.dtype, order="F")  # owns its memory, as it was
            data = result.T
        else:
            data = np.empty(shape, self.dtype)
            result = data.transpose(np.argsort(order)) if order else data
        # What lies in files as in memory is read into its place, and all else by way of a buffer.
        is_direct = bool(data.size) and self._grid.is_memory and not self._compressors
        flat = None
        if is_direct and not isinstance(self.dtype, np.dtypes.StringDType):
            flat = memoryview(data.reshape(-1).view(np.uint8).data)
        jobs: Jobs = []
        start = 0
        for corner, (path, (size, digest)) in zip(
            self._grid.corners(), chunk_files(self._entry), strict=True
        ):
            if flat is None:
                jobs.append(partial(self._read_file, files, path, size, digest, corner, data))
                continue
            stop = start + data[(*self._grid.part(corner), ...)].nbytes
            if "within" in self._entry:
                jobs.append(partial(_read_row, files, self._entry["within"], digest, flat))
            else:
                jobs.append(partial(files.read_into, path, flat[start:stop], size, digest))
            start = stop
        return result, jobs

    def read_slice(
        self, files: VerifiedFiles, axis: int, start: int, stop: int
    ) -> tuple[np.ndarray[Any, Any], Jobs]:
        """Part of it along one axis, to be filled, and the jobs that fill it.

        Only the pieces that the part lies in are read.
        """
        grid = self._grid
        along = axis if grid.order is None else grid.order.index(axis)
        shape = list(grid.shape)
        shape[along] = stop - start
        data: np.ndarray[Any, Any] = np.empty(shape, self.dtype)
        jobs: Jobs = []
        pieces = self._entry.get("pieces") or [None] * len(self._entry["files"])
        for corner, (path, (size, digest)), told in zip(
            grid.corners(), chunk_files(self._entry), pieces, strict=True
        ):
            position = 0
            for i, piece in enumerate(grid.pieces(corner)):
                length, crc = told[i] if told else (size, digest)
                held = piece.part[along]
                low, high = max(held.start, start), min(held.stop, stop)
                if low < high:
                    inside = [slice(None)] * len(shape)
                    inside[along] = slice(low - held.start, high - held.start)
                    into = [*piece.part]
                    into[along] = slice(low - start, high - start)
                    file, nbytes, at = self._entry.get("within", (path, size, position))
                    read = partial(files.read_span, file, nbytes, at, length, crc)
                    target = data[tuple(into)]
                    jobs.append(partial(self._read_piece, read, piece, tuple(inside), target))
                position += length
        return data.transpose(np.argsort(grid.order)) if grid.order else data, jobs

    @property
    def _compressors(self) -> Any:
        return self._entry.get("compressors", ())

    def _read_file(
        self,
        files: VerifiedFiles,
        path: str,
        size: int,
        digest: int,
        corner: tuple[int, ...],
        data: np.ndarray[Any, Any],
    ) -> None:
        """Put the pieces of a file into their places in an array."""
        for piece, content in split_content(files.read(path, size, digest), self._grid, corner):
            data[(*piece.part, ...)] = self._decode(content, piece)

    def _read_piece(
        self,
        read: Callable[[], bytes],
        piece: Piece,
        inside: tuple[slice, ...],
        target: np.ndarray[Any, Any],
    ) -> None:
        """Put what is `inside` a piece into its place."""
        target[...] = self._decode(read(), piece)[inside]

    def _decode(self, content: bytes, piece: Piece) -> np.ndarray[Any, Any]:
        return decode_piece(content, piece, self._grid.stored_shape, self.dtype, self._compressors)


class WantedRows:
    """Rows of one stack that are to be read."""

    def __init__(self) -> None:
        self._places: list[tuple[list[Any], int, Mapping[str, Any]]] = []

    def add(self, found: list[Any], i: int, entry: Mapping[str, Any]) -> None:
        """One more, to become ``found[i]``."""
        self._places.append((found, i, entry))

    def read(self, files: VerifiedFiles, stack: Mapping[str, Any]) -> Jobs:
        """The jobs that read them: all at once where they are a good part of the stack."""
        if len(self._places) * _WORTH_THE_STACK >= stack["shape"][0]:
            return [partial(self._split, files, stack)]
        jobs: Jobs = []
        for found, i, entry in self._places:
            found[i], row_jobs = StoredArray(entry).read(files)
            jobs += row_jobs
        return jobs

    def _split(self, files: VerifiedFiles, stack: Mapping[str, Any]) -> None:
        data, jobs = StoredArray(stack).read(files)
        for job in jobs:
            job()
        size = stack["files"][0][0] // stack["shape"][0]
        for found, i, entry in self._places:
            _, _, start = entry["within"]
            found[i] = data[start // size, ...].copy(order="K")


def _read_row(
    files: VerifiedFiles, within: tuple[str, int, int], digest: int, target: memoryview
) -> None:
    """Put a row of a stack into its place."""
    target[:] = files.read_span(*within, len(target), digest)


def logical_shape(entry: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape that users have of an array, by what the manifest says of it."""
    shape = list(entry["shape"])
    for axis, length in zip(entry["order"] or (), entry["shape"], strict=False):
        shape[axis] = length
    return tuple(shape)


def chunk_files(entry: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
    """The files of an array, by what the manifest says of it: path, size and crc32c."""
    grid = grid_of(entry)
    for corner, (size, digest) in zip(grid.corners(), entry["files"], strict=True):
        yield f"{entry['path']}/{grid.key(corner)}", (size, digest)
