"""Open an array of a store by Zarr, with the dtype that was saved. Imports Zarr.

A stranger may have written the store, so Zarr gets neither its documents nor its files: the array is
described anew from the manifest, as chunks that are not compressed, each of which is read, verified
and decompressed here. Where Zarr-Python has the dtype itself (dates, texts, records), the description
says so.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import zarr
from zarr.abc.store import ByteRequest
from zarr.buffer import cpu
from zarr.dtype import data_type_registry

from jobrunner.checkpoint.encoding import CoreType, core_type
from jobrunner.checkpoint.store.array_reader import StoredArray
from jobrunner.checkpoint.store.grid import to_logical
from jobrunner.checkpoint.store.layout import describe_array
from jobrunner.checkpoint.store.manifest import ROOT_DOCUMENT, ArrayEntry


class Labels(msgspec.Struct):
    """What the document of an array tells users."""

    attributes: dict[str, Any]
    dimension_names: list[str | None]


class LazyArray(zarr.Array):  # type: ignore[type-arg]  # Zarr 3.1.1 takes none
    """A Zarr array of a store, whose chunks are verified when they are read."""

    @property
    def shards(self) -> tuple[int, ...] | None:
        """The shape of a file, if it has several chunks."""
        shards: tuple[int, ...] | None = self.store.shards  # type: ignore[attr-defined]
        return shards


def open_array(
    stored: StoredArray, entry: ArrayEntry, path: str, labels: Labels | None
) -> LazyArray:
    """Open an array at `path`, which is for users to see."""
    grid = entry.grid
    shards = None if grid.piece_shape is None else tuple(to_logical(grid.chunk_shape, grid.order))
    grid = replace(grid, chunk_shape=grid.stored_shape, piece_shape=None, item_axis=False)
    core = core_type(stored.dtype)
    is_own = bool(core.length) or stored.dtype.kind in "mM"
    own = _own_type(stored.dtype) if is_own else core
    document = json.loads(describe_array(entry.dtype, grid, "ndarray", core=own))
    if labels is not None:
        document["dimension_names"] = labels.dimension_names[: len(grid.shape)]
        if not is_own:  # or they would tell how numbers are to be read
            document["attributes"] = labels.attributes
    chunks = _Chunks(stored, path, json.dumps(document).encode(), shards)
    opened = zarr.open_array(chunks, mode="r", zarr_format=3)
    # Public as `async_array` in later versions of Zarr; 3.1 has no other name for it.
    return LazyArray(opened._async_array)


class _Chunks(zarr.storage.WrapperStore[zarr.storage.MemoryStore]):
    """The document of an array, and its chunks, read when they are asked for."""

    def __init__(
        self, stored: StoredArray, path: str, document: bytes, shards: Sequence[int] | None
    ) -> None:
        super().__init__(_hold(ROOT_DOCUMENT, document))
        self.shards = shards
        self._about = (stored, path, document, shards)

    def with_read_only(self, read_only: bool = False) -> _Chunks:
        return self

    async def get(self, key: str, prototype: Any, byte_range: ByteRequest | None = None) -> Any:
        held = self._store
        prefix, *at = key.split(".")
        if prefix == "c":
            stored, *_ = self._about
            held = _hold(key, await asyncio.to_thread(stored.read_piece, tuple(map(int, at))))
        return await held.get(key, prototype, byte_range)

    def __reduce__(self) -> Any:
        return _Chunks, self._about

    def __str__(self) -> str:
        return self._about[1]


def _hold(name: str, data: bytes) -> zarr.storage.MemoryStore:
    buffer: Any = cpu.Buffer.from_bytes(data)
    return zarr.storage.MemoryStore({name: buffer}, read_only=True)


def _own_type(dtype: Any) -> CoreType:
    """Return Zarr-Python's data type for a dtype, or raw bytes, which NumPy can view as it."""
    codec: dict[str, Any] = {"name": "bytes"}
    try:
        found = data_type_registry.match_dtype(dtype)
        name: Any = found.to_json(zarr_format=3)
        again = data_type_registry.match_json(name, zarr_format=3).to_native_dtype()
        if dtype.names is not None and again != dtype:
            raise ValueError("it lacks byte order or gaps")
        if dtype.str[0] in "<>":
            codec["configuration"] = {"endian": "big" if dtype.str[0] == ">" else "little"}
    except (TypeError, ValueError):
        found = data_type_registry.match_dtype(np.dtype((np.void, dtype.itemsize)))
        name = found.to_json(zarr_format=3)
    fill = found.to_json_scalar(found.default_scalar(), zarr_format=3)
    if dtype.kind in "mM":
        fill = "NaT"  # Zarr-Python does not read some of the numbers that it writes
    return CoreType(name, fill, codec, 0, {})
