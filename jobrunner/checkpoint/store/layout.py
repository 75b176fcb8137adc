"""Plan the files of a store: Zarr documents, chunks and their names. Pure: no I/O.

A store is a Zarr v3 group. In it, a blob that is an array is an array, and a container of arrays is
a group; many short arrays that are alike are rows of one array. Small values are attributes of the
store's group, for people and other readers: jobrunner itself loads them from the manifest.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from json.encoder import encode_basestring_ascii
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding import (
    Array,
    ArrayPart,
    CoreType,
    EncodedBlob,
    Spec,
    core_type,
    dtype_from_spec,
    dtype_to_spec,
)
from jobrunner.checkpoint.store.chunk_bytes import TEXT_BYTES
from jobrunner.checkpoint.store.compression import suit_dtype
from jobrunner.checkpoint.store.grid import Grid, plan_grid, to_logical
from jobrunner.checkpoint.store.manifest import MANIFEST
from jobrunner.checkpoint.store.stacks import LEAST_ALIKE, Alike, Rows, cut_stacks, group_alike
from jobrunner.define import DEFAULT_ARRAY_OPTIONS, ArrayOptions
from jobrunner.names import child_names, escape

RETIRED_DOCUMENT = "zarr.retired.json"

STACKS = "_stacks"
"""The group of stacked arrays; no blob can have this name."""

OWN_KEY = "/jobrunner"
"""The attribute for jobrunner's own metadata; no blob can have this name."""

_MARK = f"JSON text {secrets.token_hex(16)}."  # in a document until the text is put in
_INDEX_CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
_CONSOLIDATED = (
    b'%s,"consolidated_metadata":{"kind":"inline","must_understand":false,"metadata":{%s}}}'
)
_SEAL = b',"sha256":"%s"}}'


@dataclass(slots=True)
class PlannedArray:
    """An array and its place in the store; a copy may replace its data until it is written."""

    blob: str  # empty for a stack, which holds arrays of many blobs, one a row
    path: str
    data: Array | Rows  # axes in memory order, outermost first
    grid: Grid
    compressors: Sequence[dict[str, Any]]
    entry: dict[str, Any]  # in the manifest; the files are added when they are written
    document: bytes
    is_stack: bool = False
    is_at_rest: bool = False
    """It lies in a blob, and does not change as long as this object refers to it."""
    is_unchanged: bool = False
    """It is the array of the store before, and no task has updated its blob since."""


@dataclass(slots=True)
class StoreLayout:
    """All files of a store except the manifest."""

    directories: dict[str, None] = field(  # within the store, parents first
        default_factory=lambda: dict.fromkeys([os.path.dirname(MANIFEST)])
    )
    documents: dict[str, bytes] = field(default_factory=dict)  # by path, except the root's
    root: bytes = b""
    arrays: list[PlannedArray] = field(default_factory=list)  # stacks come last
    blobs: dict[str, Any] = field(default_factory=dict)  # their entries in the manifest
    about: dict[str, Any] = field(default_factory=dict)
    """What root document and manifest say of the store: format, node, epoch and run."""

    def add_group(self, path: str, attributes: Mapping[str, Any]) -> None:
        """Add a group, if there is none yet."""
        if path not in self.directories:
            self.directories[path] = None
            self.documents[f"{path}/zarr.json"] = group_document(attributes)

    def add_array(self, array: PlannedArray) -> None:
        """Add an array; add its groups first."""
        self.directories[array.path] = None
        self.documents[f"{array.path}/zarr.json"] = array.document
        self.arrays.append(array)


def lay_out(blobs: Mapping[str, EncodedBlob | Alike], about: Mapping[str, Any]) -> StoreLayout:
    """Plan a store; `about` is its node, epoch, run, and more for the manifest, as JSON."""
    layout = StoreLayout(blobs=dict.fromkeys(blobs))  # in the order of the blobs
    alone = {name: blob for name, blob in blobs.items() if isinstance(blob, EncodedBlob)}
    stacks: list[PlannedArray] = []
    if len(alone) < len(blobs):
        for alike in {id(it): it for it in blobs.values() if isinstance(it, Alike)}.values():
            layout.blobs |= zip(alike.arrays, _stack(stacks, alike.arrays, None), strict=True)
    rows: dict[tuple[str, int], list[int]] = {}
    if sum(len(blob.parts) for blob in alone.values()) >= LEAST_ALIKE:
        rows = _stack_parts(stacks, alone)
    attributes: dict[str, Any] = {OWN_KEY: None}
    for name, top in zip(alone, child_names(alone), strict=True):
        _lay_out_blob(layout, attributes, name, top, alone[name], rows)
    if stacks:
        layout.add_group(STACKS, {})
    for array in stacks:
        layout.add_array(array)
    is_partial = isinstance(about["epoch"], str)
    version = _format(layout.arrays, alone.values())
    layout.about = {"format": max(version, 5 if is_partial else 1), **about}
    attributes[OWN_KEY] = layout.about
    layout.root = _root_document(attributes, layout.documents)
    return layout


