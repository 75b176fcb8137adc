"""Where a store keeps what: Zarr documents, chunks and their names. Pure: no I/O.

A store is a Zarr v3 group. An array blob is an array in it; a container of arrays is a group;
whatever is small is an attribute of the store's group, for people and other readers: what
jobrunner loads, it takes from the manifest.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jobrunner.checkpoint.dtypes import dtype_to_spec, zarr_data_type
from jobrunner.checkpoint.encoding import ArrayPart, EncodedBlob, child_names

FORMAT = 1
"""Of stores, manifests and log entries; readers refuse what is newer."""

MANIFEST = "_manifest/zarr.json"
"""A group's document, so that readers of Zarr find nothing strange in a store."""

ROOT_DOCUMENT = "zarr.json"
RETIRED_DOCUMENT = "zarr.retired.json"
CHUNK_BYTES = 64 << 20
OWN_KEY = "/jobrunner"
"""Attribute that holds our own words; no blob can be called so."""

_PADDING_SHARE = 1 / 16


@dataclass(frozen=True, slots=True)
class Chunk:
    """One file of an array.

    Attributes
    ----------
    path : str
        Within the store, with ``/``.
    index : tuple of slice
        Which part of `ArrayPart.data` it holds, contiguous when the data is.
    padding_bytes : int
        What follows to make all chunks one size, as Zarr wants it.
    """

    path: str
    index: tuple[slice, ...]
    padding_bytes: int


