"""The one document of a store, a node at an epoch, as it is written and read. Pure: no I/O.

It is the ``zarr.json`` of a Zarr group, written last. It repeats the Zarr documents of all arrays and
groups in the store, which describe the arrays for every reader; jobrunner's attribute adds the values
that are no arrays, and size and digest of each file.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from jobrunner.checkpoint.encoding import (
    LONE_ARRAY,
    CoreType,
    Spec,
    UnsupportedDtypeError,
    core_type,
    dtype_from_spec,
)
from jobrunner.checkpoint.store.chunks import MOST_RATIO, Grid, Zstd, is_text, to_logical, to_memory
from jobrunner.define import DEFAULT_ARRAY_OPTIONS, ArrayOptions
from jobrunner.errors import CheckpointCorruptError, CheckpointError
from jobrunner.names import ROOT_DOCUMENT, escape
from jobrunner.positions import position_from_json

STORE_FORMAT = 1
"""The newest format of stores."""

DOCUMENT_MOST_BYTES = 512 << 20
"""Longest document that is written or read."""


OWN_KEY = "/jobrunner"
"""The attribute for jobrunner's own metadata; no blob can have this name."""

STACKS = "_stacks"
"""The group of stacked arrays; no blob can have this name."""

ADVICE = "Resume with 'latest' to fall back to the epoch before, or restore the file from a copy."

_MOST_BYTES = 1 << 62
_MOST_DOCUMENTS_KEPT = 4096
_NO_SEAL = "0" * 64

Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST_BYTES)]
Length = Annotated[int, msgspec.Meta(ge=1, le=_MOST_BYTES)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
Path = Annotated[str, msgspec.Meta(min_length=1)]
Epoch = (
    Annotated[int, msgspec.Meta(ge=0, lt=10**18)]
    | Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,18}\.s[0-9]{1,18}\Z")]
)

File = tuple[Count, Digest]
"""Size and xxh3_128 of a file."""

Place = tuple[Count, Count]
"""Index of a stack, and of a row in it."""


