"""What is sent to the workers to save, or to find out whether all can be saved."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jobrunner.checkpoint.copies import Arena, copy_arrays
from jobrunner.checkpoint.encoding import Codec, EncodedBlob, encode_blobs, store_as
from jobrunner.checkpoint.log import Claim, memory_key
from jobrunner.checkpoint.storage import PosixFiles, run_gently
from jobrunner.checkpoint.store import (
    Alike,
    FormerStore,
    Receipt,
    StoreBatch,
    StoreReader,
    digest_blob,
    find_alike,
    former_store,
)
from jobrunner.checkpoint.unchanged import Provenance
from jobrunner.define import DEFAULT_ARRAY_OPTIONS, ArrayOptions
from jobrunner.errors import CheckpointError, CheckpointWriteError, DefinitionError
from jobrunner.workspace import Workspace

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlobCheck:
    """Finds out whether the blobs of nodes can be saved; called once on each worker.

    Parameters
    ----------
    nodes : frozenset of str
    codecs : sequence of Codec
    allow_pickle : bool
    initial : mapping of str to collection of str, optional
        Node -> the blobs that its init tasks make: only those may hold objects that are saved by
        their state. By default, any may.
    storage : mapping of str to mapping of str to ArrayOptions
        Node -> name of a blob -> how its arrays are stored.
    default : ArrayOptions
        How those of others are.

    Notes
    -----
    Runs on workers, in a thread; picklable. Touches no storage.
    """

    nodes: frozenset[str]
    codecs: Sequence[Codec] = ()
    allow_pickle: bool = False
    initial: Mapping[str, Collection[str]] | None = None
    storage: Mapping[str, Mapping[str, ArrayOptions]] = field(default_factory=dict)
    default: ArrayOptions = DEFAULT_ARRAY_OPTIONS

    def __call__(self, workspaces: Mapping[str, Workspace]) -> None:
        """Raise what `encode` raises."""
        self.encode(workspaces)

    def encode(
        self, workspaces: Mapping[str, Workspace], apart: Collection[str] = ()
    ) -> dict[str, dict[str, EncodedBlob | Alike]]:
        """Encode all that a save writes of each node: its global blobs but the transient ones.

        Parameters
        ----------
        workspaces : mapping of str to Workspace
        apart : collection of str
            Names of blobs that are not to be stacked.

        Raises
        ------
        DefinitionError
            A blob cannot be encoded; names it and the ways out.
        """
        encoded = {
            node: self._encode_node(node, workspace, apart)
            for node, workspace in workspaces.items()
            if node in self.nodes
        }
        if self.initial is not None:
            for node, blobs in encoded.items():
                for name, blob in blobs.items():
                    if _has_state(blob) and name not in self.initial.get(node, ()):
                        raise DefinitionError(
                            f"Node {node!r}, blob {name!r}: it holds an object that is saved by "
                            f"its state_dict(), and no task of the init group makes that blob, so "
                            f"nothing would be there to load the state into at a resume. Make it "
                            f"in the init group, or put its state_dict() into the blob instead, or "
                            f"keep it out of checkpoints, outputs=Blob({name!r}, transient=True)."
                        )
        return encoded

    def _encode_node(
        self, node: str, workspace: Workspace, apart: Collection[str]
    ) -> dict[str, EncodedBlob | Alike]:
        blobs = workspace.globals
        if workspace.transient:
            blobs = {name: blobs[name] for name in blobs if name not in workspace.transient}
        storage = self.storage.get(node, {})
        alike: dict[str, Alike] = {}
        if not self.default.compressors:
            alike = find_alike(blobs, {*apart, *storage})
        single = {name: value for name, value in blobs.items() if name not in alike}
        beside = {name: blobs[name] for name in alike}
        encoded = encode_blobs(
            node, single, self.codecs, allow_pickle=self.allow_pickle, beside=beside
        )
        return {
            name: alike.get(name)
            or store_as(node, name, encoded[name], storage.get(name), self.default)
            for name in blobs
        }


def _has_state(blob: EncodedBlob | Alike) -> bool:
    return isinstance(blob, EncodedBlob) and blob.has_state


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Writes the stores of a worker's nodes; called once on each worker.

    Parameters
    ----------
    path : str
        The checkpoint directory, absolute.
    run : str
    claim : Claim
    stores : mapping of str to str
        Node -> name of its store.
    check : BlobCheck
    files : PosixFiles
    former : mapping of str to (str, str)
        Node -> a recorded store of it, and the SHA-256 of its manifest: chunks that are the same
        there are linked.
    replicated : mapping of str to sequence of str
        Name of a blob -> the nodes that have it; the first one saves it.
    details : mapping
        JSON that the first node's store keeps, so that the record can be made again without the
        log.

    Notes
    -----
    Runs on workers, in a thread; picklable. *Atomicity*: the epoch exists once the manager has
    committed it, and not before. *Safe to retry*: no; begin again.
    """

    path: str
    run: str
    claim: Claim
    stores: Mapping[str, str]
    check: BlobCheck
    files: PosixFiles
    former: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    replicated: Mapping[str, Sequence[str]] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def epoch(self) -> int:
        """The epoch that is saved."""
        return self.claim.epoch

    def __call__(self, workspaces: Mapping[str, Workspace]) -> dict[str, Receipt]:
        """Write, make durable, and give a receipt for each node.

        Raises
        ------
        DefinitionError
            A blob cannot be encoded; nothing was written.
        CheckpointWriteError
            The storage failed.
        """
        prepared = self._prepare(workspaces)
        with self._writing(prepared.nodes):
            prepared.batch.write()
            return self._identify(workspaces, prepared)

    @property
    def moment(self) -> str:
        """What the workers call the states that they keep of it in memory."""
        return memory_key(self.path, self.claim)

    def copy(self, budget_bytes: int | None) -> SnapshotOrder:
        """What copies all that is to be saved, to be called on every worker.

        Parameters
        ----------
        budget_bytes : int or None
            Longest that the copies on a worker may be; what is beyond is written at once.
        """
        return SnapshotOrder(self, budget_bytes)

    def write_copies(self) -> CopiesOrder:
        """What writes the copies that `copy` made, to be called on every worker."""
        return CopiesOrder(self)

    def _prepare(self, workspaces: Mapping[str, Workspace]) -> _Prepared:
        # Before the blobs are encoded, for then nothing else refers to their arrays.
        provenance, moment = {}, self.moment
        for node in self.stores.keys() & workspaces.keys():
            workspace = workspaces[node]
            names = [name for name in workspace.globals if name not in workspace.transient]
            workspace.kept_states.keep(moment, node, workspace.globals, names)
            provenance[node] = Provenance(workspace, names)
        # All of it before anything is written: what cannot be saved is no fault of the storage.
        encoded = self.check.encode(workspaces, self.replicated)
        states = {
            node: tuple(name for name, blob in blobs.items() if _has_state(blob))
            for node, blobs in encoded.items()
        }
        replicas: dict[str, dict[str, str]] = {}
        for name, nodes in self.replicated.items():
            for node in nodes:
                blob = encoded.get(node, {}).get(name)
                if isinstance(blob, EncodedBlob):
                    digest = digest_blob(self.files, blob)
                    replicas.setdefault(node, {})[name] = digest
                    if node != nodes[0]:
                        del encoded[node][name]
        stores = {
            self.stores[node]: (self._about(node, states[node]), blobs)
            for node, blobs in encoded.items()
        }
        known = self.files.each(lambda node: self._former(node, encoded[node]), encoded)
        former = {
            self.stores[node]: found
            for node, found in zip(encoded, known, strict=True)
            if found is not None
        }
        array_pool = next(
            (workspace.kept_states.array_pool for workspace in workspaces.values()), None
        )
        batch = StoreBatch(self.files, self.path, stores, former, array_pool)
        arrays = batch.arrays()
        for node in encoded:
            origin = (self.path, *self.former[node]) if node in self.former else None
            provenance[node].tell(arrays[self.stores[node]], origin)
        return _Prepared(list(encoded), batch, replicas, states, provenance)

    def _about(self, node: str, states: Sequence[str]) -> dict[str, Any]:
        about: dict[str, Any] = {"node": node, "epoch": self.epoch, "run": self.run}
        if states:
            about["states"] = list(states)
        if node == next(iter(self.stores)):
            about["record"] = {"nodes": list(self.stores), "details": dict(self.details)}
        return about

    def _identify(
        self, workspaces: Mapping[str, Workspace], prepared: _Prepared
    ) -> dict[str, Receipt]:
        """Make all durable, and let what is kept in memory be known by it; gives the receipts."""
        receipts, moment = prepared.finish(), self.moment
        for node, receipt in receipts.items():
            identity = (self.path, receipt.store, receipt.manifest)
            workspaces[node].kept_states.identify(moment, {node: identity})
            prepared.provenance[node].leave(workspaces[node], identity)
        return receipts

    def _former(self, node: str, blobs: Mapping[str, EncodedBlob | Alike]) -> FormerStore | None:
        if node not in self.former or not any(
            part.data.nbytes >= self.files.linked_bytes
            for blob in blobs.values()
            if isinstance(blob, EncodedBlob)
            for part in blob.parts
        ):
            return None
        store, manifest = self.former[node]
        reader = StoreReader(self.files, self.path, store, manifest)
        try:
            return former_store(reader.root, reader.read_manifest())
        except CheckpointError as error:
            logger.info("Nothing is linked to %s, which cannot be read: %s", reader.root, error)
            return None

    @contextlib.contextmanager
    def _writing(self, nodes: Sequence[str]) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            first = self.stores[nodes[0]] if nodes else ""
            where = error.filename or os.path.join(self.path, first)
            raise CheckpointWriteError(
                f"Epoch {self.epoch} of {', '.join(nodes)} could not be written: {where}: "
                f"{type(error).__name__}: {error.strerror or error}. What was recorded before "
                f"still is; mend the storage and save again."
            ) from error


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A save that is ready to be written."""

    nodes: Sequence[str]
    batch: StoreBatch
    replicas: Mapping[str, Mapping[str, str]]
    states: Mapping[str, tuple[str, ...]]
    provenance: Mapping[str, Provenance]

    def finish(self) -> dict[str, Receipt]:
        """Make what was written durable; gives the nodes' receipts."""
        receipts = dict(zip(self.nodes, self.batch.finish(), strict=True))
        for node, receipt in receipts.items():
            replicas, states = self.replicas.get(node, {}), self.states[node]
            if replicas or states:
                receipts[node] = dataclasses.replace(receipt, replicas=replicas, states=states)
        return receipts


