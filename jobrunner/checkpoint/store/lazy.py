"""Open an array of a store by Zarr, with the dtype that was saved. Imports Zarr.

A store has only data types that every reader knows. Where Zarr-Python has the dtype itself (dates,
texts, records), the array is opened by another document, which says so, over the same chunks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import zarr
from zarr.abc.store import ByteRequest, Store
from zarr.buffer import cpu
from zarr.dtype import data_type_registry

from jobrunner.checkpoint.encoding import CoreType, core_type, dtype_from_spec
from jobrunner.checkpoint.store.layout import describe_array
from jobrunner.checkpoint.store.manifest import ROOT_DOCUMENT, ArrayEntry


def open_array(entry: ArrayEntry, store: Any, path: str) -> Any:
    """Open the array at `path` of an obstore `store`, or of the file system if that is None."""
    files: Store
    files = zarr.storage.LocalStore(path) if store is None else zarr.storage.ObjectStore(store)
    inside = "" if store is None else path
    document = _describe(entry)
    if document is not None:
        files = _Described(files, document, ".0" if entry.item_axis else "")
    return zarr.open_array(files, path=inside, mode="r", zarr_format=3)


def open_row(entry: ArrayEntry, data: bytes) -> Any:
    """Open an array in memory, which is all in one chunk."""
    grid = replace(entry.grid, item_axis=False)
    document = _describe(entry) or describe_array(entry.dtype, grid, "ndarray")
    files = {ROOT_DOCUMENT: document, grid.key((0,) * len(entry.shape)): data}
    buffers: dict[str, Any] = {name: cpu.Buffer.from_bytes(it) for name, it in files.items()}
    store = zarr.storage.MemoryStore(buffers, read_only=True)
    return zarr.open_array(store, mode="r", zarr_format=3)


class _Described(zarr.storage.WrapperStore[Store]):
    """The files of an array, with another document, and with `suffix` after the names of chunks."""

    def __init__(self, store: Store, document: bytes, suffix: str) -> None:
        super().__init__(store)
        self._document, self._suffix = document, suffix

    def with_read_only(self, read_only: bool = False) -> _Described:
        return _Described(self._store.with_read_only(read_only), self._document, self._suffix)

    async def get(self, key: str, prototype: Any, byte_range: ByteRequest | None = None) -> Any:
        if key.endswith(ROOT_DOCUMENT):
            return prototype.buffer.from_bytes(self._document)
        return await super().get(key + self._suffix, prototype, byte_range)


def _describe(entry: ArrayEntry) -> bytes | None:
    """Return the document that Zarr-Python would write; None if it is the one in the store."""
    dtype = dtype_from_spec(entry.dtype)
    core = core_type(dtype)
    if not core.length and dtype.kind not in "mM":
        return None
    grid = replace(entry.grid, item_axis=False)
    compressors = msgspec.to_builtins(entry.compressors)
    return describe_array(entry.dtype, grid, "ndarray", compressors, core=_own_type(dtype))


def _own_type(dtype: np.dtype[Any]) -> CoreType:
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
