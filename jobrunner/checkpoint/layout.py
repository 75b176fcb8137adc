"""Where a store keeps what: Zarr documents, chunks and their names. Pure: no I/O.

A store is a Zarr v3 group. An array blob is an array in it; a container of arrays is a group;
whatever is small is an attribute of the store's group, for people and other readers: what
jobrunner loads, it takes from the manifest.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from jobrunner.checkpoint.compression import suit_dtype
from jobrunner.checkpoint.dtypes import dtype_from_spec, dtype_to_spec, zarr_data_type
from jobrunner.checkpoint.encoding import ArrayPart, EncodedBlob, child_names
from jobrunner.checkpoint.grid import Grid, plan_grid, to_logical
from jobrunner.storage import Storage

FORMAT = 1
"""Of log entries; readers refuse what is newer."""

STORE_FORMAT = 2
"""Newest of stores and manifests. A store is 1 where nothing in it is compressed or in pieces."""

MANIFEST = "_manifest/zarr.json"
"""A group's document, so that readers of Zarr find nothing strange in a store."""

ROOT_DOCUMENT = "zarr.json"
RETIRED_DOCUMENT = "zarr.retired.json"
_ENCODER = json.JSONEncoder(allow_nan=False, check_circular=False, separators=(",", ":"))
_INDEX_CODECS = [
    {"name": "bytes", "configuration": {"endian": "little"}},
    {"name": "crc32c"},
]
OWN_KEY = "/jobrunner"
"""Attribute that holds our own words; no blob can be called so."""


@dataclass(slots=True)
class PlannedArray:
    """An array part with its place in the store; the part may give way to a copy of it.

    Attributes
    ----------
    blob : str
        Name of the blob that it is of.
    is_sole : bool
        Nothing but its blob can reach its memory, so that it stays as it is while it is referred to.
    is_constant : bool
        No task changes its blob from one epoch to the next.
    is_unchanged : bool
        It is the very array of the store before, and nothing was given it to change.
    """

    blob: str
    path: str
    part: ArrayPart
    grid: Grid
    compressors: Sequence[dict[str, Any]]
    entry: dict[str, Any]
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
    blobs : dict
        The manifest's entry for each blob; its arrays' files are filled in while writing.
    about : dict
        What root and manifest say of the store: its format, node, epoch and run.
    """

    directories: list[str]
    documents: dict[str, bytes]
    root: bytes
    arrays: list[PlannedArray]
    blobs: dict[str, dict[str, Any]]
    about: dict[str, Any]


def lay_out(blobs: Mapping[str, EncodedBlob], about: Mapping[str, Any]) -> StoreLayout:
    """Decide where each part of each blob goes.

    Parameters
    ----------
    blobs : mapping of str to EncodedBlob
    about : mapping
        JSON for the root's own attribute: node, epoch, run.
    """
    directories: dict[str, None] = {os.path.dirname(MANIFEST): None}
    documents: dict[str, bytes] = {}
    attributes: dict[str, Any] = {OWN_KEY: {}}
    arrays: list[PlannedArray] = []
    entries: dict[str, dict[str, Any]] = {}
    for name, top in zip(blobs, child_names(blobs), strict=True):
        blob = blobs[name]
        planned = [
            _plan_array(name, part, "/".join((top, *part.trail)), blob.storage)
            for part in blob.parts
        ]
        for array in planned:
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
            documents[f"{array.path}/zarr.json"] = _array_document(array)
        if not planned:
            attributes[name] = blob.tree
        arrays += planned
        entries[name] = {"value": blob.tree, "arrays": [array.entry for array in planned]}
    is_plain = all(a.grid.piece_shape is None and not a.compressors for a in arrays)
    full = {"format": 1 if is_plain else STORE_FORMAT, **about}
    attributes[OWN_KEY] = full
    root = group_document(attributes)
    return StoreLayout(list(directories), documents, root, arrays, entries, full)


def _plan_array(blob: str, part: ArrayPart, path: str, storage: Storage) -> PlannedArray:
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
    entry = {
        "path": path,
        "dtype": dtype_to_spec(data.dtype),
        "shape": list(data.shape),
        "order": list(part.order) if part.order else None,
        "chunk_shape": list(grid.chunk_shape),
        **({"piece_shape": list(grid.piece_shape)} if grid.piece_shape else {}),
        **({"compressors": compressors} if compressors else {}),
    }
    return PlannedArray(blob, path, part, grid, compressors, entry)


def grid_of(entry: Mapping[str, Any]) -> Grid:
    """How the array of a manifest's entry is cut."""
    piece, order = entry.get("piece_shape"), entry["order"]
    return Grid(
        tuple(entry["shape"]),
        tuple(entry["chunk_shape"]),
        None if piece is None else tuple(piece),
        None if order is None else tuple(order),
    )


def _mean_text_bytes(data: np.ndarray[Any, Any]) -> int:
    if not data.size:
        return 1
    return 4 + math.ceil(int(np.strings.str_len(data).sum()) / data.size)


def _array_document(array: PlannedArray) -> bytes:
    spec, holds = array.entry["dtype"], array.part.holds
    if isinstance(spec, str) and not array.compressors:
        return _plain_document(spec, array.grid, holds)
    return _describe_array(spec, array.grid, holds, array.compressors)


def _describe_array(
    spec: Any, grid: Grid, holds: str, compressors: Sequence[dict[str, Any]] = ()
) -> bytes:
    dtype = dtype_from_spec(spec)
    codecs: list[dict[str, Any]] = []
    if grid.order:
        codecs.append({"name": "transpose", "configuration": {"order": list(grid.order)}})
    if isinstance(dtype, np.dtypes.StringDType):
        data_type: Any = "string"
        fill: Any = ""
        codecs.append({"name": "vlen-utf8"})
    else:
        data_type, fill, endian = zarr_data_type(dtype)
        configuration = {"configuration": {"endian": endian}} if endian else {}
        codecs.append({"name": "bytes", **configuration})
    codecs += compressors
    if grid.piece_shape is not None:
        shard = {
            "chunk_shape": to_logical(grid.piece_shape, grid.order),
            "codecs": codecs,
            "index_codecs": _INDEX_CODECS,
            "index_location": "end",
        }
        codecs = [{"name": "sharding_indexed", "configuration": shard}]
    return to_json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": to_logical(grid.shape, grid.order),
            "data_type": data_type,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": to_logical(grid.chunk_shape, grid.order)},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": fill,
            "codecs": codecs,
            "attributes": {OWN_KEY: {"holds": holds, "dtype": spec}},
            "storage_transformers": [],
        }
    )


_plain_document = lru_cache(maxsize=4096)(_describe_array)
"""The same, kept: the arrays of one epoch are those of the one before, and often alike."""


def group_document(attributes: Mapping[str, Any]) -> bytes:
    """The Zarr document of a group."""
    return to_json({"zarr_format": 3, "node_type": "group", "attributes": attributes})


_SEAL = b',"sha256":"%s"}}'


def seal(document: bytes) -> bytes:
    """The document of a group with its own digest as a last attribute."""
    return document[:-2] + _SEAL % hashlib.sha256(document).hexdigest().encode()


def is_sealed(document: bytes) -> bool:
    """Whether it is, to the last bit, what `seal` has made."""
    return document == seal(document[: -len(_SEAL % bytes(64))] + b"}}")


def to_json(document: object) -> bytes:
    """Strict JSON in ASCII, of what does not contain itself."""
    return _ENCODER.encode(document).encode()
