"""The manifest of a store as it is read: typed, and checked once. Pure: no I/O."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np

from jobrunner.checkpoint.encoding import (
    Count,
    Document,
    EpochKey,
    Length,
    Shape,
    Spec,
    UnsupportedDtypeError,
    described,
    dtype_from_spec,
    read_document,
)
from jobrunner.checkpoint.store.chunk_bytes import index_bytes
from jobrunner.checkpoint.store.compression import MOST_RATIO, CompressorEntry
from jobrunner.checkpoint.store.grid import Grid
from jobrunner.errors import CheckpointError
from jobrunner.positions import epoch_from_json

STORE_FORMAT = 6
"""Newest format of stores and manifests: 5 in the middle of an epoch, 4 with arrays whose items have an axis in Zarr, columns of
plain values, or values of types that earlier versions cannot save, 3 with stacked arrays, 2 with compressed arrays or
arrays in pieces, else 1."""

MANIFEST_BYTES = 512 << 20
"""Longest manifest that is written or read."""

MANIFEST = "_manifest/zarr.json"
"""The document of a Zarr group, so that readers of Zarr find nothing unknown in a store."""

ROOT_DOCUMENT = "zarr.json"

LONE_ARRAY = {"$": "array", "at": 0}
"""The tree of a blob that is an array."""

ADVICE = "Resume with 'latest' to fall back to the epoch before, or restore the file from a copy."

_MOST_BYTES = 1 << 62

Checksum = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF_FFFF)]
File = tuple[Count, Checksum]
"""Size and crc32c."""

Place = tuple[Count, Count]
"""Index of a stack, and of a row in it."""

Axes = Annotated[tuple[Length, ...], msgspec.Meta(max_length=64)]
Sum = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
Path = Annotated[str, msgspec.Meta(min_length=1)]


class ArrayEntry(Document, kw_only=True):
    """An array: how it is divided, and its files; all axes in memory order."""

    path: Path
    dtype: Spec
    shape: Shape
    order: Shape | None
    item_axis: bool = False
    chunk_shape: Axes
    piece_shape: Axes | None = None
    compressors: tuple[CompressorEntry, ...] = ()
    rows: list[Checksum] | None = None  # of a stack
    files: list[File]
    sums: list[tuple[Sum, Checksum]] | None = None  # of each file: `total` and `head`
    pieces: list[list[File]] | None = None  # of each file

    def __post_init__(self) -> None:
        axes = len(self.shape)
        if self.order is not None and sorted(self.order) != list(range(axes)):
            raise ValueError(f"`order` {list(self.order)} does not permute {axes} axes")
        if len(self.chunk_shape) != axes:
            raise ValueError(f"`chunk_shape` has {len(self.chunk_shape)} axes, `shape` {axes}")
        if self.piece_shape is not None and (
            len(self.piece_shape) != axes
            or any(map(int.__mod__, self.chunk_shape, self.piece_shape))
        ):
            raise ValueError("`piece_shape` does not divide `chunk_shape`")
        num_files = 1 if self.chunk_shape == self.shape else self.grid.num_files
        if len(self.files) != num_files:
            raise ValueError(f"expected {num_files} files, found {len(self.files)}")
        if self.sums is not None and len(self.sums) != num_files:
            raise ValueError(f"expected {num_files} sums, found {len(self.sums)}")
        self._check_sizes()

    @property
    def grid(self) -> Grid:
        """How it is divided."""
        return Grid(self.shape, self.chunk_shape, self.piece_shape, self.order, self.item_axis)

    @property
    def nbytes(self) -> int:
        """Size of its files."""
        return sum(size for size, _ in self.files)

    def chunk_files(self) -> Iterator[tuple[str, File]]:
        """Yield path, size and crc32c of each file."""
        for (path, _), file in zip(self.grid.files(self.path), self.files, strict=True):
            yield path, file

    def _check_sizes(self) -> None:
        """Check that each file is as long as it must be, or long enough for what it holds."""
        dtype = _dtype(self.dtype)
        is_text = isinstance(dtype, np.dtypes.StringDType)
        if dtype is not None and self.chunk_shape == self.shape and not dtype.subdtype:
            is_plain = not (self.compressors or self.pieces or self.piece_shape or is_text)
            if is_plain and 0 < dtype.itemsize * math.prod(self.shape) == self.files[0][0]:
                return  # as are most
        grid = self.grid
        item = 4 if is_text else dtype.itemsize if dtype is not None else 1  # bytes, at least
        if not item or (dtype is not None and dtype.subdtype):
            raise ValueError(f"the items of an array are never of the dtype {dtype}")
        items = max(math.prod(max(1, it) for it in self.shape), math.prod(self.chunk_shape))
        if item * items > _MOST_BYTES:
            raise ValueError(f"an array of shape {list(self.shape)} does not fit into memory")
        piece = item * math.prod(grid.stored_shape) + (4 if is_text else 0)
        ratio = MOST_RATIO ** len(self.compressors)
        is_exact = not (self.compressors or is_text or dtype is None)

        def check(sizes: Iterable[int], what: str) -> None:
            for size in set(sizes):
                if size != piece if is_exact else size * ratio < piece:
                    raise ValueError(f"the size of a {what}: {size} bytes for {piece}")

        if self.piece_shape is None:
            if self.pieces is not None:
                raise ValueError("unexpected `pieces`")
            check((size for size, _ in self.files), "file does not fit `chunk_shape` and `dtype`")
            return
        if self.pieces is None or len(self.pieces) != len(self.files):
            raise ValueError("expected `pieces` of each file")
        for corner, (size, _), pieces in zip(grid.corners(), self.files, self.pieces, strict=True):
            expected = math.prod(grid.pieces_inside(corner))
            if len(pieces) != expected:
                raise ValueError(f"expected {expected} pieces, found {len(pieces)}")
            if size != sum(length for length, _ in pieces) + index_bytes(grid):
                raise ValueError("the size of a file does not fit those of its pieces")
            check((it for it, _ in pieces), "piece does not fit `piece_shape` and `dtype`")


class Row(NamedTuple):
    """An array that is a row of a stack."""

    stack: ArrayEntry
    number: int

    @property
    def path(self) -> str:
        """Path of the stack."""
        return self.stack.path

    @property
    def nbytes(self) -> int:
        """Size of the row."""
        return self.stack.files[0][0] // self.stack.shape[0]

    def span(self) -> tuple[str, int, int]:
        """Return path and size of the stack's file, and the byte at which the row starts."""
        ((path, (size, _)),) = self.stack.chunk_files()
        return path, size, self.number * self.nbytes

    def alone(self) -> ArrayEntry:
        """Return the entry that the array would have if it were not stacked."""
        stack = self.stack
        return ArrayEntry(
            path=stack.path,
            dtype=stack.dtype,
            shape=stack.shape[1:],
            order=stack.order and tuple(axis - 1 for axis in stack.order[1:]),
            item_axis=stack.item_axis,
            chunk_shape=stack.shape[1:],
            files=[(self.nbytes, stack.rows[self.number])],  # type: ignore[index]  # a stack has rows
        )


