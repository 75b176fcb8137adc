"""The task group that loads an epoch: verify everything on all nodes, then replace their blobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding import StatefulBlob, join_states
from jobrunner.checkpoint.history_writer import find_origin
from jobrunner.checkpoint.store import StoreReader
from jobrunner.define import Task, TaskGroup, WorkspaceType
from jobrunner.workspace import BlobUpdate, LoadedArrays, Rows, Workspace

_VERIFIED = "verified checkpoint"


@dataclass(frozen=True, slots=True)
class _Verified:
    values: dict[str, Any]
    loaded: LoadedArrays | None  # those of `values` that are whole arrays of one store
    histories: dict[str, Rows]  # those that go on from a store


@dataclass(frozen=True, slots=True)
class PartitionLoad:
    """A node's part of a partitioned array: pieces (store, start, stop) along an axis, in order."""

    blob: str
    """Its name in these stores."""
    axis: int
    pieces: Sequence[tuple[StoreReader, int, int]]

    def load(self, _: Mapping[str, type]) -> np.ndarray[Any, Any]:
        """Read the pieces and join them, in the dtype that they were saved in."""
        arrays = [
            reader.load_slice(self.blob, self.axis, start, stop)
            for reader, start, stop in self.pieces
        ]
        if len(arrays) == 1:
            return arrays[0]
        # A save refuses parts that do not fit together; only the widths of strings may differ.
        dtype = max((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize)
        shape = list(arrays[0].shape)
        shape[self.axis] = sum(array.shape[self.axis] for array in arrays)
        # Without `out`, NumPy joins in native byte order, and closes the gaps of records.
        whole = np.empty_like(arrays[0], dtype, shape=shape)
        return np.concatenate(arrays, self.axis, out=whole)


@dataclass(frozen=True, slots=True)
class StateLoad:
    """A node's part of a partitioned blob of objects: what another number of nodes saved."""

    blob: str
    """Its name in these stores."""
    stores: Sequence[StoreReader]
    new_parts: int
    """How many nodes have it now: each gets the states of all, in order."""

    def load(self, classes: Mapping[str, type]) -> Any:
        """Read the states, whose values may be of the job's classes."""
        parts = []
        for store in self.stores:
            reader = replace(store, classes=classes)
            parts.append(reader.load([self.blob], keeps_states=True)[self.blob])
        where = f"Blob {self.blob!r} in {', '.join(s.root for s in self.stores)}"
        return join_states(parts, self.new_parts, where)


def cut_evenly(lengths: Sequence[int], count: int) -> list[list[tuple[int, int, int]]]:
    """Cut consecutive parts of these `lengths` into `count` new ones of about the same length.

    Each new part is a list of pieces (old part, start, stop): at least one, which may be empty.
    """
    ends = [0, *accumulate(lengths)]
    share, more = divmod(ends[-1], count)
    cuts: list[list[tuple[int, int, int]]] = []
    for i in range(count):
        start = i * share + min(i, more)
        stop = start + share + (i < more)
        pieces = []
        for old, (before, after) in enumerate(pairwise(ends)):
            low, high = max(start, before), min(stop, after)
            if low < high:
                pieces.append((old, low - before, high - before))
        cuts.append(pieces or [(0, 0, 0)])
    return cuts


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """What a node loads, and from where."""

    stores: Sequence[tuple[StoreReader, Mapping[str, str]]]
    """Stores, and what is read of each: blobs there -> their names now."""
    parts: Mapping[str, PartitionLoad | StateLoad] = field(default_factory=dict)
    """Partitioned blobs whose parts differ from those that were saved."""
    waiting: frozenset[str] = frozenset()
    """Blobs whose objects are made only after the load."""
    classes: Mapping[str, type] = field(default_factory=dict)
    """The job's, by the names that the values have."""
    goes_on: bool = False
    """Whether later rows of histories follow those that are loaded."""

    def read(self) -> _Verified:
        """Read and verify the blobs. A task on the node calls this."""
        values: dict[str, Any] = {}
        histories: dict[str, Rows] = {}
        loaded = None
        for reader, names in self.stores:
            reader = replace(reader, classes=self.classes)
            document = reader.read_document()
            stored = reader.load(names, document=document, keeps_states=True)
            values.update({names[old]: value for old, value in stored.items()})
            if self.goes_on:
                for old in document.entry.histories.keys() & names.keys():
                    origin = find_origin(reader.directory, reader.history(document, old))
                    histories[names[old]] = origin.rows(names[old])
            arrays = {}
            for old in document.blobs.keys() & names.keys():
                arrays[names[old]] = document.described_array(old)
            # The next save may link what is loaded from one store: usually, the node's own.
            if loaded is None or len(arrays) > len(loaded.arrays):
                files = document.files(reader.files.linked_bytes)
                loaded = LoadedArrays(reader.identity, files, arrays)
        for name, part in self.parts.items():
            values[name] = part.load(self.classes)
        return _Verified(values, loaded, histories)

    def update(self, verified: _Verified, *, replaces: bool) -> BlobUpdate:
        """What changes in the node's workspace, once all nodes have read and verified.

        With `replaces`, all other blobs of the node go.
        """
        values = {}
        changes = {}
        waiting = {}
        for name, value in verified.values.items():
            if not isinstance(value, StatefulBlob):
                values[name] = value
            elif name in self.waiting:
                waiting[name] = value.load_into
            else:
                changes[name] = value.load_into
        return BlobUpdate(
            values,
            replace=replaces,
            changes=changes,
            waiting=waiting,
            loaded=verified.loaded,
            histories=verified.histories,
        )


def load_waiting_states(workspaces: Mapping[str, Workspace]) -> None:
    """Load waiting states into the objects that init tasks have made since the load.

    Runs on workers, in a thread. Raises what `StatefulBlob.load_into` raises.
    """
    for workspace in workspaces.values():
        workspace.apply_waiting()


def _all_verified() -> None:
    """A barrier: runs after all reads and before any update."""


def load_group(loads: Mapping[str, NodeLoad], *, replaces: bool = False) -> TaskGroup:
    """Make the group that loads what is planned for each node.

    It reads and verifies everything on all nodes before it updates any workspace. With `replaces`,
    it drops the nodes' other blobs.
    """
    group = TaskGroup(WorkspaceType.PRIVATE)
    group.name = "load"
    if not loads:
        return group
    with group:
        reads = []
        for node, load in loads.items():
            reads.append(Task(load.read, outputs=_VERIFIED, node=node, name="read and verify"))
        barrier = Task(_all_verified, node=reads[0].node, name="all verified", after=reads)
        for node, load in loads.items():
            update = partial(load.update, replaces=replaces)
            Task(update, inputs=_VERIFIED, node=node, name="update", after=barrier)
    return group
