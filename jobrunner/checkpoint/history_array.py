"""Histories as Dask arrays, read from the directory, also while a run appends to them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from jobrunner.checkpoint.directory import Directory, EpochRecord
from jobrunner.checkpoint.opened import store_readers
from jobrunner.checkpoint.store import HistoryReader
from jobrunner.errors import BlobNotFoundError
from jobrunner.joined import CHUNK_BYTES, ValueType, cut, join_arrays
from jobrunner.texts import listed

if TYPE_CHECKING:
    from dask.array import Array


def open_history(
    directory: Directory, record: EpochRecord, blob: str, nodes: Collection[str] | None
) -> Array:
    """See `MultiNodeCheckpointManager.history_of`."""
    import dask.array  # slow to import
    from dask.base import tokenize
    from dask.delayed import delayed

    readers = _find_readers(directory, record, blob, nodes)
    # Before the array has a chunk for each.
    for _ in directory.files.each(HistoryReader.check_files, readers.values()):
        pass
    types: dict[str, ValueType | None] = {}
    for node, reader in readers.items():
        types[node] = ValueType((reader.mark.rows, *reader.mark.shape), reader.dtype)
    pieces = []
    for names in cut(blob, types, None):
        members = [readers[node] for node in names]
        mark = members[0].mark
        # Whole chunks of the files, or some would be read twice.
        step = mark.chunk_rows * max(1, CHUNK_BYTES // mark.chunk_bytes)
        parts = []
        for start in range(0, max(1, mark.rows), step):
            stop = min(start + step, mark.rows)
            stores = [record.stores[node].sha256 for node in names]
            name = f"{blob}-{tokenize(stores, start, stop)}"
            # Without a name, Dask would look for collections in all that the readers refer to.
            read = delayed(partial(_read_rows, members, start, stop), name=f"read-{name}")
            shape = (len(members), stop - start, *mark.shape)
            parts.append(dask.array.from_delayed(read(dask_key_name=name), shape, members[0].dtype))
        pieces.append((names, dask.array.concatenate(parts, axis=1)))
    return join_arrays(types, None, pieces)


def _read_rows(readers: Sequence[HistoryReader], start: int, stop: int) -> np.ndarray[Any, Any]:
    return np.stack([reader.read_rows(start, stop) for reader in readers])


def _find_readers(
    directory: Directory, record: EpochRecord, blob: str, nodes: Collection[str] | None
) -> dict[str, HistoryReader]:
    """The readers of a blob's history, by node."""
    stores = store_readers(directory, record)
    unknown = [node for node in nodes or () if node not in stores]
    if unknown:
        raise BlobNotFoundError(
            f"There is no node {listed(map(repr, unknown))} at {record.name} of {directory.path}. "
            f"Its nodes are {listed(stores)}. Choose among these."
        )
    wanted = [node for node in stores if nodes is None or node in nodes]
    documents = directory.files.each(lambda node: stores[node].read_document(), wanted)
    readers = {}
    missing: dict[str, Collection[str]] = {}  # nodes without this history -> those that they have
    for node, document in zip(wanted, documents, strict=True):
        if blob in document.entry.histories:
            readers[node] = stores[node].history(document, blob)
        else:
            missing[node] = document.entry.histories
    if not readers or (nodes is not None and missing):
        present = sorted(set(chain(*missing.values())))
        raise BlobNotFoundError(
            f"There is no history of blob {blob!r} on {listed(map(repr, missing), 8)} at "
            f"{record.name} of {directory.path}. Histories there: {listed(present)}. Choose one of "
            f"these, or a later epoch: a history exists from its first value on."
        )
    return readers
