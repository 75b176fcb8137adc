"""Divide an array into files, and these into pieces. Pure: no I/O.

A file is a chunk of Zarr, or, if it is divided into pieces, a shard: its pieces one after another,
then an index of them, so that each can be read by itself. All shapes here have their axes in memory
order, outermost first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

CHUNK_BYTES = 64 << 20
"""Size of the longest file, by default."""

PIECE_BYTES = 4 << 20
"""Size of the longest piece, by default; files of up to two pieces are not divided."""

_PADDING_SHARE = 1 / 16
_PAGE_BYTES = 4096


class Piece(NamedTuple):
    """A unit of storage: a file, or a part of it."""

    part: tuple[Any, ...]  # slices of the array, up to its end
    place: int  # in the index of a shard


@dataclass(frozen=True, slots=True)
class Grid:
    """How an array is divided."""

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]  # of a file; the last ones extend beyond the array
    piece_shape: tuple[int, ...] | None  # None: files have no pieces
    order: tuple[int, ...] | None  # the axes in memory order; None: they are in it already
    item_axis: bool = False  # whether Zarr has one more axis, the last, along which an item lies

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of a piece, or of a file without pieces."""
        return self.piece_shape or self.chunk_shape

    @property
    def num_files(self) -> int:
        """How many files the array has."""
        return math.prod(map(_ceil_div, self.shape, self.chunk_shape))

    @property
    def num_places(self) -> int:
        """How many pieces the index of a file lists."""
        return math.prod(self._pieces_along())

    @property
    def is_memory(self) -> bool:
        """Whether a file starts with the bytes of its part of the array, in memory order."""
        stored, chunk, shape = self.stored_shape, self.chunk_shape, self.shape
        rows, files = _cut_axis(shape, stored), _cut_axis(shape, chunk)
        if rows is None or files is None:
            return False
        return rows == files or (files < rows and shape[rows] % stored[rows] == 0)

    def corners(self) -> Iterator[tuple[int, ...]]:
        """Yield the grid coordinates of all files; none if the array has no items."""
        if 0 in self.shape:
            return iter(())  # `product` would list the other axes first
        return itertools.product(*map(range, map(_ceil_div, self.shape, self.chunk_shape)))

    def files(self, path: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield path, with ``/``, and grid coordinates of all files of the array at `path`."""
        for corner in self.corners():
            yield f"{path}/{self.key(corner)}", corner

    def key(self, corner: Sequence[int]) -> str:
        """Return the file name of the chunk at `corner`."""
        inside = ("0",) if self.item_axis else ()
        return ".".join(("c", *map(str, to_logical(corner, self.order)), *inside))

    def part(self, corner: Sequence[int]) -> tuple[Any, ...]:
        """Return the part of the array that a file holds."""
        return tuple(
            slice(place * size, min((place + 1) * size, length))
            for place, size, length in zip(corner, self.chunk_shape, self.shape, strict=True)
        )

    def pieces(self, corner: Sequence[int]) -> Iterator[Piece]:
        """Yield the pieces of a file in order, but those beyond the array; or the file itself."""
        inner = self.stored_shape
        along = self._pieces_along()
        first = [place * count for place, count in zip(corner, along, strict=True)]
        logical = to_logical(along, self.order)
        for at in itertools.product(*map(range, self.pieces_inside(corner))):
            index = []
            for start, step, place, length in zip(first, inner, at, self.shape, strict=True):
                low = (start + place) * step
                index.append(slice(low, min(low + step, length)))
            # The index is in the order of the array's own axes.
            yield Piece(tuple(index), _ravel(to_logical(at, self.order), logical))

    def pieces_inside(self, corner: Sequence[int]) -> list[int]:
        """Return how many pieces of a file, along each axis, are not beyond the array."""
        return [
            min(along, _ceil_div(length, step) - place * along)
            for along, length, step, place in zip(
                self._pieces_along(), self.shape, self.stored_shape, corner, strict=True
            )
        ]

    def locate(self, at: Sequence[int]) -> tuple[tuple[int, ...], int, int]:
        """Return the corner of the file that holds a piece, its number among all, and the piece's in it.

        `at` are the grid coordinates of the piece, in memory order.
        """
        along = self._pieces_along()
        corner = tuple(map(int.__floordiv__, at, along))
        inside = map(int.__mod__, at, along)
        return (
            corner,
            _ravel(corner, map(_ceil_div, self.shape, self.chunk_shape)),
            _ravel(inside, self.pieces_inside(corner)),
        )

    def _pieces_along(self) -> list[int]:
        inner = self.stored_shape
        return [size // step for size, step in zip(self.chunk_shape, inner, strict=True)]


def plan_grid(
    shape: tuple[int, ...], itemsize: int, order: tuple[int, ...] | None, *, in_pieces: bool = True
) -> Grid:
    """Divide an array by default: files of at most 64 MiB, in pieces of 4 MiB if they are long.

    Files and pieces are contiguous in memory. `itemsize` is in bytes.
    """
    # Cached: the arrays of an epoch are often those of the one before.
    return _plan_grid(shape, itemsize, order, CHUNK_BYTES, PIECE_BYTES if in_pieces else None)


@lru_cache(maxsize=4096)
def _plan_grid(
    shape: tuple[int, ...],
    itemsize: int,
    order: tuple[int, ...] | None,
    chunk_bytes: int,
    piece_bytes: int | None,
) -> Grid:
    if piece_bytes is not None and itemsize * math.prod(shape) > 2 * piece_bytes:
        for axis, length in enumerate(shape):
            row_bytes = itemsize * math.prod(shape[axis + 1 :])
            if length > 1 and row_bytes <= chunk_bytes:
                rows = _choose_piece_rows(length, row_bytes, piece_bytes)
                pieces = min(-(-length // rows), chunk_bytes // (rows * row_bytes))
                if pieces < 2:
                    break
                before, rest = (1,) * axis, shape[axis + 1 :]
                chunk_shape = (*before, rows * pieces, *rest)
                return Grid(shape, chunk_shape, (*before, rows, *rest), order)
    return Grid(shape, plan_chunks(shape, itemsize, chunk_bytes), None, order)


def plan_chunks(shape: Sequence[int], itemsize: int, limit: int) -> tuple[int, ...]:
    """Return a chunk shape of at most `limit` bytes, of chunks contiguous in a C-ordered array."""
    for axis, length in enumerate(shape):
        row_bytes = itemsize * math.prod(shape[axis + 1 :])
        if length * row_bytes <= limit:
            break
        if row_bytes <= limit:
            rest = (max(1, size) for size in shape[axis + 1 :])
            return (*(1,) * axis, _choose_rows(length, limit // row_bytes), *rest)
    else:
        return (1,) * len(shape)
    return tuple(max(1, length) for length in shape)


def _choose_piece_rows(length: int, row_bytes: int, limit: int) -> int:
    """Return the rows of a piece: few of the last are padding, and it is whole pages if possible."""
    most = max(1, limit // row_bytes)
    rows = _choose_rows(length, most)
    a_page = _PAGE_BYTES // math.gcd(_PAGE_BYTES, row_bytes)
    for larger in (most, math.ceil(rows / a_page) * a_page):
        padding = larger * math.ceil(length / larger) - length
        if larger <= most and padding <= length * _PADDING_SHARE:
            return larger
    return rows


def _choose_rows(length: int, most: int) -> int:
    """Return the rows of a chunk, at most `most`, so that few of the last are padding."""
    fewest = math.ceil(length / most)
    candidates = []
    for count in range(fewest, 2 * fewest + 1):
        rows = math.ceil(length / count)
        padding = rows * math.ceil(length / rows) - length
        if padding <= length * _PADDING_SHARE:
            return rows
        candidates.append((padding, rows))
    return min(candidates)[1]


def _ravel(at: Iterable[int], shape: Iterable[int]) -> int:
    number = 0
    for place, length in zip(at, shape, strict=True):
        number = number * length + place
    return number


def _ceil_div(length: int, size: int) -> int:
    return -(-length // size)


def _cut_axis(shape: Sequence[int], cut: Sequence[int]) -> int | None:
    """Return the axis along which parts of this shape follow each other in memory, or None."""
    axis = next((i for i, size in enumerate(cut) if size > 1), max(len(cut) - 1, 0))
    if all(size == length for size, length in zip(cut[axis + 1 :], shape[axis + 1 :], strict=True)):
        return axis
    return None


def to_logical(sizes: Sequence[int], order: Sequence[int] | None) -> list[int]:
    """Reorder sizes from memory order to the array's own axes."""
    if not order:
        return list(sizes)
    logical = [0] * len(order)
    for axis, size in zip(order, sizes, strict=True):
        logical[axis] = size
    return logical
