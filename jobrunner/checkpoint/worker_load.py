"""The task group that loads an epoch: verify everything on all nodes, then replace their blobs."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding import StatefulBlob, given_state, join_states
from jobrunner.checkpoint.store import StoreReader
from jobrunner.define import Task, TaskGroup, WorkspaceType
from jobrunner.errors import DefinitionError
from jobrunner.workspace import BlobUpdate, LoadedArrays, Workspace, settle

_READ = "read and verify"
_VERIFIED = "verified checkpoint"
_SECONDS = "seconds of reading"


@dataclass(frozen=True, slots=True)
class _Verified:
    values: dict[str, Any]
    loaded: LoadedArrays | None  # those of `values` that are whole arrays of the node's own store


@dataclass(frozen=True, slots=True)
class Part:
    """A node's part of a partitioned array: pieces (store, start, stop) along an axis, in order."""

    blob: str
    """Its name in these stores."""
    axis: int
    pieces: Sequence[tuple[StoreReader, int, int]]

    def load(self) -> np.ndarray[Any, Any]:
        """Read the pieces and join them, in the dtype that they were saved in."""
        arrays = [
            reader.load_slice(self.blob, self.axis, start, stop)
            for reader, start, stop in self.pieces
        ]
        first, *others = arrays
        if not others:
            return first
        # Without `out`, NumPy joins in native byte order, and closes the gaps of records.
        whole = np.empty_like(first, _common_dtype(arrays), shape=self._shape(arrays))
        return np.concatenate(arrays, self.axis, out=whole)

    def _shape(self, arrays: Sequence[np.ndarray[Any, Any]]) -> tuple[int, ...]:
        length = sum(array.shape[self.axis] for array in arrays)
        shapes = {
            (*array.shape[: self.axis], length, *array.shape[self.axis + 1 :]) for array in arrays
        }
        if len(shapes) > 1 or _common_dtype(arrays) is None:
            found = ", ".join(
                f"{array.dtype}{list(array.shape)} in {reader.root}"
                for array, (reader, _, _) in zip(arrays, self.pieces, strict=True)
            )
            raise DefinitionError(
                f"The parts of {self.blob!r} do not fit together along axis {self.axis}: {found}. They "
                f"must have the same dtype and differ only in their length along it. Resume on as "
                f"many nodes as saved them, and let their tasks make them alike."
            )
        return shapes.pop()


@dataclass(frozen=True, slots=True)
class States:
    """A node's part of a partitioned blob of objects: the states that other nodes saved."""

    blob: str
    """Its name in these stores."""
    stores: Sequence[StoreReader]
    new_parts: int | None
    """If another number of nodes saved it, how many have it now: it gets the states of all, in order."""

    def load(self) -> Any:
        """Read the states."""
        parts = [store.load([self.blob], keeps_states=True)[self.blob] for store in self.stores]
        if self.new_parts is None:
            return parts[0]
        where = f"Blob {self.blob!r} in {', '.join(s.root for s in self.stores)}"
        return join_states(parts, self.new_parts, where)


def _common_dtype(arrays: Sequence[np.ndarray[Any, Any]]) -> np.dtype[Any] | None:
    """Return the dtype of all; the widest of fixed-width strings or bytes; None if they differ."""
    widest = max((array.dtype for array in arrays), key=lambda dtype: dtype.itemsize)
    kinds = {array.dtype.str[:2] if widest.kind in "SU" else array.dtype for array in arrays}
    return widest if len(kinds) == 1 else None


def cut_evenly(lengths: Sequence[int], count: int) -> list[list[tuple[int, int, int]]]:
    """Cut consecutive parts of these `lengths` into `count` new ones of about the same length.

    Each new part is a list of pieces (old part, start, stop): at least one, which may be empty.
    """
    total = sum(lengths)
    share, more = divmod(total, count)
    cuts: list[list[tuple[int, int, int]]] = []
    start = 0
    for i in range(count):
        stop = start + share + (i < more)
        pieces = []
        before = 0
        for old, length in enumerate(lengths):
            low, high = max(start, before), min(stop, before + length)
            if low < high:
                pieces.append((old, low - before, high - before))
            before += length
        cuts.append(pieces or [(0, 0, 0)])
        start = stop
    return cuts


