"""What a load reads, and from where: planned from the record of an epoch, without opening a store.

Runs on the client; `worker_load` runs on the workers.
"""

from __future__ import annotations

import os
import platform
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from jobrunner.checkpoint.directory import Directory, EpochRecord
from jobrunner.checkpoint.encoding import REGISTERED_CODECS, find_classes
from jobrunner.checkpoint.log import NodeContents, Partition
from jobrunner.checkpoint.opened import Checkpoint
from jobrunner.checkpoint.store import StoreReader, verify_stores
from jobrunner.checkpoint.worker_load import ArrayPart, NodeLoad, StatePart, cut_evenly
from jobrunner.errors import (
    BlobNotFoundError,
    CheckpointError,
    CheckpointNotFoundError,
    DefinitionError,
)
from jobrunner.positions import Position
from jobrunner.texts import listed

Key = tuple[str, str]
"""Node and blob."""

Sources = Mapping[Key, Key]
"""Node and blob -> the recorded ones. Of a blob that several nodes share, the recorded node is that
which the node was, whichever store has the value."""


def store_readers(directory: Directory, record: EpochRecord) -> dict[str, StoreReader]:
    """The readers of a recorded epoch's stores, by node."""
    if not record.stores and directory.only_node is not None:
        raise CheckpointNotFoundError(
            f"Epoch {record.at} of {directory.path} has no store of node {directory.only_node!r}. "
            f"Name a checkpointed node, or use a MultiNodeCheckpointManager."
        )
    codecs = tuple(REGISTERED_CODECS.values())
    readers = {}
    for node, store in record.stores.items():
        readers[node] = StoreReader(
            directory.files,
            directory.path,
            store.name,
            store.sha256,
            record.histories,
            codecs,
            directory.allow_pickle,
        )
    return readers


def verify_record(directory: Directory, record: EpochRecord) -> None:
    """Read every byte of the epoch of a record."""
    with directory.reading(record.at):
        verify_stores(directory.files, list(store_readers(directory, record).values()))


def open_record(
    directory: Directory, record: EpochRecord, release: Callable[[], object] | None = None
) -> Checkpoint:
    """Open the epoch of a record; `release` is called when the checkpoint is closed."""
    return Checkpoint(record, store_readers(directory, record), release)


def open_pinned(directory: Directory, epoch: Position) -> Checkpoint:
    """Open an epoch that stays pinned until the checkpoint is closed."""
    label = f"opened by process {os.getpid()} on {platform.node()}, {uuid.uuid4().hex[:8]}"
    directory.pin(epoch, label)
    release = partial(directory.unpin, epoch, label)
    try:
        return open_record(directory, directory.record(epoch), release)
    except BaseException:
        with suppress(CheckpointError):
            release()
        raise


def with_contents(directory: Directory, record: EpochRecord) -> EpochRecord:
    """The record, with what its stores have in them; read from them if that entry is lost."""
    contents = directory.contents_of(record)
    if contents is None:
        readers = store_readers(directory, record)

        def read(node: str) -> NodeContents:
            return contents_of_store(readers[node], node, record.details.partitions)

        with directory.reading(record.at):
            contents = dict(zip(readers, directory.files.each(read, readers), strict=True))
    return replace(record, contents=contents)


def blobs_of(record: EpochRecord) -> dict[str, list[str]]:
    """The names of the blobs of each node, replicated ones included; of a record with contents."""
    blobs = {node: list(store.blobs) for node, store in (record.contents or {}).items()}
    for name, (_, *replicas) in record.details.replicated.items():
        for node in replicas:
            if node in blobs:
                blobs[node].append(name)
    return blobs


def stateful_blobs(record: EpochRecord) -> set[Key]:
    """The blobs with objects that were saved by their state; of a record with contents."""
    contents = record.contents or {}
    return {(node, name) for node, store in contents.items() for name in store.states}