def _format(arrays: Sequence[PlannedArray], blobs: Iterable[EncodedBlob]) -> int:
    """Return the oldest format that has all that these arrays and blobs need."""
    needed = [blob.format for blob in blobs]
    if any(it.grid.item_axis or it.data.dtype.isbuiltin == 2 for it in arrays):
        needed.append(4)
    if any(it.is_stack for it in arrays):
        needed.append(3)
    if any(it.grid.piece_shape is not None or it.compressors for it in arrays):
        needed.append(2)
    return max(needed, default=1)


def _lay_out_blob(
    layout: StoreLayout,
    attributes: dict[str, Any],
    name: str,
    top: str,
    blob: EncodedBlob,
    rows: Mapping[tuple[str, int], list[int]],
) -> None:
    """Add a blob's arrays but those in `rows`; its tree becomes an attribute of their group."""
    places: list[Any] = []
    for i, part in enumerate(blob.parts):
        if (name, i) in rows:
            places.append(rows[name, i])
            continue
        array = _plan_array(name, part, "/".join((top, *part.trail)), blob.options)
        for depth in range(len(part.trail)):
            group = "/".join((top, *part.trail[:depth]))
            layout.add_group(group, {} if depth else {OWN_KEY: {"value": blob.tree}})
        layout.add_array(array)
        places.append(array.entry)
    is_array = bool(blob.parts) and not blob.parts[0].trail
    if not is_array and all(isinstance(place, list) for place in places):
        attributes[name] = blob.tree
    layout.blobs[name] = {"value": blob.tree, "arrays": places}


def _stack_parts(
    stacks: list[PlannedArray], blobs: Mapping[str, EncodedBlob]
) -> dict[tuple[str, int], list[int]]:
    """Stack short arrays of which many are alike; return each one's place, by blob and index."""
    parts = (
        ((name, i), part.data, part.order)
        for name, blob in blobs.items()
        if not blob.options.compressors
        if blob.options.chunks is None and blob.options.dims is None
        for i, part in enumerate(blob.parts)
    )
    places: dict[tuple[str, int], list[int]] = {}
    for alike, order in group_alike(parts):
        arrays = {
            "/".join((name, *blobs[name].parts[i].trail)): data for (name, i), data in alike.items()
        }
        places |= zip(alike, _stack(stacks, arrays, order), strict=True)
    return places


def _stack(
    stacks: list[PlannedArray], arrays: Mapping[str, Array], order: tuple[int, ...] | None
) -> Iterator[list[int]]:
    """Stack arrays that are alike; yield the indices of each one's stack and row."""
    names, members = list(arrays), list(arrays.values())
    for cut in cut_stacks(len(members), members[0].nbytes):
        rows = Rows(members[cut])
        grid = Grid(rows.shape, rows.shape, None, order and (0, *(axis + 1 for axis in order)))
        number = len(stacks)
        stacks.append(_plan("", f"{STACKS}/{number}", rows, grid, "stack", names=names[cut]))
        yield from ([number, row] for row in range(rows.shape[0]))


def _plan_array(blob: str, part: ArrayPart, path: str, options: ArrayOptions) -> PlannedArray:
    data = part.data
    is_text = isinstance(data.dtype, np.dtypes.StringDType)
    item_bytes = 1 if is_text else data.dtype.itemsize
    if options.chunks is not None:
        order = part.order or tuple(range(data.ndim))
        chunks = tuple(options.chunks[axis] for axis in order)
        shards = options.shards and tuple(options.shards[axis] for axis in order)
        grid = Grid(data.shape, shards or chunks, chunks if shards else None, part.order)
    elif is_text:
        characters = int(np.strings.str_len(data).sum())
        mean_bytes = 4 + math.ceil(characters / data.size) if data.size else 1
        grid = plan_grid(data.shape, mean_bytes, part.order, in_pieces=False)
    else:
        grid = plan_grid(data.shape, item_bytes, part.order)
    compressors = suit_dtype(options.compressors, item_bytes) if options.compressors else ()
    if compressors and is_text and _most_text_bytes(data, grid) > TEXT_BYTES:
        compressors = ()  # no reader would know a bomb from it
    return _plan(blob, path, data, grid, part.holds, compressors, options=options)


def _most_text_bytes(data: Array, grid: Grid) -> int:
    """Return an upper bound of the bytes of a file's texts."""
    nbytes = 4 + 4 * np.strings.str_len(data)  # a character has at most four
    if int(nbytes.sum()) <= TEXT_BYTES:
        return 0
    return max(int(nbytes[grid.part(corner)].sum()) for corner in grid.corners())


