"""What a checkpoint directory holds: reading it, with or without a cluster."""

from __future__ import annotations

import os
import platform
import uuid
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from jobrunner.checkpoint.encoding import registered_codecs
from jobrunner.checkpoint.epochs import RecordedEpochs, name_some
from jobrunner.checkpoint.load import Part, Reading, cut_evenly, load_group
from jobrunner.checkpoint.log import Claim, MetadataHandler, memory_key
from jobrunner.checkpoint.storage import PosixFiles
from jobrunner.checkpoint.store import Checkpoint, StoreReader
from jobrunner.define import TaskGroup, TaskOutput
from jobrunner.errors import (
    BlobNotFoundError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    DefinitionError,
)

REPLICATED = "replicated"
"""Detail of a record: name of a blob -> the nodes that have it; the first one's store holds it."""

PARTITIONS = "partitions"
"""Detail of a record: name of a blob -> its axis, and the nodes that hold its parts, in order."""

_VERIFIED_AT_ONCE = 4  # stores, each by threads of its own


class CheckpointDirectory(RecordedEpochs):
    """The recorded epochs of a directory, and what their stores hold.

    `MultiNodeCheckpointManager` documents the parameters.

    Notes
    -----
    Runs on the client. All that it says, it says from the log as it is at the call.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata_handler: MetadataHandler | None,
        *,
        allow_pickle: bool,
        files: PosixFiles | None,
        only_node: str | None = None,
    ) -> None:
        super().__init__(path, metadata_handler, files=files, only_node=only_node)
        self._allow_pickle = allow_pickle
        self._load_seconds: weakref.WeakKeyDictionary[
            TaskGroup, tuple[str, dict[str, TaskOutput]]
        ] = weakref.WeakKeyDictionary()

    def blobs(self, epoch: int) -> dict[str, list[str]]:
        """Names of the blobs of each node at a recorded epoch.

        Raises
        ------
        CheckpointCorruptError
            A manifest is missing or not what was written.
        """
        with self.reading(epoch):
            readers = self._readers(epoch)
            manifests = self._files.each(StoreReader.read_manifest, readers.values())
            found = {
                node: list(manifest["blobs"])
                for node, manifest in zip(readers, manifests, strict=True)
            }
        for name, nodes in self.record(epoch)["details"].get(REPLICATED, {}).items():
            for node in nodes[1:]:
                if node in found and nodes[0] in found:
                    found[node].append(name)
        return found

    def stateful_blobs(self, epoch: int) -> dict[str, frozenset[str]]:
        """Names of the blobs of each node that hold objects saved by their state."""
        stores = self.record(epoch)["stores"]
        return {node: frozenset(about.get("states", ())) for node, about in stores.items()}

    def shared_blobs(self, epoch: int) -> frozenset[str]:
        """Names of the blobs that nodes which were not saved can load too."""
        details = self.record(epoch)["details"]
        return frozenset(details.get(REPLICATED, ())) | frozenset(details.get(PARTITIONS, ()))

    def verify(self, epoch: int) -> None:
        """Read every byte of a recorded epoch.

        Raises
        ------
        CheckpointCorruptError
            Naming the first file that is not what was written, what was expected and found.
        """
        with self.reading(epoch):
            readers = self._readers(epoch).values()
            list(self._files.each(StoreReader.verify, readers, _VERIFIED_AT_ONCE))

    def open(self, epoch: int, *, pin: bool = False) -> Checkpoint:
        """Look into a recorded epoch: ``checkpoint[node][blob]``.

        Parameters
        ----------
        epoch : int
        pin : bool
            Keep the epoch, whatever the retention policy says, until `Checkpoint.close`; the
            checkpoint is a context manager. Writes to the log.

        Returns
        -------
        Checkpoint

        Raises
        ------
        CheckpointNotFoundError
            The epoch is not recorded.
        """
        release = None
        if pin:
            label = f"opened by process {os.getpid()} on {platform.node()}, {uuid.uuid4().hex[:8]}"
            self.pin(epoch, label)
            release = partial(self.unpin, epoch, label)
        try:
            record, readers = self.record(epoch), self._readers(epoch)
        except BaseException:
            if release is not None:
                with suppress(CheckpointError):
                    release()
            raise
        return Checkpoint(
            epoch,
            record,
            readers,
            registered_codecs(),
            allow_pickle=self._allow_pickle,
            release=release,
        )

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
        """Make the task group that loads a recorded epoch.

        It verifies everything on all nodes, and only then replaces the nodes' global blobs.

        Parameters
        ----------
        epoch : int
        nodes : collection of str, optional
            Only these nodes.
        blobs : mapping of str to collection of str, optional
            Node -> the blobs to load; these nodes' other blobs, and other nodes, stay as they
            are. Only what is asked for is read.
        partitions : mapping of str to sequence of str, optional
            Name of a partitioned blob -> the nodes that hold its parts now. Where they are others
            than those that saved it, each gets a part of about the same length.
        anew : mapping of str to collection of str, optional
            Node -> blobs of objects that are made anew once the group has run: `load_waiting_states`
            then loads their states. By default a state is loaded into the object that is there.
        from_memory : bool
            Where a worker still keeps in memory what was written to a node's store, take it from
            there. What is then not read is not verified either.

        Returns
        -------
        TaskGroup
            For `Session.run`.

        Raises
        ------
        CheckpointNotFoundError
            The epoch is not recorded.
        BlobNotFoundError
            A node or blob that was named is not in it.

        Notes
        -----
        Runs on the client; the group's tasks run on the nodes' workers, and raise
        `CheckpointCorruptError` where something is not what was written. *Atomicity*: no blob is
        replaced before all are verified. *Safe to retry*: yes.
        """
        readers = self._readers(epoch)
        details = self.record(epoch)["details"]
        moment = self.moment(epoch)
        lacking = [
            *(node for node in nodes or () if node not in readers),
            *(node for node, names in (blobs or {}).items() if node not in readers and not names),
        ]
        for node in lacking:
            raise BlobNotFoundError(
                f"Epoch {epoch} of {self.path} has no node {node!r}. It has "
                f"{name_some(list(readers))}."
            )
        wanted = [
            node for node in (readers if blobs is None else blobs) if nodes is None or node in nodes
        ]
        with self.reading(epoch):
            parts = self._cut(readers, details.get(PARTITIONS, {}), partitions or {})
            readings = {}
            named: list[tuple[str, Collection[str]]] = []
            for node in wanted:
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
                named.append((node, own or ()))
                reader = None if own is not None and not own else readers.get(node)
                memory = readers[node] if from_memory and node in readers else None
                readings[node] = Reading(reader, own, borrowed, cut, moment, memory)
            list(self._files.each(partial(self._check_blobs, epoch, readers), named))
        group, seconds = load_group(
            readings,
            registered_codecs(),
            replace=blobs is None,
            allow_pickle=self._allow_pickle,
            anew=anew or {},
        )
        action = "checkpoint_load" if blobs is None else "checkpoint_partial_load"
        self._load_seconds[group] = (action, seconds)
        return group

    def moment(self, epoch: int) -> str:
        """What workers call the states of a recorded epoch that they keep in memory."""
        return memory_key(self.path, Claim(epoch, self.record(epoch)["retry"]))

    def report_load(self, group: TaskGroup, action: str | None = None) -> None:
        """Report to the metadata handler how long each node took, once `group` has run.

        Parameters
        ----------
        group : TaskGroup
            One that `load` made.
        action : str, optional
            By default ``checkpoint_partial_load`` where `load` was told which blobs to load, else
            ``checkpoint_load``.

        Raises
        ------
        DefinitionError
            It was not.
        ExecutionError
            It has not run.
        """
        if group not in self._load_seconds:
            raise DefinitionError(f"{group!r} was not made by load() of this manager.")
        default, seconds = self._load_seconds[group]
        self._handler.report(
            action or default, {node: output.fetch() for node, output in seconds.items()}
        )

    # --- helpers

    def _readers(self, epoch: int) -> dict[str, StoreReader]:
        stores = self.record(epoch)["stores"]
        if not stores and self._only_node is not None:
            raise CheckpointNotFoundError(
                f"Epoch {epoch} of {self.path} holds nothing of node {self._only_node!r}. Name a "
                f"node that was checkpointed, or use a MultiNodeCheckpointManager."
            )
        return {
            node: StoreReader(self._files, self.path, about["store"], about["manifest"])
            for node, about in stores.items()
        }

    def _reader_of(self, readers: Mapping[str, StoreReader], node: str, blob: str) -> StoreReader:
        """What reads a blob that lies in the store of a certain node."""
        if node not in readers:
            raise BlobNotFoundError(
                f"Blob {blob!r} lies in the store of node {node!r} in {self.path}, and this "
                f"manager reads that of {self._only_node!r} alone. Use a "
                f"MultiNodeCheckpointManager, or name the blobs to load without it."
            )
        return readers[node]

    def _cut(
        self,
        readers: Mapping[str, StoreReader],
        recorded: Mapping[str, Any],
        partitions: Mapping[str, Sequence[str]],
    ) -> dict[str, dict[str, Part]]:
        """Node -> the blobs of which it gets another part than was saved of it, and which."""
        parts: dict[str, dict[str, Part]] = {}
        for name, nodes in partitions.items():
            if name not in recorded or list(nodes) == recorded[name]["nodes"]:
                continue
            axis = recorded[name]["axis"]
            stores = [self._reader_of(readers, node, name) for node in recorded[name]["nodes"]]
            measure = partial(StoreReader.axis_length, blob=name, axis=axis)
            lengths = list(self._files.each(measure, stores))
            for node, pieces in zip(nodes, cut_evenly(lengths, len(nodes)), strict=True):
                found = [(stores[i], start, stop) for i, start, stop in pieces]
                parts.setdefault(node, {})[name] = Part(axis, found)
        return parts

    def _check_blobs(
        self,
        epoch: int,
        readers: Mapping[str, StoreReader],
        named: tuple[str, Collection[str]],
    ) -> None:
        node, blobs = named
        reader = readers.get(node)
        there = [] if reader is None or not blobs else reader.read_manifest()["blobs"]
        for blob in blobs:
            if reader is None:
                raise BlobNotFoundError(
                    f"Epoch {epoch} of {self.path} has no node {node!r}, and so not its blob "
                    f"{blob!r}."
                )
            if blob not in there:
                raise BlobNotFoundError(
                    f"Node {node!r} has no blob {blob!r} at epoch {epoch} of {self.path}. "
                    f"It has {name_some(list(there))}."
                )

    @contextmanager
    def reading(self, epoch: int) -> Iterator[None]:
        """Tell damage from an epoch that was retired while it was read."""
        try:
            yield
        except CheckpointCorruptError as error:
            if epoch in self._journal.refresh().recorded:
                raise
            raise CheckpointNotFoundError(
                f"Epoch {epoch} of {self.path} was given up while it was read. Read a later one."
            ) from error
