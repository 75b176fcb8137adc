"""Histories as Dask arrays, read from the directory, also while a run appends to them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jobrunner.checkpoint.directory import Directory, EpochRecord
from jobrunner.checkpoint.load_plan import store_readers
from jobrunner.checkpoint.store import HistoryReader
from jobrunner.errors import BlobNotFoundError, DefinitionError
from jobrunner.texts import listed

_CHUNK_BYTES = 32 << 20
"""Of a Dask array. A chunk has the rows of several nodes, or part of the rows of one."""


@dataclass(frozen=True, slots=True)
class _ReadRows:
    """Reads the same rows of several nodes."""

    readers: Sequence[HistoryReader]
    start: int
    stop: int

    def __call__(self) -> np.ndarray[Any, Any]:
        first = self.readers[0]
        shape = len(self.readers), self.stop - self.start, *first.mark.shape
        rows = np.empty(shape, first.dtype)
        for i, reader in enumerate(self.readers):
            rows[i] = reader.read_rows(self.start, self.stop)
        return rows


def open_history(
    directory: Directory, record: EpochRecord, blob: str, nodes: Collection[str] | None
) -> Any:
    """See `MultiNodeCheckpointManager.history_of`."""
    import dask.array as da
    from dask.base import tokenize
    from dask.delayed import delayed

    readers = _find_readers(directory, record, blob, nodes)
    first = next(iter(readers.values()))
    mark = first.mark
    for node, reader in readers.items():
        if (reader.mark.dtype, reader.mark.shape) != (mark.dtype, mark.shape):
            raise DefinitionError(
                f"The histories of blob {blob!r} do not fit together: expected rows of "
                f"{mark.dtype} and shape {mark.shape}, as on {next(iter(readers))!r}; found "
                f"{reader.mark.dtype} and {reader.mark.shape} on {node!r}. Name nodes=."
            )
    lengths = {node: reader.mark.rows for node, reader in readers.items()}
    if len({*lengths.values()}) > 1:
        rows = listed(f"{node}: {count}" for node, count in lengths.items())
        raise DefinitionError(
            f"The histories of blob {blob!r} at {record.name} differ in length: {rows}. Name "
            f"nodes= that have as many rows."
        )
    fitting_rows = max(1, _CHUNK_BYTES // mark.row_bytes)
    # Whole chunks of the files, or each would be read twice.
    step = max(1, min(mark.rows, fitting_rows) // mark.chunk_rows) * mark.chunk_rows
    width = max(1, _CHUNK_BYTES // max(1, min(step, mark.rows) * mark.row_bytes))
    names = list(readers)
    token = [record.stores[node].sha256 for node in names]
    blocks = []
    for left in range(0, len(names), width):
        members = [readers[node] for node in names[left : left + width]]
        row_blocks = []
        for start in range(0, max(1, mark.rows), step):
            stop = min(start + step, mark.rows)
            key = tokenize(blob, token, left, start, stop)
            read = delayed(_ReadRows(members, start, stop), pure=True)
            value = read(dask_key_name=f"history-{blob}-{key}")
            shape = len(members), stop - start, *mark.shape
            row_blocks.append(da.from_delayed(value, shape, first.dtype))
        blocks.append(da.concatenate(row_blocks, axis=1))
    return da.concatenate(blocks, axis=0)


def _find_readers(
    directory: Directory, record: EpochRecord, blob: str, nodes: Collection[str] | None
) -> dict[str, HistoryReader]:
    """The readers of a blob's history, by node."""
    stores = store_readers(directory, record)
    for node in nodes or ():
        if node not in stores:
            raise BlobNotFoundError(
                f"{record.name} of {directory.path} has no node {node!r}. It has {listed(stores)}."
            )
    wanted = [node for node in stores if nodes is None or node in nodes]
    documents = directory.files.each(lambda node: stores[node].read_document(), wanted)
    readers = {}
    present: set[str] = set()
    for node, document in zip(wanted, documents, strict=True):
        present.update(document.entry.histories)
        if blob in document.entry.histories:
            readers[node] = stores[node].history(document, blob)
    missing = [node for node in nodes or () if node not in readers]
    if missing or not readers:
        where = f" on {listed(map(repr, missing))}" if missing else ""
        raise BlobNotFoundError(
            f"{record.name} of {directory.path} has no history of blob {blob!r}{where}. It has "
            f"{listed(sorted(present)) or 'none'}. Declare it: outputs=Blob({blob!r}, history=True)."
        )
    return readers
