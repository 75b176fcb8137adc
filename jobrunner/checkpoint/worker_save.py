"""What workers do for saves: capture epochs at their end, and write them in groups."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

import msgspec
import numpy as np

from jobrunner.checkpoint.encoding import (
    Codec,
    EncodedBlob,
    check_dimensions,
    check_part,
    encode_blobs,
    with_options,
)
from jobrunner.checkpoint.history_writer import HistoryWriters, RowCount
from jobrunner.checkpoint.log import NodeContents, Record
from jobrunner.checkpoint.storage import (
    THREADS,
    Files,
    join_path,
    run_all,
    run_gently,
    write_remedy,
)
from jobrunner.checkpoint.store import (
    NO_STORE,
    Former,
    HistoryMark,
    StoreWriter,
    digest_blob,
    lay_out,
    write_stores,
)
from jobrunner.define import DEFAULT_ARRAY_OPTIONS, ArrayOptions
from jobrunner.errors import CheckpointError, CheckpointWriteError, DefinitionError
from jobrunner.gc_pause import gc_paused
from jobrunner.names import HISTORIES
from jobrunner.positions import Position
from jobrunner.workspace import Rows, StoredAs, StoredBlob, Workspace

_LARGE_BYTES = 32 << 20
"""A group of so many bytes is written at low priority, or tasks beside it would take up to three times
as long. Smaller ones are not: where all cores are busy, they would starve, and epochs wait for them."""


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
    histories: Sequence[str] = ()
    """The names of blobs that are histories."""
    puts: int | None = None
    """How many values a whole run puts in a history, if that is known."""


class Receipt(msgspec.Struct, array_like=True):
    """What a worker says of a node's store: begun by a capture, returned once the store is durable."""

    store: str
    sha256: str  # of the root document
    nbytes: int  # of all files
    seconds: float = 0.0  # that the worker took for the store; a group shares what it costs
    linked_bytes: int = 0  # how many of `nbytes` are in files shared with the epoch before
    contents: NodeContents | None = None  # None: that of the node's receipt before
    replicas: dict[str, str] = {}  # replicated blobs: digests, which all nodes must share
    # Partitioned blobs: dtype and shape, but for the length along the axis.
    parts: dict[str, str] = {}


# ---- at the end of an epoch


@dataclass(slots=True)
class NodeCapture:
    """What is saved of a node at one position. It does not change any more."""

    blobs: dict[str, EncodedBlob]
    versions: dict[str, int]
    at_rest: set[int]
    """The `id` of each array that lies in a blob: nothing changes it as long as this refers to it."""
    contents: NodeContents
    """What the log says of the store; also of a replica that another node saves."""
    receipt: Receipt
    """What is known of it before the store is written."""
    histories: dict[str, RowCount] = field(default_factory=dict)


@gc_paused()  # of thousands of blobs, none of what is made here is garbage
def capture_nodes(
    encoding: Encoding, workspaces: Mapping[str, Workspace], constants: Constants
) -> dict[str, NodeCapture]:
    """Encode the blobs of a worker's nodes, by node.

    The arrays are those of the workspaces: before a task runs, those that are not at rest must be
    written or copied. Raises DefinitionError, which names all blobs of a node that cannot be encoded.
    """
    captures = {}
    for node in encoding.nodes:
        if node in workspaces:
            captures[node] = _capture_node(encoding, node, workspaces[node], constants)
    for name, owners in encoding.replicated.items():
        for node in owners:
            if node in captures and name in captures[node].blobs:
                blobs = captures[node].blobs
                captures[node].receipt.replicas[name] = digest_blob(blobs[name])
                if node != owners[0]:
                    del blobs[name]
    for name, (axis, owners) in encoding.partitions.items():
        for node in owners:
            if node in captures and name in captures[node].blobs:
                value = workspaces[node].value(name)
                check_part(node, name, value, captures[node].blobs[name], axis)
                captures[node].receipt.parts[name] = _describe_part(value, axis)
    return captures


