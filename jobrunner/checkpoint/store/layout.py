"""Where a store keeps what: Zarr documents, chunks and their names. Pure: no I/O.

A store is a Zarr v3 group. An array blob is an array in it; a container of arrays is a group;
short arrays of which many are alike are rows of one; whatever is small is an attribute of the
store's group, for people and other readers: what jobrunner loads, it takes from the manifest.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding import ArrayPart, EncodedBlob, child_names, dtype_to_spec
from jobrunner.checkpoint.store.compression import suit_dtype
from jobrunner.checkpoint.store.grid import Grid, plan_grid
from jobrunner.checkpoint.store.stacks import (
    MOST_BYTES,
    Alike,
    Rows,
    are_worth_stacking,
    cut_stacks,
)
from jobrunner.checkpoint.store.zarr_json import (
    OWN_KEY,
    describe_array,
    describe_usual_array,
    group_document,
)
from jobrunner.define import ArrayOptions

FORMAT = 1
"""Of log entries; readers refuse what is newer."""

STORE_FORMAT = 3
"""Newest of stores and manifests. A store is 3 where arrays are stacked, 2 where one is compressed
or in pieces, and else 1."""

MANIFEST = "_manifest/zarr.json"
"""A group's document, so that readers of Zarr find nothing strange in a store."""

ROOT_DOCUMENT = "zarr.json"
RETIRED_DOCUMENT = "zarr.retired.json"
STACKS = "_stacks"
"""Group of the arrays of which many short ones are rows; no blob's name begins so."""

LONE_ARRAY = {"$": "array", "at": 0}
"""What stands for a blob that is an array and nothing else; see `encoding`."""