class BlobEntry(Document):
    """A blob: its tree, and the arrays that the tree refers to."""

    value: Any
    arrays: list[ArrayEntry | Place]


class StoredBlob(NamedTuple):
    """A blob with its rows of stacks looked up."""

    tree: Any
    arrays: Sequence[ArrayEntry | Row]


class RecordEntry(Document):
    """What the log says of the epoch, so that the log can be repaired."""

    nodes: list[str]
    details: dict[str, Any]


class Manifest(Document, kw_only=True):
    """All blobs of a store, and size and checksum of each of its files."""

    format: Count
    node: str
    position: EpochKey = msgspec.field(name="epoch")
    run: str
    states: list[str] | None = None
    classes: dict[str, list[str]] | None = None  # of the job, by blob
    record: RecordEntry | None = None
    blobs: dict[str, BlobEntry | Place]
    stacks: tuple[ArrayEntry, ...] = ()
    documents: dict[str, File]  # by path
    sha256: str | None = None

    def __post_init__(self) -> None:
        epoch_from_json(self.position)  # raises
        for i, stack in enumerate(self.stacks):
            rows = stack.rows or ()
            is_cut = stack.chunk_shape != stack.shape or stack.pieces is not None
            is_moved = stack.order is not None and stack.order[:1] != (0,)
            if (
                not rows
                or stack.shape[:1] != (len(rows),)
                or is_moved
                or is_cut
                or stack.compressors
            ):
                raise ValueError(
                    f"stack {i}: `rows`, `shape`, `order` and `chunk_shape` do not fit together"
                )
        lengths = [stack.shape[0] for stack in self.stacks]
        places: list[Place] = []
        for name, blob in self.blobs.items():
            if isinstance(blob, tuple):
                _check_place(name, blob, lengths)
                places.append(blob)
                continue
            if len(blob.arrays) != 1 and blob.value == LONE_ARRAY:
                raise ValueError(f"blob {name!r}: expected one array, found {len(blob.arrays)}")
            for array in blob.arrays:
                if isinstance(array, tuple):
                    _check_place(name, array, lengths)
                    places.append(array)
        paths = [it.path for it in self.arrays()]
        # Each use of an array takes its memory again.
        if len(set(places)) < len(places) or len(set(paths)) < len(paths):
            raise ValueError("an array of `blobs` or `stacks` is there twice")
        missing = documents_of(paths).difference(self.documents)
        for path in (*self.documents, *missing):
            if not {"", ".", ".."}.isdisjoint(path.split("/")):
                raise ValueError(f"the path {path!r} leads out of the store")
        if missing:
            raise ValueError(f"`documents` lacks {min(missing)!r}")

    @property
    def epoch(self) -> int:
        """The epoch, or the position in one."""
        return epoch_from_json(self.position)

    def blob(self, name: str) -> StoredBlob:
        """Look up a blob, and the rows of stacks that it refers to."""
        entry = self.blobs[name]
        if isinstance(entry, tuple):
            entry = BlobEntry(LONE_ARRAY, [entry])
        arrays = [
            Row(self.stacks[it[0]], it[1]) if isinstance(it, tuple) else it for it in entry.arrays
        ]
        return StoredBlob(entry.value, arrays)

    def arrays(self) -> Iterator[ArrayEntry]:
        """Yield all stacks, and the arrays that are not in one."""
        yield from self.stacks
        for blob in self.blobs.values():
            if not isinstance(blob, tuple):
                yield from (it for it in blob.arrays if not isinstance(it, tuple))

    def files(self) -> dict[str, File]:
        """Return size and crc32c of all files of the store but the manifest, by path."""
        chunks = {path: file for array in self.arrays() for path, file in array.chunk_files()}
        return {**self.documents, **chunks}


