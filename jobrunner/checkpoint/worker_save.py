"""One save of an epoch, as the client sends it to the workers: prepare, copy, write."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from jobrunner.checkpoint.arrays import Arena, UnchangedArrays, copy_arrays
from jobrunner.checkpoint.encoding import (
    Codec,
    EncodedBlob,
    check_dimensions,
    encode_blobs,
    join_refusals,
    sent_as,
    with_options,
)
from jobrunner.checkpoint.loader import PARTITIONS
from jobrunner.checkpoint.log import Claim, memory_key
from jobrunner.checkpoint.storage import Files, run_gently
from jobrunner.checkpoint.store import (
    LEAST_ALIKE,
    Alike,
    FormerStore,
    JsonText,
    Receipt,
    StoreBatch,
    StoreReader,
    digest_blob,
    find_alike,
    former_store,
    to_json,
)
from jobrunner.define import DEFAULT_ARRAY_OPTIONS, ArrayOptions
from jobrunner.errors import CheckpointError, CheckpointWriteError, DefinitionError
from jobrunner.positions import Position
from jobrunner.texts import get_logger
from jobrunner.workspace import Form, Workspace

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class BlobEncoder:
    """Encodes the global blobs of each node, except transient ones; see `Commits.begin`."""

    codecs: Sequence[Codec] = ()
    allow_pickle: bool = False
    initial: Mapping[str, Collection[str]] | None = None
    options: Mapping[str, Mapping[str, ArrayOptions]] = field(default_factory=dict)
    default: ArrayOptions = DEFAULT_ARRAY_OPTIONS  # for blobs without options

    def encode(
        self, node: str, workspace: Workspace, apart: Collection[str] = ()
    ) -> dict[str, EncodedBlob | Alike]:
        """Encode the blobs of a node; do not stack those named in `apart`."""
        blobs = workspace.globals
        # First, since references to the blobs would count.
        known = {
            name: its
            for name in blobs
            if (its := workspace.recollect(blobs, name)) is not None and its.form is not Form.OTHER
        }
        if workspace.transient:
            blobs = {name: blobs[name] for name in blobs if name not in workspace.transient}
        options = self.options.get(node, {})
        alike: dict[str, Alike] = {}
        if len(blobs) >= LEAST_ALIKE and not self.default.compressors:
            alike = find_alike(blobs, {*apart, *options})
        single = {name: value for name, value in blobs.items() if name not in alike}
        beside = {name: blobs[name] for name in alike}
        way = (self.allow_pickle, tuple((codec.cls, codec.name) for codec in self.codecs))
        done = {name: its.encoded[way] for name, its in known.items() if way in (its.encoded or ())}
        encoded = encode_blobs(
            node, single, self.codecs, allow_pickle=self.allow_pickle, beside=beside, done=done
        )
        for name in known.keys() & encoded.keys() - done.keys():
            # Until a task changes it, it need not be encoded again.
            encoded[name] = replace(encoded[name], tree=JsonText(to_json(encoded[name].tree)))
            known[name].encoded = {way: encoded[name]}
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
        encoded = {
            name: with_options(node, name, blob, options.get(name), self.default)
            for name, blob in encoded.items()
        }
        if options:
            check_dimensions(node, encoded)
        return {name: alike.get(name) or encoded[name] for name in blobs}


@dataclass(frozen=True, slots=True)
class Save:
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
    """Node -> its recorded store whose unchanged chunks are linked, and its manifest's SHA-256."""
    replicated: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Name of a blob -> the nodes that have it. The first one saves it."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Of the record; the first node's store has a copy, for repairs."""

    @property
    def epoch(self) -> int:
        """The epoch of the claim."""
        return self.claim.epoch

    @property
    def memory_key(self) -> str:
        """The key under which workers keep the saved states in memory."""
        return memory_key(self.path, self.claim)

    def write(
        self, workspaces: Mapping[str, Workspace], *, is_copied: bool = False
    ) -> dict[str, Receipt]:
        """Write the stores, make them durable, and return a receipt for each node.

        With `is_copied`, write what `copy` has copied, at low priority where the system has thread
        priorities. Raises DefinitionError, before anything is written, if a blob cannot be
        encoded, and CheckpointWriteError if the storage fails.
        """
        if not is_copied:
            _Background.of(workspaces).save = None  # it refers to arrays
        prepared = self._take_copy(workspaces) if is_copied else self._prepare(workspaces)
        with self._writing(prepared.nodes):
            if is_copied:
                run_gently(prepared.batch.write)
            else:
                prepared.batch.write()
            return self._finish(workspaces, prepared)

    def copy(
        self,
        workspaces: Mapping[str, Workspace],
        budget_bytes: int | None = None,
        *,
        keeps: bool = True,
    ) -> None:
        """Copy what `write` will write; the epochs may continue when it returns.

        Copies up to `budget_bytes` and writes the rest at once. Raises what `write` raises. With
        `keeps`, the states are also kept for recovery; see `KeptStates`.
        """
        background = _Background.of(workspaces)
        background.save = None
        prepared = self._prepare(workspaces, keeps=keeps)
        arrays = [array for its in prepared.batch.arrays().values() for array in its]
        left = copy_arrays(arrays, background.arena, budget_bytes)
        if left:
            with self._writing(prepared.nodes):
                prepared.batch.write(left)
        background.claim, background.save = self.claim, prepared

    def _take_copy(self, workspaces: Mapping[str, Workspace]) -> _Prepared:
        background = _Background.of(workspaces)
        prepared, background.save = background.save, None
        if prepared is None or background.claim != self.claim:
            raise CheckpointWriteError(
                f"Epoch {self.epoch} of {self.path} cannot be written: this worker has no copy of "
                f"its blobs. Save the epoch again."
            )
        return prepared

    def _prepare(self, workspaces: Mapping[str, Workspace], *, keeps: bool = True) -> _Prepared:
        nodes = [node for node in workspaces if node in self.stores]
        # Encoding refers to the arrays of the blobs, so find the unchanged ones first.
        unchanged = {}
        for node in nodes:
            workspace = workspaces[node]
            names = [name for name in workspace.globals if name not in workspace.transient]
            if keeps:
                workspace.kept_states.keep(
                    self.memory_key,
                    node,
                    workspace.globals,
                    names,
                    recollect=partial(workspace.recollect, workspace.globals),
                )
            unchanged[node] = UnchangedArrays(workspace, names)
        # Encode everything before writing anything: a blob that cannot be saved is an error of the
        # job, not of the storage.
        encoded: dict[str, dict[str, EncodedBlob | Alike]] = {}
        refused: list[DefinitionError] = []
        for node in nodes:
            try:
                encoded[node] = self.encoder.encode(node, workspaces[node], self.replicated)
            except DefinitionError as error:
                refused.append(error)
        if refused:
            raise join_refusals(refused) from refused[0].__cause__
        states = {
            node: tuple(
                name
                for name, blob in blobs.items()
                if isinstance(blob, EncodedBlob) and blob.has_state
            )
            for node, blobs in encoded.items()
        }
        of_job = {
            node: {
                name: blob.classes
                for name, blob in blobs.items()
                if isinstance(blob, EncodedBlob) and blob.classes
            }
            for node, blobs in encoded.items()
        }
        replicas: dict[str, dict[str, str]] = {}
        for name, (first, *others) in self.replicated.items():
            for node in (first, *others):
                blob = encoded.get(node, {}).get(name)
                if isinstance(blob, EncodedBlob):
                    replicas.setdefault(node, {})[name] = digest_blob(blob)
                    if node != first:
                        del encoded[node][name]
        parts: dict[str, dict[str, str]] = {node: {} for node in encoded}
        for name, about in self.details.get(PARTITIONS, {}).items():
            for node in about["nodes"]:
                if name in encoded.get(node, ()):
                    value = workspaces[node].globals[name]
                    parts[node][name] = _describe_part(value, about["axis"])
        stores = {
            self.stores[node]: (self._about(node, states[node], of_job[node]), blobs)
            for node, blobs in encoded.items()
        }
        known = self.files.each(lambda node: self._former(node, encoded[node]), encoded)
        former = dict(zip(stores, known, strict=True))
        array_pool = next((w.kept_states.array_pool for w in workspaces.values()), None)
        batch = StoreBatch(self.files, self.path, stores, former, array_pool)
        arrays = batch.arrays()
        for node in nodes:
            identity = (self.path, *self.former[node]) if node in self.former else None
            unchanged[node].mark(arrays[self.stores[node]], identity)
        classes = {
            node: {(name, sent_as(cls)) for its in blobs.values() for name, cls in its.items()}
            for node, blobs in of_job.items()
        }
        return _Prepared(nodes, batch, replicas, parts, states, classes, unchanged)

    def _about(
        self, node: str, states: Sequence[str], classes: Mapping[str, Collection[str]]
    ) -> dict[str, Any]:
        about: dict[str, Any] = {"node": node, "epoch": self.epoch, "run": self.run}
        if isinstance(self.epoch, Position):
            about["epoch"] = str(self.epoch)
        if states:
            about["states"] = list(states)
        if classes:
            about["classes"] = {name: sorted(its) for name, its in classes.items()}
        if node == next(iter(self.stores)):
            about["record"] = {"nodes": list(self.stores), "details": dict(self.details)}
        return about

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
                states=prepared.states[node],
                classes=tuple(sorted(prepared.classes[node])),
            )
            identity = (self.path, receipt.store, receipt.manifest)
            workspaces[node].kept_states.identify(self.memory_key, {node: identity})
            prepared.unchanged[node].remember(workspaces[node], identity)
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
    states: Mapping[str, tuple[str, ...]]
    classes: Mapping[str, Collection[tuple[str, str]]]
    unchanged: Mapping[str, UnchangedArrays]


def _describe_part(value: object, axis: int) -> str:
    """What the parts of a partitioned array have in common; of another value, its type."""
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        return type(value).__name__
    # Strings of different widths can be joined.
    dtype = value.dtype.str[:2] if value.dtype.kind in "SU" else value.dtype
    shape = (":" if i == axis else str(length) for i, length in enumerate(value.shape))
    return f"{dtype}[{', '.join(shape)}]"


_COPIES = "copies to be saved"


class _Background:
    """A worker's state for saves in the background: the memory for copies, and the copied save."""

    def __init__(self) -> None:
        self.arena = Arena()
        self.claim: Claim | None = None
        self.save: _Prepared | None = None

    @classmethod
    def of(cls, workspaces: Mapping[str, Workspace]) -> _Background:
        """The one that a worker's workspaces share; lives as long as they do."""
        found = [w.companions[_COPIES] for w in workspaces.values() if _COPIES in w.companions]
        background: _Background = found[0] if found else cls()
        for workspace in workspaces.values():
            workspace.companions[_COPIES] = background
        return background
