"""Read a store, one node at one epoch, and verify it, or open it lazily."""

from __future__ import annotations

import errno
import hashlib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jobrunner.checkpoint.encoding import (
    Array,
    Codec,
    Decoder,
    InvalidTreeError,
    StatefulBlob,
    read_document,
)
from jobrunner.checkpoint.storage import Files, join_path, run_all
from jobrunner.checkpoint.store.array_reader import StoredArray, VerifiedFiles, WantedRow, read_rows
from jobrunner.checkpoint.store.manifest import (
    ADVICE,
    LONE_ARRAY,
    MANIFEST,
    MANIFEST_BYTES,
    ROOT_DOCUMENT,
    ArrayEntry,
    Manifest,
    Row,
    documents_of,
    read_manifest,
)
from jobrunner.dask_internals import machine_bytes
from jobrunner.errors import (
    BlobNotFoundError,
    CheckpointCorruptError,
    CheckpointError,
    DefinitionError,
)

_SURELY_THERE_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class ArrayOutline:
    """Shape and dtype of an array, as NumPy names them."""

    shape: tuple[int, ...]
    dtype: str

    def __repr__(self) -> str:
        return f"{self.dtype}[{' x '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class StoreReader:
    """Reads and verifies the store named `store` in a checkpoint `directory`; picklable.

    `manifest` is the SHA-256 of its manifest, from the record; `codecs`, `allow_pickle` and the
    job's `classes` are for its values, see `Decoder`. Errors name the file, and what was expected and found.
    """

    files: Files
    directory: str
    store: str
    manifest: str
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
        return (self.directory, self.store, self.manifest)

    def read_manifest(self) -> Manifest:
        """Read the manifest and compare it with the record's digest."""
        path = join_path(self.root, MANIFEST)
        with self.verified.reading(path):
            data = self.files.read(path, MANIFEST_BYTES)
            if data is None:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
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
        keeps_states: bool = False,
    ) -> dict[str, Any]:
        """Read some blobs, or all, and verify every byte of them and their Zarr documents.

        They are returned in the order in which they were saved. With `keeps_states`, a blob of
        objects saved by their ``state_dict()`` is a `StatefulBlob`; else it holds the states.
        """
        manifest = self.read_manifest() if manifest is None else manifest
        for name in blobs or ():
            if name not in manifest.blobs:
                raise BlobNotFoundError(
                    f"Node {manifest.node!r} has no blob {name!r} at epoch {manifest.epoch} "
                    f"({self.root}). It has {', '.join(map(repr, manifest.blobs))}."
                )
        if blobs is None or len(blobs) > 1:
            blobs = [name for name in manifest.blobs if blobs is None or name in blobs]
        wanted = {name: manifest.blob(name) for name in blobs}
        verified = self.verified
        loaded: dict[str, list[Any]] = {}
        rows: dict[str, list[WantedRow]] = {}
        alone: list[tuple[list[Any], int, StoredArray]] = []
        jobs: list[Callable[[], None]] = []
        paths: set[str] = set()
        nbytes = expanded = 0
        for name, blob in wanted.items():
            found: list[Any] = [None] * len(blob.arrays)
            loaded[name] = found
            for i, array in enumerate(blob.arrays):
                paths.add(array.path)
                nbytes += array.nbytes
                if isinstance(array, Row):
                    rows.setdefault(array.path, []).append((found, i, array))
                else:
                    stored = StoredArray(verified, array)
                    expanded += max(0, stored.nbytes - array.nbytes)
                    alone.append((found, i, stored))
        self._check_memory(expanded)
        for found, i, stored in alone:
            found[i], array_jobs = stored.read()
            jobs += array_jobs
        for wanted_rows in rows.values():
            jobs += read_rows(verified, wanted_rows)
        for document in documents_of(paths):
            jobs.append(partial(verified.read_into, document, None, manifest.documents[document]))
        run_all(jobs, self.files.threads, nbytes)
        return {
            name: self._decode(name, blob.tree, loaded[name].__getitem__, keeps_states=keeps_states)
            for name, blob in wanted.items()
        }

    def _check_memory(self, nbytes: int) -> None:
        """Refuse arrays that take more memory than there is, by so much more than their files."""
        if nbytes > _SURELY_THERE_BYTES:
            there = machine_bytes()
            if nbytes > there:
                raise CheckpointError(
                    f"The compressed arrays in {self.root} take more than {nbytes} bytes of memory, "
                    f"and this machine has {there}. Read fewer blobs at once, or read them elsewhere."
                )

    def axis_length(self, blob: str, axis: int) -> int:
        """Return the length of an array blob along `axis`."""
        return self._lone_array(blob, axis)[0].shape[axis]

    def load_slice(self, blob: str, axis: int, start: int, stop: int) -> Array:
        """Read part of an array blob along one axis, and verify the pieces that hold it."""
        array, tree = self._lone_array(blob, axis)
        data, jobs = array.read_slice(axis, start, stop)
        run_all(jobs, self.files.threads, data.nbytes)
        part: Array = self._decode(blob, tree, lambda i: data)
        return part

    def _lone_array(self, name: str, axis: int) -> tuple[StoredArray, Any]:
        """An array blob, and its tree, which adds at most metadata of the dtype."""
        manifest = self.read_manifest()
        if name not in manifest.blobs:
            raise BlobNotFoundError(f"{self.root} has no blob {name!r}.")
        blob = manifest.blob(name)
        kind = blob.tree.get("$") if isinstance(blob.tree, dict) else None
        if len(blob.arrays) != 1 or kind not in ("array", "noted"):
            raise DefinitionError(
                f"Blob {name!r} in {self.root} is not an array, so it cannot be part of one."
            )
        array = StoredArray(self.verified, blob.arrays[0])
        if axis >= len(array.shape):
            raise DefinitionError(
                f"Blob {name!r} in {self.root} has {len(array.shape)} axes, but is declared as a "
                f"part along axis {axis}."
            )
        return array, blob.tree

    def verify(self) -> None:
        """Read and verify every file of the store."""
        files, verified = self.read_manifest().files(), self.verified
        jobs = [partial(verified.read_into, path, None, file) for path, file in files.items()]
        run_all(jobs, self.files.threads, sum(size for size, _ in files.values()))

    def peek(self, manifest: Manifest, name: str, *, outline: bool = False) -> Any:
        """Read a blob with a `zarr.Array`, or an `ArrayOutline`, in place of each array.

        Arrays of other values (bytes, long texts, tensors) and rows of stacks are read and
        verified, and so is each chunk that is read through a `zarr.Array` later.
        """
        blob = manifest.blob(name)

        def read(i: int) -> Array:
            array, jobs = StoredArray(self.verified, blob.arrays[i]).read()
            run_all(jobs, self.files.threads, array.nbytes)
            return array

        def leaf(i: int) -> Any:
            if not outline:
                return self._open_lazily(manifest, blob.arrays[i])
            stored = StoredArray(self.verified, blob.arrays[i])
            return ArrayOutline(stored.shape, str(stored.dtype))

        return self._decode(name, blob.tree, read, leaf=leaf, is_outline=outline)

    def _open_lazily(self, manifest: Manifest, array: ArrayEntry | Row) -> Any:
        from jobrunner.checkpoint.store import lazy  # imports Zarr, which is slow

        path = join_path(self.root, array.path)
        stored = StoredArray(self.verified, array)
        labels = None
        if isinstance(array, Row):
            array = array.alone()
        else:
            name = f"{array.path}/{ROOT_DOCUMENT}"
            data = self.verified.read(name, manifest.documents[name])
            labels = read_document(data, lazy.Labels, join_path(self.root, name), advice=ADVICE)
        with warnings.catch_warnings():
            # Zarr warns of data types whose specification is young.
            warnings.simplefilter("ignore")
            try:
                return lazy.open_array(stored, array, path, labels)
            except Exception as error:
                raise CheckpointError(
                    f"{path} cannot be opened by Zarr: {type(error).__name__}: {error}. Load the "
                    f"blob instead."
                ) from error

    def _decode(self, name: str, tree: Any, array: Callable[[int], Array], **options: Any) -> Any:
        if tree == LONE_ARRAY:
            return options.get("leaf", array)(0)
        where = f"Blob {name!r} in {self.root}"
        decoder = Decoder(
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
            path = join_path(self.root, MANIFEST)
            raise CheckpointCorruptError(
                f"{path} has an invalid value for the blob {name!r}: {error}. {ADVICE}", path=path
            ) from error
        return StatefulBlob(value, where) if decoder.has_states else value
