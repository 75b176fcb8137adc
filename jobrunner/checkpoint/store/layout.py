"""Plan the files of a store: Zarr documents, chunks and their names. Pure: no I/O.

A store is a Zarr v3 group. In it, a blob that is an array is an array, and a container of arrays is
a group. An array by itself takes a directory, a document and a chunk; so many short arrays that are
alike become rows of one array. Small values are attributes of the store's group, for people and other
readers: jobrunner itself loads them from its own attribute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding import (
    Array,
    ArrayPart,
    EncodedBlob,
    core_type,
    dtype_to_spec,
)
from jobrunner.checkpoint.store.chunks import Grid, Zstd, is_text, plan_chunks
from jobrunner.checkpoint.store.document import (
    STACKS,
    STORE_FORMAT,
    ArrayDocument,
    ArrayFiles,
    BlobEntry,
    File,
    GroupDocument,
    Place,
    RecordEntry,
    StoreEntry,
    ZarrDocument,
    describe_array,
    describe_usual_array,
    write_document,
)
from jobrunner.define import ArrayOptions
from jobrunner.names import child_names

LEAST_ALIKE = 64
"""Fewer are stored one by one, where other readers of Zarr find them by their names."""

STACKED_BYTES = (64 << 10) - 1
"""The longest array that is stacked; longer ones are linked if they have not changed."""

_STACK_BYTES = 1 << 20
_STACKED_KINDS = "biufcmMSU"


class Rows:
    """Arrays of one dtype and shape, contiguous in C order, to be stored as one."""

    __slots__ = ("_arrays", "dtype", "shape")

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._arrays = arrays
        self.dtype = arrays[0].dtype
        self.shape = (len(arrays), *arrays[0].shape)

    @property
    def nbytes(self) -> int:
        """The size of all of them."""
        return len(self._arrays) * self._arrays[0].nbytes

    def gather(self) -> Array:
        """Copy them into one array, along a new first axis."""
        # Twice as fast as np.stack; typeshed does not know that arrays are buffers.
        joined = b"".join(self._arrays)  # type: ignore[arg-type]
        rows: Array = np.frombuffer(joined, np.uint8).view(self.dtype)
        return rows.reshape(self.shape)


@dataclass(slots=True)
class PlannedArray:
    """An array and its place in the store; a copy may replace its data until it is written."""

    blob: str  # empty for a stack, which holds arrays of many blobs, one a row
    path: str
    data: Array | Rows  # axes in memory order, outermost first
    grid: Grid
    zstd: Zstd | None
    document: ArrayDocument
    is_at_rest: bool = False
    """It lies in a blob, and does not change as long as this object refers to it."""
    is_unchanged: bool = False
    """It is the array of the store before, and no task has updated its blob since."""


@dataclass(slots=True)
class _PlannedBlob:
    tree: Any
    arrays: list[PlannedArray | Place]


@dataclass(slots=True)
class StoreLayout:
    """All files of a store."""

    about: Mapping[str, Any]
    """What the document says of the store: node, epoch, run, and for the first node the record."""
    arrays: list[PlannedArray] = field(default_factory=list)  # stacks come last
    documents: dict[str, ZarrDocument] = field(default_factory=dict)  # groups before their content
    _attributes: dict[str, Any] = field(default_factory=dict)
    _blobs: dict[str, _PlannedBlob] = field(default_factory=dict)
    _stacks: list[PlannedArray] = field(default_factory=list)

    def add_blob(
        self, name: str, path: str, blob: EncodedBlob, rows: Mapping[tuple[str, int], Place]
    ) -> None:
        """Add a blob, whose arrays are at `path` or below it, but for those in `rows`."""
        planned = _PlannedBlob(blob.tree, [])
        is_attribute = True
        for i, part in enumerate(blob.parts):
            place = rows.get((name, i))
            if place is not None:
                planned.arrays.append(place)
                is_attribute = is_attribute and bool(part.trail)
                continue
            is_attribute = False
            for depth in range(len(part.trail)):
                group = "/".join((path, *part.trail[:depth]))
                self.documents.setdefault(group, GroupDocument())
            array = _plan_array(name, part, "/".join((path, *part.trail)), blob.options)
            planned.arrays.append(array)
            self._add_array(array)
        if is_attribute:
            self._attributes[name] = blob.tree
        self._blobs[name] = planned

    def stack(
        self, names: Sequence[str], arrays: Sequence[Array], order: tuple[int, ...] | None
    ) -> list[Place]:
        """Plan stacks of arrays that are alike; returns the place of each."""
        places: list[Place] = []
        step = max(1, _STACK_BYTES // arrays[0].nbytes)
        for start in range(0, len(arrays), step):
            number = len(self._stacks)
            rows = Rows(arrays[start : start + step])
            axes = None if order is None else (0, *(axis + 1 for axis in order))
            grid = Grid(rows.shape, rows.shape, axes, _has_item_axis(rows.dtype))
            spec = dtype_to_spec(rows.dtype)
            document = describe_array(spec, grid, "stack", names=names[start : start + step])
            path = f"{STACKS}/{number}"
            self._stacks.append(PlannedArray("", path, rows, grid, None, document))
            places += [(number, row) for row in range(rows.shape[0])]
        return places

    def close(self) -> None:
        """Add the stacks, after all blobs."""
        if self._stacks:
            self.documents[STACKS] = GroupDocument()
        for array in self._stacks:
            self._add_array(array)

    def _add_array(self, array: PlannedArray) -> None:
        self.documents[array.path] = array.document
        self.arrays.append(array)

    def write_document(self, files: Mapping[str, Sequence[File]]) -> bytes:
        """Return the root document; `files` are those of each array, by its path."""
        blobs: dict[str, BlobEntry] = {}
        for name, planned in self._blobs.items():
            arrays: list[ArrayFiles | Place] = []
            for array in planned.arrays:
                if isinstance(array, PlannedArray):
                    arrays.append(ArrayFiles(array.path, list(files[array.path])))
                else:
                    arrays.append(array)
            blobs[name] = BlobEntry(planned.tree, arrays)
        stacks = [ArrayFiles(array.path, list(files[array.path])) for array in self._stacks]
        about = dict(self.about)
        record = about.pop("record", None)
        entry = StoreEntry(
            STORE_FORMAT,
            **about,
            blobs=blobs,
            stacks=stacks,
            record=None if record is None else RecordEntry(**record),
        )
        return write_document(entry, self._attributes, self.documents)


def lay_out(blobs: Mapping[str, EncodedBlob], about: Mapping[str, Any]) -> StoreLayout:
    """Plan a store; `about` is its node, epoch, run, and more for the document, as JSON."""
    layout = StoreLayout(about)
    rows = _stack_parts(layout, blobs)
    for name, path in zip(blobs, child_names(blobs), strict=True):
        layout.add_blob(name, path, blobs[name], rows)
    layout.close()
    return layout


def _stack_parts(
    layout: StoreLayout, blobs: Mapping[str, EncodedBlob]
) -> dict[tuple[str, int], Place]:
    """Stack short arrays of which many are alike; returns each one's place, by blob and index."""
    places: dict[tuple[str, int], Place] = {}
    if sum(len(blob.parts) for blob in blobs.values()) < LEAST_ALIKE:
        return places
    for keys, parts in _group_alike(blobs):
        names = ["/".join((name, *part.trail)) for (name, _), part in zip(keys, parts, strict=True)]
        stacked = layout.stack(names, [part.data for part in parts], parts[0].order)
        places.update(zip(keys, stacked, strict=True))
    return places


