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
    LONE_ARRAY,
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
    files: list[File] = field(default_factory=list)  # of its chunks, as soon as these are written
    is_unchanged: bool = False
    """It is the array of the store before, and no task has updated its blob since."""


@dataclass(slots=True)
class StoreLayout:
    """All files of a store."""

    about: Mapping[str, Any]
    """What the document says of the store: node, epoch, run, and for the first node the record."""
    arrays: list[PlannedArray] = field(default_factory=list)  # stacks come last
    documents: dict[str, ZarrDocument] = field(default_factory=dict)  # groups before their content
    _attributes: dict[str, Any] = field(default_factory=dict)
    _blobs: dict[str, BlobEntry] = field(default_factory=dict)
    _stacks: list[ArrayFiles] = field(default_factory=list)

    def add_blobs(self, blobs: Mapping[str, EncodedBlob], rows: Mapping[int, Place]) -> None:
        """Add all blobs; `rows` has the places of parts that are in stacks, by their `id`."""
        apart = []
        for name, blob in blobs.items():
            arrays: list[Any] = [rows.get(id(part)) for part in blob.parts]
            if None in arrays:
                apart.append(name)
            elif blob.tree is not LONE_ARRAY:
                self._attributes[name] = blob.tree
            self._blobs[name] = BlobEntry(blob.tree, arrays)
        for name, path in zip(apart, child_names(apart), strict=True):
            arrays = self._blobs[name].arrays
            for i, part in enumerate(blobs[name].parts):
                if arrays[i] is None:
                    arrays[i] = self._add_part(name, path, part, blobs[name].options)

    def _add_part(self, blob: str, path: str, part: ArrayPart, options: ArrayOptions) -> ArrayFiles:
        """Add a part of the blob at `path`, after the groups that it is in."""
        for depth in range(len(part.trail)):
            group = "/".join((path, *part.trail[:depth]))
            self.documents.setdefault(group, GroupDocument())
        return self._add_array(_plan_array(blob, part, "/".join((path, *part.trail)), options))

    def _add_array(self, array: PlannedArray) -> ArrayFiles:
        self.documents[array.path] = array.document
        self.arrays.append(array)
        return ArrayFiles(array.path, array.files)  # the same list

    def add_stacks(self, stacks: Sequence[PlannedArray]) -> None:
        """Add the stacks, after all blobs."""
        if stacks:
            self.documents[STACKS] = GroupDocument()
        for stack in stacks:
            self._stacks.append(self._add_array(stack))

    def write_document(self) -> bytes:
        """Return the root document, once all chunks are written."""
        about = dict(self.about)
        record = about.pop("record", None)
        entry = StoreEntry(
            STORE_FORMAT,
            **about,
            blobs=self._blobs,
            stacks=self._stacks,
            record=None if record is None else RecordEntry(**record),
        )
        return write_document(entry, self._attributes, self.documents)


def lay_out(blobs: Mapping[str, EncodedBlob], about: Mapping[str, Any]) -> StoreLayout:
    """Plan a store; `about` is its node, epoch, run, and more for the document, as JSON."""
    layout = StoreLayout(about)
    stacks: list[PlannedArray] = []
    rows: dict[int, Place] = {}
    if sum(len(blob.parts) for blob in blobs.values()) >= LEAST_ALIKE:
        for group in _group_alike(blobs):
            _stack(group, stacks, rows)
    layout.add_blobs(blobs, rows)
    layout.add_stacks(stacks)
    return layout


_NamedPart = tuple[str, ArrayPart]


def _group_alike(blobs: Mapping[str, EncodedBlob]) -> Iterable[list[_NamedPart]]:
    """Group short arrays in C order that are alike, each with the name of its blob."""
    groups: dict[Any, list[_NamedPart]] = {}
    for name, blob in blobs.items():
        options = blob.options
        if options.compressors or options.chunks is not None or options.dims is not None:
            continue
        for part in blob.parts:
            data = part.data
            if 0 < data.nbytes <= STACKED_BYTES and data.flags.c_contiguous:
                key = (data.dtype, data.shape, part.order)
                groups.setdefault(key, []).append((name, part))
    for (dtype, _, _), group in groups.items():
        # NumPy's own dtypes, of items without gaps.
        if len(group) >= LEAST_ALIKE and dtype.kind in _STACKED_KINDS and dtype.isbuiltin < 2:
            yield group


def _stack(group: Sequence[_NamedPart], stacks: list[PlannedArray], rows: dict[int, Place]) -> None:
    """Plan stacks of arrays that are alike, and note the place of each."""
    _, first = group[0]
    step = max(1, _STACK_BYTES // first.data.nbytes)
    axes = None if first.order is None else (0, *(axis + 1 for axis in first.order))
    spec = dtype_to_spec(first.data.dtype)
    has_item_axis = _has_item_axis(first.data.dtype)
    for start in range(0, len(group), step):
        members = group[start : start + step]
        names = []
        for row, (name, part) in enumerate(members):
            names.append("/".join((name, *part.trail)))
            rows[id(part)] = (len(stacks), row)
        data = Rows([part.data for _, part in members])
        grid = Grid(data.shape, data.shape, axes, has_item_axis)
        document = describe_array(spec, grid, "stack", names=names)
        stacks.append(PlannedArray("", f"{STACKS}/{len(stacks)}", data, grid, None, document))


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
