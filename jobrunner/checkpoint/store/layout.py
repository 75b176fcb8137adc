"""Plan the files of a store: Zarr documents, chunks and their names. Pure: no I/O.

A store is a Zarr v3 group. In it, a blob that is an array is an array, and a container of arrays is
a group. An array by itself takes a directory, a document and a chunk; so many short arrays that are
alike become rows of one array. Small values are attributes of the store's group, for people and other
readers: jobrunner itself loads them from its own attribute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding import (
    LONE_ARRAY,
    Array,
    ArrayPart,
    EncodedBlob,
    core_type,
)
from jobrunner.checkpoint.store.array_document import GROUP, File, describe_array
from jobrunner.checkpoint.store.chunks import Grid, Zstd, is_text, plan_chunks, to_memory
from jobrunner.checkpoint.store.document import (
    STACKS,
    ArrayFiles,
    BlobEntry,
    RowPlace,
    StoreEntry,
)
from jobrunner.define import ArrayOptions
from jobrunner.names import child_names

LEAST_ALIKE = 64
"""Fewer are stored one by one, where other readers of Zarr find them by their names."""

STACKED_BYTES = (64 << 10) - 1
"""The longest array that is stacked; longer ones are linked if they have not changed."""

StackMember = tuple[str, ArrayPart]
"""An array that may become a row of a stack, and its blob."""

_STACK_BYTES = 1 << 20
_STACKED_KINDS = "biufcmMSU"


@dataclass(slots=True)
class PlannedArray:
    """An array and its place in the store; a copy may replace its data until it is written."""

    blob: str  # empty for a stack, which holds arrays of many blobs, one a row
    path: str
    data: Array  # axes in memory order, outermost first
    grid: Grid
    zstd: Zstd | None
    document: bytes
    files: list[File] = field(default_factory=list)  # of its chunks, as soon as these are written
    is_unchanged: bool = False
    """It is the array of the store before, and no task has updated its blob since."""

    def drop(self) -> None:
        """Drop the array once it is written, so that tasks can change it uncopied."""
        self.data = np.empty(0, self.data.dtype)


@dataclass(slots=True)
class StoreLayout:
    """All files of a store."""

    entry: StoreEntry
    arrays: list[PlannedArray] = field(default_factory=list)
    documents: dict[str, bytes] = field(default_factory=dict)  # groups before their content
    attributes: dict[str, Any] = field(default_factory=dict)

    def add(self, array: PlannedArray) -> ArrayFiles:
        """Add an array; the entry that is returned lists its files as soon as they are written."""
        self.documents[array.path] = array.document
        self.arrays.append(array)
        return ArrayFiles(array.path, array.files)  # the same list


def lay_out(blobs: Mapping[str, EncodedBlob], entry: StoreEntry) -> StoreLayout:
    """Plan a store; `entry` says of it all that is known without the blobs, which are added."""
    layout = StoreLayout(entry)
    rows = _add_stacks(layout, blobs)
    with_arrays = []  # of their own
    for name, blob in blobs.items():
        # Rows of stacks are known now; None stands for the arrays that are added below.
        references: list[Any] = [rows.get(id(part)) for part in blob.parts]
        layout.entry.blobs[name] = BlobEntry(blob.tree, references)
        if None in references:
            with_arrays.append(name)
        elif blob.tree is not LONE_ARRAY:
            layout.attributes[name] = blob.tree
    for name, path in zip(with_arrays, child_names(with_arrays), strict=True):
        references = layout.entry.blobs[name].arrays
        for i, part in enumerate(blobs[name].parts):
            if references[i] is not None:
                continue
            array = _plan_array(name, part, path, blobs[name].options)
            # All that is above it in the blob, outermost first, is a group.
            for depth in range(len(part.trail)):
                layout.documents.setdefault("/".join((path, *part.trail[:depth])), GROUP)
            references[i] = layout.add(array)
    return layout


def _add_stacks(layout: StoreLayout, blobs: Mapping[str, EncodedBlob]) -> dict[int, RowPlace]:
    """Add stacks of short arrays that are alike; returns the place of each, by its `id`."""
    rows: dict[int, RowPlace] = {}
    if sum(len(blob.parts) for blob in blobs.values()) < LEAST_ALIKE:
        return rows
    for group in _group_alike(blobs):
        layout.documents[STACKS] = GROUP
        stacks = layout.entry.stacks
        length = max(1, _STACK_BYTES // group[0][1].data.nbytes)
        for start in range(0, len(group), length):
            members = group[start : start + length]
            for row, (_, part) in enumerate(members):
                rows[id(part)] = (len(stacks), row)
            path = f"{STACKS}/{len(stacks)}"
            stacks.append(layout.add(_plan_stack(path, members)))
    return rows


def _group_alike(blobs: Mapping[str, EncodedBlob]) -> Iterator[list[StackMember]]:
    """Group short arrays in C order that are alike."""
    groups: dict[Any, list[StackMember]] = {}
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


def _plan_stack(path: str, members: Sequence[StackMember]) -> PlannedArray:
    _, first = members[0]
    # Twice as fast as np.stack; typeshed does not know that arrays are buffers.
    joined = b"".join(part.data for _, part in members)  # type: ignore[misc]
    shape = (len(members), *first.data.shape)
    data = np.frombuffer(joined, np.uint8).view(first.data.dtype).reshape(shape)
    order = first.order
    if order is not None:  # one more axis, the outermost
        order = (0, *(axis + 1 for axis in order))
    grid = Grid(shape, shape, order, _has_item_axis(data.dtype))
    names = ["/".join((blob, *part.trail)) for blob, part in members]
    document = describe_array(data.dtype, grid, "stack", names=names)
    return PlannedArray("", path, data, grid, None, document)


def _plan_array(blob: str, part: ArrayPart, path: str, options: ArrayOptions) -> PlannedArray:
    data = part.data
    item_bytes = data.dtype.itemsize
    if is_text(data.dtype):  # each is stored as its length and its characters: their mean
        item_bytes = 4 + math.ceil(np.strings.str_len(data).sum() / max(1, data.size))
    chunk_shape = plan_chunks(data.shape, item_bytes)
    if options.chunks is not None:
        chunk_shape = to_memory(options.chunks, part.order)
    grid = Grid(data.shape, chunk_shape, part.order, _has_item_axis(data.dtype))
    zstd = None
    if options.compressors and not is_text(data.dtype):  # a reader would not know a bomb from texts
        zstd = Zstd(**options.compressors[0]["configuration"])
    dims, coords = options.dims or (), options.coords or ()
    document = describe_array(data.dtype, grid, part.holds, zstd, dims=dims, coords=coords)
    path = "/".join((path, *part.trail))
    return PlannedArray(blob, path, data, grid, zstd, document)


def _has_item_axis(dtype: np.dtype[Any]) -> bool:
    return bool(core_type(dtype).length)
