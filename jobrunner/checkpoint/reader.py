"""One node at one epoch on disk: read a store and verify it, or look into it lazily."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from jobrunner.checkpoint.codecs import Codec
from jobrunner.checkpoint.content import decode_piece, split_content
from jobrunner.checkpoint.decoding import Decoder
from jobrunner.checkpoint.dtypes import dtype_from_spec
from jobrunner.checkpoint.files import PosixFiles
from jobrunner.checkpoint.grid import Grid, Piece
from jobrunner.checkpoint.layout import MANIFEST, STORE_FORMAT, grid_of
from jobrunner.checkpoint.states import StatefulBlob
from jobrunner.checkpoint.store import join_path, run_all
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
    def identity(self) -> tuple[str, str, str]:
        """What tells the store and its content from all others."""
        return (self.directory, self.store, self.manifest)

    def read_manifest(self) -> dict[str, Any]:
        """The manifest, checked against its digest in the record."""
        path = join_path(self.root, MANIFEST)
        with self._reading(path):
            data = self.files.read(path)
        digest = hashlib.sha256(data).hexdigest()
        if digest != self.manifest:
            raise CheckpointCorruptError(
                f"{path} is not what was written: expected SHA-256 {self.manifest}, as recorded; "
                f"found {digest} ({len(data)} bytes). {_WAY_OUT}",
                path=path,
            )
        manifest: dict[str, Any] = json.loads(data)["attributes"]
        if manifest["format"] > STORE_FORMAT:
            raise CheckpointError(
                f"{path} has format {manifest['format']}, and this version of jobrunner reads up "
                f"to {STORE_FORMAT}. Read it with a later version."
            )
        return manifest

    def load(
        self,
        blobs: Collection[str] | None = None,
        *,
        codecs: Sequence[Codec] = (),
        allow_pickle: bool = False,
        keeps_states: bool = False,
    ) -> dict[str, Any]:
        """Read blobs, every byte of them verified.

        Parameters
        ----------
        blobs : collection of str, optional
            By default all. Of the store's documents, those of these blobs are verified as well.
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
        manifest = self.read_manifest()
        entries = manifest["blobs"]
        for name in blobs or ():
            if name not in entries:
                raise BlobNotFoundError(
                    f"Node {manifest['node']!r} has no blob {name!r} at epoch "
                    f"{manifest['epoch']} ({self.root}). It has {', '.join(map(repr, entries))}."
                )
        wanted = {name: entry for name, entry in entries.items() if blobs is None or name in blobs}
        tops = {array["path"].split("/")[0] for e in wanted.values() for array in e["arrays"]}
        loaded: dict[str, list[Any]] = {}
        jobs: list[Callable[[], None]] = []
        for name, entry in wanted.items():
            loaded[name] = [None] * len(entry["arrays"])
            for i, array in enumerate(entry["arrays"]):
                with self._decoding(name):
                    loaded[name][i], array_jobs = self._read_array(array)
                jobs += array_jobs
        jobs += self._document_jobs(
            manifest,
            (
                path
                for path in manifest["documents"]
                if "/" not in path or path.split("/")[0] in tops
            ),
        )
        run_all(jobs, self.files.threads, _stored_bytes(wanted))
        return {
            name: self._decode(
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
        entry = self._array_entry(self.read_manifest(), blob, axis)
        return int(_logical_shape(entry)[axis])

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
        entry = self._array_entry(self.read_manifest(), blob, axis)
        grid = grid_of(entry)
        along = axis if grid.order is None else grid.order.index(axis)
        shape = list(grid.shape)
        shape[along] = stop - start
        data: np.ndarray[Any, Any] = np.empty(shape, dtype_from_spec(entry["dtype"]))
        jobs: list[Callable[[], None]] = []
        pieces = entry.get("pieces") or [None] * len(entry["files"])
        for corner, (path, (size, digest)), told in zip(
            grid.corners(), _chunk_files(entry), pieces, strict=True
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
                    span = (position, length, crc) if told else (0, size, digest)
                    jobs.append(
                        partial(
                            self._read_piece,
                            path,
                            size,
                            span,
                            partial(
                                _decode_into, data[tuple(into)], entry, grid, piece, tuple(inside)
                            ),
                        )
                    )
                position += length
        run_all(jobs, self.files.threads, data.nbytes)
        return data.transpose(np.argsort(grid.order)) if grid.order else data

    def _read_piece(
        self, path: str, size: int, span: tuple[int, int, int], take: Callable[[bytes], None]
    ) -> None:
        """Read and verify a span (start, length, crc32c) of a file of `size` bytes."""
        full = self._safe_path(path)
        start, length, digest = span
        with self._reading(full):
            found_size, data = self.files.read_span(full, start, length)
        if found_size != size:
            self._compare(full, size, digest, found_size, 0)
        self._compare(full, length, digest, len(data), self.files.digest(data))
        take(data)

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
        manifest = self.read_manifest()
        listed = self.list_files(manifest)
        jobs = [partial(self._read_file, path, None, *about) for path, about in listed]
        run_all(jobs, self.files.threads, _stored_bytes(manifest["blobs"]))

    def list_files(self, manifest: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, int]]]:
        """All files of the store but the manifest: path, size and crc32c."""
        yield from manifest["documents"].items()
        for entry in manifest["blobs"].values():
            for array in entry["arrays"]:
                yield from _chunk_files(array)

    def read_file(self, path: str, size: int, digest: int) -> bytes:
        """Content of one file, verified."""
        full = self._safe_path(path)
        with self._reading(full):
            data = self.files.read(full)
        self._compare(full, size, digest, len(data), self.files.digest(data))
        return data

    def _document_jobs(
        self, manifest: Mapping[str, Any], paths: Iterable[str]
    ) -> Iterator[Callable[[], None]]:
        documents = manifest["documents"]
        return (partial(self._read_file, path, None, *documents[path]) for path in paths)

    def _read_array(self, array: Mapping[str, Any]) -> tuple[Any, list[Callable[[], None]]]:
        """An array to be filled, and the jobs that fill it."""
        dtype = dtype_from_spec(array["dtype"])
        shape, order = tuple(array["shape"]), array["order"]
        jobs: list[Callable[[], None]] = []
        if order and list(order) == list(range(len(shape)))[::-1]:
            result = np.empty(shape[::-1], dtype, order="F")  # owns its memory, as it was
            data = result.T
        else:
            data = np.empty(shape, dtype)
            result = data.transpose(np.argsort(order)) if order else data
        grid = grid_of(array)
        # What lies in files as in memory is read into its place, and all else by way of a buffer.
        is_direct = bool(data.size) and grid.is_memory and not array.get("compressors")
        flat = None
        if is_direct and not isinstance(dtype, np.dtypes.StringDType):
            flat = memoryview(data.reshape(-1).view(np.uint8).data)
        start = 0
        for corner, (path, (size, digest)) in zip(grid.corners(), _chunk_files(array), strict=True):
            if flat is None:
                take = partial(_decode_file, data, array, grid, corner)
                jobs.append(partial(self._read_encoded, path, size, digest, take))
                continue
            stop = start + data[(*grid.part(corner), ...)].nbytes
            jobs.append(partial(self._read_file, path, flat[start:stop], size, digest))
            start = stop
        return result, jobs

    def _read_file(self, path: str, target: memoryview | None, size: int, digest: int) -> None:
        full = self._safe_path(path)
        with self._reading(full):
            found_size, found = self.files.read_into(full, target, size)
        self._compare(full, size, digest, found_size, found)

    def _read_encoded(
        self, path: str, size: int, digest: int, take: Callable[[bytes], None]
    ) -> None:
        full = self._safe_path(path)
        with self._reading(full):
            data = self.files.read(full)
        self._compare(full, size, digest, len(data), self.files.digest(data))
        take(data)

    def _safe_path(self, path: str) -> str:
        pieces = path.split("/")
        if any(piece in ("", ".", "..") for piece in pieces) or (os.sep != "/" and os.sep in path):
            raise CheckpointCorruptError(
                f"{join_path(self.root, MANIFEST)} names the file {path!r}, which does not "
                f"lie in the store. {_WAY_OUT}",
                path=join_path(self.root, MANIFEST),
            )
        return join_path(self.root, path)

    def _compare(self, path: str, size: int, digest: int, found_size: int, found: int) -> None:
        if found_size != size:
            problem = f"expected {size} bytes, found {found_size}"
        elif found != digest:
            problem = f"expected crc32c {digest:08x}, found {found:08x}"
        else:
            return
        raise CheckpointCorruptError(
            f"{path} is not what was written: {problem}. {_WAY_OUT}", path=path
        )

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise CheckpointCorruptError(
                f"{path} is missing: expected the file that the checkpoint's record names, found "
                f"{error.strerror}. {_WAY_OUT}",
                path=path,
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {type(error).__name__}: {error}. That is not the same "
                f"as damage: mend the storage and read again."
            ) from error

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
        Arrays that are parts of something else (bytes, long texts, tensors) are read and
        verified; what is read through a `zarr.Array` later is not.
        """
        entry = manifest["blobs"][blob]

        return self._decode(
            blob,
            entry,
            partial(self._read_part, entry),
            codecs,
            allow_pickle,
            leaf=lambda i: self._open_lazily(entry["arrays"][i]["path"]),
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
        entry = manifest["blobs"][blob]

        def outline(i: int) -> ArrayOutline:
            array = entry["arrays"][i]
            return ArrayOutline(tuple(_logical_shape(array)), str(dtype_from_spec(array["dtype"])))

        read = partial(self._read_part, entry)
        return self._decode(blob, entry, read, codecs, allow_pickle, leaf=outline)

    def _read_part(self, entry: Mapping[str, Any], i: int) -> np.ndarray[Any, Any]:
        """One array of a blob, read and verified."""
        array: np.ndarray[Any, Any]
        array, jobs = self._read_array(entry["arrays"][i])
        run_all(jobs, self.files.threads, array.nbytes)
        return array

    def _open_lazily(self, path: str) -> Any:
        import zarr  # only who looks into a store pays for the import

        full = self._safe_path(path)
        with self._reading(full), warnings.catch_warnings():
            # Zarr warns of data types whose specification is young; they are read all the same.
            warnings.simplefilter("ignore")
            store, within = self.files.locate(full)
            if store is None:
                return zarr.open_array(within, mode="r", zarr_format=3)
            objects = zarr.storage.ObjectStore(store, read_only=True)
            return zarr.open_array(objects, path=within, mode="r", zarr_format=3)

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


_WAY_OUT = "Resume with 'latest' to fall back to the epoch before, or restore the file from a copy."


def _stored_bytes(blobs: Mapping[str, Any]) -> int:
    """Size of all chunks of some blobs."""
    arrays = (array for entry in blobs.values() for array in entry["arrays"])
    return sum(size for array in arrays for size, _ in array["files"])


def _logical_shape(entry: Mapping[str, Any]) -> list[int]:
    shape = list(entry["shape"])
    for axis, length in zip(entry["order"] or (), entry["shape"], strict=False):
        shape[axis] = length
    return shape


def _chunk_files(array: Mapping[str, Any]) -> Iterable[tuple[str, tuple[int, int]]]:
    grid = grid_of(array)
    for corner, (size, digest) in zip(grid.corners(), array["files"], strict=True):
        yield f"{array['path']}/{grid.key(corner)}", (size, digest)


def _decode_file(
    data: np.ndarray[Any, Any],
    entry: Mapping[str, Any],
    grid: Grid,
    corner: tuple[int, ...],
    content: bytes,
) -> None:
    """Put the pieces of a file, which was verified, into their places in an array."""
    for piece, held in split_content(content, grid, corner):
        _decode_into(data[(*piece.part, ...)], entry, grid, piece, (), held)


def _decode_into(
    target: np.ndarray[Any, Any],
    entry: Mapping[str, Any],
    grid: Grid,
    piece: Piece,
    inside: tuple[slice, ...],
    content: bytes,
) -> None:
    part = decode_piece(
        content, piece, grid.stored_shape, target.dtype, entry.get("compressors", ())
    )
    target[...] = part[inside] if inside else part