@dataclass(frozen=True, slots=True)
class Reading:
    """What a node loads, and from where."""

    own: StoreReader | None
    """The store of the node, if it was saved."""
    blobs: Mapping[str, str] | None
    """The blobs to load from `own` -> their names there; None: all."""
    borrowed: Mapping[str, tuple[StoreReader, str]]
    """Blobs that are in other nodes' stores: replicated ones, and some that were renamed."""
    parts: Mapping[str, Part | States] = field(default_factory=dict)
    """Partitioned blobs whose parts differ from those that were saved."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Values of other blobs; of those in `_Update.anew`, their states."""

    def with_classes(self, classes: Mapping[str, type]) -> Reading:
        """The same, with the job's classes, by name, for the values."""

        def prepared(reader: StoreReader) -> StoreReader:
            return replace(reader, classes=classes)

        own = None if self.own is None else prepared(self.own)
        borrowed = {name: (prepared(it), then) for name, (it, then) in self.borrowed.items()}
        parts = {
            name: replace(part, stores=[*map(prepared, part.stores)])
            if isinstance(part, States)
            else part
            for name, part in self.parts.items()
        }
        return replace(self, own=own, borrowed=borrowed, parts=parts)

    def load(self) -> tuple[_Verified, float]:
        """Read and verify the blobs. Returns the seconds too.

        A task on the node calls this.
        """
        started = time.perf_counter()
        values: dict[str, Any] = {}
        arrays: dict[str, Mapping[str, bytes]] = {}
        if self.own is not None and (self.blobs is None or self.blobs):
            document = self.own.read_document()
            blobs = self.blobs
            if blobs is None:
                blobs = {name: name for name in document.blobs}
            new_names = {old: new for new, old in blobs.items()}
            stored = self.own.load(new_names, document=document, keeps_states=True)
            for old, value in stored.items():
                values[new_names[old]] = value
                arrays[new_names[old]] = document.described_array(old)
        for name, (reader, then) in self.borrowed.items():
            values[name] = reader.load([then], keeps_states=True)[then]
        for name, part in self.parts.items():
            values[name] = part.load()
        loaded = None
        if self.own is not None:
            # What comes from other stores, or from the user, is not what the own store has.
            for name in (*self.borrowed, *self.parts, *self.given):
                arrays.pop(name, None)
            loaded = LoadedArrays(self.own.identity, arrays)
        return _Verified(values, loaded), time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class _Update:
    """The task that updates a node's workspace, after all nodes have read and verified."""

    reading: Reading
    replace: bool
    anew: frozenset[str]

    def __call__(self, verified: _Verified) -> BlobUpdate:
        values, reading = verified.values, self.reading
        states = {
            name: value.load_into
            for name, value in values.items()
            if isinstance(value, StatefulBlob)
        }
        for name, value in reading.given.items():
            if name in self.anew:
                states[name] = given_state(value, f"Blob {name!r}, from migrate").load_into
            else:
                values[name] = settle([value])  # two of them may share an array
        return BlobUpdate(
            {name: value for name, value in values.items() if name not in states},
            replace=self.replace,
            changes={name: load for name, load in states.items() if name not in self.anew},
            waiting={name: load for name, load in states.items() if name in self.anew},
            loaded=verified.loaded,
        )


def load_waiting_states(workspaces: Mapping[str, Workspace]) -> None:
    """Load waiting states into the objects that init tasks have made since the load.

    Runs on workers, in a thread. Raises what `StatefulBlob.load_into` raises.
    """
    for workspace in workspaces.values():
        workspace.apply_waiting()


def _all_verified() -> None:
    """A barrier: runs after all reads and before any update."""


def load_group(
    readings: Mapping[str, Reading], *, replace: bool, anew: Mapping[str, Collection[str]]
) -> TaskGroup:
    """Make the group for nodes' `readings`.

    With `replace`, drop the nodes' other blobs. For `anew` see `Loader.load`.
    """
    group = TaskGroup(WorkspaceType.PRIVATE)
    group.name = "load"
    reads = [
        Task(reading.load, outputs=[_VERIFIED, _SECONDS], node=node, group=group, name=_READ)
        for node, reading in readings.items()
    ]
    if reads:
        verified = Task(
            _all_verified, node=reads[0].node, group=group, name="all verified", after=reads
        )
        for node, reading in readings.items():
            Task(
                _Update(reading, replace, frozenset(anew.get(node, ()))),
                inputs=_VERIFIED,
                node=node,
                group=group,
                name="update",
                after=verified,
            )
    return group
