"""What workers do for saves: keep captures of epochs, and write them in groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import msgspec

from jobrunner.checkpoint.encoding import ArrayPart
from jobrunner.checkpoint.history_writer import HistoryWriters
from jobrunner.checkpoint.log import NodeContents, Record
from jobrunner.checkpoint.node_capture import (
    Constants,
    Encoding,
    NodeCapture,
    NodeFacts,
    capture_nodes,
)
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
    STORE_FORMAT,
    Former,
    HistoryMark,
    RecordEntry,
    StoreEntry,
    StoreWriter,
    lay_out,
    write_stores,
)
from jobrunner.errors import CheckpointError, CheckpointWriteError, DefinitionError
from jobrunner.names import HISTORIES, BlobKey, parse_store_name
from jobrunner.positions import Position
from jobrunner.texts import listed
from jobrunner.workspace import StoredAs, StoredBlob, Workspace

_LARGE_BYTES = 32 << 20
"""A group of so many bytes is written at low priority, or tasks beside it would take up to three times
as long. Smaller ones are not: where all cores are busy, they would starve, and epochs wait for them."""


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """What workers write for one entry of the log: the stores of a group of positions, in order.

    Picklable. Not safe to write twice, as each name is used once.
    """

    path: str
    files: Files
    run: str
    claim: int
    """The number of the entry of the log that claims the names."""
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
        self, node: str, at: Position, contents: NodeContents, histories: dict[str, HistoryMark]
    ) -> StoreEntry:
        """What a store's document says of it, but for its blobs."""
        entry = StoreEntry(
            STORE_FORMAT,
            node,
            at.to_json(),
            self.run,
            blobs={},
            histories=histories,
            claim=self.claim,
            states=contents.states,
            classes=contents.classes,
        )
        if node == next(iter(self.stores[at])):
            record = self.records[at]
            details = {name: value for name, value in record.details.items() if name != "timing"}
            entry.record = RecordEntry(list(self.stores[at]), details, record.histories)
        return entry


class Receipt(msgspec.Struct, array_like=True, frozen=True):
    """What a worker says of a node's store, once that is durable."""

    store: str
    sha256: str  # of the root document
    nbytes: int  # of all files
    seconds: float = 0.0  # that the worker took for the store; a group shares what it costs
    linked_bytes: int = 0  # how many of `nbytes` are in files shared with the epoch before
    contents: NodeContents | None = None  # None: that of the node's receipt before
    replicas: Mapping[str, str] = {}  # as in `NodeFacts`
    parts: Mapping[str, str] = {}  # as in `NodeFacts`


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


@dataclass(frozen=True, slots=True)
class _NewStore:
    """A store that is being written. It has no arrays: its writer drops each that is written."""

    name: str
    writer: StoreWriter
    facts: NodeFacts

    def receipt(self, contents: NodeContents | None, seconds: float) -> Receipt:
        """The receipt of a store that is durable; for `contents`, see there."""
        writer, facts = self.writer, self.facts
        return Receipt(
            self.name,
            writer.sha256,
            writer.nbytes,
            seconds,
            sum(writer.linked),
            contents,
            facts.replicas,
            facts.parts,
        )

    def as_stored(self, order: SaveOrder) -> StoredAs:
        """What the next save is told of a store that is written."""
        writer = self.writer
        blobs: dict[str, StoredBlob] = {}
        for array in writer.arrays:
            if array.blob and array.files and array.files[0][0] >= order.files.linked_bytes:
                version = self.facts.versions[array.blob]
                blob = blobs.setdefault(array.blob, StoredBlob(version, {}))
                blob.arrays[array.path] = array.document
        store = (order.path, self.name, writer.sha256)
        return StoredAs(store, writer.long_files(), blobs)


