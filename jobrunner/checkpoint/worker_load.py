"""Loads an epoch as a task group: verify everything on all nodes, then replace their blobs."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from jobrunner.checkpoint.encoding import Codec, StatefulBlob
from jobrunner.checkpoint.store import StoreReader
from jobrunner.define import Task, TaskGroup, TaskOutput, WorkspaceType
from jobrunner.worker import current_task
from jobrunner.workspace import BlobUpdate, Workspace

_VERIFIED = "verified checkpoint"
_SECONDS = "seconds of reading"


class _Verified:
    """Blobs that were read and verified, for the workspace of the same node."""

    __slots__ = ("values",)

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values


@dataclass(frozen=True, slots=True)
class Part:
    """A node's part of a partitioned array: consecutive slices of recorded stores."""

    axis: int
    pieces: Sequence[tuple[StoreReader, int, int]]

    def load(self, blob: str) -> np.ndarray[Any, Any]:
        """Read the pieces and join them."""
        arrays = [
            reader.load_slice(blob, self.axis, start, stop) for reader, start, stop in self.pieces
        ]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, self.axis)


def cut_evenly(lengths: Sequence[int], count: int) -> list[list[tuple[int, int, int]]]:
    """Cut consecutive parts into `count` new ones of about the same length.

    Returns
    -------
    list of list of (int, int, int)
        For each new part its pieces: old part, start, stop; at least one, which may be empty.
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
    """What a node loads, and where it reads it.

    Attributes
    ----------
    own : StoreReader or None
        Its own store.
    blobs : frozenset of str or None
        The blobs of its own store to load; None: all.
    borrowed : mapping of str to StoreReader
        Replicated blobs, which are in another node's store.
    parts : mapping of str to Part
        Partitioned blobs whose parts differ from those that were saved.
    memory_key : str
        The key under which workers keep the states of this epoch.
    memory : StoreReader or None
        The node's own store: what the worker still holds of it in memory is not read. None: all
        is read.
    """

    own: StoreReader | None
    blobs: frozenset[str] | None
    borrowed: Mapping[str, StoreReader] = field(default_factory=dict)
    parts: Mapping[str, Part] = field(default_factory=dict)
    memory_key: str = ""
    memory: StoreReader | None = None

    def load(
        self,
        codecs: Sequence[Codec],
        *,
        allow_pickle: bool,
        known: Mapping[str, Any] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Read and verify all of it but the blobs that are known."""
        values = dict(known)
        if self.own is not None:
            left = None if self.blobs is None else self.blobs - known.keys()
            if left is None or left:
                values |= self.own.load(
                    left, codecs=codecs, allow_pickle=allow_pickle, keeps_states=True
                )
        for name in self.borrowed.keys() - known.keys():
            values |= self.borrowed[name].load(
                [name], codecs=codecs, allow_pickle=allow_pickle, keeps_states=True
            )
        for name, part in self.parts.items():
            values[name] = part.load(name)
        return values

    def recall(self) -> dict[str, Any]:
        """The blobs that this task's worker still holds in memory."""
        if self.memory is None or self.blobs is None:
            return {}
        task = current_task()
        names = self.blobs | self.borrowed.keys()
        return task.workspace.kept_states.recall(task.node, self.memory.identity, names)

    def keep(self, values: Mapping[str, Any]) -> None:
        """Let this task's worker keep what was loaded in memory, for a later recovery."""
        if self.memory is not None and not self.parts:
            task = current_task()
            kept_states = task.workspace.kept_states
            kept_states.keep(self.memory_key, task.node, values, values, self.memory.identity)


@dataclass(frozen=True, slots=True)
class _Read:
    """Reads and verifies what one node loads; runs on the node's worker."""

    reading: Reading
    codecs: Sequence[Codec]
    allow_pickle: bool

    def __call__(self) -> tuple[_Verified, float]:
        started = time.perf_counter()
        known = self.reading.recall()
        values = self.reading.load(self.codecs, allow_pickle=self.allow_pickle, known=known)
        return _Verified(values), time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class _HandOver:
    """Puts what was read into the node's workspace, after all nodes have read theirs."""

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
    """Load the states that a load left waiting into the objects that were made since.

    Raises
    ------
    PlanMismatchError, CheckpointError
        See `StatefulBlob.load_into`.

    Notes
    -----
    Runs on workers, in a thread, with their workspaces.
    """
    for workspace in workspaces.values():
        workspace.apply_waiting()


def _all_verified() -> None:
    """Does nothing: it runs after all reads and before any hand-over."""


def load_group(
    readings: Mapping[str, Reading],
    codecs: Sequence[Codec],
    *,
    replace: bool,
    allow_pickle: bool,
    anew: Mapping[str, Collection[str]],
) -> tuple[TaskGroup, dict[str, TaskOutput]]:
    """Make the group that loads stores into the workspaces of their nodes.

    Parameters
    ----------
    readings : mapping of str to Reading
        By node.
    codecs : sequence of Codec
    replace : bool
        Drop the nodes' other blobs.
    allow_pickle : bool
    anew : mapping of str to collection of str
        Node -> blobs whose objects are made later: their states wait for `load_waiting_states`.
        Other states are loaded into the objects that are there.

    Returns
    -------
    group : TaskGroup
    seconds : dict of str to TaskOutput
        How long each node took to read; fetch it after the group has run.
    """
    group = TaskGroup(WorkspaceType.PRIVATE)
    group.name = "load"
    reads = {
        node: Task(
            _Read(reading, tuple(codecs), allow_pickle),
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
                _HandOver(reading, replace, frozenset(anew.get(node, ()))),
                inputs=_VERIFIED,
                node=node,
                group=group,
                name="hand over",
                after=verified,
            )
    return group, {node: task.output(1) for node, task in reads.items()}
