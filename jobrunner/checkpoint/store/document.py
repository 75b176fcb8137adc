"""The one document of a store, a node at an epoch, as it is written and read. Pure: no I/O.

It is the ``zarr.json`` of a Zarr group, written last. It repeats the Zarr documents of all arrays and
groups in the store, which describe the arrays for every reader; jobrunner's attribute adds the values
that are no arrays, and size and digest of each file.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from jobrunner.checkpoint.encoding import LONE_ARRAY
from jobrunner.checkpoint.store.array_document import (
    OWN_KEY,
    ArrayDocument,
    File,
    Size,
    StoredArray,
    read_array,
    read_zarr_document,
)
from jobrunner.checkpoint.store.damage import damaged_file
from jobrunner.checkpoint.store.history_reader import HistoryMark
from jobrunner.errors import CheckpointError
from jobrunner.names import ROOT_DOCUMENT
from jobrunner.positions import position_from_json

STORE_FORMAT: Literal[1] = 1
"""The newest format of stores."""

DOCUMENT_MOST_BYTES = 512 << 20
"""Longest document that is written or read."""

STACKS = "_stacks"
"""The group of stacked arrays; no blob can have this name."""

_NO_SEAL = b"0" * 64

RowPlace = tuple[Size, Size]
"""Index of a stack, and of a row in it."""


class _JSONObject(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A JSON object of the document."""


class ArrayFiles(_JSONObject):
    """An array of the store, and its files in the order of their grid coordinates in memory."""

    path: Annotated[str, msgspec.Meta(min_length=1)]
    files: list[File]


class BlobEntry(_JSONObject):
    """A blob: its tree, and the arrays that the tree refers to."""

    tree: Any
    arrays: list[ArrayFiles | RowPlace]


class RecordEntry(_JSONObject):
    """What the log says of the epoch, so that the log can be repaired."""

    nodes: list[str]
    details: dict[str, Any]
    histories: str = ""  # where they were written; a copy has them elsewhere


class StoreEntry(_JSONObject):
    """All blobs of a store, and size and digest of each of its files but the documents."""

    format: Literal[1]
    node: str
    epoch: int | str  # a position
    run: str
    blobs: dict[str, BlobEntry]
    histories: dict[str, HistoryMark] = {}  # blobs whose values are rows elsewhere
    claim: Size = 0  # the number of its ``claim`` in the log
    stacks: list[ArrayFiles] = []
    states: list[str] = []
    classes: dict[str, list[str]] = {}  # of the job, by blob
    record: RecordEntry | None = None
    sha256: str = ""  # of the whole document with 64 zeros in this place


class _Consolidated(_JSONObject):
    kind: Literal["inline"]
    must_understand: Literal[False]
    metadata: dict[str, msgspec.Raw]


class _Attributes(msgspec.Struct):
    """All others are blobs, which `StoreEntry` has too."""

    own: StoreEntry = msgspec.field(name=OWN_KEY)


class _RootDocument(_JSONObject):
    zarr_format: Literal[3]
    node_type: Literal["group"]
    consolidated_metadata: _Consolidated
    attributes: _Attributes


# Made once: two threads that first use a type at the same time would crash.
_ROOT_DECODER = msgspec.json.Decoder(_RootDocument)


# --- writing


def write_document(
    entry: StoreEntry, attributes: Mapping[str, Any], documents: Mapping[str, bytes]
) -> bytes:
    """Return the root document.

    `documents` are those of all arrays and groups, by path; `attributes` are for other readers.
    """
    entry.sha256 = _NO_SEAL.decode()
    metadata = {path: msgspec.Raw(document) for path, document in documents.items()}
    document = msgspec.json.encode(
        {
            "zarr_format": 3,
            "node_type": "group",
            "consolidated_metadata": _Consolidated("inline", False, metadata),
            "attributes": {**attributes, OWN_KEY: entry},
        }
    )
    # A blob may hold as many zeros, but this field comes last.
    return _seal(document, document.rindex(_NO_SEAL))


def _seal(document: bytes, start: int) -> bytes:
    digest = hashlib.sha256(document).hexdigest().encode()
    return document[:start] + digest + document[start + len(digest) :]


def is_sealed(document: bytes) -> bool:
    """Whether a document contains its own SHA-256, as `write_document` puts it in.

    A repair trusts it where no entry of the log is left that has the document's digest.
    """
    start = len(document) - len(_NO_SEAL) - len('"}}}')
    blank = document[:start] + _NO_SEAL + document[start + len(_NO_SEAL) :]
    return start > 0 and _seal(blank, start) == document


# --- reading