def _capture_node(
    encoding: Encoding, node: str, workspace: Workspace, constants: Constants
) -> NodeCapture:
    blobs = encode_node(encoding, node, workspace, constants)
    contents = NodeContents(list(blobs))
    at_rest = set()
    initial = None if encoding.initial is None else encoding.initial.get(node, ())
    for name, blob in blobs.items():
        is_provable = bool(blob.parts) and workspace.is_provable(name)
        for part in blob.parts:
            if is_provable or workspace.has_at_rest(name, part.data):
                at_rest.add(id(part.data))
        if blob.classes:
            contents.classes[name] = sorted(blob.classes)
        if blob.has_state:
            contents.states.append(name)
            if initial is not None and name not in initial:
                raise DefinitionError(
                    f"Node {node!r}, blob {name!r}: it contains an object that is saved by its "
                    f"state_dict(), but no task of the init group makes the blob, so a resume "
                    f"would have no object to load the state into. Make the blob in the init "
                    f"group, or store the object's state_dict() in it, or exclude it from "
                    f"checkpoints: outputs=Blob({name!r}, transient=True)."
                )
    versions = {name: workspace.versions[name] for name in blobs}
    capture = NodeCapture(blobs, versions, at_rest, contents, Receipt("", "", 0))
    for name, rows in workspace.histories.items():
        if workspace.has_rows(name):
            dims = _find_dims(encoding, node, rows)
            capture.histories[name] = RowCount(rows.count, rows.last or 0, rows.holds, dims)
            contents.blobs.append(name)
    return capture


def _find_dims(encoding: Encoding, node: str, rows: Rows) -> tuple[str, ...]:
    """The names of the axes of a history's values; raises DefinitionError if they do not fit."""
    options = encoding.options.get(node, {}).get(rows.name)
    if options is None or options.dims is None:
        return ()
    axes = len(rows.shape) + rows.extends
    if len(options.dims) != axes:
        raise DefinitionError(
            f"Node {node!r}, blob {rows.name!r}: dims={options.dims} expect values of "
            f"{len(options.dims)} axes, but those of the history have {axes}. Give one for each axis."
        )
    return options.dims


def encode_node(
    encoding: Encoding, node: str, workspace: Workspace, constants: Constants
) -> dict[str, EncodedBlob]:
    """Encode the blobs of a node, but for constants, which are taken over and added to."""
    unchanged: dict[str, EncodedBlob] = {}
    values: dict[str, Any] = {}
    for name in workspace.globals:
        if name not in workspace.transient and not workspace.has_rows(name):
            version, blob = constants.get((node, name), (0, None))
            values[name] = None
            if blob is not None and version == workspace.versions[name]:
                unchanged[name] = blob
            else:
                values[name] = workspace.value(name)
    blobs = encode_blobs(
        node, values, encoding.codecs, allow_pickle=encoding.allow_pickle, done=unchanged
    )
    for name, value in values.items():
        if type(value) is np.ndarray or name in unchanged:
            continue
        if workspace.is_provable(name) and not workspace.holds_arrays(name):
            tree = msgspec.Raw(msgspec.json.encode(blobs[name].tree))
            blobs[name] = replace(blobs[name], tree=tree)
            constants[node, name] = workspace.versions[name], blobs[name]
    options = encoding.options.get(node, {})
    if options or encoding.default.compressors:
        for name, blob in blobs.items():
            blobs[name] = with_options(node, name, blob, options.get(name), encoding.default)
        check_dimensions(node, blobs)
    return blobs


def _describe_part(value: object, axis: int) -> str:
    """What the parts of a partitioned array have in common; of another value, its type."""
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        return type(value).__name__
    # Strings of different widths can be joined.
    dtype = value.dtype.str[:2] if value.dtype.kind in "SU" else value.dtype
    shape = (":" if i == axis else str(length) for i, length in enumerate(value.shape))
    return f"{dtype}[{', '.join(shape)}]"


# ---- a group


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """What workers write for one entry of the log: the stores of a group of positions, in order.

    Picklable. `SaveQueue.save` and `SaveQueue.write` run on workers, in a thread; not safe to retry,
    as each name is used once.
    """

    path: str
    files: Files
    run: str
    begin: int
    """The number of the attempt's entry in the log."""
    records: dict[Position, Record]
    """In ascending order, without stores. The first node's store has a copy, for repairs."""
    stores: dict[Position, dict[str, str]]
    """Position -> node -> name of its store; without those that are passed over, because the retention
    policy would retire them at once."""

    @property
    def at(self) -> Position:
        """The newest position."""
        return next(reversed(self.stores))

    def describe(
        self,
        node: str,
        at: Position,
        contents: NodeContents,
        histories: Mapping[str, HistoryMark],
    ) -> dict[str, Any]:
        """What a store's document says of it."""
        described: dict[str, Any] = {
            "node": node,
            "epoch": at.to_json(),
            "run": self.run,
            "attempt": self.begin,
        }
        if histories:
            described["histories"] = histories
        if contents.states:
            described["states"] = contents.states
        if contents.classes:
            described["classes"] = contents.classes
        if node == next(iter(self.stores[at])):
            record = self.records[at]
            details = {name: value for name, value in record.details.items() if name != "timing"}
            described["record"] = {"nodes": list(self.stores[at]), "details": details}
            if record.histories:
                described["record"]["histories"] = record.histories
        return described