class Part(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A JSON object of the document."""


# --- Zarr documents


class ChunkShape(Part):
    """How large chunks are, in the order of the array's own axes."""

    chunk_shape: Annotated[list[Length], msgspec.Meta(max_length=65)]


class ChunkGrid(Part, omit_defaults=False):
    """How an array is divided."""

    name: Literal["regular"]
    configuration: ChunkShape


class Separator(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What separates the coordinates in a chunk's name."""

    separator: Literal["."] = "."


class KeyEncoding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How chunks are named."""

    name: Literal["default"] = "default"
    configuration: Separator = Separator()


class ZarrCodec(Part):
    """One step from an array to the bytes of a chunk."""

    name: str
    configuration: dict[str, Any] = {}


class OwnAttributes(Part):
    """What jobrunner needs to know of an array beside Zarr's description."""

    holds: str
    dtype: Spec
    item_axis: bool = False


class ArrayDocument(Part, omit_defaults=False, tag_field="node_type", tag="array"):
    """The Zarr document of an array."""

    zarr_format: Literal[3]
    shape: Annotated[list[Count], msgspec.Meta(max_length=65)]
    data_type: Any
    chunk_grid: ChunkGrid
    chunk_key_encoding: KeyEncoding
    fill_value: Any
    codecs: Annotated[list[ZarrCodec], msgspec.Meta(min_length=1, max_length=3)]
    attributes: dict[str, Any]
    dimension_names: list[str | None]
    storage_transformers: Annotated[list[Any], msgspec.Meta(max_length=0)] = []


class GroupDocument(Part, omit_defaults=False, tag_field="node_type", tag="group"):
    """The Zarr document of a group that contains the arrays of a blob."""

    zarr_format: Literal[3] = 3
    attributes: dict[str, Any] = {}


ZarrDocument = ArrayDocument | GroupDocument


def describe_array(
    spec: Spec,
    grid: Grid,
    holds: str,
    zstd: Zstd | None = None,
    names: Sequence[str] = (),
    options: ArrayOptions = DEFAULT_ARRAY_OPTIONS,
    core: CoreType | None = None,
) -> ArrayDocument:
    """Return the Zarr document of an array; `names` are those of its rows, if it is a stack.

    `core` is another data type than the one of Zarr's core; `options` are for other readers only.
    """
    core = core or core_type(dtype_from_spec(spec))
    item = [core.length] if grid.item_axis else []
    codecs = [ZarrCodec(**core.codec)]
    if grid.order:
        order = [*grid.order, *range(len(grid.order), len(grid.order) + len(item))]
        codecs.insert(0, ZarrCodec("transpose", {"order": order}))
    if zstd is not None:
        codecs.append(ZarrCodec("zstd", {"level": zstd.level, "checksum": zstd.checksum}))
    shape = to_logical(grid.shape, grid.order) + item
    attributes: dict[str, Any] = dict(core.attributes)
    if names:
        attributes["names"] = list(names)
    if options.coords:
        attributes["coordinates"] = " ".join(map(escape, options.coords))
    attributes[OWN_KEY] = OwnAttributes(holds, spec, grid.item_axis)
    return ArrayDocument(
        zarr_format=3,
        shape=shape,
        data_type=core.name,
        chunk_grid=ChunkGrid(
            "regular", ChunkShape(to_logical(grid.chunk_shape, grid.order) + item)
        ),
        chunk_key_encoding=KeyEncoding(),
        fill_value=core.fill,
        codecs=codecs,
        attributes=attributes,
        dimension_names=_name_dimensions(shape, options.dims or ()),
    )


def _name_dimensions(shape: Sequence[int], given_names: Sequence[str]) -> list[str | None]:
    """Name the axes that no name is given by their lengths, so that arrays of one group fit together.

    No array has such a name, which would make it the coordinate of the axis.
    """
    names: list[str | None] = list(given_names)
    for axis in range(len(names), len(shape)):
        length = shape[axis]
        repeats = shape[len(given_names) : axis].count(length)
        names.append(f"_dim_{length}_{repeats}" if repeats else f"_dim_{length}")
    return names


describe_usual_array = lru_cache(maxsize=_MOST_DOCUMENTS_KEPT)(describe_array)
"""`describe_array`, cached: the arrays of an epoch are often those of the one before."""


# --- what jobrunner adds


class ArrayFiles(Part):
    """An array of the store, and its files in the order of their grid coordinates in memory."""

    path: Path
    files: list[File]


class BlobEntry(Part):
    """A blob: its tree, and the arrays that the tree refers to."""

    tree: Any
    arrays: list[ArrayFiles | Place]


class RecordEntry(Part):
    """What the log says of the epoch, so that the log can be repaired."""

    nodes: list[str]
    details: dict[str, Any]


class StoreEntry(Part, omit_defaults=True):
    """All blobs of a store, and size and digest of each of its files but the documents."""

    format: Count
    node: str
    epoch: Epoch
    run: str
    blobs: dict[str, BlobEntry]
    attempt: Count = 0  # its label in the log
    stacks: list[ArrayFiles] = []
    states: list[str] = []
    classes: dict[str, list[str]] = {}  # of the job, by blob
    record: RecordEntry | None = None
    sha256: str = ""  # of the whole document with 64 zeros in this place


class _Consolidated(Part, omit_defaults=False):
    kind: Literal["inline"]
    must_understand: Literal[False]
    metadata: dict[str, ZarrDocument]


class _Attributes(msgspec.Struct):
    """All others are blobs, which `StoreEntry` has too."""

    own: StoreEntry = msgspec.field(name=OWN_KEY)


class _RootDocument(Part):
    zarr_format: Literal[3]
    node_type: Literal["group"]
    consolidated_metadata: _Consolidated
    attributes: _Attributes


class _AnyEntry(msgspec.Struct):
    format: Count


class _AnyAttributes(msgspec.Struct):
    own: _AnyEntry = msgspec.field(name=OWN_KEY)


class _AnyDocument(msgspec.Struct):
    """The root document of a store of any format."""

    attributes: _AnyAttributes


# Made once: two threads that first use a type at the same time would crash.
_ROOT_DECODER = msgspec.json.Decoder(_RootDocument)
_ANY_DECODER = msgspec.json.Decoder(_AnyDocument)
_ENCODER = msgspec.json.Encoder()


def encode_json(document: object) -> bytes:
    """Encode as JSON."""
    return _ENCODER.encode(document)


def write_document(
    entry: StoreEntry, attributes: dict[str, Any], documents: dict[str, ZarrDocument]
) -> bytes:
    """Return the root document; `attributes` are for other readers."""
    entry.sha256 = _NO_SEAL
    consolidated = _Consolidated("inline", False, documents)  # a field of Zarr
    document = encode_json(
        {
            "zarr_format": 3,
            "node_type": "group",
            "consolidated_metadata": consolidated,
            "attributes": {**attributes, OWN_KEY: entry},
        }
    )
    start = document.rindex(_NO_SEAL.encode())
    return _seal(document, start)


def _seal(document: bytes, start: int) -> bytes:
    digest = hashlib.sha256(document).hexdigest().encode()
    return document[:start] + digest + document[start + len(digest) :]


def is_sealed(document: bytes) -> bool:
    """Whether a document contains its own SHA-256, as `write_document` puts it in."""
    start = len(document) - len(_NO_SEAL) - len('"}}}')
    blank = document[:start] + _NO_SEAL.encode() + document[start + len(_NO_SEAL) :]
    return start > 0 and _seal(blank, start) == document


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array of a store, or a row of a stack: its description and its files."""

    path: str
    document: ArrayDocument
    own: OwnAttributes
    grid: Grid
    zstd: Zstd | None
    files: Sequence[File]
    row: int | None = None

    @property
    def nbytes(self) -> int:
        """Size of its files."""
        return sum(size for size, _ in self.files)

    def chunk_files(self) -> Iterator[tuple[str, tuple[int, ...], File]]:
        """Yield path, grid coordinates and file of each chunk."""
        for corner, file in zip(self.grid.corners(), self.files, strict=True):
            yield f"{self.path}/{self.grid.key(corner)}", corner, file


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
            self.documents = root.consolidated_metadata.metadata
            self.position = position_from_json(self.entry.epoch)
            if self.entry.format == STORE_FORMAT:
                self._check()
        except (ValueError, RecursionError) as error:
            self._refuse_later(data)
            is_deep = isinstance(error, RecursionError)
            problem = "it is nested too deep" if is_deep else str(error)
            raise CheckpointCorruptError(
                f"{path} is not a document that jobrunner writes: {problem}. {ADVICE}", path=path
            ) from None
        self._refuse_later(data)

    def _refuse_later(self, data: bytes) -> None:
        try:
            version = _ANY_DECODER.decode(data).attributes.own.format
        except (ValueError, RecursionError):
            return
        if version > STORE_FORMAT:
            raise CheckpointError(
                f"{self.path} has format {version}, and this version of jobrunner reads up to "
                f"{STORE_FORMAT}. Read it with a later version."
            )

    @property
    def node(self) -> str:
        """The node that was saved."""
        return self.entry.node

    @property
    def blobs(self) -> dict[str, BlobEntry]:
        """The entries of the blobs, in the order in which they were saved."""
        return self.entry.blobs

    def array(self, reference: ArrayFiles | Place) -> StoredArray:
        """Look up an array that a blob refers to."""
        if isinstance(reference, tuple):
            stack, row = reference
            return self._stored(self.entry.stacks[stack], row)
        return self._stored(reference)

    def _stored(self, array: ArrayFiles, row: int | None = None) -> StoredArray:
        document = self.documents[array.path]
        assert isinstance(document, ArrayDocument)
        own = msgspec.convert(document.attributes[OWN_KEY], OwnAttributes)
        grid, zstd = _read_grid(document, own)
        return StoredArray(array.path, document, own, grid, zstd, array.files, row)

    def arrays(self) -> Iterator[StoredArray]:
        """Yield all stacks, and the arrays that are not in one."""
        for stack in self.entry.stacks:
            yield self._stored(stack)
        for blob in self.entry.blobs.values():
            for reference in blob.arrays:
                if not isinstance(reference, tuple):
                    yield self._stored(reference)

    def files(self) -> dict[str, File]:
        """Return size and digest of all chunks, by path within the store."""
        chunks = itertools.chain.from_iterable(array.chunk_files() for array in self.arrays())
        return {path: file for path, _, file in chunks}

    def zarr_documents(self, arrays: Collection[str] | None = None) -> dict[str, bytes]:
        """Return the content of Zarr documents, by path within the store: all but this one.

        Or those of some arrays, given by their paths, and of the groups that they are in.
        """
        paths = set(self.documents) if arrays is None else set(arrays)
        for path in arrays or ():
            while "/" in path:
                path = path.rpartition("/")[0]
                paths.add(path)
        return {
            f"{path}/{ROOT_DOCUMENT}": encode_json(document)
            for path, document in self.documents.items()
            if path in paths
        }

    def described_array(self, name: str) -> dict[str, bytes]:
        """The Zarr document of a blob that is an array with files of its own, by its path.

        Empty for other blobs: their values are made of arrays, and an equal value may be made of
        others, or of these in another order.
        """
        blob = self.blobs[name]
        reference = blob.arrays[0] if blob.tree == LONE_ARRAY else None
        if not isinstance(reference, ArrayFiles):
            return {}
        return {reference.path: encode_json(self.documents[reference.path])}

    # --- checks

    def _check(self) -> None:
        for path in self.documents:
            if not {"", ".", ".."}.isdisjoint(path.split("/")):
                raise ValueError(f"the path {path!r} leads out of the store")
        lengths = [self._check_stack(i) for i in range(len(self.entry.stacks))]
        paths = {stack.path for stack in self.entry.stacks}
        count = len(self.entry.stacks)
        places: set[Place] = set()
        for name, blob in self.entry.blobs.items():
            if blob.tree == LONE_ARRAY and len(blob.arrays) != 1:
                raise ValueError(f"blob {name!r}: expected one array, found {len(blob.arrays)}")
            for reference in blob.arrays:
                count += 1
                if isinstance(reference, tuple):
                    stack, row = reference
                    if stack >= len(lengths) or row >= lengths[stack]:
                        raise ValueError(f"blob {name!r}: no stack has a row {list(reference)}")
                    places.add(reference)
                else:
                    self._check_array(reference)
                    paths.add(reference.path)
        # Each use of an array takes its memory again.
        if len(paths) + len(places) < count:
            raise ValueError("an array of `blobs` or `stacks` is there twice")

    def _check_stack(self, i: int) -> int:
        grid = self._check_array(self.entry.stacks[i])
        is_moved = grid.order is not None and grid.order[0] != 0
        if not grid.shape or is_moved or grid.num_chunks != 1 or grid.chunk_shape != grid.shape:
            raise ValueError(f"stack {i} is not one chunk of rows")
        return grid.shape[0]

    def _check_array(self, array: ArrayFiles) -> Grid:
        document = self.documents.get(array.path)
        if not isinstance(document, ArrayDocument):
            raise ValueError(f"no document describes an array {array.path!r}")
        try:
            own = msgspec.convert(document.attributes.get(OWN_KEY), OwnAttributes)
            grid, zstd = _read_grid(document, own)
            _check_sizes(own, grid, zstd, array.files)
        except ValueError as error:
            raise ValueError(f"array {array.path!r}: {error}") from None
        return grid


def _read_grid(document: ArrayDocument, own: OwnAttributes) -> tuple[Grid, Zstd | None]:
    shape, chunk_shape = document.shape, document.chunk_grid.configuration.chunk_shape
    if len(shape) != len(chunk_shape):
        raise ValueError(f"`chunk_shape` has {len(chunk_shape)} axes, `shape` {len(shape)}")
    order: tuple[int, ...] | None = None
    codecs = list(document.codecs)
    if codecs[0].name == "transpose":
        order = tuple(codecs.pop(0).configuration.get("order", ()))
        if sorted(order) != list(range(len(shape))):
            raise ValueError(f"`order` {list(order)} does not permute {len(shape)} axes")
    zstd = None
    if codecs and codecs[-1].name == "zstd":
        zstd = Zstd()
        codecs.pop()
    if [codec.name for codec in codecs] not in (["bytes"], ["vlen-utf8"]):
        raise ValueError(f"unexpected codecs {[codec.name for codec in document.codecs]}")
    if own.item_axis:
        if not shape or shape[-1] != chunk_shape[-1] or (order and order[-1] != len(order) - 1):
            raise ValueError("an item does not lie in one chunk")
        shape, chunk_shape, order = shape[:-1], chunk_shape[:-1], order and order[:-1]
    grid = Grid(to_memory(shape, order), to_memory(chunk_shape, order), order, own.item_axis)
    return grid, zstd


def _check_sizes(own: OwnAttributes, grid: Grid, zstd: Zstd | None, files: Sequence[File]) -> None:
    """Check that there are as many files as chunks, each as long as it must be, or long enough."""
    if len(files) != (0 if 0 in grid.shape else grid.num_chunks):
        raise ValueError(f"expected {grid.num_chunks} files, found {len(files)}")
    dtype = _dtype(own.dtype)
    item_bytes = 1 if dtype is None else 4 if is_text(dtype) else dtype.itemsize
    if not item_bytes or (dtype is not None and dtype.subdtype):
        raise ValueError(f"the items of an array are never of the dtype {dtype}")
    items = max(math.prod(max(1, size) for size in grid.shape), math.prod(grid.chunk_shape))
    if item_bytes * items > _MOST_BYTES:
        raise ValueError(f"an array of shape {list(grid.shape)} does not fit into memory")
    chunk_bytes = item_bytes * math.prod(grid.chunk_shape)
    for size in {size for size, _ in files}:
        if zstd is not None:
            is_possible = size * MOST_RATIO >= chunk_bytes
        elif dtype is None or is_text(dtype):
            is_possible = size >= chunk_bytes
        else:
            is_possible = size == chunk_bytes
        if not is_possible:
            raise ValueError(f"a file has {size} bytes, and its chunk {chunk_bytes}")


def _dtype(spec: Spec) -> np.dtype[Any] | None:
    """Return the dtype; None if this platform lacks it."""
    try:
        return dtype_from_spec(spec)
    except UnsupportedDtypeError:
        return None
    except ValueError as error:
        raise ValueError(f"`dtype`: {error}") from None