def _group_alike(
    blobs: Mapping[str, EncodedBlob],
) -> Iterable[tuple[list[tuple[str, int]], list[ArrayPart]]]:
    """Group short arrays in C order that are alike, with their blobs and indices."""
    groups: dict[Any, tuple[list[tuple[str, int]], list[ArrayPart]]] = {}
    for name, blob in blobs.items():
        options = blob.options
        if options.compressors or options.chunks is not None or options.dims is not None:
            continue
        for i, part in enumerate(blob.parts):
            data = part.data
            if 0 < data.nbytes <= STACKED_BYTES and data.flags.c_contiguous:
                keys, parts = groups.setdefault((data.dtype, data.shape, part.order), ([], []))
                keys.append((name, i))
                parts.append(part)
    for keys, parts in groups.values():
        dtype = parts[0].data.dtype
        # NumPy's own dtypes, of items without gaps.
        if len(parts) >= LEAST_ALIKE and dtype.kind in _STACKED_KINDS and dtype.isbuiltin < 2:
            yield keys, parts


def _plan_array(blob: str, part: ArrayPart, path: str, options: ArrayOptions) -> PlannedArray:
    data = part.data
    if options.chunks is not None:
        order = part.order or tuple(range(data.ndim))
        chunk_shape = tuple(options.chunks[axis] for axis in order)
    elif is_text(data.dtype):
        characters = int(np.strings.str_len(data).sum())
        mean_bytes = 4 + math.ceil(characters / data.size) if data.size else 1
        chunk_shape = plan_chunks(data.shape, mean_bytes)
    else:
        chunk_shape = plan_chunks(data.shape, data.dtype.itemsize)
    grid = Grid(data.shape, chunk_shape, part.order, _has_item_axis(data.dtype))
    zstd = None
    if options.compressors and not is_text(data.dtype):  # a reader would not know a bomb from texts
        zstd = Zstd(**options.compressors[0]["configuration"])
    spec = data.dtype.str if data.dtype.isbuiltin == 1 else dtype_to_spec(data.dtype)
    if isinstance(spec, str) and options.dims is None:
        document = describe_usual_array(spec, grid, part.holds, zstd)
    else:
        document = describe_array(spec, grid, part.holds, zstd, options=options)
    return PlannedArray(blob, path, data, grid, zstd, document)


def _has_item_axis(dtype: np.dtype[Any]) -> bool:
    return bool(core_type(dtype).length)
