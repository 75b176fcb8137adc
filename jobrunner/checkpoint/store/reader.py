"""Read a store, one node at one epoch, and verify it, or open it lazily."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding import Codec, Decoder, InvalidTreeError, StatefulBlob
from jobrunner.checkpoint.storage import Files, join_path, run_all
from jobrunner.checkpoint.store.array_reader import StoredArray, VerifiedFiles, WantedRows
from jobrunner.checkpoint.store.layout import describe_array
from jobrunner.checkpoint.store.manifest import (
    ADVICE,
    LONE_ARRAY,
    MANIFEST,
    ArrayEntry,
    BlobEntry,
    File,
    Manifest,
    Row,
    documents_of,
    read_manifest,
)
from jobrunner.errors import (
    BlobNotFoundError,
    CheckpointCorruptError,
    CheckpointError,
    DefinitionError,
    JobRunnerError,
)


@dataclass(frozen=True, slots=True)
class ArrayOutline:
    """Shape and dtype of an array, as NumPy names them."""

    shape: tuple[int, ...]
    dtype: str

    def __repr__(self) -> str:
        return f"{self.dtype}[{' x '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class StoreReader:
    """Reads and verifies one store.

    Parameters
    ----------
    files : Files
    directory : str
        Absolute path of the checkpoint directory.
    store : str
        Name of the store.
    manifest : str
        SHA-256 of its manifest, from the record.

    Notes
    -----
    Runs on client and workers; picklable. Errors name the file, and what was expected and found.
    """

    files: Files
    directory: str
    store: str
    manifest: str

    @property
    def root(self) -> str:
        """Path of the store."""
        return os.path.join(self.directory, self.store)

    @property
    def _verified(self) -> VerifiedFiles:
        return VerifiedFiles(self.files, self.root)

    @property
    def identity(self) -> tuple[str, str, str]:
        """Identifies the store and all that it contains."""
        return (self.directory, self.store, self.manifest)

    def read_manifest(self) -> Manifest:
        """Read the manifest and compare it with its digest in the record."""
        path = join_path(self.root, MANIFEST)
        with self._verified.reading(path):
            data = self.files.read(path)
        digest = hashlib.sha256(data).hexdigest()
        if digest != self.manifest:
            raise CheckpointCorruptError(
                f"{path} is not what was written: expected SHA-256 {self.manifest}, as recorded; "
                f"found {digest} ({len(data)} bytes). {ADVICE}",
                path=path,
            )
        return read_manifest(data, path)

    def load(
        self,
        blobs: Collection[str] | None = None,
        *,
        manifest: Manifest | None = None,
        codecs: Sequence[Codec] = (),
        allow_pickle: bool = False,
        keeps_states: bool = False,
    ) -> dict[str, Any]:
        """Read blobs and verify every byte of them.

        Parameters
        ----------
        blobs : collection of str, optional
            By default all. Only the Zarr documents of these blobs are verified.
        manifest : Manifest, optional
            By default it is read.
        codecs : sequence of Codec
        allow_pickle : bool
        keeps_states : bool
            Return a `StatefulBlob` for a blob of objects saved by their ``state_dict()``; by
            default the states take their places.

        Returns
        -------
        dict of str to object
            In the order in which they were saved.
        """
        manifest = self.read_manifest() if manifest is None else manifest
        entries = manifest.blobs
        for name in blobs or ():
            if name not in entries:
                raise BlobNotFoundError(
                    f"Node {manifest.node!r} has no blob {name!r} at epoch {manifest.epoch} "
                    f"({self.root}). It has {', '.join(map(repr, entries))}."
                )
        if blobs is not None and len(blobs) > 1:
            blobs = [name for name in entries if name in blobs]
        wanted = entries if blobs is None else {name: entries[name] for name in blobs}
        verified = self._verified
        loaded: dict[str, list[Any]] = {}
        rows: dict[str, WantedRows] = {}
        jobs: list[Callable[[], None]] = []
        for name, blob in wanted.items():
            found: list[Any] = [None] * len(blob.arrays)
            loaded[name] = found
            for i, array in enumerate(blob.arrays):
                if isinstance(array, Row):
                    path = array.stack.path
                    if path not in rows:
                        rows[path] = WantedRows(array.stack)
                    rows[path].add(found, i, array)
                    continue
                found[i], array_jobs = StoredArray(verified, array).read()
                jobs += array_jobs
        for stack in rows.values():
            jobs += stack.read(verified)
        paths = {array.path for blob in wanted.values() for array in blob.arrays}
        for document in documents_of(paths):
            file = manifest.documents[document]
            jobs.append(partial(verified.read_into, document, None, file))
        run_all(jobs, self.files.threads, _stored_bytes(wanted))
        return {
            name: loaded[name][0]
            if blob.tree == LONE_ARRAY
            else self._decode(
                name,
                blob,
                loaded[name].__getitem__,
                codecs,
                allow_pickle,
                keeps_states=keeps_states,
            )
            for name, blob in wanted.items()
        }

    def axis_length(self, blob: str, axis: int) -> int:
        """Return the length of an array blob along `axis`."""
        return self._lone_array(blob, axis).shape[axis]

    def load_slice(self, blob: str, axis: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Read part of an array blob along one axis: only the pieces that it lies in.

        Notes
        -----
        All that is read is verified, except the array's own Zarr document.
        """
        data, jobs = self._lone_array(blob, axis).read_slice(axis, start, stop)
        run_all(jobs, self.files.threads, data.nbytes)
        return data

    def _lone_array(self, name: str, axis: int) -> StoredArray:
        blob = self.read_manifest().blobs.get(name)
        if blob is None:
            raise BlobNotFoundError(f"{self.root} has no blob {name!r}.")
        if blob.tree != LONE_ARRAY:
            raise DefinitionError(
                f"Blob {name!r} in {self.root} is not an array, so it cannot be part of one."
            )
        array = StoredArray(self._verified, blob.arrays[0])
        if axis >= len(array.shape):
            raise DefinitionError(
                f"Blob {name!r} in {self.root} has {len(array.shape)} axes, but is declared as a "
                f"part along axis {axis}."
            )
        return array

    def verify(self) -> None:
        """Read and digest every file of the store."""
        manifest, verified = self.read_manifest(), self._verified
        jobs = [
            partial(verified.read_into, path, None, file) for path, file in manifest.files().items()
        ]
        run_all(jobs, self.files.threads, _stored_bytes(manifest.blobs))

    def read_file(self, path: str, file: File) -> bytes:
        """Read and verify one file."""
        return self._verified.read(path, file)

    def peek(
        self,
        manifest: Manifest,
        blob: str,
        *,
        codecs: Sequence[Codec] = (),
        allow_pickle: bool = False,
    ) -> Any:
        """Read a blob with `zarr.Array` objects in place of its arrays.

        Notes
        -----
        Arrays of other values (bytes, long texts, tensors) and rows of stacks are read and
        verified; what is read through a `zarr.Array` later is not.
        """
        return self._peek(manifest, blob, codecs, allow_pickle, self._open_lazily)

    def outline(
        self,
        manifest: Manifest,
        blob: str,
        *,
        codecs: Sequence[Codec] = (),
        allow_pickle: bool = False,
    ) -> Any:
        """Read a blob as `peek` does, with an `ArrayOutline` in place of each array."""

        def outline(array: ArrayEntry | Row) -> ArrayOutline:
            stored = StoredArray(self._verified, array)
            return ArrayOutline(stored.shape, str(stored.dtype))

        return self._peek(manifest, blob, codecs, allow_pickle, outline)

    def _peek(
        self,
        manifest: Manifest,
        name: str,
        codecs: Sequence[Codec],
        allow_pickle: bool,
        leaf: Callable[[ArrayEntry | Row], object],
    ) -> Any:
        blob = manifest.blobs[name]

        def read(i: int) -> np.ndarray[Any, Any]:
            array, jobs = StoredArray(self._verified, blob.arrays[i]).read()
            run_all(jobs, self.files.threads, array.nbytes)
            return array

        return self._decode(
            name, blob, read, codecs, allow_pickle, leaf=lambda i: leaf(blob.arrays[i])
        )

    def _open_lazily(self, array: ArrayEntry | Row) -> Any:
        import zarr

        full = join_path(self.root, array.path)
        with self._verified.reading(full), warnings.catch_warnings():
            # Zarr warns of data types whose specification is young.
            warnings.simplefilter("ignore")
            try:
                if isinstance(array, Row):
                    return self._open_row(array)
                store, within = self.files.locate(full)
                if store is None:
                    return zarr.open_array(within, mode="r", zarr_format=3)
                objects = zarr.storage.ObjectStore(store, read_only=True)
                return zarr.open_array(objects, path=within, mode="r", zarr_format=3)
            except (OSError, JobRunnerError):
                raise
            except Exception as error:
                raise CheckpointError(
                    f"{full} cannot be opened by Zarr: {type(error).__name__}: {error}. Load the "
                    f"blob instead, which verifies it."
                ) from error

    def _open_row(self, row: Row) -> Any:
        """Open a row of a stack as the array that it would be by itself, in memory."""
        import zarr
        from zarr.buffer import cpu

        entry = row.alone()
        data = {
            "zarr.json": describe_array(entry.dtype, entry.grid, "ndarray"),
            entry.grid.key((0,) * len(entry.shape)): StoredArray(self._verified, row).read_alone(),
        }
        buffers: dict[str, Any] = {name: cpu.Buffer.from_bytes(it) for name, it in data.items()}
        store = zarr.storage.MemoryStore(buffers, read_only=True)
        return zarr.open_array(store, mode="r", zarr_format=3)

    def _decode(
        self,
        name: str,
        blob: BlobEntry,
        array: Callable[[int], np.ndarray[Any, Any]],
        codecs: Sequence[Codec],
        allow_pickle: bool,
        leaf: Callable[[int], object] | None = None,
        *,
        keeps_states: bool = False,
    ) -> Any:
        where = f"Blob {name!r} in {self.root}"
        decoder = Decoder(
            array,
            codecs,
            allow_pickle=allow_pickle,
            leaf=leaf,
            where=where,
            keeps_states=keeps_states,
        )
        try:
            value = decoder.decode(blob.tree)
        except InvalidTreeError as error:
            path = join_path(self.root, MANIFEST)
            raise CheckpointCorruptError(
                f"{path} has an invalid value for the blob {name!r}: {error}. {ADVICE}", path=path
            ) from error
        return StatefulBlob(value, where) if decoder.has_states else value


def _stored_bytes(blobs: Mapping[str, BlobEntry]) -> int:
    """Return the size of all chunks and rows of some blobs."""
    return sum(
        array.nbytes if isinstance(array, Row) else sum(size for size, _ in array.files)
        for blob in blobs.values()
        for array in blob.arrays
    )
