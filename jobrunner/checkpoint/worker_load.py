"""The task group that loads an epoch: verify everything on all nodes, then replace their blobs."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding import StatefulBlob
from jobrunner.checkpoint.store import StoreReader
from jobrunner.define import Task, TaskGroup, TaskOutput, WorkspaceType
from jobrunner.worker import current_task
from jobrunner.workspace import BlobUpdate, Workspace

_VERIFIED = "verified checkpoint"
_SECONDS = "seconds of reading"


@dataclass(frozen=True, slots=True)
class _Verified:
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """A node's part of a partitioned array: pieces (store, start, stop) along an axis, in order."""

    axis: int
    pieces: Sequence[tuple[StoreReader, int, int]]

    def load(self, blob: str) -> np.ndarray[Any, Any]:
        """Read the pieces and join them."""
        arrays = [
            reader.load_slice(blob, self.axis, start, stop) for reader, start, stop in self.pieces
        ]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, self.axis)


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
    """The node's store, if anything is read from it."""
    blobs: frozenset[str] | None
    """The blobs to load from `own`; None: all."""
    borrowed: Mapping[str, StoreReader]
    """Replicated blobs, which are in another node's store."""
    parts: Mapping[str, Part]
    """Partitioned blobs whose parts differ from those that were saved."""
    memory_key: str
    """The key under which workers keep the states of this epoch in memory."""
    memory: StoreReader | None
    """The node's store, whose states in memory are used instead of reading; None: read all."""

    def load(self) -> dict[str, Any]:
        """Recall the blobs that are in memory; read and verify all others."""
        known = self._recall()
        values = dict(known)
        if self.own is not None:
            left = None if self.blobs is None else self.blobs - known.keys()
            if left is None or left:
                values |= self.own.load(left, keeps_states=True)
        for name in self.borrowed.keys() - known.keys():
            values |= self.borrowed[name].load([name], keeps_states=True)
        for name, part in self.parts.items():
            values[name] = part.load(name)
        return values

    def _recall(self) -> Mapping[str, Any]:
        if self.memory is None or self.blobs is None:
            return {}
        task = current_task()
        names = self.blobs | self.borrowed.keys()
        return task.workspace.kept_states.recall(task.node, self.memory.identity, names)

    def keep(self, values: Mapping[str, Any]) -> None:
        """Keep the loaded values in the memory of this task's worker, for a later recovery."""
        if self.memory is not None and not self.parts:
            task = current_task()
            kept_states = task.workspace.kept_states
            kept_states.keep(self.memory_key, task.node, values, values, self.memory.identity)


@dataclass(frozen=True, slots=True)
class _Read:
    """The task that reads and verifies what one node loads."""

    reading: Reading

    def __call__(self) -> tuple[_Verified, float]:
        started = time.perf_counter()
        values = self.reading.load()
        return _Verified(values), time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class _Update:
    """The task that updates a node's workspace, after all nodes have read and verified."""

    reading: Reading
    replace: bool
    anew: frozenset[str]

    def __call__(self, verified: _Verified) -> BlobUpdate:
        self.reading.keep(verified.values)
        states = {
            name: value.load_into
            for name, value in verified.values.items()
            if isinstance(value, StatefulBlob)
        }
        return BlobUpdate(
            {name: value for name, value in verified.values.items() if name not in states},
            replace=self.replace,
            changes={name: load for name, load in states.items() if name not in self.anew},
            waiting={name: load for name, load in states.items() if name in self.anew},
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
) -> tuple[TaskGroup, dict[str, TaskOutput]]:
    """Make the group for nodes' `readings`; also return the seconds that each node took to read.

    With `replace`, drop the nodes' other blobs. For `anew` see `Loader.load`.
    """
    group = TaskGroup(WorkspaceType.PRIVATE)
    group.name = "load"
    reads = {
        node: Task(
            _Read(reading),
            outputs=[_VERIFIED, _SECONDS],
            node=node,
            group=group,
            name="read and verify",
        )
        for node, reading in readings.items()
    }
    first = next(iter(readings), None)
    if first is not None:
        verified = Task(
            _all_verified,
            node=first,
            group=group,
            name="all verified",
            after=list(reads.values()),
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
    return group, {node: task.output(1) for node, task in reads.items()}
