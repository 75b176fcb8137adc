"""One node at one epoch on disk: read a store and verify it, or look into it lazily."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding import Codec, Decoder, StatefulBlob
from jobrunner.checkpoint.storage import PosixFiles, join_path, run_all
from jobrunner.checkpoint.store.array_reader import (
    StoredArray,
    WantedRows,
    chunk_files,
    logical_shape,
)
from jobrunner.checkpoint.store.layout import (
    LONE_ARRAY,
    MANIFEST,
    ROOT_DOCUMENT,
    STORE_FORMAT,
    grid_of,
    resolve_rows,
)
from jobrunner.checkpoint.store.verified_files import WAY_OUT, VerifiedFiles
from jobrunner.checkpoint.store.zarr_json import describe_usual_array
from jobrunner.errors import (
    BlobNotFoundError,
    CheckpointCorruptError,
    CheckpointError,
    DefinitionError,
    JobRunnerError,
)


@dataclass(frozen=True, slots=True)
class ArrayOutline:
    """What the manifest says of an array, as NumPy names it."""

    shape: tuple[int, ...]
    dtype: str

    def __repr__(self) -> str:
        return f"{self.dtype}[{' x '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class StoreReader:
    """Reads and verifies one store.

    Parameters
    ----------
    files : PosixFiles
    directory : str
        Of the checkpoints, an absolute path.
    store : str
        Name of the store.
    manifest : str
        SHA-256 that the record gives for its manifest.

    Notes
    -----
    Runs on client and workers; picklable. Errors name the file, and what was expected and found.
    """

    files: PosixFiles
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
        """What tells the store and its content from all others."""
        return (self.directory, self.store, self.manifest)

    def read_manifest(self) -> dict[str, Any]:
        """The manifest, checked against its digest in the record."""
        path = join_path(self.root, MANIFEST)
        with self._verified.reading(path):
            data = self.files.read(path)
        digest = hashlib.sha256(data).hexdigest()
        if digest != self.manifest:
            raise CheckpointCorruptError(
                f"{path} is not what was written: expected SHA-256 {self.manifest}, as recorded; "
                f"found {digest} ({len(data)} bytes). {WAY_OUT}",
                path=path,
            )
        with self._understanding():
            manifest: dict[str, Any] = json.loads(data)["attributes"]
            if manifest["format"] > STORE_FORMAT:
                raise CheckpointError(
                    f"{path} has format {manifest['format']}, and this version of jobrunner reads "
                    f"up to {STORE_FORMAT}. Read it with a later version."
                )
            return resolve_rows(manifest)

    def load(
        self,
        blobs: Collection[str] | None = None,
        *,
        manifest: Mapping[str, Any] | None = None,
        codecs: Sequence[Codec] = (),
        allow_pickle: bool = False,
        keeps_states: bool = False,
    ) -> dict[str, Any]:
        """Read blobs, every byte of them verified.

        Parameters
        ----------
        blobs : collection of str, optional
            By default all. Of the store's documents, those of these blobs are verified as well.
        manifest : mapping, optional
            As `read_manifest` gave it; by default it is read.
        codecs : sequence of Codec
        allow_pickle : bool
        keeps_states : bool
            Give a `StatefulBlob` for a blob of objects that were saved by their state; by default
            the states stand in their places.

        Returns
        -------
        dict of str to object
            In the order in which they were saved.
        """
        with self._understanding():
            manifest = self.read_manifest() if manifest is None else manifest
            entries = manifest["blobs"]
            for name in blobs or ():
                if name not in entries:
                    raise BlobNotFoundError(
                        f"Node {manifest['node']!r} has no blob {name!r} at epoch "
                        f"{manifest['epoch']} ({self.root}). It has {', '.join(map(repr, entries))}."
                    )
            if blobs is not None and len(blobs) > 1:
                blobs = [name for name in entries if name in blobs]
            wanted = entries if blobs is None else {name: entries[name] for name in blobs}
            loaded: dict[str, list[Any]] = {}
            rows: dict[str, WantedRows] = {}
            jobs: list[Callable[[], None]] = []
            for name, entry in wanted.items():
                loaded[name] = found = [None] * len(entry["arrays"])
                for i, array in enumerate(entry["arrays"]):
                    if "within" in array:
                        rows.setdefault(array["path"], WantedRows()).add(found, i, array)
                        continue
                    with self._decoding(name):
                        found[i], array_jobs = StoredArray(array).read(self._verified)
                    jobs += array_jobs
            for stack in manifest.get("stacks", ()):
                if stack["path"] in rows:
                    jobs += rows[stack["path"]].read(self._verified, stack)
            jobs += self._document_jobs(manifest, wanted)
            run_all(jobs, self.files.threads, _stored_bytes(wanted))
            return {
                name: loaded[name][0]
                if entry["value"] == LONE_ARRAY
                else self._decode(
                    name,
                    entry,
                    loaded[name].__getitem__,
                    codecs,
                    allow_pickle,
                    keeps_states=keeps_states,
                )
                for name, entry in wanted.items()
            }

    def axis_length(self, blob: str, axis: int) -> int:
        """How long an array blob is along `axis`."""
        with self._understanding():
            entry = self._array_entry(self.read_manifest(), blob, axis)
            return logical_shape(entry)[axis]

    def load_slice(self, blob: str, axis: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Part of an array blob along one axis; only the pieces that it lies in are read.

        Parameters
        ----------
        blob : str
            Of which the value is an array.
        axis, start, stop : int

        Notes
        -----
        What is read is verified, but for the array's own document.
        """
        with self._understanding():
            entry = self._array_entry(self.read_manifest(), blob, axis)
            data, jobs = StoredArray(entry).read_slice(self._verified, axis, start, stop)
            run_all(jobs, self.files.threads, data.nbytes)
            return data

    def _array_entry(self, manifest: Mapping[str, Any], blob: str, axis: int) -> Mapping[str, Any]:
        entry = manifest["blobs"].get(blob)
        if entry is None:
            raise BlobNotFoundError(f"{self.root} has no blob {blob!r}.")
        tree = entry["value"]
        if not isinstance(tree, dict) or tree.get("$") != "array":
            raise DefinitionError(
                f"Blob {blob!r} in {self.root} is no array, so it cannot be part of one."
            )
        found: Mapping[str, Any] = entry["arrays"][tree["at"]]
        if axis >= len(found["shape"]):
            raise DefinitionError(
                f"Blob {blob!r} in {self.root} has {len(found['shape'])} axes, and is declared "
                f"as a part along axis {axis}."
            )
        return found

    def verify(self) -> None:
        """Read and digest every file of the store."""
        with self._understanding():
            manifest = self.read_manifest()
            listed = self.list_files(manifest)
            jobs = [
                partial(self._verified.read_into, path, None, *about)
                for path, about in listed.items()
            ]
            run_all(jobs, self.files.threads, _stored_bytes(manifest["blobs"]))

    def list_files(self, manifest: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
        """All files of the store but the manifest, by path: size and crc32c."""
        with self._understanding():
            listed = {path: (size, crc) for path, (size, crc) in manifest["documents"].items()}
            for array in manifest.get("stacks", ()):
                listed.update(chunk_files(array))
            for entry in manifest["blobs"].values():
                for array in entry["arrays"]:
                    if "within" not in array:
                        listed.update(chunk_files(array))
            for path in listed:
                self._verified.path(path)  # which refuses one that lies elsewhere
            return listed

    def read_file(self, path: str, size: int, digest: int) -> bytes:
        """Content of one file, verified."""
        return self._verified.read(path, size, digest)

    def _document_jobs(
        self, manifest: Mapping[str, Any], wanted: Mapping[str, Any]
    ) -> Iterator[Callable[[], None]]:
        """Verify the documents of some blobs, and the root's."""
        paths = {array["path"] for entry in wanted.values() for array in entry["arrays"]}
        documents = {ROOT_DOCUMENT}
        for path in paths:
            self._verified.path(path)  # which refuses one that lies elsewhere
            while path:
                documents.add(f"{path}/zarr.json")
                path = path.rpartition("/")[0]
        for document in documents:
            about = manifest["documents"][document]
            yield partial(self._verified.read_into, document, None, *about)

    def peek(
        self,
        manifest: Mapping[str, Any],
        blob: str,
        *,
        codecs: Sequence[Codec] = (),
        allow_pickle: bool = False,
    ) -> Any:
        """One blob without reading its arrays: `zarr.Array` objects stand for them.

        Parameters
        ----------
        manifest : mapping
            As `read_manifest` gave it.
        blob : str
        codecs : sequence of Codec
        allow_pickle : bool

        Notes
        -----
        Arrays that are parts of something else (bytes, long texts, tensors), and rows of stacks,
        are read and verified; what is read through a `zarr.Array` later is not.
        """
        with self._understanding():
            entry = manifest["blobs"][blob]

            return self._decode(
                blob,
                entry,
                partial(self._read_part, entry),
                codecs,
                allow_pickle,
                leaf=lambda i: self._open_lazily(entry["arrays"][i]),
            )

    def outline(
        self,
        manifest: Mapping[str, Any],
        blob: str,
        *,
        codecs: Sequence[Codec] = (),
        allow_pickle: bool = False,
    ) -> Any:
        """One blob as `peek` gives it, an `ArrayOutline` in the place of each array."""
        with self._understanding():
            entry = manifest["blobs"][blob]

            def outline(i: int) -> ArrayOutline:
                array = StoredArray(entry["arrays"][i])
                return ArrayOutline(array.shape, str(array.dtype))

            read = partial(self._read_part, entry)
            return self._decode(blob, entry, read, codecs, allow_pickle, leaf=outline)

    def _read_part(self, entry: Mapping[str, Any], i: int) -> np.ndarray[Any, Any]:
        """One array of a blob, read and verified."""
        array: np.ndarray[Any, Any]
        array, jobs = StoredArray(entry["arrays"][i]).read(self._verified)
        run_all(jobs, self.files.threads, array.nbytes)
        return array

    def _open_lazily(self, entry: Mapping[str, Any]) -> Any:
        import zarr  # only who looks into a store pays for the import

        if "within" in entry:
            return self._open_row(entry)
        full = self._verified.path(entry["path"])
        with self._verified.reading(full), warnings.catch_warnings():
            # Zarr warns of data types whose specification is young; they are read all the same.
            warnings.simplefilter("ignore")
            store, within = self.files.locate(full)
            if store is None:
                return zarr.open_array(within, mode="r", zarr_format=3)
            objects = zarr.storage.ObjectStore(store, read_only=True)
            return zarr.open_array(objects, path=within, mode="r", zarr_format=3)

    def _open_row(self, entry: Mapping[str, Any]) -> Any:
        """A row of a stack as the array that it would be by itself, in memory."""
        import zarr
        from zarr.buffer import cpu

        grid, (file, size, start) = grid_of(entry), entry["within"]
        ((nbytes, digest),) = entry["files"]
        content = {
            "zarr.json": describe_usual_array(entry["dtype"], grid, "ndarray"),
            grid.key((0,) * len(grid.shape)): self._verified.read_span(
                file, size, start, nbytes, digest
            ),
        }
        buffers: dict[str, Any] = {
            name: cpu.Buffer.from_bytes(data) for name, data in content.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            store = zarr.storage.MemoryStore(buffers, read_only=True)
            return zarr.open_array(store, mode="r", zarr_format=3)

    def _decode(
        self,
        name: str,
        entry: Mapping[str, Any],
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
        with self._decoding(name):
            value = decoder.decode(entry["value"])
        return StatefulBlob(value, where) if decoder.has_states else value

    @contextlib.contextmanager
    def _understanding(self) -> Iterator[None]:
        """Name the manifest where it makes no sense: its digest tells damage, not who wrote it."""
        try:
            yield
        except JobRunnerError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            path = join_path(self.root, MANIFEST)
            raise CheckpointCorruptError(
                f"{path} is what the checkpoint's record names, and says what jobrunner does not "
                f"write: {type(error).__name__}: {error}. Ask whoever wrote it. {WAY_OUT}",
                path=path,
            ) from error

    @contextlib.contextmanager
    def _decoding(self, blob: str) -> Iterator[None]:
        """Nothing that fails here is damage: the manifest is what was written."""
        try:
            yield
        except JobRunnerError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"Blob {blob!r} in {self.root} is whole, but cannot be decoded: "
                f"{type(error).__name__}: {error}. Mend the decode of its codec (or the class that "
                f"it unpickles), or read it where its dtype exists; then run again."
            ) from error


def _stored_bytes(blobs: Mapping[str, Any]) -> int:
    """Size of all chunks of some blobs."""
    arrays = (array for entry in blobs.values() for array in entry["arrays"])
    return sum(size for array in arrays for size, _ in array["files"])
