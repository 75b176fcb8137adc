"""What a load reads, and from where: planned from the record of an epoch, without opening a store.

Runs on the client; `worker_load` runs on the workers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from jobrunner.checkpoint.directory import Directory, EpochRecord
from jobrunner.checkpoint.encoding import find_classes
from jobrunner.checkpoint.log import CommitEntry, NodeContents
from jobrunner.checkpoint.opened import contents_of_store, store_readers
from jobrunner.checkpoint.store import StoreReader
from jobrunner.checkpoint.worker_load import NodeLoad, PartitionLoad, StateLoad, cut_evenly
from jobrunner.errors import (
    BlobNotFoundError,
    CheckpointCorruptError,
)
from jobrunner.names import BlobKey
from jobrunner.texts import listed

Sources = Mapping[BlobKey, BlobKey]
"""Node and blob -> the recorded ones. Of a blob that several nodes share, the recorded node is that
which the node was, whichever store has the value."""


def with_contents(directory: Directory, record: EpochRecord) -> EpochRecord:
    """The record, with what its stores have in them; read from them if that entry is lost."""
    entry = None
    with suppress(CheckpointCorruptError):
        entry = directory.log.read_entry(record.contents_number)
    if isinstance(entry, CommitEntry):
        contents = {node: entry.contents.get(node, NodeContents()) for node in record.stores}
    else:
        readers = store_readers(directory, record)
        with directory.reading(record.at):
            read = directory.files.each(contents_of_store, readers.values())
            contents = dict(zip(readers, read, strict=True))
    return replace(record, contents=contents)


def blobs_of(record: EpochRecord) -> dict[str, list[str]]:
    """The names of the blobs of each node, replicated ones included; of a record with contents."""
    blobs = {node: list(store.blobs) for node, store in (record.contents or {}).items()}
    for name, (_, *replicas) in record.details.replicated.items():
        for node in replicas:
            if node in blobs:
                blobs[node].append(name)
    return blobs


def stateful_blobs(record: EpochRecord) -> set[BlobKey]:
    """The blobs with objects that were saved by their state; of a record with contents."""
    contents = record.contents or {}
    return {(node, name) for node, store in contents.items() for name in store.states}


def choose_sources(
    directory: Directory,
    record: EpochRecord,
    nodes: Collection[str] | None = None,
    blobs: Mapping[str, Collection[str]] | None = None,
) -> dict[BlobKey, BlobKey]:
    """The sources of a load under the recorded names; see `MultiNodeCheckpointManager.load`."""
    recorded = blobs_of(record)
    chosen = recorded if blobs is None else blobs
    for node in (*(nodes or ()), *chosen):
        # Replicated and partitioned blobs may be loaded by other nodes: the plan finds them.
        if node not in recorded and not chosen.get(node):
            raise BlobNotFoundError(
                f"Epoch {record.at} of {directory.path} has no node {node!r}. It has "
                f"{listed(recorded)}."
            )
    sources = {}
    for node, names in chosen.items():
        if nodes is None or node in nodes:
            sources.update({(node, name): (node, name) for name in names})
    return sources


def plan_load(
    directory: Directory,
    record: EpochRecord,
    sources: Sources,
    *,
    partitions: Mapping[str, Sequence[str]] | None = None,
    waiting: Mapping[str, Collection[str]] | None = None,
    goes_on: bool = False,
) -> dict[str, NodeLoad]:
    """Say what each node loads.

    Parameters
    ----------
    record : EpochRecord
        One with contents.
    sources : Sources
    partitions : mapping of str to sequence of str
        Partitioned blob -> the nodes that get its parts now, in order.
    waiting : mapping of str to collection of str
        Node -> blobs whose objects are made only after the load; `load_waiting_states` then loads
        their states. By default a state is loaded into the object that is there.
    goes_on : bool
        Whether later rows of histories follow those of the checkpoint.

    Raises
    ------
    BlobNotFoundError
        A source is not in the checkpoint.
    PlanMismatchError
        The program lacks a class of some of the values.
    """
    plan = _LoadPlan(directory, record, sources)
    for name, nodes in (partitions or {}).items():
        plan.cut(name, nodes)
    reads: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for (node, name), source in plan.sources.items():
        if name not in plan.parts[node]:
            reads[node][plan.locate(*source)][source[1]] = name
    classes = find_classes(sorted(plan.classes), f"Epoch {record.at} of {directory.path}")
    loads = {}
    for node in dict.fromkeys(node for node, _ in sources):
        loads[node] = NodeLoad(
            stores=[(plan.readers[owner], names) for owner, names in reads[node].items()],
            parts=plan.parts[node],
            waiting=frozenset((waiting or {}).get(node, ())),
            classes=classes,
            goes_on=goes_on,
        )
    return loads


class _LoadPlan:
    """Finds blobs in the stores of a record, and collects the classes of their values."""

    def __init__(self, directory: Directory, record: EpochRecord, sources: Sources) -> None:
        self._directory = directory
        self._record = record
        self._contents = record.contents or {}
        self.sources = dict(sources)
        self.readers = store_readers(directory, record)
        self.classes: set[str] = set()
        self.parts: dict[str, dict[str, PartitionLoad | StateLoad]] = defaultdict(dict)
        """By node and blob: what is read of several stores."""

    def locate(self, node: str, blob: str) -> str:
        """The node whose store has a recorded blob."""
        path = self._directory.path
        owner = self._record.details.replicated.get(blob, [node])[0]
        if owner not in self._contents:
            raise BlobNotFoundError(
                f"Epoch {self._record.at} of {path} has no node {owner!r}, so blob {blob!r} cannot "
                f"be loaded there."
            )
        contents = self._contents[owner]
        if blob not in contents.blobs:
            raise BlobNotFoundError(
                f"Node {owner!r} has no blob {blob!r} at epoch {self._record.at} of {path}. It has "
                f"{listed(contents.blobs)}."
            )
        self.classes.update(contents.classes.get(blob, ()))
        return owner

    def cut(self, name: str, nodes: Sequence[str]) -> None:
        """Divide a partitioned blob anew between nodes, of which only those with a source load it.

        If these are the nodes that saved it, each part is in the store of its node.
        """
        wanted = {node: self.sources[node, name] for node in nodes if (node, name) in self.sources}
        if not wanted:
            return
        _, old_name = next(iter(wanted.values()))
        partition = self._record.details.partitions.get(old_name)
        savers = []  # the nodes that saved what each of these loads
        for node in nodes:
            saver, _ = wanted.get(node, (node, name))
            savers.append(saver)
        if partition is None or savers == partition.nodes:
            return
        owners = [self.locate(node, old_name) for node in partition.nodes]
        stores = [self.readers[owner] for owner in owners]
        if all(old_name in self._contents[owner].states for owner in owners):
            for i, node in enumerate(nodes):
                if node in wanted and len(nodes) == len(owners):
                    self.sources[node, name] = owners[i], old_name
                elif node in wanted:
                    self.parts[node][name] = StateLoad(old_name, stores, len(nodes))
            return
        measure = partial(StoreReader.axis_length, blob=old_name, axis=partition.axis)
        lengths = list(self._directory.files.each(measure, stores))
        for node, pieces in zip(nodes, cut_evenly(lengths, len(nodes)), strict=True):
            if node in wanted:
                named = [(stores[i], start, stop) for i, start, stop in pieces]
                self.parts[node][name] = PartitionLoad(old_name, partition.axis, named)
