"""Read a store, one node at one epoch, and verify it, or open it lazily."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jobrunner.checkpoint.encoding import (
    LONE_ARRAY,
    Array,
    Codec,
    Decoder,
    InvalidTreeError,
    StatefulBlob,
    Tree,
    show_outline,
)
from jobrunner.checkpoint.storage import Files, Jobs, join_path, run_all
from jobrunner.checkpoint.store.array_reader import ArrayReader, RowReader
from jobrunner.checkpoint.store.damage import VerifiedFiles, changed_file, damaged_file
from jobrunner.checkpoint.store.document import (
    DOCUMENT_MOST_BYTES,
    ArrayFiles,
    BlobEntry,
    RowPlace,
    StoreDocument,
)
from jobrunner.checkpoint.store.history_reader import HistoryReader, history_root
from jobrunner.errors import BlobNotFoundError, CheckpointError, DefinitionError
from jobrunner.names import ROOT_DOCUMENT

_SURELY_FREE_BYTES = 1 << 28


_Target = tuple[list[Any], int, int | None]
"""Where an array that is read goes: a list, an index of it, and which row of a stack it is, if one.

Not a class: to make one for each of 10,000 short arrays would take a twentieth of their load.
"""


@dataclass(frozen=True, slots=True)
class ArrayOutline:
    """Shape and dtype of an array, as NumPy names them."""

    shape: tuple[int, ...]
    dtype: str

    def __repr__(self) -> str:
        return f"{self.dtype}[{' x '.join(map(str, self.shape))}]"


class StoredValue(NamedTuple):
    """A blob as it is stored, and not decoded."""

    tree: Tree
    arrays: Sequence[Array]
    """What the tree refers to."""


@dataclass(frozen=True, slots=True)
class StoreReader:
    """Reads and verifies the store named `store` in a checkpoint `directory`; picklable.

    `sha256` is that of its root document, and `histories` the directory of the epoch's histories,
    both from the record; `codecs`, `allow_pickle` and the job's
    `classes` are for its values, see `Decoder`. Errors name the file, and what was expected and found.
    """

    files: Files
    directory: str
    store: str
    sha256: str
    histories: str = ""
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
            raise changed_file(
                self._document_path,
                f"expected SHA-256 {self.sha256}, as recorded; found {digest} ({len(data)} bytes)",
            )
        return data

    def read_document(self) -> StoreDocument:
        """Read and check the root document."""
        return StoreDocument(self.read_bytes(), self._document_path)

    @property
    def _document_path(self) -> str:
        return join_path(self.root, ROOT_DOCUMENT)

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
        if document is None:
            document = self.read_document()
        values: dict[str, Any] = {}
        for name, stored in self.read_stored(document, blobs).items():
            array = stored.arrays.__getitem__
            values[name] = self._decode(name, stored.tree, array, keeps_states=keeps_states)
        return values

    def read_stored(
        self, document: StoreDocument, blobs: Collection[str] | None = None
    ) -> dict[str, StoredValue]:
        """Read some blobs, or all, as they are stored, and verify every byte of them."""
        for name in blobs or ():
            self._check_name(document, name)
        names = [name for name in document.blobs if blobs is None or name in blobs]
        arrays = self._read_arrays(document, names)
        stored = {name: StoredValue(document.blobs[name].tree, arrays[name]) for name in names}
        for name in document.entry.histories:
            if blobs is None or name in blobs:
                stored[name] = StoredValue(LONE_ARRAY, [self.history(document, name).read_last()])
        return stored

    def history(self, document: StoreDocument, name: str) -> HistoryReader:
        """The reader of a history."""
        if not self.histories:
            raise damaged_file(self._document_path, "has histories, and the record says not where")
        root = history_root(self.directory, self.histories, name, document.node)
        return HistoryReader(self.files, root, document.entry.histories[name])

    def _read_arrays(self, document: StoreDocument, names: Sequence[str]) -> dict[str, list[Any]]:
        """Read and verify the arrays of some blobs, once their memory is known to exist."""
        # A stack is read once, for all its rows that are wanted. All other arrays have one target: no
        # document names one twice. Nothing is allocated before the memory of all is known to be there.
        verified = self.verified
        arrays: dict[str, list[Any]] = {}
        readers: dict[str, ArrayReader] = {}
        targets: dict[str, list[_Target]] = defaultdict(list)
        for name in names:
            references = document.blobs[name].arrays
            slots = arrays[name] = [None] * len(references)
            for i, reference in enumerate(references):
                array, row = document.locate(reference)
                if array.path not in readers:
                    readers[array.path] = ArrayReader(verified, array)
                targets[array.path].append((slots, i, row))
        self._check_memory(readers.values())
        jobs: Jobs = []
        nbytes = 0
        for path, reader in readers.items():
            slots, i, row = targets[path][0]
            if row is None:
                slots[i], chunk_jobs = reader.read()
                jobs += chunk_jobs
            else:
                jobs.append(partial(_read_rows, reader, targets[path]))
            nbytes += reader.nbytes
        run_all(jobs, self.files.threads, nbytes)
        return arrays

    def _check_memory(self, readers: Collection[ArrayReader]) -> None:
        """Refuse arrays that take more memory than there is, by so much more than their files.

        Zeros take 65,536 times as much memory as their compressed file. NumPy would hand out such
        memory, and the system would kill the process that fills it.
        """
        expanded_bytes = sum(max(0, reader.nbytes - reader.array.nbytes) for reader in readers)
        if expanded_bytes > _SURELY_FREE_BYTES:
            from jobrunner.dask_internals import machine_bytes  # imports distributed

            present_bytes = machine_bytes()
            if expanded_bytes > present_bytes:
                raise CheckpointError(
                    f"The compressed arrays in {self.root} take more than {expanded_bytes} bytes "
                    f"of memory, and this machine has {present_bytes}. Read fewer blobs at once, "
                    f"or read them elsewhere."
                )

    def _reader(self, document: StoreDocument, reference: ArrayFiles | RowPlace) -> ArrayReader:
        """The reader of one array that a blob refers to."""
        array, row = document.locate(reference)
        if row is None:
            return ArrayReader(self.verified, array)
        return RowReader(self.verified, array, row)

    def _check_name(self, document: StoreDocument, name: str) -> None:
        if name not in document.names:
            raise BlobNotFoundError(
                f"Node {document.node!r} has no blob {name!r} at epoch {document.position} "
                f"({self.root}). It has {', '.join(map(repr, document.names))}."
            )

    def _blob(self, document: StoreDocument, name: str) -> BlobEntry:
        self._check_name(document, name)
        if name in document.entry.histories:
            raise DefinitionError(
                f"Blob {name!r} in {self.root} is a history, so it cannot be part of an array."
            )
        return document.blobs[name]

    def array_reader(self, document: StoreDocument, name: str) -> ArrayReader | None:
        """The reader of a blob that is an array; None of any other."""
        blob = self._blob(document, name)
        if blob.tree != LONE_ARRAY:
            return None
        return self._reader(document, blob.arrays[0])

    def axis_length(self, blob: str, axis: int) -> int:
        """Return the length of an array blob along `axis`."""
        return self._lone_array(blob, axis).shape[axis]

    def load_slice(self, blob: str, axis: int, start: int, stop: int) -> Array:
        """Read part of an array blob along one axis, and verify the chunks that hold it."""
        reader = self._lone_array(blob, axis)
        length = reader.shape[axis]
        if stop > length:
            problem = f"expected {stop} rows of the blob {blob!r}, as recorded; found {length}"
            raise changed_file(self._document_path, problem)
        data, jobs = reader.read_slice(axis, start, stop)
        run_all(jobs, self.files.threads, data.nbytes)
        return data

    def _lone_array(self, name: str, axis: int) -> ArrayReader:
        """The reader of an array blob."""
        document = self.read_document()
        reader = self.array_reader(document, name)
        if reader is None:
            raise DefinitionError(
                f"Blob {name!r} in {self.root} is not an array, so it cannot be part of one."
            )
        if axis >= len(reader.shape):
            raise DefinitionError(
                f"Blob {name!r} in {self.root} has {len(reader.shape)} axes, but is declared as a "
                f"part along axis {axis}."
            )
        return reader

    def verify(self) -> None:
        """Read and verify every file of the store."""
        verify_stores(self.files, [self])

    def digest(self, document: StoreDocument, name: str) -> str:
        """Return a SHA-256 of a blob's values, types and shapes."""
        if name in document.entry.histories:
            value = np.asarray(self.history(document, name).read_last())
            head = f"{value.dtype.str} {value.shape} ".encode()
            return hashlib.sha256(head + value.tobytes()).hexdigest()
        blob = self._blob(document, name)
        arrays = []
        for reference in blob.arrays:
            # Alike for a row of a stack and an array of its own: how many short arrays a node has
            # decides which of the two an array is.
            reader = self._reader(document, reference)
            grid = reader.grid
            arrays.append(
                [reader.array.dtype, grid.shape, grid.chunk_shape, grid.order, reader.digests()]
            )
        try:
            return hashlib.sha256(msgspec.json.encode([blob.tree, arrays])).hexdigest()
        except RecursionError as error:
            problem = f"the value of the blob {name!r} is nested too deep"
            raise changed_file(self._document_path, problem) from error

    def peek(self, document: StoreDocument, name: str) -> Any:
        """Read a blob with a `zarr.Array` in place of each array.

        Arrays of other values (bytes, long texts, tensors) are read and verified, and so is each
        chunk that is read through a `zarr.Array` later.
        """
        if name in document.entry.histories:
            return self.history(document, name).read_last()
        blob = self._blob(document, name)

        # What a codec makes a value of must be arrays, such as the data of a tensor; others are lazy.
        def read(i: int) -> Array:
            return self._reader(document, blob.arrays[i]).read_whole()

        def leaf(i: int) -> Any:
            return self._open_lazily(self._reader(document, blob.arrays[i]))

        return self._decode(name, blob.tree, read, leaf=leaf)

    def outline(self, document: StoreDocument, name: str) -> Any:
        """Return a blob with an `ArrayOutline` in place of each array, and no value of a codec made."""
        if name in document.entry.histories:
            history = self.history(document, name)
            if history.mark.holds == "array":
                return ArrayOutline(history.mark.value_shape, str(history.dtype))
            return history.read_last()
        blob = self._blob(document, name)

        def leaf(i: int) -> ArrayOutline:
            reader = self._reader(document, blob.arrays[i])
            return ArrayOutline(reader.shape, str(reader.dtype))

        with self._invalid_trees_are_damage(name):
            return show_outline(blob.tree, leaf)

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
        *,
        leaf: Callable[[int], Any] | None = None,
        keeps_states: bool = False,
    ) -> Any:
        if tree == LONE_ARRAY:
            return (leaf or array)(0)
        where = f"Blob {name!r} in {self.root}"
        decoder = Decoder(
            array,
            self.codecs,
            allow_pickle=self.allow_pickle,
            leaf=leaf,
            where=where,
            keeps_states=keeps_states,
            classes=self.classes,
        )
        with self._invalid_trees_are_damage(name):
            value = decoder.decode(tree)
        if decoder.has_states:
            return StatefulBlob(value, where)
        return value

    @contextlib.contextmanager
    def _invalid_trees_are_damage(self, name: str) -> Iterator[None]:
        try:
            yield
        except InvalidTreeError as error:
            problem = f"has an invalid value for the blob {name!r}: {error}"
            raise damaged_file(self._document_path, problem) from error


def verify_stores(files: Files, readers: Sequence[StoreReader]) -> None:
    """Read and verify every file of stores."""
    jobs: Jobs = []
    nbytes = 0
    documents = files.each(StoreReader.read_document, readers)
    for reader, document in zip(readers, documents, strict=True):
        verified = reader.verified
        for path, file in document.files().items():
            jobs.append(partial(verified.verify, path, file))
            nbytes += file[0]
        for path, content in document.zarr_documents().items():
            jobs.append(partial(verified.verify_document, path, content))
        for name in document.entry.histories:
            history = reader.history(document, name)
            jobs.append(history.verify)
            nbytes += history.mark.nbytes
    run_all(jobs, files.threads, nbytes)


def _read_rows(reader: ArrayReader, targets: Sequence[_Target]) -> None:
    """Read a stack, and copy its rows, so that none keeps the memory of the others."""
    stack = reader.read_whole()
    for slots, i, row in targets:
        slots[i] = stack[row, ...].copy(order="K")