def read_manifest(data: bytes, path: str) -> Manifest:
    """Read a manifest; `path` is for messages.

    Raises `CheckpointCorruptError`, which names the field, if no version of jobrunner writes such a
    manifest; `CheckpointError` if a later version wrote it.
    """
    found = 0
    with contextlib.suppress(ValueError, RecursionError):  # raised by `read_document` below
        found = msgspec.json.decode(data, type=described(_AnyDocument)).attributes.format
    if found > STORE_FORMAT:
        raise CheckpointError(
            f"{path} has format {found}, and this version of jobrunner reads up to "
            f"{STORE_FORMAT}. Read it with a later version."
        )
    return read_document(data, _ManifestDocument, path, advice=ADVICE).attributes


class _ManifestDocument(Document):
    zarr_format: Literal[3]
    node_type: Literal["group"]
    attributes: Manifest


class _AnyAttributes(msgspec.Struct):
    format: Count


class _AnyDocument(msgspec.Struct):
    """A manifest of any format."""

    attributes: _AnyAttributes


def _check_place(blob: str, place: Place, lengths: Sequence[int]) -> None:
    stack, row = place
    if stack >= len(lengths) or row >= lengths[stack]:
        raise ValueError(f"blob {blob!r}: no stack has a row {list(place)}")


def documents_of(paths: Iterable[str]) -> set[str]:
    """Return the documents of arrays, of the groups that they are in, and of the root."""
    documents = {ROOT_DOCUMENT}
    for path in paths:
        while path and (document := f"{path}/{ROOT_DOCUMENT}") not in documents:
            documents.add(document)
            path = path.rpartition("/")[0]
    return documents


def _dtype(spec: Spec) -> np.dtype[Any] | None:
    """Return the dtype; None if this platform lacks it."""
    try:
        return dtype_from_spec(spec)
    except UnsupportedDtypeError:
        return None
    except msgspec.ValidationError as error:
        raise ValueError(f"`dtype`: {error}") from None
