"""What workers do for saves: capture epochs at their end, and write them in groups."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

import msgspec
import numpy as np

from jobrunner.checkpoint.encoding import (
    LONE_ARRAY,
    Codec,
    EncodedBlob,
    check_dimensions,
    check_part,
    encode_blobs,
    join_lines,
    with_options,
)
from jobrunner.checkpoint.log import NodeContents
from jobrunner.checkpoint.storage import THREADS, Files, join_path, run_all, run_gently
from jobrunner.checkpoint.store import (
    NO_STORE,
    Former,
    PlannedArray,
    StoreWriter,
    digest_blob,
    encode_json,
    lay_out,
    write_stores,
)
from jobrunner.compile import gc_paused
from jobrunner.define import DEFAULT_ARRAY_OPTIONS, ArrayOptions
from jobrunner.errors import CheckpointError, CheckpointWriteError, DefinitionError
from jobrunner.positions import Position
from jobrunner.texts import get_logger
from jobrunner.workspace import StoredAs, StoredBlob, Workspace

logger = get_logger(__name__)

_LARGE_BYTES = 32 << 20
"""A group of so many bytes is written at low priority, or tasks beside it would take up to three times
as long. Smaller ones are not: where all cores are busy, they would starve, and epochs wait for them."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


Constants = dict[tuple[str, str], tuple[int, EncodedBlob]]
"""By node and blob: the version of one without arrays, and how it is encoded until a task sets it."""


@dataclass(frozen=True, slots=True)
class Encoding:
    """How the global blobs of nodes are encoded, except transient ones; the same for a whole run."""

    nodes: Sequence[str] = ()
    """The nodes that are saved."""
    codecs: Sequence[Codec] = ()
    allow_pickle: bool = False
    initial: Mapping[str, Collection[str]] | None = None
    """Node -> the blobs that its init tasks make; only these may contain objects with a state."""
    options: Mapping[str, Mapping[str, ArrayOptions]] = field(default_factory=dict)
    """Node -> blob -> how its arrays are stored."""
    default: ArrayOptions = DEFAULT_ARRAY_OPTIONS
    """The same for blobs without options."""
    replicated: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Name of a blob -> the nodes that have it. The first one saves it."""
    partitions: Mapping[str, tuple[int, Sequence[str]]] = field(default_factory=dict)
    """Name of a blob -> its axis, and the nodes that have its parts."""
    busy: frozenset[str] = frozenset()
    """The nodes that have tasks in every epoch."""

    def encode(
        self, node: str, workspace: Workspace, constants: Constants
    ) -> dict[str, EncodedBlob]:
        """Encode the blobs of a node, but for constants, which are taken over and added to."""
        done: dict[str, EncodedBlob] = {}
        blobs: dict[str, Any] = {}
        for name in workspace.globals:
            if name in workspace.transient:
                continue
            blobs[name] = None
            version, encoded_before = constants.get((node, name), (0, None))
            if encoded_before is not None and version == workspace.versions[name]:
                done[name] = encoded_before
            else:
                blobs[name] = workspace.value(name)
        options = self.options.get(node, {})
        encoded = encode_blobs(node, blobs, self.codecs, allow_pickle=self.allow_pickle, done=done)
        for name, value in blobs.items():
            if type(value) is np.ndarray or name in done:
                continue
            if workspace.is_provable(name) and not workspace.holds_arrays(name):
                tree = msgspec.Raw(encode_json(encoded[name].tree))
                encoded[name] = replace(encoded[name], tree=tree)
                constants[node, name] = workspace.versions[name], encoded[name]
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


@dataclass(slots=True)
class NodeCapture:
    """What is saved of a node at one position. It does not change any more."""

    blobs: dict[str, EncodedBlob]
    versions: dict[str, int]
    at_rest: set[int]
    """The `id` of each array that lies in a blob: nothing changes it as long as this refers to it."""
    contents: NodeContents
    """What the log says of the store; also of a replica that another node saves."""
    parts: dict[str, str] = field(default_factory=dict)
    replicas: dict[str, str] = field(default_factory=dict)


class Receipt(msgspec.Struct, array_like=True):
    """What a worker returns once a node's store is durable."""

    store: str
    sha256: str  # of the root document
    nbytes: int  # of all files
    seconds: float = 0.0  # that the worker took for the store; a group shares what it costs
    linked_bytes: int = 0  # how many of `nbytes` are in files shared with the epoch before
    contents: NodeContents | None = None  # None: that of the node's store before, in a reply
    replicas: dict[str, str] = {}  # replicated blobs: digests, which all nodes must share
    # Partitioned blobs: dtype and shape, but for the length along the axis.
    parts: dict[str, str] = {}


