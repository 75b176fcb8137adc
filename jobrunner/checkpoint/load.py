"""A load as a task group: verify everything everywhere, then replace the nodes' blobs."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobrunner.checkpoint.codecs import Codec
from jobrunner.checkpoint.reader import StoreReader
from jobrunner.node import WorkspaceType
from jobrunner.task import Task, TaskGroup, TaskOutput
from jobrunner.workspace import BlobUpdate

_HELD = "verified checkpoint"
_SECONDS = "seconds of reading"


class _Held:
    """Blobs that were read and verified, on their way into the workspace of the same node."""

    __slots__ = ("values",)

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values


@dataclass(frozen=True, slots=True)
class _Read:
    """Reads and verifies what one node loads; runs on its worker."""

    reader: StoreReader
    blobs: frozenset[str] | None
    codecs: Sequence[Codec]
    allow_pickle: bool

    def __call__(self) -> tuple[_Held, float]:
        started = time.perf_counter()
        values = self.reader.load(self.blobs, codecs=self.codecs, allow_pickle=self.allow_pickle)
        return _Held(values), time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class _HandOver:
    """Puts what was read into the node's workspace, once all nodes have read theirs."""

    replace: bool

    def __call__(self, held: _Held) -> BlobUpdate:
        return BlobUpdate(held.values, replace=self.replace)


def _all_verified() -> None:
    """Nothing to do: it ends after all reads and before any hand-over."""


def load_group(
    readers: Mapping[str, StoreReader],
    blobs: Mapping[str, Collection[str]] | None,
    codecs: Sequence[Codec],
    *,
    allow_pickle: bool,
) -> tuple[TaskGroup, dict[str, TaskOutput]]:
    """Make the group that loads stores into the workspaces of their nodes.

    Parameters
    ----------
    readers : mapping of str to StoreReader
        By node.
    blobs : mapping of str to collection of str, optional
        Only these blobs of these nodes; then the nodes' other blobs stay as they are.
    codecs : sequence of Codec
    allow_pickle : bool

    Returns
    -------
    group : TaskGroup
    seconds : dict of str to TaskOutput
        How long each node took to read, to be fetched once the group has run.
    """
    group = TaskGroup(WorkspaceType.PRIVATE)
    group.name = "load"
    reads = {
        node: Task(
            _Read(
                reader,
                None if blobs is None else frozenset(blobs[node]),
                tuple(codecs),
                allow_pickle,
            ),
            outputs=[_HELD, _SECONDS],
            node=node,
            group=group,
            name="read and verify",
        )
        for node, reader in readers.items()
    }
    first = next(iter(readers), None)
    if first is not None:
        verified = Task(
            _all_verified,
            node=first,
            group=group,
            name="all verified",
            after=list(reads.values()),
        )
        for node in readers:
            Task(
                _HandOver(replace=blobs is None),
                inputs=_HELD,
                node=node,
                group=group,
                name="hand over",
                after=verified,
            )
    return group, {node: task.output(1) for node, task in reads.items()}