class _Copies:
    """What a worker keeps for saves in the background: memory to copy to, and the save itself."""

    def __init__(self) -> None:
        self.arena = Arena()
        self.claim: Claim | None = None
        self.save: _Prepared | None = None

    @classmethod
    def of(cls, workspaces: Mapping[str, Workspace]) -> _Copies:
        """The one that belongs to a worker's workspaces, and lives as long as they do."""
        found = [w.companions[_COPIES] for w in workspaces.values() if _COPIES in w.companions]
        copies: _Copies = found[0] if found else cls()
        for workspace in workspaces.values():
            workspace.companions[_COPIES] = copies
        return copies


_COPIES = "copies to be saved"


@dataclass(frozen=True, slots=True)
class SnapshotOrder:
    """Copies what a `SaveOrder` would write; the epochs may go on when it returns.

    Notes
    -----
    Runs on workers, in a thread; picklable. What exceeds the budget is written at once.
    """

    order: SaveOrder
    budget_bytes: int | None

    def __call__(self, workspaces: Mapping[str, Workspace]) -> None:
        """Raise what `SaveOrder` raises."""
        copies = _Copies.of(workspaces)
        copies.save = None
        prepared = self.order._prepare(workspaces)
        arrays = [array for its in prepared.batch.arrays().values() for array in its]
        left = copy_arrays(arrays, copies.arena, self.budget_bytes)
        if left:
            with self.order._writing(prepared.nodes):
                prepared.batch.write(left)
        copies.claim, copies.save = self.order.claim, prepared


@dataclass(frozen=True, slots=True)
class CopiesOrder:
    """Writes what a `SnapshotOrder` copied, while epochs run.

    Notes
    -----
    Runs on workers, in a thread of low priority where the system has such; picklable.
    """

    order: SaveOrder

    def __call__(self, workspaces: Mapping[str, Workspace]) -> dict[str, Receipt]:
        """Write, make durable, and give a receipt for each node."""
        copies = _Copies.of(workspaces)
        prepared, copies.save = copies.save, None
        if prepared is None or copies.claim != self.order.claim:
            raise CheckpointWriteError(
                f"Epoch {self.order.epoch} of {self.order.path} cannot be written: this worker "
                f"has no copy of its blobs. Save again."
            )
        with self.order._writing(prepared.nodes):
            run_gently(prepared.batch.write)
            return self.order._identify(workspaces, prepared)