@gc_paused()  # of thousands of blobs, none of what is made here is garbage
def capture_nodes(
    encoding: Encoding, workspaces: Mapping[str, Workspace], constants: Constants
) -> dict[str, NodeCapture]:
    """Encode the blobs of a worker's nodes, by node.

    The arrays are those of the workspaces. Before a task runs, they must be written, or else
    `copy_what_may_change` must be called. Raises DefinitionError, which names all blobs that cannot
    be encoded.
    """
    captures = {}
    refusals = []
    for node in encoding.nodes:
        if node in workspaces:
            try:
                captures[node] = _capture_node(encoding, node, workspaces[node], constants)
            except DefinitionError as error:
                refusals.append(error)
    if refusals:
        lines = "\n".join(map(str, refusals)).splitlines()
        raise join_lines(lines) from refusals[0].__cause__
    for name, owners in encoding.replicated.items():
        for node in owners:
            if node not in captures or name not in captures[node].blobs:
                continue
            captures[node].replicas[name] = digest_blob(captures[node].blobs[name])
            if node != owners[0]:
                del captures[node].blobs[name]
    for name, (axis, owners) in encoding.partitions.items():
        for node in owners:
            if node in captures and name in captures[node].blobs:
                value = workspaces[node].value(name)
                check_part(node, name, value, captures[node].blobs[name], axis)
                captures[node].parts[name] = _describe_part(value, axis)
                if captures[node].blobs[name].tree == LONE_ARRAY:
                    captures[node].contents.parts[name] = value.shape[axis]
    return captures


def _capture_node(
    encoding: Encoding, node: str, workspace: Workspace, constants: Constants
) -> NodeCapture:
    blobs = encoding.encode(node, workspace, constants)
    contents = NodeContents(list(blobs))
    at_rest = set()
    for name, blob in blobs.items():
        is_provable = bool(blob.parts) and workspace.is_provable(name)
        for part in blob.parts:
            if is_provable or workspace.has_at_rest(name, part.data):
                at_rest.add(id(part.data))
        if blob.classes:
            contents.classes[name] = sorted(blob.classes)
        if blob.has_state:
            contents.states.append(name)
    versions = {name: workspace.versions[name] for name in blobs}
    return NodeCapture(blobs, versions, at_rest, contents)


def copy_what_may_change(captures: Iterable[NodeCapture]) -> None:
    """Copy the arrays of captures, but for those at rest.

    A task that updates the blob of an array at rest gets a copy, as long as a capture refers to it.
    """
    copies = []
    nbytes = 0
    for capture in captures:
        for blob in capture.blobs.values():
            for part in blob.parts:
                if id(part.data) not in capture.at_rest:
                    copies.append(partial(_copy, part))
                    nbytes += part.data.nbytes
    if copies:
        run_all(copies, THREADS, nbytes)


def _copy(part: Any) -> None:
    part.data = part.data.copy()


def _describe_part(value: object, axis: int) -> str:
    """What the parts of a partitioned array have in common; of another value, its type."""
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        return type(value).__name__
    # Strings of different widths can be joined.
    dtype = value.dtype.str[:2] if value.dtype.kind in "SU" else value.dtype
    shape = (":" if i == axis else str(length) for i, length in enumerate(value.shape))
    return f"{dtype}[{', '.join(shape)}]"


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """What workers write for one entry of the log: the stores of a group of positions, in order.

    Picklable. `save` and `write` run on workers, in a thread; not safe to retry, as each name is
    used once.
    """

    path: str
    files: Files
    run: str
    begin: int
    """The number of the attempt's entry in the log."""
    label: int
    """The attempt's."""
    stores: dict[Position, dict[str, str]]
    """Position -> node -> name of its store; in ascending order, without those passed over."""
    details: Mapping[Position, Mapping[str, Any]]
    """Of the records. The first node's store has a copy, for repairs."""
    drops: Sequence[Position]
    """Positions that are passed over: the retention policy would retire them at once."""

    @property
    def at(self) -> Position:
        """The newest position."""
        return next(reversed(self.stores))

    def describe(self, node: str, at: Position, capture: NodeCapture) -> dict[str, Any]:
        """What a store's document says of it."""
        described: dict[str, Any] = {
            "node": node,
            "epoch": at.to_json(),
            "run": self.run,
            "attempt": self.label,
        }
        if capture.contents.states:
            described["states"] = capture.contents.states
        if capture.contents.classes:
            described["classes"] = capture.contents.classes
        if node == next(iter(self.stores[at])):
            described["record"] = {"nodes": list(self.stores[at]), "details": self.details[at]}
        return described


@dataclass(frozen=True, slots=True)
class Written:
    """What workers have made durable of an order: a receipt for each store, by position and node."""

    receipts: Mapping[Position, Mapping[str, Receipt]] = field(default_factory=dict)
    failure: str = ""
    """Why later positions of the order were not written."""