@dataclass(slots=True)
class PlannedArray:
    """An array with its place in the store; what it is made of may give way to a copy.

    Attributes
    ----------
    blob : str
        Name of the blob that it is of; a stack is of many, and of none by itself.
    data : numpy.ndarray or Rows
        Its axes in the order they lie in memory, outermost first.
    entry : dict
        What the manifest says of it; its files are filled in while writing.
    document : bytes
    is_stack : bool
        It is made of many blobs' arrays, a row each.
    is_sole : bool
        Nothing but its blob can reach its memory, so that it stays as it is while it is referred to.
    is_constant : bool
        No task changes its blob from one epoch to the next.
    is_unchanged : bool
        It is the very array of the store before, and nothing was given it to change.
    """

    blob: str
    path: str
    data: np.ndarray[Any, Any] | Rows
    grid: Grid
    compressors: Sequence[dict[str, Any]]
    entry: dict[str, Any]
    document: bytes
    is_stack: bool = False
    is_sole: bool = False
    is_constant: bool = False
    is_unchanged: bool = False

    def files(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Path within the store, with ``/``, and place in the grid of every file."""
        for corner in self.grid.corners():
            yield f"{self.path}/{self.grid.key(corner)}", corner


@dataclass(frozen=True, slots=True)
class StoreLayout:
    """All that a store consists of, but for the manifest.

    Attributes
    ----------
    directories : list of str
        Within the store, parents first.
    documents : dict of str to bytes
        Zarr documents by path within the store, but the root's.
    root : bytes
        The root document.
    arrays : list of PlannedArray
        Stacks included.
    stacks : list of dict
        The manifest's entries for them.
    blobs : dict
        The manifest's entry for each blob; of one that is a row, its stack and its place there.
    about : dict
        What root and manifest say of the store: its format, node, epoch and run.
    """

    directories: list[str]
    documents: dict[str, bytes]
    root: bytes
    arrays: list[PlannedArray]
    stacks: list[dict[str, Any]]
    blobs: dict[str, Any]
    about: dict[str, Any]


def lay_out(blobs: Mapping[str, EncodedBlob | Alike], about: Mapping[str, Any]) -> StoreLayout:
    """Decide where each part of each blob goes.

    Parameters
    ----------
    blobs : mapping of str to EncodedBlob or Alike
    about : mapping
        JSON for the root's own attribute: node, epoch, run.
    """
    directories: dict[str, None] = {os.path.dirname(MANIFEST): None}
    documents: dict[str, bytes] = {}
    attributes: dict[str, Any] = {OWN_KEY: {}}
    arrays: list[PlannedArray] = []
    entries: dict[str, Any] = dict.fromkeys(blobs)  # in the order of the blobs
    single = {name: blob for name, blob in blobs.items() if isinstance(blob, EncodedBlob)}
    stacks: list[PlannedArray] = []
    for alike in {id(blob): blob for blob in blobs.values() if isinstance(blob, Alike)}.values():
        entries |= zip(alike.arrays, _stack(stacks, alike.arrays, None), strict=True)
    rows = _stack_parts(stacks, single)
    for name, top in zip(single, child_names(single), strict=True):
        blob = single[name]
        planned = {
            i: _plan_array(name, part, "/".join((top, *part.trail)), blob.storage)
            for i, part in enumerate(blob.parts)
            if (name, i) not in rows
        }
        for array in planned.values():
            pieces = array.path.split("/")
            for depth in range(1, len(pieces)):
                group = "/".join(pieces[:depth])
                if group not in directories:
                    directories[group] = None
                    tree = blob.tree if depth == 1 else None
                    documents[f"{group}/zarr.json"] = group_document(
                        {} if tree is None else {OWN_KEY: {"value": tree}}
                    )
            directories[array.path] = None
            documents[f"{array.path}/zarr.json"] = array.document
        if not planned and not (blob.parts and not blob.parts[0].trail):
            attributes[name] = blob.tree
        arrays += planned.values()
        places = [
            planned[i].entry if i in planned else rows[name, i] for i in range(len(blob.parts))
        ]
        entries[name] = {"value": blob.tree, "arrays": places}
    if stacks:
        directories[STACKS] = None
        documents[f"{STACKS}/zarr.json"] = group_document({})
    for array in stacks:
        directories[array.path] = None
        documents[f"{array.path}/zarr.json"] = array.document
    is_plain = all(a.grid.piece_shape is None and not a.compressors for a in arrays)
    full = {"format": STORE_FORMAT if stacks else 1 if is_plain else 2, **about}
    attributes[OWN_KEY] = full
    root = group_document(attributes)
    told = [array.entry for array in stacks]
    return StoreLayout(list(directories), documents, root, arrays + stacks, told, entries, full)


def _stack_parts(
    stacks: list[PlannedArray], blobs: Mapping[str, EncodedBlob]
) -> dict[tuple[str, int], list[int]]:
    """Stack short arrays within blobs of which many are alike: name and number -> its place."""
    classes: dict[tuple[Any, ...], dict[tuple[str, int], ArrayPart]] = {}
    for name, blob in blobs.items():
        if blob.storage.compressors or blob.storage.chunks is not None:
            continue
        for i, part in enumerate(blob.parts):
            data = part.data
            if 0 < data.nbytes <= MOST_BYTES and data.flags.c_contiguous:
                parts = classes.setdefault((data.dtype, data.shape, part.order), {})
                parts[name, i] = part
    places: dict[tuple[str, int], list[int]] = {}
    for (dtype, _, order), parts in classes.items():
        if are_worth_stacking(dtype, len(parts)):
            arrays = {"/".join((name, *part.trail)): part.data for (name, _), part in parts.items()}
            places |= zip(parts, _stack(stacks, arrays, order), strict=True)
    return places


def _stack(
    stacks: list[PlannedArray],
    arrays: Mapping[str, np.ndarray[Any, Any]],
    order: tuple[int, ...] | None,
) -> Iterator[list[int]]:
    """Stack arrays that are alike, which are called so; which stack each is in, and which row."""
    names, members = list(arrays), list(arrays.values())
    spec = dtype_to_spec(members[0].dtype)
    for cut in cut_stacks(len(members), members[0].nbytes):
        rows = Rows(members[cut])
        grid = Grid(rows.shape, rows.shape, None, order and (0, *(axis + 1 for axis in order)))
        path = f"{STACKS}/{len(stacks)}"
        document = describe_array(spec, grid, "stack", names=names[cut])
        entry = _entry(path, spec, grid)
        stacks.append(PlannedArray("", path, rows, grid, (), entry, document, is_stack=True))
        yield from ([len(stacks) - 1, row] for row in range(len(names[cut])))


def _plan_array(blob: str, part: ArrayPart, path: str, storage: ArrayOptions) -> PlannedArray:
    data = part.data
    is_text = isinstance(data.dtype, np.dtypes.StringDType)
    if storage.chunks is not None:
        order = part.order or tuple(range(data.ndim))
        chunks = tuple(storage.chunks[axis] for axis in order)
        shards = storage.shards and tuple(storage.shards[axis] for axis in order)
        grid = Grid(data.shape, shards or chunks, chunks if shards else None, part.order)
    elif is_text:
        grid = plan_grid(data.shape, _mean_text_bytes(data), part.order, in_pieces=False)
    else:
        grid = plan_grid(data.shape, data.dtype.itemsize, part.order)
    compressors = suit_dtype(storage.compressors or (), 1 if is_text else data.dtype.itemsize)
    spec = dtype_to_spec(data.dtype)
    if isinstance(spec, str) and not compressors:
        document = describe_usual_array(spec, grid, part.holds)
    else:
        document = describe_array(spec, grid, part.holds, compressors)
    entry = _entry(path, spec, grid, compressors)
    return PlannedArray(blob, path, data, grid, compressors, entry, document)


def _entry(
    path: str, spec: Any, grid: Grid, compressors: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """What the manifest says of an array, but for its files."""
    return {
        "path": path,
        "dtype": spec,
        "shape": list(grid.shape),
        "order": list(grid.order) if grid.order else None,
        "chunk_shape": list(grid.chunk_shape),
        **({"piece_shape": list(grid.piece_shape)} if grid.piece_shape else {}),
        **({"compressors": compressors} if compressors else {}),
    }


def grid_of(entry: Mapping[str, Any]) -> Grid:
    """How the array of a manifest's entry is cut."""
    piece, order = entry.get("piece_shape"), entry["order"]
    return Grid(
        tuple(entry["shape"]),
        tuple(entry["chunk_shape"]),
        None if piece is None else tuple(piece),
        None if order is None else tuple(order),
    )


def resolve_rows(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with an entry for each array that is a row of a stack, like those of others.

    Such an entry also says where the row lies (``within``: the stack's file, its size, and where
    in it the row begins, in bytes).

    Raises
    ------
    LookupError, TypeError, ValueError, AttributeError
        It is no manifest that jobrunner writes.
    """
    stacks = manifest.get("stacks", ())
    if not stacks:
        return manifest
    told = [_row_entry(stack) for stack in stacks]

    def resolve(place: Any) -> dict[str, Any]:
        if isinstance(place, dict):
            return place
        number, row = place
        if number < 0 or row < 0:
            raise IndexError(f"no stack has a row {place}")
        path, size, nbytes, digests, about = told[number]
        entry = dict(about)
        entry["files"] = [[nbytes, digests[row]]]
        entry["within"] = (path, size, row * nbytes)
        return entry

    blobs = {
        name: {"value": entry["value"], "arrays": list(map(resolve, entry["arrays"]))}
        if isinstance(entry, dict)
        else {"value": LONE_ARRAY, "arrays": [resolve(entry)]}
        for name, entry in manifest["blobs"].items()
    }
    return {**manifest, "blobs": blobs}


def _row_entry(stack: Mapping[str, Any]) -> tuple[str, int, int, Sequence[int], dict[str, Any]]:
    """A stack's file, its size, that of a row, the rows' digests, and what is said of each row."""
    path, shape, order = stack["path"], stack["shape"], stack["order"]
    grid = grid_of(stack)
    (corner,) = grid.corners()
    ((size, _),) = stack["files"]
    about = {
        "path": path,
        "dtype": stack["dtype"],
        "shape": shape[1:],
        "order": order and [axis - 1 for axis in order[1:]],
        "chunk_shape": shape[1:],
    }
    return f"{path}/{grid.key(corner)}", size, size // shape[0], stack["rows"], about


def _mean_text_bytes(data: np.ndarray[Any, Any]) -> int:
    if not data.size:
        return 1
    return 4 + math.ceil(int(np.strings.str_len(data).sum()) / data.size)
