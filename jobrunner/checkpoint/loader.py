"""Verifies, opens and loads recorded epochs. Runs on the client; `worker_load` on the workers."""

from __future__ import annotations

import os
import platform
import uuid
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from jobrunner.checkpoint.directory import Directory, name_some
from jobrunner.checkpoint.encoding import REGISTERED_CODECS, find_classes
from jobrunner.checkpoint.log import EpochRecord, NodeContents, Partition
from jobrunner.checkpoint.opened import Checkpoint
from jobrunner.checkpoint.storage import Files, absolute_path, files_beside
from jobrunner.checkpoint.store import StoreReader
from jobrunner.checkpoint.worker_load import (
    Part,
    Reading,
    States,
    cut_evenly,
    load_group,
)
from jobrunner.define import TaskGroup
from jobrunner.errors import (
    BlobNotFoundError,
    CheckpointError,
    CheckpointNotFoundError,
    DefinitionError,
)
from jobrunner.positions import Position

REPLICATED = "replicated"
"""Detail of a record: name of a blob -> the nodes that have it. The first node's store has it."""

PARTITIONS = "partitions"
"""Detail of a record: name of a blob -> its axis, and the nodes that have its parts, in order."""

_VERIFIED_AT_ONCE = 4  # stores, each by threads of its own