class Written(msgspec.Struct):
    """What workers have made durable of an order."""

    receipts: list[dict[str, Receipt]]
    """By node, of the first positions of the order."""
    failure: str = ""
    """Why later positions were not written."""


def reply_to(
    write: Callable[..., Written],
    queue: SaveQueue,
    workspaces: Mapping[str, Workspace],
    *,
    order: SaveOrder,
) -> bytes:
    """Call a method of the queue that writes an order; `read_receipts` reads what this returns."""
    return msgspec.json.encode(write(queue, workspaces, order=order))


class SaveQueue:
    """The captures of a worker's nodes that are not yet written.

    Tasks' threads add to it at the end of epochs, and another thread writes. One group is written at
    a time.
    """

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._captures: dict[Position, dict[str, NodeCapture]] = {}
        self._constants: Constants = {}
        # Of the newest capture: versions, and rows of histories.
        self._counted: dict[tuple[str, str], int] = {}
        self._newest_bytes = 0
        self._histories = HistoryWriters(encoding.puts)

    def capture(
        self,
        workspaces: Mapping[str, Workspace],
        *,
        at: Position,
        budget_bytes: float = math.inf,
    ) -> int:
        """Capture the state of the workspaces, which is that of a position; tasks may go on then.

        Returns how much memory that keeps from being freed, in bytes. If it exceeds the budget, no
        task may run until it is written: then nothing is copied. Raises DefinitionError if a blob
        cannot be encoded.
        """
        captures = capture_nodes(self._encoding, workspaces, self._constants)
        changing = []
        copied_bytes = held_bytes = 0
        for node, capture in captures.items():
            for name, blob in capture.blobs.items():
                version = capture.versions[name]
                # An array at rest in both this capture and the one before costs nothing more.
                is_counted = self._counted.get((node, name)) == version
                self._counted[node, name] = version
                for part in blob.parts:
                    if id(part.data) not in capture.at_rest:
                        changing.append(part)
                        copied_bytes += part.data.nbytes
                    elif not is_counted:
                        held_bytes += part.data.nbytes
            for name, rows in capture.histories.items():
                before = self._counted.get((node, name), 0)
                held_bytes += workspaces[node].histories[name].pending_bytes(before)
                self._counted[node, name] = rows.rows
        self._newest_bytes = copied_bytes + held_bytes
        if changing and self._newest_bytes <= budget_bytes:
            # A task that updates an array at rest gets a copy itself, as long as this refers to it.
            run_all([partial(_copy, part) for part in changing], THREADS, copied_bytes)
        self._captures[at] = captures
        return self._newest_bytes

    def save(self, workspaces: Mapping[str, Workspace], *, order: SaveOrder) -> Written:
        """Write the state of the workspaces, which is that of an order's only position.

        No task may run meanwhile, so nothing is copied. Raises DefinitionError, before anything is
        written, if a blob cannot be encoded, and what `write` raises.
        """
        self._captures = {order.at: capture_nodes(self._encoding, workspaces, self._constants)}
        return self._write(workspaces, order)

    def capture_bytes(self) -> int:
        """How much memory the newest capture keeps from being freed."""
        return self._newest_bytes

    def close(self) -> None:
        """Forget everything."""
        self._captures.clear()
        self._histories.close()

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
        captures = {}
        for at in list(self._captures):
            if at <= order.at:  # later orders are of later positions
                captures[at] = self._captures.pop(at)
        batches = [[at] for at in order.stores]
        if order.files.lookups > 1:
            # Requests take long, so those of all positions go out together. Unchanged chunks are
            # linked to those before the group alone.
            batches = [list(order.stores)]
        names: list[str] = []
        receipts: list[dict[str, Receipt]] = []
        failure: Exception | None = None
        started = perf_counter()
        try:
            # `durable` reads the names at its end: those of stores that are written whole by then.
            with order.files.durable(order.path, names):
                for batch in batches:
                    try:
                        receipts += self._write_batch(order, batch, captures, workspaces)
                    except (OSError, DefinitionError) as error:
                        failure = self._explain(order, batch[0], error)
                        break
                    for at in batch:
                        names += [order.stores[at][node] for node in receipts[-1]]
                self._histories.write(order.files)
                label = order.records[order.at].histories
                if label:
                    names.append(join_path(HISTORIES, label))
            self._histories.settle()
        except OSError as error:
            failure = self._explain(order, order.at, error)
            receipts = []
        if failure is not None:
            # The system may have lost what it was to flush. So nothing is linked to that.
            for workspace in workspaces.values():
                workspace.stored = None
            if not receipts:
                raise failure
        seconds = (perf_counter() - started) / max(1, len(receipts))
        newest: dict[str, NodeContents | None] = {}
        for of_position in receipts:
            for node, receipt in of_position.items():
                receipt.seconds = seconds
                if newest.get(node) == receipt.contents:
                    receipt.contents = None
                else:
                    newest[node] = receipt.contents
        return Written(receipts, "" if failure is None else str(failure))

    def _write_batch(
        self,
        order: SaveOrder,
        positions: Sequence[Position],
        captures: dict[Position, dict[str, NodeCapture]],
        workspaces: Mapping[str, Workspace],
    ) -> list[dict[str, Receipt]]:
        batch = [(at, self._take(order, at, captures, workspaces)) for at in positions]
        writers = {}
        for at, of_position in batch:
            for node, capture in of_position.items():
                marks = self._histories.advance(
                    order.files,
                    order.path,
                    order.records[at].histories,
                    workspaces[node],
                    capture.histories,
                )
                described = order.describe(node, at, capture.contents, marks)
                writers[at, node] = _plan_store(order, at, capture, described, workspaces[node])
        write_stores(order.files, list(writers.values()))
        receipts: list[dict[str, Receipt]] = []
        for at, of_position in batch:
            receipts.append({})
            for node, capture in of_position.items():
                writer, receipt = writers[at, node], capture.receipt
                receipt.store, receipt.sha256 = order.stores[at][node], writer.sha256
                receipt.nbytes, receipt.linked_bytes = writer.nbytes, sum(writer.linked)
                receipt.contents = capture.contents
                receipts[-1][node] = receipt
                workspaces[node].stored = _stored_as(order, receipt, writer, capture)
        return receipts

    def _take(
        self,
        order: SaveOrder,
        at: Position,
        captures: dict[Position, dict[str, NodeCapture]],
        workspaces: Mapping[str, Workspace],
    ) -> dict[str, NodeCapture]:
        if at in captures:
            return captures.pop(at)
        if self._encoding.busy.isdisjoint(workspaces):
            # Without tasks it takes no part in epochs, and nothing changes its values.
            return capture_nodes(self._encoding, workspaces, self._constants)
        raise CheckpointWriteError(
            f"Epoch {at} of {order.path} cannot be written: this worker has no copy of its "
            f"blobs. Save the epoch again."
        )

    def _explain(self, order: SaveOrder, at: Position, error: Exception) -> Exception:
        if not isinstance(error, OSError) or isinstance(error, CheckpointError):
            return error
        nodes = [node for node in order.stores[at] if node in self._encoding.nodes]
        first = order.stores[at][nodes[0]] if nodes else ""
        where = error.filename or os.path.join(order.path, first)
        recorded = "Earlier epochs are still recorded. " if at > Position(0) else ""
        explained = CheckpointWriteError(
            f"Epoch {at} of {', '.join(nodes)} could not be written: {where}: "
            f"{type(error).__name__}: {error.strerror or error}. {recorded}"
            f"{write_remedy(error, order.path)}"
        )
        explained.__cause__ = error
        return explained