class Reply(msgspec.Struct):
    """How a worker tells what it has written: the same, for the first positions of the order."""

    receipts: list[dict[str, Receipt]]
    failure: str


def reply_to(
    write: Callable[..., Written],
    queue: SaveQueue,
    workspaces: Mapping[str, Workspace],
    *,
    order: SaveOrder,
) -> bytes:
    """Call a method of the queue that writes an order; `read_receipts` reads what this returns."""
    written = write(queue, workspaces, order=order)
    sent: dict[str, NodeContents | None] = {}
    for receipts in written.receipts.values():
        for node, receipt in receipts.items():
            if sent.get(node) == receipt.contents:
                receipt.contents = None
            else:
                sent[node] = receipt.contents
    return encode_json(Reply(list(map(dict, written.receipts.values())), written.failure))


class SaveQueue:
    """The captures of a worker's nodes that are not yet written.

    Tasks' threads add to it at the end of epochs, and another thread writes. One group is written at
    a time.
    """

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._captures: dict[Position, dict[str, NodeCapture]] = {}
        self._constants: Constants = {}
        self._counted: dict[tuple[str, str], int] = {}  # versions in the newest capture
        self._newest_bytes = 0

    def capture(
        self,
        workspaces: Mapping[str, Workspace],
        *,
        at: Position,
        pending: Collection[Position] | None = None,
        budget_bytes: float = math.inf,
    ) -> int:
        """Capture the state of the workspaces, which is that of a position; tasks may go on then.

        If other positions are said to be pending, forget all other captures but theirs. Returns how
        much memory the new one keeps from being freed, in bytes. If that exceeds the budget, no task
        may run until it is written: then nothing is copied. Raises DefinitionError if a blob cannot
        be encoded.
        """
        for captured in list(self._captures):
            if pending is not None and captured not in pending:
                self._captures.pop(captured, None)
        captures = capture_nodes(self._encoding, workspaces, self._constants)
        self._newest_bytes = self._count(captures)
        if self._newest_bytes <= budget_bytes:
            copy_what_may_change(captures.values())
        self._captures[at] = captures
        return self._newest_bytes

    def save(self, workspaces: Mapping[str, Workspace], *, order: SaveOrder) -> Written:
        """Write the state of the workspaces, which is that of an order's only position.

        No task may run meanwhile, so nothing is copied. Raises DefinitionError, before anything is
        written, if a blob cannot be encoded, and what `write` raises.
        """
        self._captures = {order.at: capture_nodes(self._encoding, workspaces, self._constants)}
        return self._write(workspaces, order)

    def room(self) -> tuple[int, int]:
        """How much memory the newest capture keeps from being freed; the client knows the rest."""
        return (self._newest_bytes, 0)

    def close(self) -> None:
        """Forget everything."""
        self._captures.clear()

    def _count(self, captures: Mapping[str, NodeCapture]) -> int:
        """How much memory captures keep from being freed.

        A blob that has not changed since the capture before costs nothing more.
        """
        nbytes = 0
        for node, capture in captures.items():
            for name, blob in capture.blobs.items():
                version = capture.versions[name]
                for part in blob.parts:
                    is_at_rest = id(part.data) in capture.at_rest
                    if not is_at_rest or self._counted.get((node, name)) != version:
                        nbytes += part.data.nbytes
                self._counted[node, name] = version
        return nbytes

    def write(self, workspaces: Mapping[str, Workspace], *, order: SaveOrder) -> Written:
        """Write what was captured, at low priority if it is large.

        Positions are written in their order; after one that fails, no later one is. Raises what made
        the first one fail, or CheckpointWriteError if nothing is known to be durable.
        """
        if self._newest_bytes * len(order.stores) < _LARGE_BYTES:
            return self._write(workspaces, order)
        written: list[Written] = []
        run_gently(lambda: written.append(self._write(workspaces, order)))
        return written[0]

    def _write(self, workspaces: Mapping[str, Workspace], order: SaveOrder) -> Written:
        newest = order.at
        for at in list(self._captures):
            # Positions are saved in their order: no later order asks for this one.
            if at < newest and at not in order.stores:
                self._captures.pop(at, None)
        batches = [[at] for at in order.stores]
        if order.files.lookups > 1:
            # Requests take long, so those of all positions go out together. Unchanged chunks are
            # linked to those before the group alone.
            batches = [list(order.stores)]
        names: list[str] = []
        receipts: dict[Position, dict[str, Receipt]] = {}
        failure: Exception | None = None
        is_durable = False
        started = perf_counter()
        try:
            # `durable` reads the names at its end: those of stores that are written whole by then.
            with order.files.durable(order.path, names):
                for batch in batches:
                    try:
                        receipts |= self._write_batch(order, batch, workspaces)
                    except (OSError, DefinitionError) as error:
                        failure = self._explain(order, batch[0], error)
                        break
                    for at in batch:
                        names += [receipt.store for receipt in receipts[at].values()]
            is_durable = failure is None
        except OSError as error:
            raise self._explain(order, order.at, error) from error
        finally:
            for at in order.stores:
                self._captures.pop(at, None)
            if not is_durable:
                # The system may have lost what it was to flush. So nothing is linked to that.
                for workspace in workspaces.values():
                    workspace.stored = None
        if failure is not None and not receipts:
            raise failure
        seconds = (perf_counter() - started) / max(1, len(receipts))
        for of_position in receipts.values():
            for receipt in of_position.values():
                receipt.seconds = seconds
        return Written(receipts, "" if failure is None else str(failure))

    def _write_batch(
        self,
        order: SaveOrder,
        positions: Sequence[Position],
        workspaces: Mapping[str, Workspace],
    ) -> dict[Position, dict[str, Receipt]]:
        files, path = order.files, order.path
        captures: list[tuple[Position, str, NodeCapture]] = []
        writers: list[StoreWriter] = []
        stored: list[dict[str, StoredBlob]] = []
        for at in positions:
            for node, capture in self._take(order, at, workspaces).items():
                captures.append((at, node, capture))
                layout = lay_out(capture.blobs, order.describe(node, at, capture))
                former = NO_STORE
                last = workspaces[node].stored
                if last is not None and last.store[0] == path:
                    former = Former(join_path(path, last.store[1]), last.files)
                    _mark_unchanged(layout.arrays, last, capture)
                name = order.stores[at][node]
                writers.append(StoreWriter(files, join_path(path, name), layout, former))
                stored.append(_stored_blobs(layout.arrays, capture, files.linked_bytes))
                capture.blobs = {}  # so that each array is released as soon as it is written
        write_stores(files, writers)
        receipts: dict[Position, dict[str, Receipt]] = {at: {} for at in positions}
        for (at, node, capture), writer, blobs in zip(captures, writers, stored, strict=True):
            receipts[at][node] = Receipt(
                order.stores[at][node],
                writer.sha256,
                writer.nbytes,
                linked_bytes=sum(writer.linked),
                contents=capture.contents,
                replicas=capture.replicas,
                parts=capture.parts,
            )
            workspaces[node].stored = StoredAs(
                (path, order.stores[at][node], writer.sha256),
                writer.long_files(),
                blobs,
            )
        return receipts

    def _take(
        self, order: SaveOrder, at: Position, workspaces: Mapping[str, Workspace]
    ) -> dict[str, NodeCapture]:
        captures = self._captures.pop(at, None)
        if captures is None and self._encoding.busy.isdisjoint(workspaces):
            # Without tasks it takes no part in epochs, and nothing changes its values.
            captures = capture_nodes(self._encoding, workspaces, self._constants)
        if captures is None:
            raise CheckpointWriteError(
                f"Epoch {at} of {order.path} cannot be written: this worker has no copy of its "
                f"blobs. Save the epoch again."
            )
        return captures

    def _explain(self, order: SaveOrder, at: Position, error: Exception) -> Exception:
        if not isinstance(error, OSError) or isinstance(error, CheckpointError):
            return error
        nodes = [node for node in order.stores[at] if node in self._encoding.nodes]
        first = order.stores[at][nodes[0]] if nodes else ""
        where = error.filename or os.path.join(order.path, first)
        advice = "Repair the storage and save again."
        if error.errno in _FULL:
            advice = f"Make room, for example by `jobrunner prune {order.path} --keep-last N`."
        explained = CheckpointWriteError(
            f"Epoch {at} of {', '.join(nodes)} could not be written: {where}: "
            f"{type(error).__name__}: {error.strerror or error}. Earlier epochs are still "
            f"recorded. {advice}"
        )
        explained.__cause__ = error
        return explained


def _mark_unchanged(arrays: Sequence[PlannedArray], last: StoredAs, capture: NodeCapture) -> None:
    """Mark the arrays that are those of the node's last store, whose blobs no task has updated."""
    for array in arrays:
        blob = last.blobs.get(array.blob)
        if blob is not None and blob.version == capture.versions[array.blob]:
            is_same = blob.arrays.get(array.path) == array.document
            array.is_unchanged = is_same and id(array.data) in capture.at_rest


def _stored_blobs(
    arrays: Sequence[PlannedArray], capture: NodeCapture, linked_bytes: int
) -> dict[str, StoredBlob]:
    """What the next save is told of the blobs of this one."""
    stored: dict[str, StoredBlob] = {}
    for array in arrays:
        if array.data.nbytes >= linked_bytes and array.blob:
            blob = stored.setdefault(array.blob, StoredBlob(capture.versions[array.blob], {}))
            blob.arrays[array.path] = array.document
    return stored