def choose_sources(
    directory: Directory,
    record: EpochRecord,
    nodes: Collection[str] | None = None,
    blobs: Mapping[str, Collection[str]] | None = None,
) -> dict[Key, Key]:
    """The sources of a load under the recorded names; see `MultiNodeCheckpointManager.load`."""
    recorded = blobs_of(record)
    named = list(nodes or ())
    for node, names in (blobs or {}).items():
        if not names:
            named.append(node)
    for node in named:
        if node not in recorded:
            raise BlobNotFoundError(
                f"Epoch {record.at} of {directory.path} has no node {node!r}. It has "
                f"{listed(recorded)}."
            )
    sources = {}
    for node, names in (recorded if blobs is None else blobs).items():
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
    homes: Mapping[str, str] | None = None,
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
    homes : mapping of str to str
        Node -> the recorded node that it was, if that has another name.
    goes_on : bool
        Whether later rows of histories follow those of the checkpoint.

    Raises
    ------
    BlobNotFoundError
        A source is not in the checkpoint.
    PlanMismatchError
        The program lacks a class of some of the values.
    """
    plan = _LoadPlan(directory, record)
    parted: dict[str, dict[str, ArrayPart | StatePart]] = defaultdict(dict)
    for name, nodes in (partitions or {}).items():
        for node, part in plan.cut(name, nodes, sources).items():
            parted[node][name] = part
    reads: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for (node, name), source in sources.items():
        if name not in parted[node]:
            reads[node][plan.locate(*source)][source[1]] = name
    where = f"Epoch {record.at} of {directory.path}"
    classes = find_classes(sorted(plan.classes), where)
    loads = {}
    for node in dict.fromkeys(node for node, _ in sources):
        home = record.stores.get((homes or {}).get(node, node))
        loads[node] = NodeLoad(
            own=None if home is None else home.name,
            stores=[(plan.readers[owner], names) for owner, names in reads[node].items()],
            parts=parted[node],
            waiting=frozenset((waiting or {}).get(node, ())),
            classes=classes,
            goes_on=goes_on,
        )
    return loads


class _LoadPlan:
    """Finds blobs in the stores of a record, and collects the classes of their values."""

    def __init__(self, directory: Directory, record: EpochRecord) -> None:
        self._directory = directory
        self._record = record
        self._contents = record.contents or {}
        self.readers = store_readers(directory, record)
        self.classes: set[str] = set()

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

    def cut(
        self, name: str, nodes: Sequence[str], sources: Sources
    ) -> dict[str, ArrayPart | StatePart]:
        """The new parts of a partitioned blob that the nodes get, in order; of those with a source.

        Nothing, if the parts are as they were saved: then each is in the store of its node.
        """
        wanted = {node: sources[node, name] for node in nodes if (node, name) in sources}
        if not wanted:
            return {}
        _, old_name = next(iter(wanted.values()))
        partition = self._record.details.partitions.get(old_name)
        homes = [wanted[node][0] if node in wanted else node for node in nodes]
        if partition is None or homes == partition.nodes:
            return {}
        owners = [self.locate(node, old_name) for node in partition.nodes]
        stores = [self.readers[owner] for owner in owners]
        contents = [self._contents[owner] for owner in owners]
        parts: dict[str, ArrayPart | StatePart] = {}
        if all(old_name in store.states for store in contents):
            for i, node in enumerate(nodes):
                if len(nodes) == len(stores):
                    parts[node] = StatePart(old_name, [stores[i]], None)
                else:
                    parts[node] = StatePart(old_name, stores, len(nodes))
        else:
            lengths = [store.parts.get(old_name, 0) for store in contents]
            for node, pieces in zip(nodes, cut_evenly(lengths, len(nodes)), strict=True):
                named = [(stores[i], start, stop) for i, start, stop in pieces]
                parts[node] = ArrayPart(old_name, partition.axis, named)
        return {node: part for node, part in parts.items() if node in wanted}


def contents_of_store(
    reader: StoreReader, node: str, partitions: Mapping[str, Partition]
) -> NodeContents:
    """What the log says of the store of a node, from the store itself."""
    entry = reader.read_document().entry
    parts = {}
    for name, partition in partitions.items():
        if node in partition.nodes:
            # Only arrays have a length: of objects, the states are joined.
            with suppress(DefinitionError, BlobNotFoundError):
                parts[name] = reader.axis_length(name, partition.axis)
    return NodeContents([*entry.blobs, *entry.histories], entry.states, entry.classes, parts)