def _copy(part: Any) -> None:
    part.data = part.data.copy()


def _plan_store(
    order: SaveOrder,
    at: Position,
    capture: NodeCapture,
    described: dict[str, Any],
    workspace: Workspace,
) -> StoreWriter:
    layout = lay_out(capture.blobs, described)
    capture.blobs = {}  # so that each array is released as soon as it is written
    former = NO_STORE
    last = workspace.stored
    if last is not None and last.store[0] == order.path:
        former = Former(join_path(order.path, last.store[1]), last.files)
        for array in layout.arrays:
            blob = last.blobs.get(array.blob)
            if blob is not None and blob.version == capture.versions[array.blob]:
                # It is the array of the store before, and no task has updated its blob since.
                is_same = blob.arrays.get(array.path) == array.document
                array.is_unchanged = is_same and id(array.data) in capture.at_rest
    return StoreWriter(
        order.files, join_path(order.path, order.stores[at][workspace.node]), layout, former
    )


def _stored_as(
    order: SaveOrder, receipt: Receipt, writer: StoreWriter, capture: NodeCapture
) -> StoredAs:
    """What the next save is told of a store."""
    blobs: dict[str, StoredBlob] = {}
    for array in writer.arrays:
        if array.blob and array.files and array.files[0][0] >= order.files.linked_bytes:
            blob = blobs.setdefault(array.blob, StoredBlob(capture.versions[array.blob], {}))
            blob.arrays[array.path] = array.document
    return StoredAs((order.path, receipt.store, receipt.sha256), writer.long_files(), blobs)