class StoreDocument:
    """The root document of a store, read and checked; `path` is for messages.

    Raises `CheckpointCorruptError`, which names the field, if jobrunner does not write such a
    document; `CheckpointError` if a later version wrote it.
    """

    def __init__(self, data: bytes, path: str) -> None:
        self.path = path
        try:
            root = _ROOT_DECODER.decode(data)
            self.entry = root.attributes.own
            self.position = position_from_json(self.entry.epoch)
            self._documents = root.consolidated_metadata.metadata
            self._arrays: dict[str, StoredArray] = {}
            self._read_arrays()
        except (ValueError, RecursionError) as error:
            self._refuse_later(data)
            problem = str(error)
            if isinstance(error, RecursionError):
                problem = "it is nested too deep"
            raise damaged_file(
                path, f"is not a document that jobrunner writes: {problem}"
            ) from None

    def _refuse_later(self, data: bytes) -> None:
        version = None
        with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError):
            version = msgspec.json.decode(data)["attributes"][OWN_KEY]["format"]
        if isinstance(version, int) and version > STORE_FORMAT:
            raise CheckpointError(
                f"{self.path} has format {version}, and this version of jobrunner reads up to "
                f"{STORE_FORMAT}. Read it with a later version."
            )

    def _read_arrays(self) -> None:
        """Read the documents of all arrays; each array, and each row of a stack, is used once.

        Of an array that is used twice, each use would take its memory again.
        """
        documents = {}
        for path, data in self._documents.items():
            if not {"", ".", ".."}.isdisjoint(path.split("/")):
                raise ValueError(f"the path {path!r} leads out of the store")
            documents[path] = read_zarr_document(data)

        def add(files: ArrayFiles) -> StoredArray:
            document = documents.get(files.path)
            if not isinstance(document, ArrayDocument):
                raise ValueError(f"no document describes an array {files.path!r}")
            if files.path in self._arrays:
                raise ValueError(f"the array {files.path!r} is there twice")
            array = self._arrays[files.path] = read_array(files.path, document, files.files)
            return array

        if not self.entry.blobs.keys().isdisjoint(self.entry.histories):
            raise ValueError("a blob is a history, and is not")
        lengths = [_count_rows(add(stack)) for stack in self.entry.stacks]
        places: set[RowPlace] = set()
        for name, blob in self.entry.blobs.items():
            if blob.tree == LONE_ARRAY and len(blob.arrays) != 1:
                raise ValueError(f"blob {name!r}: expected one array, found {len(blob.arrays)}")
            for reference in blob.arrays:
                if not isinstance(reference, tuple):
                    add(reference)
                    continue
                stack, row = reference
                if stack >= len(lengths) or row >= lengths[stack]:
                    raise ValueError(f"blob {name!r}: no stack has a row {list(reference)}")
                if reference in places:
                    raise ValueError(f"blob {name!r}: the row {list(reference)} is there twice")
                places.add(reference)

    @property
    def node(self) -> str:
        """The node that was saved."""
        return self.entry.node

    @property
    def blobs(self) -> dict[str, BlobEntry]:
        """The entries of the blobs, in the order in which they were saved."""
        return self.entry.blobs

    @property
    def names(self) -> list[str]:
        """The names of all blobs, histories last."""
        return [*self.entry.blobs, *self.entry.histories]

    def locate(self, reference: ArrayFiles | RowPlace) -> tuple[StoredArray, int | None]:
        """Return the array that a blob refers to, or the stack and the number of the row in it."""
        if isinstance(reference, ArrayFiles):
            return self._arrays[reference.path], None
        stack, row = reference
        return self._arrays[self.entry.stacks[stack].path], row

    def nbytes_of(self, name: str) -> int:
        """How many bytes the arrays of a blob have on disk; histories are in `entry.histories`."""
        nbytes = 0
        for reference in self.blobs[name].arrays:
            array, row = self.locate(reference)
            if row is None:
                nbytes += array.nbytes
            else:
                nbytes += array.nbytes // array.grid.shape[0]
        return nbytes

    def files(self, least_bytes: int = 0) -> dict[str, File]:
        """Return size and digest of all chunks that are so long, by path within the store."""
        files: dict[str, File] = {}
        for array in self._arrays.values():
            for path, _, file in array.chunk_files():
                if file[0] >= least_bytes:
                    files[path] = file
        return files

    def zarr_documents(self) -> dict[str, bytes]:
        """Return the content of all other Zarr documents, by path within the store."""
        return {f"{path}/{ROOT_DOCUMENT}": bytes(data) for path, data in self._documents.items()}

    def described_array(self, name: str) -> dict[str, bytes]:
        """The Zarr document of a blob that is an array with files of its own, by its path.

        Empty for other blobs: their values are made of arrays, and an equal value may be made of
        others, or of these in another order.
        """
        blob = self.blobs[name]
        if blob.tree != LONE_ARRAY or not isinstance(blob.arrays[0], ArrayFiles):
            return {}
        path = blob.arrays[0].path
        return {path: bytes(self._documents[path])}


def _count_rows(stack: StoredArray) -> int:
    grid = stack.grid
    is_moved = grid.order is not None and grid.order[0] != 0
    if not grid.shape or is_moved or grid.num_chunks != 1 or grid.chunk_shape != grid.shape:
        raise ValueError(f"the stack {stack.path!r} is not one chunk of rows")
    return grid.shape[0]