_NewStores = dict[str, _NewStore]
"""By node, those of one position."""


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
        self._counted: dict[BlobKey, int] = {}
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
                version = capture.facts.versions[name]
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

    def capture_bytes(self) -> int:
        """How much memory the newest capture keeps from being freed."""
        return self._newest_bytes

    def close(self) -> None:
        """Forget everything."""
        self._captures.clear()
        self._histories.close()

    # --- in another thread

    def save(self, workspaces: Mapping[str, Workspace], *, order: SaveOrder) -> Written:
        """Write the state of the workspaces, which is that of an order's only position.

        No task may run meanwhile, so nothing is copied. Raises DefinitionError, before anything is
        written, if a blob cannot be encoded, and what `write` raises.
        """
        self._captures = {order.at: capture_nodes(self._encoding, workspaces, self._constants)}
        return self._write(workspaces, order)

    def write(self, workspaces: Mapping[str, Workspace], *, order: SaveOrder) -> Written:
        """Write what was captured, at low priority if it is large.

        Positions are written in their order; after one that fails, no later one is. Raises what made
        the first one fail, or CheckpointWriteError if nothing is known to be durable.
        """
        if self._newest_bytes * len(order.stores) < _LARGE_BYTES:
            return self._write(workspaces, order)
        return run_gently(partial(self._write, workspaces, order))

    def _write(self, workspaces: Mapping[str, Workspace], order: SaveOrder) -> Written:
        started = perf_counter()
        try:
            stores, failure = self._write_durably(workspaces, order)
        except OSError as error:
            stores, failure = [], _explain(error, order, order.at, workspaces)
        written = Written([])
        if failure is not None:
            written.failure = str(failure)
            # The system may have lost what it was to flush. So nothing is linked to that.
            for workspace in workspaces.values():
                workspace.stored = None
            if not stores:
                raise failure
        seconds = (perf_counter() - started) / max(1, len(stores))
        newest: dict[str, NodeContents | None] = {}
        for by_node in stores:
            receipts = {}
            for node, store in by_node.items():
                contents: NodeContents | None = store.facts.contents
                if newest.get(node) == contents:
                    contents = None
                else:
                    newest[node] = contents
                receipts[node] = store.receipt(contents, seconds)
            written.receipts.append(receipts)
        return written

    def _write_durably(
        self, workspaces: Mapping[str, Workspace], order: SaveOrder
    ) -> tuple[list[_NewStores], Exception | None]:
        """Write stores and rows of histories, and flush them.

        Returns the stores of each position that are durable now, and why those of later ones are
        not. Raises OSError if nothing is known to be durable.
        """
        captures = {}
        for at in list(self._captures):
            if at <= order.at:  # later orders are of later positions
                captures[at] = self._captures.pop(at)
        batches = [[at] for at in order.stores]
        if order.files.lookups > 1:
            # Requests take long, so those of all positions go out together. Unchanged chunks are
            # linked to those before the group alone.
            batches = [list(order.stores)]
        stores: list[_NewStores] = []
        names: list[str] = []
        failure: Exception | None = None
        # `making_durable` reads the names at its end: those of stores that are written whole by then.
        with order.files.making_durable(order.path, names):
            for batch in batches:
                try:
                    stores += self._write_batch(order, batch, captures, workspaces)
                except (OSError, DefinitionError) as error:
                    failure = _explain(error, order, batch[0], workspaces)
                    break
            for by_node in stores:
                names += [store.name for store in by_node.values()]
            # The rows of a position that failed, too: nothing counts them before a record does.
            self._histories.write(order.files)
            histories = order.records[order.at].histories
            if histories:
                names.append(join_path(HISTORIES, histories))
        self._histories.settle()
        return stores, failure

    def _write_batch(
        self,
        order: SaveOrder,
        batch: Sequence[Position],
        captures: dict[Position, dict[str, NodeCapture]],
        workspaces: Mapping[str, Workspace],
    ) -> list[_NewStores]:
        """Write the stores of some positions together."""
        stores = []
        for at in batch:
            stores.append(self._plan_stores(order, at, captures.pop(at, None), workspaces))
        writers = [store.writer for by_node in stores for store in by_node.values()]
        write_stores(order.files, writers)
        for by_node in stores:
            for node, store in by_node.items():
                workspaces[node].stored = store.as_stored(order)
        return stores

    def _plan_stores(
        self,
        order: SaveOrder,
        at: Position,
        captures: Mapping[str, NodeCapture] | None,
        workspaces: Mapping[str, Workspace],
    ) -> _NewStores:
        """Plan the stores of a position. From then on, only the writers refer to the captures' arrays."""
        if captures is None:
            if not self._encoding.busy.isdisjoint(workspaces):
                raise CheckpointWriteError(
                    f"Epoch {at} of {order.path} cannot be written: this worker has no copy of its "
                    f"blobs. Save the epoch again."
                )
            # Without tasks it takes no part in epochs, and nothing changes its values.
            captures = capture_nodes(self._encoding, workspaces, self._constants)
        stores = {}
        for node, capture in captures.items():
            marks = self._histories.advance(
                order.files,
                order.path,
                order.records[at].histories,
                workspaces[node],
                capture.histories,
            )
            entry = order.describe(node, at, capture.facts.contents, marks)
            name = order.stores[at][node]
            writer = _plan_store(order, name, capture, entry, workspaces[node].stored)
            stores[node] = _NewStore(name, writer, capture.facts)
        return stores


def _copy(part: ArrayPart) -> None:
    part.data = part.data.copy()


def _plan_store(
    order: SaveOrder,
    name: str,
    capture: NodeCapture,
    entry: StoreEntry,
    last: StoredAs | None,
) -> StoreWriter:
    """Plan a store; `last` is that of the node before, to whose files it may link its own."""
    layout = lay_out(capture.blobs, entry)
    former = NO_STORE
    if last is not None and last.store[0] == order.path:
        former = Former(join_path(order.path, last.store[1]), last.files)
        for array in layout.arrays:
            blob = last.blobs.get(array.blob)
            if blob is not None and blob.version == capture.facts.versions[array.blob]:
                # It is the array of the store before, and no task has updated its blob since.
                is_same = blob.arrays.get(array.path) == array.document
                array.is_unchanged = is_same and id(array.data) in capture.at_rest
    return StoreWriter(order.files, join_path(order.path, name), layout, former)


def _explain(
    error: Exception, order: SaveOrder, at: Position, workspaces: Collection[str]
) -> Exception:
    """What to raise for an error while a position, or a group that begins with it, was written."""
    if not isinstance(error, OSError) or isinstance(error, CheckpointError):
        return error
    nodes = [node for node in order.stores[at] if node in workspaces]
    where = str(error.filename or order.path)
    name, _, _ = where.removeprefix(f"{order.path}/").partition("/")
    store = parse_store_name(name)
    if store is not None and store.epoch in order.stores:
        at, nodes = store.epoch, [store.node]
    recorded = ""
    if at > Position(0):
        recorded = "Earlier epochs are still recorded. "
    explained = CheckpointWriteError(
        f"Epoch {at} of {listed(nodes)} could not be written: {where}: "
        f"{type(error).__name__}: {error.strerror or error}. {recorded}"
        f"{write_remedy(error, order.path)}"
    )
    explained.__cause__ = error
    return explained
