"""Read a store, one node at one epoch, and verify it, or open it lazily."""

from __future__ import annotations

import contextlib
import hashlib
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import xxhash

from jobrunner.checkpoint.encoding import (
    LONE_ARRAY,
    Array,
    Codec,
    Decoder,
    InvalidTreeError,
    Outline,
    StatefulBlob,
    UnsupportedDtypeError,
    dtype_from_spec,
)
from jobrunner.checkpoint.storage import Files, join_path, run_all
from jobrunner.checkpoint.store.chunks import (
    Grid,
    decode_chunk,
    decode_texts,
    is_text,
    to_logical,
    unpack_chunk,
)
from jobrunner.checkpoint.store.document import (
    ADVICE,
    DOCUMENT_MOST_BYTES,
    ArrayFiles,
    BlobEntry,
    File,
    Place,
    StoredArray,
    StoreDocument,
    encode_json,
)
from jobrunner.errors import (
    BlobNotFoundError,
    CheckpointCorruptError,
    CheckpointError,
    DefinitionError,
)
from jobrunner.names import ROOT_DOCUMENT

Jobs = list[Callable[[], None]]
"""Work that several threads may do in any order."""

_SURELY_THERE_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class ArrayOutline:
    """Shape and dtype of an array, as NumPy names them."""

    shape: tuple[int, ...]
    dtype: str

    def __repr__(self) -> str:
        return f"{self.dtype}[{' x '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class VerifiedFiles:
    """Reads files of the store at `root` whose sizes and digests are known.

    All methods raise `CheckpointCorruptError` if a file is missing or is not what was written, and
    `CheckpointError` if it cannot be read.
    """

    files: Files
    root: str

    def read(self, name: str, file: File) -> bytes:
        """Read a file."""
        data = self.read_document(name, file[0])
        self._compare(name, file, (len(data), xxhash.xxh3_128_hexdigest(data)))
        return data

    def read_document(self, name: str, most: int) -> bytes:
        """Read a file whose digest is elsewhere."""
        path = join_path(self.root, name)
        with self.reading(path):
            data = self.files.read(path, most)
        if data is None:
            raise self._missing(path)
        return data

    def read_into(self, name: str, target: memoryview, file: File) -> None:
        """Read a file, of which memory gets the first bytes, and verify it."""
        path = join_path(self.root, name)
        with self.reading(path):
            present = self.files.read_into(path, target, file[0])
        self._compare(name, file, present)

    def _compare(self, name: str, expected: File, present: File) -> None:
        if present[0] != expected[0]:
            problem = f"expected {expected[0]} bytes, found {present[0]}"
        elif present[1] != expected[1]:
            problem = f"expected xxh3_128 {expected[1]}, found {present[1]}"
        else:
            return
        raise self.damaged(name, problem)

    def damaged(self, name: str, problem: str) -> CheckpointCorruptError:
        """The error for a file that is not what was written."""
        path = join_path(self.root, name)
        return CheckpointCorruptError(
            f"{path} is not what was written: {problem}. {ADVICE}", path=path
        )

    def _missing(self, path: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(
            f"{path} is missing: expected a file that the checkpoint lists. {ADVICE}", path=path
        )

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """Turn errors about a file into checkpoint errors."""
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise self._missing(path) from None
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


class ArrayReader:
    """Reads an array of a store; making one raises if this platform lacks its dtype.

    For a row of a stack, reads the stack as a whole: it is short.
    """

    def __init__(self, files: VerifiedFiles, array: StoredArray) -> None:
        self.array = array
        self._files = files
        self._grid = array.grid
        self._row_shape = array.grid.shape
        self._order = array.grid.order
        try:
            self.dtype = dtype_from_spec(array.own.dtype)
        except UnsupportedDtypeError as error:
            raise CheckpointError(
                f"The array {array.path} in {files.root} is whole, but this platform lacks its "
                f"dtype: {error}. Read it where the dtype exists."
            ) from error
        if array.row is not None:
            self._row_shape = self._row_shape[1:]
            if self._order is not None:
                self._order = tuple(axis - 1 for axis in self._order[1:])

    @property
    def grid(self) -> Grid:
        """How the array would be divided if it were no row of a stack."""
        if self.array.row is None:
            return self._grid
        return Grid(self._row_shape, self._row_shape, self._order, self._grid.item_axis)

    @property
    def shape(self) -> tuple[int, ...]:
        """In the order of the array's own axes."""
        return tuple(to_logical(self._row_shape, self._order))

    @property
    def nbytes(self) -> int:
        """How much memory the array takes, or the stack that it is in."""
        return math.prod(self._grid.shape) * self.dtype.itemsize

    def read(self) -> tuple[Array, Jobs]:
        """Return an array, or a whole stack, to be filled, and the jobs that fill it."""
        order, shape = self._grid.order, self._grid.shape
        if order and order == tuple(range(len(shape)))[::-1]:
            result: Array = self._allocate(np.empty, shape[::-1], order="F")  # owns its memory
            data = result.T
        else:
            data = self._allocate(np.empty, shape)
            result = data.transpose(np.argsort(order)) if order else data
        jobs: Jobs = []
        if self.array.zstd is None and self._grid.is_memory and not is_text(self.dtype):
            # Read into its place, without a copy; padding, if any, is at the end of the last file.
            start = 0
            flat = (
                memoryview(data.reshape(-1).view(np.uint8).data) if data.size else memoryview(b"")
            )
            for path, corner, file in self.array.chunk_files():
                stop = start + data[self._grid.part(corner)].nbytes
                jobs.append(partial(self._files.read_into, path, flat[start:stop], file))
                start = stop
        else:
            for path, corner, file in self.array.chunk_files():
                target = data[self._grid.part(corner)]
                jobs.append(partial(self._read_chunk_into, path, file, target))
        return result, jobs

    def read_whole(self) -> Array:
        """Read the array."""
        data, jobs = self.read()
        for job in jobs:
            job()
        return data if self.array.row is None else data[self.array.row, ...].copy(order="K")

    def read_slice(self, axis: int, start: int, stop: int) -> tuple[Array, Jobs]:
        """Return a part along an axis, to be filled, and the jobs that fill it from its chunks."""
        if self.array.row is not None:
            index = (slice(None),) * axis
            return self.read_whole()[(*index, slice(start, stop))], []
        grid = self._grid
        along = axis if grid.order is None else grid.order.index(axis)
        shape = list(grid.shape)
        shape[along] = stop - start
        data = self._allocate(np.empty, shape)
        jobs: Jobs = []
        for path, corner, file in self.array.chunk_files():
            part = list(grid.part(corner))
            chunk = part[along]
            low, high = max(chunk.start, start), min(chunk.stop, stop)
            if low < high:
                part[along] = slice(low - start, high - start)
                inside = [slice(None)] * len(shape)
                inside[along] = slice(low - chunk.start, high - chunk.start)
                target = data[tuple(part)]
                jobs.append(partial(self._read_chunk_into, path, file, target, tuple(inside)))
        return data.transpose(np.argsort(grid.order)) if grid.order else data, jobs

    def _read_chunk_into(
        self, path: str, file: File, target: Array, inside: tuple[slice, ...] = ()
    ) -> None:
        data = self._files.read(path, file)
        with self._decoding(path):
            chunk = decode_chunk(data, self._grid, self.dtype, self.array.zstd)
            # With the ellipses, an array without axes stays one. What is left over is padding.
            wanted: Any = (*inside, ...)
            content: Any = tuple(slice(size) for size in target.shape)
            target[...] = chunk[wanted][(*content, ...)]

    def read_chunk(self, at: Sequence[int]) -> bytes:
        """Read a chunk, not compressed, at coordinates in the order of the array's own axes."""
        if self.array.row is not None:
            return self.read_row_bytes()
        grid = self._grid
        corner = tuple(at[axis] for axis in grid.order) if grid.order else tuple(at)
        path = f"{self.array.path}/{grid.key(corner)}"
        data = self._files.read(path, self.array.files[grid.number_at(corner)])
        with self._decoding(path):
            data = unpack_chunk(data, grid, self.dtype, self.array.zstd)
            if is_text(self.dtype):
                decode_texts(data)
        return data

    def read_row_bytes(self) -> bytes:
        """Read the bytes of a row of a stack."""
        assert self.array.row is not None
        ((path, _, file),) = self.array.chunk_files()
        data = self._files.read(path, file)
        step = len(data) // self._grid.shape[0]
        return data[self.array.row * step : (self.array.row + 1) * step]

    def _allocate(self, empty: Callable[..., Array], shape: Sequence[int], **options: Any) -> Array:
        try:
            return empty(shape, self.dtype, **options)
        except (MemoryError, ValueError) as error:
            raise CheckpointError(
                f"The array {self.array.path} in {self._files.root}, {self.dtype}{list(shape)}, "
                f"does not fit into memory: {error}. Read it where there is more."
            ) from error

    @contextlib.contextmanager
    def _decoding(self, path: str) -> Iterator[None]:
        """Blame the document if a file that is whole does not decode as it says."""
        try:
            yield
        except ValueError as error:
            document = join_path(self._files.root, ROOT_DOCUMENT)
            raise CheckpointCorruptError(
                f"{document} does not describe {path}: {error}. {ADVICE}", path=document
            ) from error


@dataclass(slots=True)
class _StackReading:
    """A stack that is read, and where its rows go: to an index of a list."""

    reader: ArrayReader
    rows: list[tuple[int, list[Any], int]] = field(default_factory=list)

    def read(self) -> None:
        """Read the stack, and copy its rows."""
        stack, jobs = self.reader.read()
        for job in jobs:
            job()
        for row, slots, i in self.rows:
            slots[i] = stack[row, ...].copy(order="K")


@dataclass(slots=True)
class _Reading:
    """The arrays of some blobs that are read together."""

    files: VerifiedFiles
    document: StoreDocument
    jobs: Jobs = field(default_factory=list)
    nbytes: int = 0
    expanded_bytes: int = 0
    paths: set[str] = field(default_factory=set)  # of all arrays and stacks
    arrays: dict[str, list[Any]] = field(default_factory=dict)
    _stacks: dict[int, _StackReading] = field(default_factory=dict)

    def add(self, name: str, blob: BlobEntry) -> None:
        """Add the arrays of a blob."""
        slots: list[Any] = [None] * len(blob.arrays)
        self.arrays[name] = slots
        for i, reference in enumerate(blob.arrays):
            if isinstance(reference, tuple):
                stack, row = reference
                if stack not in self._stacks:
                    self._stacks[stack] = _StackReading(self._reader(reference))
                self._stacks[stack].rows.append((row, slots, i))
            else:
                slots[i] = self._reader(reference)

    def _reader(self, reference: ArrayFiles | Place) -> ArrayReader:
        reader = ArrayReader(self.files, self.document.array(reference))
        self.paths.add(reader.array.path)
        self.nbytes += reader.nbytes
        self.expanded_bytes += max(0, reader.nbytes - reader.array.nbytes)
        return reader

    def read(self, threads: int) -> None:
        """Read and verify all arrays, once their memory is known to exist."""
        self._check_memory()
        for slots in self.arrays.values():
            for i, reader in enumerate(slots):
                if reader is not None:
                    slots[i], jobs = reader.read()
                    self.jobs += jobs
        self.jobs += [stack.read for stack in self._stacks.values()]
        run_all(self.jobs, threads, self.nbytes)

    def _check_memory(self) -> None:
        """Refuse arrays that take more memory than there is, by so much more than their files."""
        if self.expanded_bytes > _SURELY_THERE_BYTES:
            from jobrunner.dask_internals import machine_bytes  # imports distributed

            there = machine_bytes()
            if self.expanded_bytes > there:
                raise CheckpointError(
                    f"The compressed arrays in {self.files.root} take more than "
                    f"{self.expanded_bytes} bytes of memory, and this machine has {there}. Read "
                    f"fewer blobs at once, or read them elsewhere."
                )


@dataclass(frozen=True, slots=True)
class StoreReader:
    """Reads and verifies the store named `store` in a checkpoint `directory`; picklable.

    `sha256` is that of its root document, from the record; `codecs`, `allow_pickle` and the job's
    `classes` are for its values, see `Decoder`. Errors name the file, and what was expected and found.
    """

    files: Files
    directory: str
    store: str
    sha256: str
    codecs: Sequence[Codec] = ()
    allow_pickle: bool = False
    classes: Mapping[str, type] | None = None

    @property
    def root(self) -> str:
        """Path of the store."""
        return join_path(self.directory, self.store)

    @property
    def verified(self) -> VerifiedFiles:
        """Its files."""
        return VerifiedFiles(self.files, self.root)

    @property
    def identity(self) -> tuple[str, str, str]:
        """Identifies the store and all that it contains."""
        return (self.directory, self.store, self.sha256)

    def read_bytes(self) -> bytes:
        """Read the root document, and compare it with the record's digest."""
        data = self.verified.read_document(ROOT_DOCUMENT, DOCUMENT_MOST_BYTES)
        digest = hashlib.sha256(data).hexdigest()
        if digest != self.sha256:
            raise self.verified.damaged(
                ROOT_DOCUMENT,
                f"expected SHA-256 {self.sha256}, as recorded; found {digest} ({len(data)} bytes)",
            )
        return data

    def read_document(self) -> StoreDocument:
        """Read and check the root document."""
        return StoreDocument(self.read_bytes(), join_path(self.root, ROOT_DOCUMENT))

    def load(
        self,
        blobs: Collection[str] | None = None,
        *,
        document: StoreDocument | None = None,
        keeps_states: bool = False,
    ) -> dict[str, Any]:
        """Read some blobs, or all, and verify every byte of them.

        They are returned in the order in which they were saved. With `keeps_states`, a blob of
        objects saved by their ``state_dict()`` is a `StatefulBlob`; else it holds the states.
        """
        document = self.read_document() if document is None else document
        for name in blobs or ():
            self._blob(document, name)
        reading = _Reading(self.verified, document)
        for name, blob in document.blobs.items():
            if blobs is None or name in blobs:
                reading.add(name, blob)
        reading.jobs += self._document_jobs(document.zarr_documents(reading.paths))
        reading.read(self.files.threads)
        values: dict[str, Any] = {}
        for name, arrays in reading.arrays.items():
            tree = document.blobs[name].tree
            values[name] = self._decode(name, tree, arrays.__getitem__, keeps_states=keeps_states)
        return values

    def _blob(self, document: StoreDocument, name: str) -> BlobEntry:
        if name not in document.blobs:
            raise BlobNotFoundError(
                f"Node {document.node!r} has no blob {name!r} at epoch {document.position} "
                f"({self.root}). It has {', '.join(map(repr, document.blobs))}."
            )
        return document.blobs[name]

    def axis_length(self, blob: str, axis: int) -> int:
        """Return the length of an array blob along `axis`."""
        return self._lone_array(blob, axis)[0].shape[axis]

    def load_slice(self, blob: str, axis: int, start: int, stop: int) -> Array:
        """Read part of an array blob along one axis, and verify the chunks that hold it."""
        array, tree = self._lone_array(blob, axis)
        if stop > array.shape[axis]:
            raise self.verified.damaged(
                ROOT_DOCUMENT,
                f"expected {stop} rows of the blob {blob!r}, as recorded; found {array.shape[axis]}",
            )
        data, jobs = array.read_slice(axis, start, stop)
        run_all(jobs, self.files.threads, data.nbytes)
        part: Array = self._decode(blob, tree, lambda i: data)
        return part

    def _lone_array(self, name: str, axis: int) -> tuple[ArrayReader, Any]:
        """An array blob, and its tree."""
        document = self.read_document()
        blob = self._blob(document, name)
        if blob.tree != LONE_ARRAY:
            raise DefinitionError(
                f"Blob {name!r} in {self.root} is not an array, so it cannot be part of one."
            )
        array = ArrayReader(self.verified, document.array(blob.arrays[0]))
        if axis >= len(array.shape):
            raise DefinitionError(
                f"Blob {name!r} in {self.root} has {len(array.shape)} axes, but is declared as a "
                f"part along axis {axis}."
            )
        return array, blob.tree

    def verify(self) -> None:
        """Read and verify every file of the store."""
        document, verified = self.read_document(), self.verified
        files = document.files()
        jobs: Jobs = [
            partial(verified.read_into, path, memoryview(b""), files[path]) for path in files
        ]
        jobs += self._document_jobs(document.zarr_documents())
        run_all(jobs, self.files.threads, sum(size for size, _ in files.values()))

    def _document_jobs(self, documents: Mapping[str, bytes]) -> Jobs:
        return [partial(self._verify_document, *document) for document in documents.items()]

    def _verify_document(self, path: str, expected: bytes) -> None:
        content = self.verified.read_document(path, len(expected))
        if content != expected:
            problem = f"expected what {ROOT_DOCUMENT} of the store repeats, found other content"
            raise self.verified.damaged(path, problem)

    def digest(self, document: StoreDocument, name: str) -> str:
        """Return a SHA-256 of a blob's values, types and shapes."""
        blob = self._blob(document, name)
        arrays = []
        for reference in blob.arrays:
            array = document.array(reference)
            reader = ArrayReader(self.verified, array)
            # The same for a row of a stack as for an array of its own.
            digests = [digest for _, digest in array.files]
            if array.row is not None:
                digests = [xxhash.xxh3_128_hexdigest(reader.read_row_bytes())]
            grid = reader.grid
            arrays.append([array.own.dtype, grid.shape, grid.chunk_shape, grid.order, digests])
        try:
            return hashlib.sha256(encode_json([blob.tree, arrays])).hexdigest()
        except RecursionError as error:
            raise self.verified.damaged(
                ROOT_DOCUMENT, f"the value of the blob {name!r} is nested too deep"
            ) from error

    def peek(self, document: StoreDocument, name: str, *, outline: bool = False) -> Any:
        """Read a blob with a `zarr.Array`, or an `ArrayOutline`, in place of each array.

        Arrays of other values (bytes, long texts, tensors) are read and verified, and so is each
        chunk that is read through a `zarr.Array` later.
        """
        blob = self._blob(document, name)
        verified = self.verified

        def read(i: int) -> Array:
            return ArrayReader(verified, document.array(blob.arrays[i])).read_whole()

        def leaf(i: int) -> Any:
            reader = ArrayReader(verified, document.array(blob.arrays[i]))
            if outline:
                return ArrayOutline(reader.shape, str(reader.dtype))
            return self._open_lazily(reader)

        decoder = Outline if outline else Decoder
        return self._decode(name, blob.tree, read, decoder, leaf=leaf)

    def _open_lazily(self, reader: ArrayReader) -> Any:
        from jobrunner.checkpoint.store import lazy  # imports Zarr, which is slow

        path = join_path(self.root, reader.array.path)
        with warnings.catch_warnings():
            # Zarr warns of data types whose specification is young.
            warnings.simplefilter("ignore")
            try:
                return lazy.open_array(reader, path)
            except Exception as error:
                raise CheckpointError(
                    f"{path} cannot be opened by Zarr: {type(error).__name__}: {error}. Load the "
                    f"blob instead."
                ) from error

    def _decode(
        self,
        name: str,
        tree: Any,
        array: Callable[[int], Array],
        kind: type[Decoder] = Decoder,
        **options: Any,
    ) -> Any:
        if tree == LONE_ARRAY:
            return options.get("leaf", array)(0)
        where = f"Blob {name!r} in {self.root}"
        decoder = kind(
            array,
            self.codecs,
            allow_pickle=self.allow_pickle,
            where=where,
            classes=self.classes,
            **options,
        )
        try:
            value = decoder.decode(tree)
        except InvalidTreeError as error:
            path = join_path(self.root, ROOT_DOCUMENT)
            raise CheckpointCorruptError(
                f"{path} has an invalid value for the blob {name!r}: {error}. {ADVICE}", path=path
            ) from error
        return StatefulBlob(value, where) if decoder.has_states else value