@dataclass(slots=True)
class PlannedArray:
    """An array part with its place in the store; the part may give way to a copy of it."""

    path: str
    part: ArrayPart
    chunk_shape: tuple[int, ...]
    entry: dict[str, Any]

    def chunks(self) -> Iterator[Chunk]:
        """All chunks, in the order in which they lie in memory."""
        itemsize = self.part.data.dtype.itemsize
        for corner in chunk_corners(self.part.data.shape, self.chunk_shape):
            index = tuple(
                slice(start * size, min((start + 1) * size, length))
                for start, size, length in zip(
                    corner, self.chunk_shape, self.part.data.shape, strict=True
                )
            )
            items = math.prod(part.stop - part.start for part in index)
            padding = (math.prod(self.chunk_shape) - items) * itemsize
            yield Chunk(f"{self.path}/{chunk_key(corner, self.part.order)}", index, padding)


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
    """

    directories: list[str]
    documents: dict[str, bytes]
    root: bytes
    arrays: list[PlannedArray]
    blobs: dict[str, dict[str, Any]]


def lay_out(blobs: Mapping[str, EncodedBlob], about: Mapping[str, Any]) -> StoreLayout:
    """Decide where each part of each blob goes.

    Parameters
    ----------
    blobs : mapping of str to EncodedBlob
    about : mapping
        JSON for the root's own attribute: format, node, epoch, run.
    """
    directories: dict[str, None] = {os.path.dirname(MANIFEST): None}
    documents: dict[str, bytes] = {}
    attributes: dict[str, Any] = {OWN_KEY: dict(about)}
    arrays: list[PlannedArray] = []
    entries: dict[str, dict[str, Any]] = {}
    for name, top in zip(blobs, child_names(blobs), strict=True):
        blob = blobs[name]
        planned = [_plan_array(part, "/".join((top, *part.trail))) for part in blob.parts]
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
    return StoreLayout(list(directories), documents, group_document(attributes), arrays, entries)


def _plan_array(part: ArrayPart, path: str) -> PlannedArray:
    data = part.data
    if isinstance(data.dtype, np.dtypes.StringDType):
        chunk_shape = plan_chunks(data.shape, _mean_text_bytes(data))
    else:
        chunk_shape = plan_chunks(data.shape, data.dtype.itemsize)
    entry = {
        "path": path,
        "dtype": dtype_to_spec(data.dtype),
        "shape": list(data.shape),
        "order": list(part.order) if part.order else None,
        "chunk_shape": list(chunk_shape),
    }
    return PlannedArray(path, part, chunk_shape, entry)


def _mean_text_bytes(data: np.ndarray[Any, Any]) -> int:
    if not data.size:
        return 1
    return 4 + math.ceil(int(np.strings.str_len(data).sum()) / data.size)


def plan_chunks(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Chunk shape of at most 64 MiB whose every chunk is contiguous in a C-ordered array.

    Parameters
    ----------
    shape : sequence of int
    itemsize : int
        In bytes.
    """
    for axis, length in enumerate(shape):
        row_bytes = itemsize * math.prod(shape[axis + 1 :])
        if length * row_bytes <= CHUNK_BYTES:
            break
        if row_bytes <= CHUNK_BYTES:
            rest = (max(1, size) for size in shape[axis + 1 :])
            return (*(1,) * axis, _choose_rows(length, CHUNK_BYTES // row_bytes), *rest)
    else:
        return (1,) * len(shape)
    return tuple(max(1, length) for length in shape)


def _choose_rows(length: int, most: int) -> int:
    """Rows a chunk, at most `most`, so that little of the last chunk is padding."""
    fewest = math.ceil(length / most)
    candidates = []
    for count in range(fewest, 2 * fewest + 1):
        rows = math.ceil(length / count)
        padding = rows * math.ceil(length / rows) - length
        if padding <= length * _PADDING_SHARE:
            return rows
        candidates.append((padding, rows))
    return min(candidates)[1]


def chunk_corners(shape: Sequence[int], chunk_shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Grid coordinates of all chunks; none where the array has no items."""
    counts = (math.ceil(length / size) for length, size in zip(shape, chunk_shape, strict=True))
    return itertools.product(*map(range, counts))


def chunk_key(corner: Sequence[int], order: Sequence[int] | None) -> str:
    """File name of the chunk at `corner`, whose axes are those of memory."""
    if order:
        logical = [0] * len(order)
        for axis, position in zip(order, corner, strict=True):
            logical[axis] = position
        corner = logical
    return ".".join(("c", *map(str, corner)))


def _array_document(array: PlannedArray) -> bytes:
    data, order = array.part.data, array.part.order
    codecs: list[dict[str, Any]] = []
    if order:
        codecs.append({"name": "transpose", "configuration": {"order": list(order)}})
    if isinstance(data.dtype, np.dtypes.StringDType):
        data_type: Any = "string"
        fill: Any = ""
        codecs.append({"name": "vlen-utf8"})
    else:
        data_type, fill, endian = zarr_data_type(data.dtype)
        configuration = {"configuration": {"endian": endian}} if endian else {}
        codecs.append({"name": "bytes", **configuration})
    return to_json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": _logical(data.shape, order),
            "data_type": data_type,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": _logical(array.chunk_shape, order)},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": fill,
            "codecs": codecs,
            "attributes": {OWN_KEY: {"holds": array.part.holds, "dtype": array.entry["dtype"]}},
            "storage_transformers": [],
        }
    )


def _logical(shape: Sequence[int], order: Sequence[int] | None) -> list[int]:
    """A shape whose axes are those of memory, in the array's own order."""
    if not order:
        return list(shape)
    logical = [0] * len(order)
    for axis, length in zip(order, shape, strict=True):
        logical[axis] = length
    return logical


def group_document(attributes: Mapping[str, Any]) -> bytes:
    """The Zarr document of a group."""
    return to_json({"zarr_format": 3, "node_type": "group", "attributes": attributes})


def to_json(document: object) -> bytes:
    """Strict JSON in ASCII."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode()


# --- texts


def encode_texts(data: np.ndarray[Any, Any], count: int) -> bytes:
    """Texts in the form of Zarr's ``vlen-utf8``, empty ones added up to `count`."""
    texts = [text.encode() for text in data.ravel().tolist()]
    pieces = [count.to_bytes(4, "little")]
    for text in texts:
        pieces += (len(text).to_bytes(4, "little"), text)
    pieces.append(bytes(4 * (count - len(texts))))
    return b"".join(pieces)


def decode_texts(data: bytes) -> list[str]:
    """The texts that `encode_texts` wrote, the added ones included."""
    texts = []
    position = 4
    for _ in range(int.from_bytes(data[:4], "little")):
        start = position + 4
        position = start + int.from_bytes(data[position:start], "little")
        texts.append(data[start:position].decode())
    return texts
