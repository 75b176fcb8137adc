"""Verifies, opens and loads recorded epochs. Runs on the client; `worker_load` on the workers."""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from jobrunner.checkpoint.encoding import REGISTERED_CODECS, find_classes
from jobrunner.checkpoint.epochs import Epochs, name_some
from jobrunner.checkpoint.log import Claim, memory_key
from jobrunner.checkpoint.store import Checkpoint, StoreReader
from jobrunner.checkpoint.worker_load import Part, Reading, cut_evenly, load_group, reading_seconds
from jobrunner.define import TaskGroup
from jobrunner.errors import BlobNotFoundError, CheckpointError, CheckpointNotFoundError

REPLICATED = "replicated"
"""Detail of a record: name of a blob -> the nodes that have it. The first node's store has it."""

PARTITIONS = "partitions"
"""Detail of a record: name of a blob -> its axis, and the nodes that have its parts, in order."""

_VERIFIED_AT_ONCE = 4  # stores, each by threads of its own


class Loader:
    """Verifies, opens and loads the stores of recorded epochs."""

    def __init__(self, recorded: Epochs, *, allow_pickle: bool = False) -> None:
        self.recorded = recorded
        self.path = recorded.path
        self._allow_pickle = allow_pickle

    def blobs(self, epoch: int) -> dict[str, list[str]]:
        """The names of the blobs of each node at a recorded epoch; verifies the manifests."""
        record = self.recorded.record(epoch)
        readers = self.readers(record)
        with self.recorded.reading(epoch):
            manifests = self.recorded.files.each(StoreReader.read_manifest, readers.values())
            found = {
                node: list(manifest.blobs)
                for node, manifest in zip(readers, manifests, strict=True)
            }
        for name, (owner, *others) in record["details"].get(REPLICATED, {}).items():
            for node in others:
                if node in found and owner in found:
                    found[node].append(name)
        return found

    def stateful_blobs(self, epoch: int) -> dict[str, frozenset[str]]:
        """The names of each node's blobs with objects that are saved by their state."""
        stores = self.recorded.record(epoch)["stores"]
        return {node: frozenset(about.get("states", ())) for node, about in stores.items()}

    def shared_blobs(self, epoch: int) -> frozenset[str]:
        """The replicated and partitioned blobs, which also nodes that were not saved can load."""
        details = self.recorded.record(epoch)["details"]
        return frozenset(details.get(REPLICATED, ())) | frozenset(details.get(PARTITIONS, ()))

    def verify(self, epoch: int) -> None:
        """See `MultiNodeCheckpointManager.verify`."""
        with self.recorded.reading(epoch):
            readers = self.readers(self.recorded.record(epoch)).values()
            list(self.recorded.files.each(StoreReader.verify, readers, _VERIFIED_AT_ONCE))

    def open(self, epoch: int, *, pin: bool = False) -> Checkpoint:
        """See `MultiNodeCheckpointManager.open`."""
        release = None
        if pin:
            label = f"opened by process {os.getpid()} on {platform.node()}, {uuid.uuid4().hex[:8]}"
            self.recorded.pin(epoch, label)
            release = partial(self.recorded.unpin, epoch, label)
        try:
            record = self.recorded.record(epoch)
            readers = self.readers(record)
        except BaseException:
            if release is not None:
                with suppress(CheckpointError):
                    release()
            raise
        return Checkpoint(epoch, record, readers, release)

    def load(
        self,
        epoch: int,
        *,
        nodes: Collection[str] | None = None,
        blobs: Mapping[str, Collection[str]] | None = None,
        partitions: Mapping[str, Sequence[str]] | None = None,
        anew: Mapping[str, Collection[str]] | None = None,
        from_memory: bool = False,
    ) -> TaskGroup:
        """See `MultiNodeCheckpointManager.load`.

        For blobs named in `anew`, by node, objects are made only after the group has run;
        `load_waiting_states` then loads their states. By default a state is loaded into the
        existing object. With `from_memory`, states that workers still have in memory are used
        instead of read and verified.
        """
        record = self.recorded.record(epoch)
        readers, details = self.readers(record), record["details"]
        named_alone = [node for node, names in (blobs or {}).items() if not names]
        for node in (*(nodes or ()), *named_alone):
            if node not in readers:
                raise BlobNotFoundError(
                    f"Epoch {epoch} of {self.path} has no node {node!r}. It has "
                    f"{name_some(readers)}."
                )
        readings: dict[str, Reading] = {}
        with self.recorded.reading(epoch):
            parts = self._cut(readers, details.get(PARTITIONS, {}), partitions or {})
            for node in readers if blobs is None else blobs:
                if nodes is not None and node not in nodes:
                    continue
                asked = None if blobs is None else frozenset(blobs[node])
                borrowed = {
                    name: self._reader_of(readers, owner, name)
                    for name, (owner, *others) in details.get(REPLICATED, {}).items()
                    if node != owner and (node in others if asked is None else name in asked)
                }
                cut = {
                    name: part
                    for name, part in parts.get(node, {}).items()
                    if asked is None or name in asked
                }
                own = None if asked is None else asked - borrowed.keys() - cut.keys()
                if own and node not in readers:
                    raise BlobNotFoundError(
                        f"Epoch {epoch} of {self.path} has no node {node!r}, so blob "
                        f"{next(iter(own))!r} cannot be loaded there."
                    )
                key = self.memory_key(record) if from_memory else None
                readings[node] = Reading(readers.get(node), own, borrowed, cut, key)
            check = partial(self._check_blobs, epoch)
            found = list(self.recorded.files.each(check, readings.items()))
        where = f"Epoch {epoch} of {self.path}"
        classes = find_classes(sorted({name for names in found for name in names}), where)
        readings = {node: reading.with_classes(classes) for node, reading in readings.items()}
        group = load_group(readings, replace=blobs is None, anew=anew or {})
        self.recorded.loaded = epoch
        return group

    def memory_key(self, record: Mapping[str, Any]) -> str:
        """The key under which workers keep the states of a recorded epoch in memory."""
        return memory_key(self.path, Claim(record["epoch"], record["retry"]))

    def report_load(self, group: TaskGroup, action: str) -> None:
        """Report to the metadata handler how long each node took to run a group that `load` made.

        Raises ExecutionError if the group has not run.
        """
        self.recorded.handler.report(action, reading_seconds(group))

    def readers(self, record: Mapping[str, Any]) -> dict[str, StoreReader]:
        """The readers of a recorded epoch's stores, by node."""
        stores = record["stores"]
        if not stores and self.recorded.only_node is not None:
            raise CheckpointNotFoundError(
                f"Epoch {record['epoch']} of {self.path} has no store of node "
                f"{self.recorded.only_node!r}. Name a checkpointed node, or use a "
                f"MultiNodeCheckpointManager."
            )
        codecs = tuple(REGISTERED_CODECS.values())
        return {
            node: StoreReader(
                self.recorded.files,
                self.path,
                about["store"],
                about["manifest"],
                codecs,
                self._allow_pickle,
            )
            for node, about in stores.items()
        }

    def _reader_of(self, readers: Mapping[str, StoreReader], node: str, blob: str) -> StoreReader:
        if node not in readers:
            raise BlobNotFoundError(
                f"Blob {blob!r} is in the store of node {node!r} in {self.path}; this manager "
                f"reads only stores of node {self.recorded.only_node!r}. Use a "
                f"MultiNodeCheckpointManager, or omit the blob from `blobs`."
            )
        return readers[node]

    def _cut(
        self,
        readers: Mapping[str, StoreReader],
        recorded: Mapping[str, Any],
        partitions: Mapping[str, Sequence[str]],
    ) -> dict[str, dict[str, Part]]:
        """Node -> its partitioned blobs that other nodes saved -> its new part."""
        parts: dict[str, dict[str, Part]] = {}
        for name, nodes in partitions.items():
            if name not in recorded or list(nodes) == recorded[name]["nodes"]:
                continue
            axis = recorded[name]["axis"]
            stores = [self._reader_of(readers, node, name) for node in recorded[name]["nodes"]]
            measure = partial(StoreReader.axis_length, blob=name, axis=axis)
            lengths = list(self.recorded.files.each(measure, stores))
            for node, pieces in zip(nodes, cut_evenly(lengths, len(nodes)), strict=True):
                found = [(stores[i], start, stop) for i, start, stop in pieces]
                parts.setdefault(node, {})[name] = Part(axis, found)
        return parts

    def _check_blobs(self, epoch: int, named: tuple[str, Reading]) -> set[str]:
        """Check that a node has the blobs that it is to load; return the classes that they name."""
        node, reading = named
        classes: set[str] = set()
        for name, reader in reading.borrowed.items():
            classes.update((reader.read_manifest().classes or {}).get(name, ()))
        if reading.own is None or (reading.blobs is not None and not reading.blobs):
            return classes
        manifest = reading.own.read_manifest()
        for blob in manifest.blobs if reading.blobs is None else reading.blobs:
            if blob not in manifest.blobs:
                raise BlobNotFoundError(
                    f"Node {node!r} has no blob {blob!r} at epoch {epoch} of {self.path}. "
                    f"It has {name_some(manifest.blobs)}."
                )
            classes.update((manifest.classes or {}).get(blob, ()))
        return classes
