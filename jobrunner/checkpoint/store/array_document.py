"""The Zarr document of an array, as it is written and read. Pure: no I/O.

It describes the array for every reader of Zarr; jobrunner's attribute adds the dtype that was saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from jobrunner.checkpoint.encoding import (
    CoreType,
    Spec,
    UnsupportedDtypeError,
    core_type,
    dtype_from_spec,
    dtype_to_spec,
)
from jobrunner.checkpoint.store.chunks import MOST_RATIO, Grid, Zstd, is_text, to_logical, to_memory
from jobrunner.names import escape

OWN_KEY = "/jobrunner"
"""The attribute for jobrunner's own metadata; no blob can have this name."""

_KEY_ENCODING = {"name": "default", "configuration": {"separator": "."}}
_MOST_BYTES = 1 << 62

Size = Annotated[int, msgspec.Meta(ge=0, le=_MOST_BYTES)]
Length = Annotated[int, msgspec.Meta(ge=1, le=_MOST_BYTES)]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]

File = tuple[Size, Digest]
"""Size and xxh3_128 of a file."""


class JSONObject(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A JSON object of a document."""


class ChunkShape(JSONObject):
    """How large chunks are, in the order of the array's own axes."""

    chunk_shape: Annotated[list[Length], msgspec.Meta(max_length=65)]


class ChunkGrid(JSONObject):
    """How an array is divided."""

    name: Literal["regular"]
    configuration: ChunkShape


class ZarrCodec(JSONObject, omit_defaults=True):
    """One step from an array to the bytes of a chunk."""

    name: str
    configuration: dict[str, Any] = {}


class OwnAttributes(JSONObject, omit_defaults=True):
    """What jobrunner needs to know of an array beside Zarr's description."""

    holds: str
    dtype: Spec
    item_axis: bool = False


class ArrayDocument(JSONObject, tag_field="node_type", tag="array"):
    """The Zarr document of an array."""

    zarr_format: Literal[3]
    shape: Annotated[list[Size], msgspec.Meta(max_length=65)]
    data_type: Any
    chunk_grid: ChunkGrid
    chunk_key_encoding: Any
    fill_value: Any
    codecs: Annotated[list[ZarrCodec], msgspec.Meta(min_length=1, max_length=3)]
    attributes: dict[str, Any]
    dimension_names: list[str | None]
    storage_transformers: Annotated[list[Any], msgspec.Meta(max_length=0)] = []


class GroupDocument(JSONObject, tag_field="node_type", tag="group"):
    """The Zarr document of a group, which contains the arrays of a blob."""

    zarr_format: Literal[3] = 3
    attributes: dict[str, Any] = {}


# Made once: two threads that first use a type at the same time would crash.
_DECODER = msgspec.json.Decoder(ArrayDocument | GroupDocument)

GROUP = msgspec.json.encode(GroupDocument())
"""The document of any group but that of the store."""


# --- writing


def describe_array(
    dtype: np.dtype[Any],
    grid: Grid,
    holds: str,
    zstd: Zstd | None = None,
    *,
    names: Sequence[str] = (),
    dims: Sequence[str] = (),
    coords: Sequence[str] = (),
    core: CoreType | None = None,
) -> bytes:
    """Return the Zarr document of an array; `names` are those of its rows, if it is a stack.

    `core` is another data type than the one of Zarr's core. `dims` and `coords`, the names of axes
    and of the arrays along them, are for other readers only.
    """
    core = core or core_type(dtype)
    shape = to_logical(grid.shape, grid.order)
    chunk_shape = to_logical(grid.chunk_shape, grid.order)
    order = list(grid.order or ())
    if grid.item_axis:
        if order:
            order.append(len(shape))
        shape.append(core.length)
        chunk_shape.append(core.length)
    codecs = []
    if order:
        codecs.append(ZarrCodec("transpose", {"order": order}))
    codecs.append(ZarrCodec(**core.codec))
    if zstd is not None:
        codecs.append(ZarrCodec("zstd", {"level": zstd.level, "checksum": zstd.checksum}))
    attributes: dict[str, Any] = dict(core.attributes)
    if names:
        attributes["names"] = names
    if coords:
        attributes["coordinates"] = " ".join(map(escape, coords))
    attributes[OWN_KEY] = OwnAttributes(holds, dtype_to_spec(dtype), grid.item_axis)
    document = ArrayDocument(
        zarr_format=3,
        shape=shape,
        data_type=core.name,
        chunk_grid=ChunkGrid("regular", ChunkShape(chunk_shape)),
        chunk_key_encoding=_KEY_ENCODING,
        fill_value=core.fill,
        codecs=codecs,
        attributes=attributes,
        dimension_names=_name_dimensions(shape, dims),
    )
    return msgspec.json.encode(document)


def _name_dimensions(shape: Sequence[int], dims: Sequence[str]) -> list[str | None]:
    """Name the axes that have no name by their lengths, so that arrays of one group fit together.

    No array has such a name, which would make it the coordinate of the axis.
    """
    names: list[str | None] = list(dims)
    for axis in range(len(names), len(shape)):
        length = shape[axis]
        repeats = shape[len(dims) : axis].count(length)
        names.append(f"_dim_{length}_{repeats}" if repeats else f"_dim_{length}")
    return names


# --- reading


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array of a store: how it is divided, and its files, last axis in memory fastest."""

    path: str
    document: ArrayDocument
    dtype: Spec
    grid: Grid
    zstd: Zstd | None
    files: Sequence[File]

    @property
    def nbytes(self) -> int:
        """Size of its files."""
        return sum(size for size, _ in self.files)

    def chunk_files(self) -> Iterator[tuple[str, tuple[int, ...], File]]:
        """Yield path, grid coordinates and file of each chunk."""
        for (corner, key), file in zip(self.grid.chunks, self.files, strict=True):
            yield f"{self.path}/{key}", corner, file


def read_zarr_document(data: bytes | msgspec.Raw) -> ArrayDocument | GroupDocument:
    """Read the document of an array or group; raises ValueError if jobrunner writes none like it."""
    document: ArrayDocument | GroupDocument = _DECODER.decode(data)
    return document


def read_array(path: str, document: ArrayDocument, files: Sequence[File]) -> StoredArray:
    """Return the array that a document describes.

    Raises ValueError, which names the path, if it cannot be read, or has not the files that it must
    have.
    """
    try:
        own = msgspec.convert(document.attributes.get(OWN_KEY), OwnAttributes)
        grid, zstd = _read_grid(document, own)
        array = StoredArray(path, document, own.dtype, grid, zstd, files)
        _check_sizes(array)
    except ValueError as error:
        raise ValueError(f"array {path!r}: {error}") from None
    return array


def _read_grid(document: ArrayDocument, own: OwnAttributes) -> tuple[Grid, Zstd | None]:
    shape, chunk_shape = document.shape, document.chunk_grid.configuration.chunk_shape
    if len(shape) != len(chunk_shape):
        raise ValueError(f"`chunk_shape` has {len(chunk_shape)} axes, `shape` {len(shape)}")
    if document.chunk_key_encoding != _KEY_ENCODING:
        raise ValueError("`chunk_key_encoding` is not jobrunner's")
    # What is left of the codecs, once those at both ends are taken off, makes bytes of items.
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
        # The last axis is one of bytes or code points: to NumPy, it is part of the dtype.
        if not shape or shape[-1] != chunk_shape[-1]:
            raise ValueError("an item does not lie in one chunk")
        shape, chunk_shape = shape[:-1], chunk_shape[:-1]
        if order:
            if order[-1] != len(shape):
                raise ValueError("an item does not lie in one chunk")
            order = order[:-1]
    grid = Grid(to_memory(shape, order), to_memory(chunk_shape, order), order, own.item_axis)
    return grid, zstd


def _check_sizes(array: StoredArray) -> None:
    """Check that there are as many files as chunks, each as long as it must be, or long enough."""
    grid = array.grid
    if len(array.files) != grid.num_chunks:
        raise ValueError(f"expected {grid.num_chunks} files, found {len(array.files)}")
    item_bytes, is_exact = _item_bytes(array.dtype)
    items = math.prod(max(1, size) for size in grid.shape)
    chunk_items = math.prod(grid.chunk_shape)
    if item_bytes * max(items, chunk_items) > _MOST_BYTES:
        raise ValueError(f"an array of shape {list(grid.shape)} does not fit into memory")
    chunk_bytes = item_bytes * chunk_items
    # A stranger's document of a kilobyte could else name arrays of terabytes, of which a reader would
    # allocate the first before it finds that the files do not have them.
    for size in {size for size, _ in array.files}:
        if array.zstd is not None:
            is_possible = size * MOST_RATIO >= chunk_bytes
        elif is_exact:
            is_possible = size == chunk_bytes
        else:
            is_possible = size >= chunk_bytes
        if not is_possible:
            raise ValueError(f"a file has {size} bytes, and its chunk {chunk_bytes}")


def _item_bytes(spec: Spec) -> tuple[int, bool]:
    """Return the bytes that an item takes at least, and whether it takes exactly so many."""
    try:
        dtype = dtype_from_spec(spec)
    except UnsupportedDtypeError:
        return 1, False
    except ValueError as error:
        raise ValueError(f"`dtype`: {error}") from None
    if is_text(dtype):
        return 4, False
    if not dtype.itemsize or dtype.subdtype:
        raise ValueError(f"the items of an array are never of the dtype {dtype}")
    return dtype.itemsize, True