@dataclass(frozen=True, slots=True)
class Origins:
    """Where the nodes and blobs of a job are in a checkpoint, if it has them under other names."""

    nodes: Mapping[str, str] = field(default_factory=dict)
    """Node -> the recorded node that it was; others have the same name."""
    blobs: Mapping[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    """Node and blob -> the recorded ones; other blobs have the same name on that recorded node."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Replicated or partitioned blob -> its recorded name; others have the same name."""

    def of(self, node: str, blob: str) -> tuple[str, str]:
        """The recorded node and blob."""
        return self.blobs.get((node, blob)) or (
            self.nodes.get(node, node),
            self.shared.get(blob, blob),
        )


_UNCHANGED = Origins()


class Loader:
    """Verifies, opens and loads the stores of recorded epochs."""

    def __init__(self, directory: Directory, *, allow_pickle: bool = False) -> None:
        self.directory = directory
        self.path = directory.path
        self._allow_pickle = allow_pickle

    def blobs(self, record: EpochRecord) -> dict[str, list[str]]:
        """The names of the blobs of each node at an epoch with this record."""
        found = {node: list(it.blobs) for node, it in self.contents(record).items()}
        for name, (owner, *others) in record.details.replicated.items():
            for node in others:
                if node in found and owner in found:
                    found[node].append(name)
        return found

    def stateful_blobs(self, epoch: Position) -> dict[str, frozenset[str]]:
        """The names of each node's blobs with objects that are saved by their state."""
        record = self.directory.record(epoch)
        return {node: frozenset(it.states) for node, it in self.contents(record).items()}

    def contents(self, record: EpochRecord) -> Mapping[str, NodeContents]:
        """What the stores have in them, by node."""
        if record.contents is not None:
            return record.contents
        readers = self.readers(record)

        def read(node: str) -> NodeContents:
            return read_contents(readers[node], node, record.details.partitions)

        with self.directory.reading(record.at):
            return dict(zip(readers, self.directory.files.each(read, readers), strict=True))

    def verify(self, epoch: Position) -> None:
        """See `MultiNodeCheckpointManager.verify`."""
        self.verify_record(self.directory.record(epoch))

    def verify_record(self, record: EpochRecord) -> None:
        """Read every byte of the epoch of a record."""
        with self.directory.reading(record.at):
            readers = self.readers(record).values()
            list(self.directory.files.each(StoreReader.verify, readers, _VERIFIED_AT_ONCE))

    def open_record(self, record: EpochRecord) -> Checkpoint:
        """Open the epoch of a record."""
        return Checkpoint(record, self.readers(record))

    def open(self, epoch: Position, *, pin: bool = False) -> Checkpoint:
        """See `MultiNodeCheckpointManager.open`."""
        release = None
        if pin:
            label = f"opened by process {os.getpid()} on {platform.node()}, {uuid.uuid4().hex[:8]}"
            self.directory.pin(epoch, label)
            release = partial(self.directory.unpin, epoch, label)
        try:
            record = self.directory.record(epoch)
            readers = self.readers(record)
        except BaseException:
            if release is not None:
                with suppress(CheckpointError):
                    release()
            raise
        return Checkpoint(record, readers, release)

    def load(
        self,
        epoch: Position,
        *,
        nodes: Collection[str] | None = None,
        blobs: Mapping[str, Collection[str]] | None = None,
        partitions: Mapping[str, Sequence[str]] | None = None,
        anew: Mapping[str, Collection[str]] | None = None,
        origins: Origins = _UNCHANGED,
        given: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> TaskGroup:
        """See `MultiNodeCheckpointManager.load`.

        For blobs named in `anew`, by node, objects are made only after the group has run;
        `load_waiting_states` then loads their states. By default a state is loaded into the
        existing object. `origins` are for nodes and blobs that have other names now. `given` are
        values of other blobs, by node, to set together with those loaded.
        """
        record = self.directory.record(epoch)
        readers = self.readers(record)
        given = given or {}
        named_alone = [node for node, its in (blobs or {}).items() if not its and node not in given]
        for node in (*(nodes or ()), *named_alone):
            if origins.nodes.get(node, node) not in readers:
                raise BlobNotFoundError(
                    f"Epoch {epoch} of {self.path} has no node {node!r}. It has "
                    f"{name_some(readers)}."
                )
        readings: dict[str, Reading] = {}
        with self.directory.reading(epoch):
            parts = self._cut(record, readers, partitions or {}, origins)
            for node in readers if blobs is None else blobs:
                if nodes is None or node in nodes:
                    asked = None if blobs is None else frozenset(blobs[node]) - parts[node].keys()
                    cut = {
                        name: part
                        for name, part in parts[node].items()
                        if blobs is None or name in blobs[node]
                    }
                    reading = self._reading(node, asked, readers, record, origins)
                    readings[node] = replace(reading, parts=cut, given=given.get(node, {}))
            check = partial(self._check_blobs, epoch)
            found = list(self.directory.files.each(check, readings.items()))
        where = f"Epoch {epoch} of {self.path}"
        classes = find_classes(sorted({name for names in found for name in names}), where)
        readings = {node: reading.with_classes(classes) for node, reading in readings.items()}
        group = load_group(readings, replace=blobs is None, anew=anew or {})
        self.directory.loaded = epoch
        return group

    def _reading(
        self,
        node: str,
        asked: Collection[str] | None,
        readers: Mapping[str, StoreReader],
        record: EpochRecord,
        origins: Origins,
    ) -> Reading:
        """What a node loads from its own store and from those of others; `asked` None: all."""
        home = origins.nodes.get(node, node)
        replicated = record.details.replicated
        own: dict[str, str] | None = None if asked is None else {}
        borrowed: dict[str, tuple[StoreReader, str]] = {}
        if asked is None:
            asked = [name for name, (_, *others) in replicated.items() if node in others]
        for name in asked:
            at, then = origins.of(node, name)
            owner = replicated[then][0] if then in replicated else at
            if owner != home:
                borrowed[name] = self._reader_of(readers, owner, then), then
            elif own is not None:
                own[name] = then
        if own and home not in readers:
            raise BlobNotFoundError(
                f"Epoch {record.at} of {self.path} has no node {node!r}, so blob "
                f"{next(iter(own))!r} cannot be loaded there."
            )
        return Reading(readers.get(home), own, borrowed)

    def readers(self, record: EpochRecord) -> dict[str, StoreReader]:
        """The readers of a recorded epoch's stores, by node."""
        stores = record.stores
        if not stores and self.directory.only_node is not None:
            raise CheckpointNotFoundError(
                f"Epoch {record.at} of {self.path} has no store of node "
                f"{self.directory.only_node!r}. Name a checkpointed node, or use a "
                f"MultiNodeCheckpointManager."
            )
        codecs = tuple(REGISTERED_CODECS.values())
        return {
            node: StoreReader(
                self.directory.files,
                self.path,
                store.name,
                store.sha256,
                codecs,
                self._allow_pickle,
            )
            for node, store in stores.items()
        }

    def _reader_of(self, readers: Mapping[str, StoreReader], node: str, blob: str) -> StoreReader:
        if node not in readers:
            raise BlobNotFoundError(
                f"Blob {blob!r} is in the store of node {node!r} in {self.path}; this manager "
                f"reads only stores of node {self.directory.only_node!r}. Use a "
                f"MultiNodeCheckpointManager, or omit the blob from `blobs`."
            )
        return readers[node]

    def _cut(
        self,
        record: EpochRecord,
        readers: Mapping[str, StoreReader],
        partitions: Mapping[str, Sequence[str]],
        origins: Origins,
    ) -> dict[str, dict[str, Part | States]]:
        """Node -> its partitioned blobs that other nodes saved -> its new part."""
        parts: dict[str, dict[str, Part | States]] = defaultdict(dict)
        recorded = record.details.partitions
        contents = self.contents(record)
        for name, nodes in partitions.items():
            then = origins.shared.get(name, name)
            if then not in recorded:
                continue
            axis, before = recorded[then].axis, recorded[then].nodes
            if [origins.nodes.get(node, node) for node in nodes] == before:
                continue
            stores = [self._reader_of(readers, node, then) for node in before]
            if all(then in contents[node].states for node in before):
                is_joined = len(nodes) != len(before)
                for i, node in enumerate(nodes):
                    ours = stores if is_joined else [stores[i]]
                    parts[node][name] = States(then, ours, len(nodes) if is_joined else None)
                continue
            measure = partial(StoreReader.axis_length, blob=then, axis=axis)
            lengths = list(self.directory.files.each(measure, stores))
            for node, pieces in zip(nodes, cut_evenly(lengths, len(nodes)), strict=True):
                found = [(stores[i], start, stop) for i, start, stop in pieces]
                parts[node][name] = Part(then, axis, found)
        return parts

    def _check_blobs(self, epoch: Position, named: tuple[str, Reading]) -> set[str]:
        """Check that a node has the blobs that it is to load; return the classes that they name."""
        node, reading = named
        classes: set[str] = set()
        elsewhere = list(reading.borrowed.values())
        for part in reading.parts.values():
            if isinstance(part, States):
                elsewhere += [(store, part.blob) for store in part.stores]
        for reader, name in elsewhere:
            classes.update(reader.read_document().entry.classes.get(name, ()))
        if reading.own is None or (reading.blobs is not None and not reading.blobs):
            return classes
        document = reading.own.read_document()
        for blob in document.blobs if reading.blobs is None else reading.blobs.values():
            if blob not in document.blobs:
                raise BlobNotFoundError(
                    f"Node {node!r} has no blob {blob!r} at epoch {epoch} of {self.path}. "
                    f"It has {name_some(document.blobs)}."
                )
            classes.update(document.entry.classes.get(blob, ()))
        return classes


def open_origin(
    load_path: str | os.PathLike[str], path: str, files: Files | None, *, allow_pickle: bool
) -> Loader:
    """The loader of another directory than `path`, to resume from; see `load_path` of managers."""
    origin = Directory(load_path, None, files_beside(absolute_path(load_path), files))
    if origin.path == path:
        raise DefinitionError(
            f"load_path and path are both {path}. Omit load_path: a run resumes from path."
        )
    return Loader(origin, allow_pickle=allow_pickle)


def read_contents(
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
    return NodeContents(list(entry.blobs), entry.states, entry.classes, parts)