def _plan(
    blob: str,
    path: str,
    data: Array | Rows,
    grid: Grid,
    holds: str,
    compressors: Sequence[dict[str, Any]] = (),
    names: Sequence[str] = (),
    options: ArrayOptions = DEFAULT_ARRAY_OPTIONS,
) -> PlannedArray:
    spec = data.dtype.str if data.dtype.isbuiltin == 1 else dtype_to_spec(data.dtype)
    if core_type(data.dtype).length:
        grid = replace(grid, item_axis=True)
    if isinstance(spec, str) and not compressors and not names and options.dims is None:
        document = _describe_usual_array(spec, grid, holds)
    else:
        document = describe_array(spec, grid, holds, compressors, names, options=options)
    entry = {  # what `manifest.ArrayEntry` reads, without the files
        "path": path,
        "dtype": spec,
        "shape": list(grid.shape),
        "order": list(grid.order) if grid.order else None,
        **({"item_axis": True} if grid.item_axis else {}),
        "chunk_shape": list(grid.chunk_shape),
        **({"piece_shape": list(grid.piece_shape)} if grid.piece_shape else {}),
        **({"compressors": compressors} if compressors else {}),
    }
    return PlannedArray(blob, path, data, grid, compressors, entry, document, bool(names))


# --- Zarr documents


def describe_array(
    spec: Spec,
    grid: Grid,
    holds: str,
    compressors: Sequence[dict[str, Any]] = (),
    names: Sequence[str] = (),
    core: CoreType | None = None,
    options: ArrayOptions = DEFAULT_ARRAY_OPTIONS,
) -> bytes:
    """Return the Zarr document of an array; `names` are those of its rows, if it is a stack.

    `core` is another data type than the one of Zarr's core; `options` are for other readers only.
    """
    core = core or core_type(dtype_from_spec(spec))
    item = [core.length] if grid.item_axis else []
    codecs: list[dict[str, Any]] = []
    if grid.order:
        order = [*grid.order, *range(len(grid.order), len(grid.order) + len(item))]
        codecs.append({"name": "transpose", "configuration": {"order": order}})
    codecs += [core.codec, *compressors]
    if grid.piece_shape is not None:
        shard = {
            "chunk_shape": [*to_logical(grid.piece_shape, grid.order), *item],
            "codecs": codecs,
            "index_codecs": _INDEX_CODECS,
            "index_location": "end",
        }
        codecs = [{"name": "sharding_indexed", "configuration": shard}]
    chunk_shape = [*to_logical(grid.chunk_shape, grid.order), *item]
    shape = [*to_logical(grid.shape, grid.order), *item]
    return to_json(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape,
            "data_type": core.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "fill_value": core.fill,
            "codecs": codecs,
            "attributes": {
                **({"names": names} if names else {}),
                **core.attributes,
                **(
                    {"coordinates": " ".join(map(escape, options.coords))} if options.coords else {}
                ),
                OWN_KEY: {"holds": holds, "dtype": spec},
            },
            "dimension_names": _name_dimensions(shape, options.dims or ()),
            "storage_transformers": [],
        }
    )


def _name_dimensions(shape: Sequence[int], given: Sequence[str]) -> list[str]:
    """Name the axes that no name is given by their lengths, so that arrays of one group fit together.

    No array has such a name, which would make it the coordinate of the axis.
    """
    names = list(given)
    for length in shape[len(names) :]:
        same = sum(other == length for other in shape[len(given) : len(names)])
        names.append(f"_dim_{length}_{same}" if same else f"_dim_{length}")
    return names


_describe_usual_array = lru_cache(maxsize=4096)(describe_array)
"""`describe_array`, cached: the arrays of an epoch are often those of the one before."""


def group_document(attributes: Mapping[str, Any]) -> bytes:
    """Return the Zarr document of a group."""
    return to_json({"zarr_format": 3, "node_type": "group", "attributes": attributes})


def _root_document(attributes: Mapping[str, Any], documents: Mapping[str, bytes]) -> bytes:
    """Return the document of the root, with those of all groups and arrays for other readers."""
    parts = (
        b"%s:%s" % (encode_basestring_ascii(os.path.dirname(path)).encode(), document)
        for path, document in documents.items()
    )
    return _CONSOLIDATED % (group_document(attributes)[:-1], b",".join(parts))


def seal(document: bytes) -> bytes:
    """Add its SHA-256 to the document of a group, as the last attribute."""
    return document[:-2] + _SEAL % hashlib.sha256(document).hexdigest().encode()


def is_sealed(document: bytes) -> bool:
    """Whether a document is exactly what `seal` returned."""
    return document == seal(document[: -len(_SEAL % bytes(64))] + b"}}")


@dataclass(frozen=True, slots=True)
class JsonText:
    """A part of a document that is encoded already."""

    text: bytes


def to_json(document: object) -> bytes:
    """Encode as strict JSON in ASCII."""
    parts: list[JsonText] = []

    def mark(part: object) -> str:
        if not isinstance(part, JsonText):
            raise TypeError(f"{type(part).__name__} is not JSON")
        parts.append(part)
        return f"{_MARK}{len(parts) - 1}."

    encoder = json.JSONEncoder(
        allow_nan=False, check_circular=False, separators=(",", ":"), default=mark
    )
    text = encoder.encode(document).encode()
    for i, part in enumerate(parts):
        text = text.replace(f'"{_MARK}{i}."'.encode(), part.text, 1)
    return text
