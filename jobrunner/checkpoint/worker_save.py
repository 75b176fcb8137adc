"""One save of an epoch, as the client sends it to the workers: prepare, copy, write."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np

from jobrunner.checkpoint.encoding import (
    LONE_ARRAY,
    Codec,
    EncodedBlob,
    check_dimensions,
    check_part,
    encode_blobs,
    join_refusals,
    sent_as,
    with_options,
)
from jobrunner.checkpoint.loader import PARTITIONS
from jobrunner.checkpoint.storage import THREADS, Files, run_all, run_gently
from jobrunner.checkpoint.store import (
    LINKED_BYTES,
    Former,
    PlannedArray,
    Receipt,
    Rows,
    StoreBatch,
    StoreReader,
    digest_blob,
    encode_json,
)
from jobrunner.compile import gc_paused
from jobrunner.define import DEFAULT_ARRAY_OPTIONS, ArrayOptions
from jobrunner.errors import CheckpointError, CheckpointWriteError, DefinitionError
from jobrunner.positions import Position
from jobrunner.texts import get_logger
from jobrunner.workspace import StoredAs, StoredBlob, Workspace

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BlobEncoder:
    """Encodes the global blobs of each node, except transient ones; see `Commits.begin`."""

    codecs: Sequence[Codec] = ()
    allow_pickle: bool = False
    initial: Mapping[str, Collection[str]] | None = None
    options: Mapping[str, Mapping[str, ArrayOptions]] = field(default_factory=dict)
    default: ArrayOptions = DEFAULT_ARRAY_OPTIONS  # for blobs without options

    def encode(self, node: str, workspace: Workspace) -> dict[str, EncodedBlob]:
        """Encode the blobs of a node."""
        names = [name for name in workspace.globals if name not in workspace.transient]
        done = self._encoded_before(workspace, names)
        blobs = {name: None if name in done else workspace.value(name) for name in names}
        options = self.options.get(node, {})
        encoded = encode_blobs(node, blobs, self.codecs, allow_pickle=self.allow_pickle, done=done)
        for name in encoded.keys() - done.keys():
            if type(blobs[name]) is np.ndarray:
                continue
            if workspace.is_provable(name) and not workspace.holds_arrays(name):
                # Until a task changes it, it need not be encoded again.
                encoded[name] = replace(
                    encoded[name], tree=msgspec.Raw(encode_json(encoded[name].tree))
                )
        initial = None if self.initial is None else self.initial.get(node, ())
        for name, blob in encoded.items():
            if blob.has_state and initial is not None and name not in initial:
                raise DefinitionError(
                    f"Node {node!r}, blob {name!r}: it contains an object that is saved by its "
                    f"state_dict(), but no task of the init group makes the blob, so a resume "
                    f"would have no object to load the state into. Make the blob in the init "
                    f"group, or store the object's state_dict() in it, or exclude it from "
                    f"checkpoints: outputs=Blob({name!r}, transient=True)."
                )
        if options or self.default.compressors:
            for name, blob in encoded.items():
                encoded[name] = with_options(node, name, blob, options.get(name), self.default)
            check_dimensions(node, encoded)
        return encoded

    def key(self) -> Any:
        """Equal for encoders that encode equal values alike."""
        return self.allow_pickle, tuple((codec.cls, codec.name) for codec in self.codecs)

    def _encoded_before(
        self, workspace: Workspace, names: Collection[str]
    ) -> dict[str, EncodedBlob]:
        """The blobs that nothing has changed since the last save, as they were encoded then."""
        stored = workspace.stored
        if stored is None or stored.encoded_by != self.key():
            return {}
        encoded = {}
        for name in names:
            blob = stored.blobs.get(name)
            if blob is None or blob.encoded is None:
                continue
            if blob.version == workspace.versions[name]:
                encoded[name] = blob.encoded
        return encoded


class Claim(NamedTuple):
    """An attempt to save an epoch: `begin` is the number of its entry in the log."""

    epoch: Position
    begin: int
    label: int


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Writes the stores of a worker's nodes: call `write`, or `copy` and `write`, once on each.

    Picklable; runs on workers, in a thread. Not safe to retry: begin a new save instead.
    """

    path: str
    run: str
    claim: Claim
    stores: Mapping[str, str]
    """Node -> name of its store."""
    encoder: BlobEncoder
    files: Files
    former: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Node -> its recorded store whose unchanged chunks are linked, and the SHA-256 of its document."""
    replicated: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Name of a blob -> the nodes that have it. The first one saves it."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Of the record; the first node's store has a copy, for repairs."""

    @property
    def epoch(self) -> Position:
        """What the claim is for."""
        return self.claim.epoch

    def write(
        self, workspaces: Mapping[str, Workspace], *, is_copied: bool = False
    ) -> dict[str, Receipt]:
        """Write the stores, make them durable, and return a receipt for each node.

        With `is_copied`, write what `copy` has copied, at low priority where the system has thread
        priorities. Raises DefinitionError, before anything is written, if a blob cannot be
        encoded, and CheckpointWriteError if the storage fails.
        """
        prepared = self._take_copy(workspaces)  # which refers to arrays
        if not is_copied:
            prepared = self._prepare(workspaces)
        elif prepared is None:
            raise CheckpointWriteError(
                f"Epoch {self.epoch} of {self.path} cannot be written: this worker has no copy of "
                f"its blobs. Save the epoch again."
            )
        with self._writing(prepared.nodes):
            if is_copied:
                run_gently(prepared.batch.write)
            else:
                prepared.batch.write()
            return self._finish(workspaces, prepared)

    def copy(self, workspaces: Mapping[str, Workspace], budget_bytes: int | None = None) -> None:
        """Copy what `write` will write; the epochs may continue when it returns.

        Copies up to `budget_bytes` and writes the rest at once. Raises what `write` raises.
        """
        self._take_copy(workspaces)
        prepared = self._prepare(workspaces)
        arrays = [array for its in prepared.batch.arrays().values() for array in its]
        left = hold_arrays(arrays, budget_bytes)
        if left:
            with self._writing(prepared.nodes):
                prepared.batch.write(left)
        for workspace in workspaces.values():
            workspace.set_aside[_COPIED] = (self.claim, prepared)

    def _take_copy(self, workspaces: Mapping[str, Workspace]) -> _Prepared | None:
        """Return the copy of this save, and drop it or that of another one."""
        copied = [workspace.set_aside.pop(_COPIED, None) for workspace in workspaces.values()]
        for claim, prepared in filter(None, copied):
            if claim == self.claim:
                return prepared  # type: ignore[no-any-return]  # all nodes have the same one
        return None

    @gc_paused()  # of thousands of blobs, none of what is made here is garbage
    def _prepare(self, workspaces: Mapping[str, Workspace]) -> _Prepared:
        nodes = [node for node in workspaces if node in self.stores]
        # Encode everything before writing anything: a blob that cannot be saved is an error of the
        # job, not of the storage.
        encoded: dict[str, dict[str, EncodedBlob]] = {}
        refused: list[DefinitionError] = []
        for node in nodes:
            try:
                encoded[node] = self.encoder.encode(node, workspaces[node])
            except DefinitionError as error:
                refused.append(error)
        if refused:
            raise join_refusals(refused) from refused[0].__cause__
        states = {
            node: tuple(name for name, blob in blobs.items() if blob.has_state)
            for node, blobs in encoded.items()
        }
        of_job = {
            node: {name: blob.classes for name, blob in blobs.items() if blob.classes}
            for node, blobs in encoded.items()
        }
        replicas: dict[str, dict[str, str]] = {}
        for name, (first, *others) in self.replicated.items():
            for node in (first, *others):
                blob = encoded.get(node, {}).get(name)
                if blob is not None:
                    replicas.setdefault(node, {})[name] = digest_blob(blob)
                    if node != first:
                        del encoded[node][name]
        parts: dict[str, dict[str, str]] = {node: {} for node in encoded}
        lengths: dict[str, dict[str, int]] = {node: {} for node in encoded}
        for name, about in self.details.get(PARTITIONS, {}).items():
            for node in about["nodes"]:
                blob = encoded.get(node, {}).get(name)
                if blob is not None:
                    value = workspaces[node].value(name)
                    check_part(node, name, value, blob, about["axis"])
                    parts[node][name] = _describe_part(value, about["axis"])
                    if blob.tree == LONE_ARRAY:
                        lengths[node][name] = value.shape[about["axis"]]
        stores = {
            self.stores[node]: (self._about(node, states[node], of_job[node]), blobs)
            for node, blobs in encoded.items()
        }
        known = self.files.each(lambda node: self._former(node, encoded[node]), encoded)
        former = dict(zip(stores, known, strict=True))
        batch = StoreBatch(self.files, self.path, stores, former)
        arrays = batch.arrays()
        stored = {}
        for node in nodes:
            identity = (self.path, *self.former[node]) if node in self.former else None
            planned = arrays[self.stores[node]]
            mark_arrays(planned, workspaces[node], identity)
            stored[node] = _stored_blobs(planned, workspaces[node], encoded[node])
        classes = {
            node: {(name, sent_as(cls)) for its in blobs.values() for name, cls in its.items()}
            for node, blobs in of_job.items()
        }
        blobs_of = {
            node: {name: tuple(sorted(blob.classes)) for name, blob in blobs.items()}
            for node, blobs in encoded.items()
        }
        return _Prepared(nodes, batch, replicas, parts, lengths, blobs_of, states, classes, stored)

    def _about(
        self, node: str, states: Sequence[str], classes: Mapping[str, Collection[str]]
    ) -> dict[str, Any]:
        about: dict[str, Any] = {
            "node": node,
            "epoch": self.epoch.to_json(),
            "run": self.run,
            "attempt": self.claim.label,
        }
        if states:
            about["states"] = list(states)
        if classes:
            about["classes"] = {name: sorted(its) for name, its in classes.items()}
        if node == next(iter(self.stores)):
            about["record"] = {"nodes": list(self.stores), "details": dict(self.details)}
        return about

    def _former(self, node: str, blobs: Mapping[str, EncodedBlob]) -> Former | None:
        if node not in self.former or not any(
            part.data.nbytes >= self.files.linked_bytes
            for blob in blobs.values()
            for part in blob.parts
        ):
            return None
        store, sha256 = self.former[node]
        reader = StoreReader(self.files, self.path, store, sha256)
        try:
            return Former.of(reader.root, reader.read_document())
        except CheckpointError as error:
            logger.info("Nothing is linked to %s, which cannot be read: %s", reader.root, error)
            return None

    def _finish(
        self, workspaces: Mapping[str, Workspace], prepared: _Prepared
    ) -> dict[str, Receipt]:
        """Make the stores durable, and note in the workspaces what they were written from."""
        receipts = dict(zip(prepared.nodes, prepared.batch.finish(), strict=True))
        for node, receipt in receipts.items():
            receipts[node] = msgspec.structs.replace(
                receipt,
                replicas=prepared.replicas.get(node, {}),
                parts=prepared.parts[node],
                lengths=prepared.lengths[node],
                blobs=prepared.blobs[node],
                states=prepared.states[node],
                classes=tuple(sorted(prepared.classes[node])),
            )
            identity = (self.path, receipt.store, receipt.sha256)
            blobs = prepared.stored[node]
            workspaces[node].stored = StoredAs(identity, blobs, self.encoder.key())
        return receipts

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
                f"{type(error).__name__}: {error.strerror or error}. Earlier epochs are still "
                f"recorded. Repair the storage and save again."
            ) from error


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A save that is ready to be written."""

    nodes: Sequence[str]
    batch: StoreBatch
    replicas: Mapping[str, Mapping[str, str]]
    parts: Mapping[str, Mapping[str, str]]
    lengths: Mapping[str, Mapping[str, int]]
    blobs: Mapping[str, Mapping[str, tuple[str, ...]]]
    states: Mapping[str, tuple[str, ...]]
    classes: Mapping[str, Collection[tuple[str, str]]]
    stored: Mapping[str, Mapping[str, StoredBlob]]  # node -> blob -> what the next save is told


def _describe_part(value: object, axis: int) -> str:
    """What the parts of a partitioned array have in common; of another value, its type."""
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        return type(value).__name__
    # Strings of different widths can be joined.
    dtype = value.dtype.str[:2] if value.dtype.kind in "SU" else value.dtype
    shape = (":" if i == axis else str(length) for i, length in enumerate(value.shape))
    return f"{dtype}[{', '.join(shape)}]"


_COPIED = "a copy to be saved"
"""Where workspaces keep a prepared save, with its claim, between `copy` and `write`."""


def mark_arrays(
    arrays: Iterable[PlannedArray], workspace: Workspace, former: tuple[str, str, str] | None
) -> None:
    """Set `is_at_rest` and, since store `former`, `is_unchanged` on each array."""
    last = workspace.stored
    blobs = last.blobs if last is not None and last.store == former else {}
    for array in arrays:
        if isinstance(array.data, Rows):
            continue
        name = array.blob
        array.is_at_rest = workspace.is_provable(name) or workspace.has_at_rest(name, array.data)
        stored = blobs.get(name)
        if stored is not None and array.is_at_rest and array.path in stored.arrays:
            is_same_version = stored.version == workspace.versions[name]
            array.is_unchanged = is_same_version and stored.arrays[array.path] == encode_json(
                array.document
            )


def _stored_blobs(
    arrays: Iterable[PlannedArray],
    workspace: Workspace,
    encoded: Mapping[str, EncodedBlob],
) -> dict[str, StoredBlob]:
    """What the next save is told of the blobs of this one."""
    described: dict[str, dict[str, bytes]] = {}
    for array in arrays:
        if not isinstance(array.data, Rows) and array.data.nbytes >= LINKED_BYTES:
            document = encode_json(array.document)
            described.setdefault(array.blob, {})[array.path] = document
    stored = {}
    for name, blob in encoded.items():
        kept = blob if isinstance(blob.tree, msgspec.Raw) else None
        if kept is not None or name in described:
            stored[name] = StoredBlob(workspace.versions[name], kept, described.get(name, {}))
    return stored


def hold_arrays(arrays: Iterable[PlannedArray], budget_bytes: int | None) -> list[PlannedArray]:
    """Copy the arrays that something may change; return those that exceed the budget.

    These must be written at once. An array at rest is not copied: a task that updates it gets a
    copy, as long as the save refers to the array. The budget covers these copies too, but for arrays
    that no task has changed since the last save.
    """
    left = []
    copies: list[Callable[[], None]] = []
    nbytes = 0
    for array in arrays:
        if array.is_at_rest and array.is_unchanged:
            continue
        size = array.data.nbytes
        if budget_bytes is not None and nbytes + size > budget_bytes:
            left.append(array)
            continue
        nbytes += size
        if isinstance(array.data, Rows):
            array.data = array.data.gather()
        elif not array.is_at_rest:
            copies.append(partial(_copy, array))
    run_all(copies, THREADS, nbytes)
    return left


def _copy(array: PlannedArray) -> None:
    assert not isinstance(array.data, Rows)
    array.data = array.data.copy()
