"""Open an array of a store by Zarr, with the dtype that was saved. Imports Zarr.

A stranger may have written the store, so Zarr gets neither its documents nor its files: the array is
described anew, as chunks that are not compressed, each of which is read, verified and decompressed
here. Where Zarr-Python has the dtype itself (dates, texts, records), the description says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import zarr
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.dtype import data_type_registry

from jobrunner.checkpoint.encoding import CoreType, core_type
from jobrunner.checkpoint.store.array_document import describe_array
from jobrunner.checkpoint.store.array_reader import ArrayReader, RowReader
from jobrunner.names import ROOT_DOCUMENT


class VerifyingStore(Store):
    """One array, read-only: its description, and its chunks, verified when they are read."""

    supports_writes = False
    supports_deletes = False
    supports_listing = False

    def __init__(self, reader: ArrayReader, path: str, document: bytes) -> None:
        super().__init__(read_only=True)
        self._reader = reader
        self._path = path
        self._document = document

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """The description, or a chunk."""
        name, *places = key.split(".")  # of a chunk, "c.0.2"
        if key == ROOT_DOCUMENT:
            data = self._document
        elif name == "c":
            data = await asyncio.to_thread(self._reader.read_chunk, list(map(int, places)))
        else:
            return None
        return prototype.buffer.from_bytes(_cut(data, byte_range))

    async def get_partial_values(
        self,
        prototype: BufferPrototype,
        key_ranges: Iterable[tuple[str, ByteRequest | None]],
    ) -> list[Buffer | None]:
        """Parts of chunks, each of which is verified as a whole."""
        return [await self.get(key, prototype, part) for key, part in key_ranges]

    async def exists(self, key: str) -> bool:
        """Whether there is such a chunk."""
        return key == ROOT_DOCUMENT or key.startswith("c")

    async def set(self, key: str, value: Buffer) -> None:
        """Refused."""
        raise PermissionError(f"{self._path} is part of a checkpoint, and read-only.")

    async def delete(self, key: str) -> None:
        """Refused."""
        raise PermissionError(f"{self._path} is part of a checkpoint, and read-only.")

    async def list(self) -> AsyncIterator[str]:
        """Only the description: chunks have to be asked for."""
        yield ROOT_DOCUMENT

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Only the description."""
        yield ROOT_DOCUMENT

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Only the description."""
        yield ROOT_DOCUMENT

    def __eq__(self, store: object) -> bool:
        return isinstance(store, VerifyingStore) and self._path == store._path

    def __str__(self) -> str:
        return self._path


def _cut(data: bytes, part: ByteRequest | None) -> bytes:
    match part:
        case None:
            return data
        case RangeByteRequest(start, end):
            return data[start:end]
        case OffsetByteRequest(offset):
            return data[offset:]
        case SuffixByteRequest(suffix):
            return data[-suffix:]


def open_array(reader: ArrayReader, path: str) -> Any:
    """Open an array as a `zarr.Array`; `path` is for users to see."""
    dtype = reader.dtype
    # On disk, a text is code points along one more axis, and a date a number: what every reader knows.
    # Zarr-Python knows more, so it gets an array without that axis, of a type of its own.
    core = core_type(dtype)
    has_own_type = bool(core.length) or dtype.kind in "mM"
    if has_own_type:
        core = _own_type(dtype)
    grid = replace(reader.grid, item_axis=False)
    document = msgspec.json.decode(describe_array(dtype, grid, "ndarray", core=core))
    if not isinstance(reader, RowReader):
        stored = reader.array.document
        document["dimension_names"] = stored.dimension_names[: len(reader.shape)]
        if not has_own_type:  # or they would tell how numbers are to be read
            document["attributes"] = {**stored.attributes, **document["attributes"]}
    store = VerifyingStore(reader, path, msgspec.json.encode(document))
    return zarr.open_array(store, mode="r", zarr_format=3)


def _own_type(dtype: Any) -> CoreType:
    """Return Zarr-Python's data type for a dtype, or raw bytes, which NumPy can view as it."""
    codec: dict[str, Any] = {"name": "bytes"}
    try:
        kind = data_type_registry.match_dtype(dtype)
        name: Any = kind.to_json(zarr_format=3)
        native = data_type_registry.match_json(name, zarr_format=3).to_native_dtype()
        if dtype.names is not None and native != dtype:
            raise ValueError("it lacks byte order or gaps")
        if dtype.str[0] in "<>":
            codec["configuration"] = {"endian": "big" if dtype.str[0] == ">" else "little"}
    except (TypeError, ValueError):
        kind = data_type_registry.match_dtype(np.dtype((np.void, dtype.itemsize)))
        name = kind.to_json(zarr_format=3)
    fill = kind.to_json_scalar(kind.default_scalar(), zarr_format=3)
    if dtype.kind in "mM":
        fill = "NaT"  # Zarr-Python does not read some of the numbers that it writes
    return CoreType(name, fill, codec, 0, {})
