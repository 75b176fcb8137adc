"""Orders, commits and abandons saves. Runs on the client; `worker_save` runs on the workers."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from jobrunner.checkpoint.directory import Directory
from jobrunner.checkpoint.encoding import REGISTERED_CODECS, find_classes, refuse_classes
from jobrunner.checkpoint.history import as_json
from jobrunner.checkpoint.log import (
    PARTITIONS,
    REPLICATED,
    Attempt,
    CommitEntry,
    NodeContents,
    Record,
    RunLock,
    State,
    Store,
)
from jobrunner.checkpoint.retention import Retention
from jobrunner.checkpoint.storage import join_path
from jobrunner.checkpoint.worker_save import Encoding, Receipt, Reply, SaveOrder, Written
from jobrunner.define import ArrayOptions
from jobrunner.errors import CheckpointError, CheckpointWriteError, DefinitionError
from jobrunner.names import ROOT_DOCUMENT, parse_store_name
from jobrunner.positions import Position
from jobrunner.texts import get_logger, listed

logger = get_logger(__name__)

_MOST_STORES = 20_000
"""In an order: its entry of the log takes some megabytes then."""


class Committed(NamedTuple):
    """What has become of an order."""

    recorded: list[Position]  # in order; what is passed over is not among them
    problem: Exception | None  # why later positions of the order are not


@dataclass(eq=False)
class Commits:
    """The saves of the run that holds the directory.

    A group of positions costs one entry of the log: its ``commit`` records them, retires others by
    policy, and claims the names of what is expected next. Only where no earlier entry has claimed
    the names of a group, a ``begin`` comes before it.
    """

    directory: Directory
    retention: Retention
    default_options: ArrayOptions
    lock: RunLock | None = field(default=None, init=False)
    """Of the current run."""
    _open: SaveOrder | None = field(default=None, init=False)
    """The order that was neither committed nor abandoned."""
    _records: dict[Position, Record] = field(default_factory=dict, init=False)
    """Of the open order, as far as they are known: no record has stores yet."""
    _encoding: Encoding = field(default_factory=Encoding, init=False)
    """Of the open order."""
    _abandoned: list[SaveOrder] = field(default_factory=list, init=False)
    _awaited: Position = field(default=Position(0), init=False)
    """The newest position that was to be ordered."""
    _has_failed: bool = field(default=False, init=False)
    """Whether the newest order was given up."""
    _written: Position | None = field(default=None, init=False)
    """The newest position that workers may have written in the current attempt."""
    _contents: tuple[int, dict[str, NodeContents]] | None = field(default=None, init=False)
    """What the stores of this run have in them, and the number of the entry that says so."""
    _names: Sequence[str] = field(default=(), init=False)
    """Those in the directory when the run took it."""
    _must_look: bool = field(default=True, init=False)
    """Whether the client has not yet seen what the workers write, as they are placed now."""

    def refuse_classes(self, made: Mapping[tuple[str, str], type]) -> None:
        """Raise `DefinitionError` if no object of a class can be saved that a blob will be one of."""
        if not self.directory.allow_pickle:
            refuse_classes(made, tuple(REGISTERED_CODECS.values()))

    def encoding(
        self,
        *,
        initial: Mapping[str, Collection[str]] | None = None,
        array_options: Mapping[str, Mapping[str, ArrayOptions]] | None = None,
        replicated: Mapping[str, Sequence[str]] | None = None,
        partitions: Mapping[str, tuple[int, Sequence[str]]] | None = None,
        busy: Collection[str] | None = None,
    ) -> Encoding:
        """Make what workers must know to encode the blobs of the run's nodes; see `Encoding`."""
        return Encoding(
            tuple(self.held().nodes),
            tuple(REGISTERED_CODECS.values()),
            self.directory.allow_pickle,
            initial,
            array_options or {},
            self.default_options,
            replicated or {},
            partitions or {},
            frozenset(self.held().nodes if busy is None else busy),
        )

    # ---- a group

    def order(
        self, group: Mapping[Position, Mapping[str, Any]], encoding: Encoding | None = None
    ) -> SaveOrder:
        """Decide what is written of positions, in ascending order, and claim names for their stores.

        `group` has the details of each record, which may contain NaN and infinities. A store has a
        copy of them, for repairs, without ``timing``.

        The order may be of the first ones only: those whose names an earlier commit has claimed. Let
        the `SaveQueue` of every worker write them, then call `commit` with what they answer, or else
        `abandon`.

        Raises CommitConflictError if another run has taken the directory over, and
        CheckpointWriteError if the claim could not be recorded.
        """
        lock = self.held()
        encoding = encoding or self.encoding()
        records = {}
        for at, told in group.items():
            details = as_json({**told, **_shared(encoding)}, "details")
            records[at] = Record(at, None, details=details)
        first, last = min(group), max(group)
        if self._open is not None:
            self.abandon(self._open)
        if self._has_failed:
            self._retire_first()
        # The disk needs room for the epochs that are kept and one group, even if deletion is slow.
        self.retention.sweeper.drain()
        with writing(self.directory.path, f"the save of epoch {first} could not be begun"):
            attempt = self._claim(first)
        # A group that is larger than expected is cut, as a `begin` would give its epochs other names.
        self._awaited = last
        most = max(1, _MOST_STORES // max(1, len(lock.nodes)))
        for i, at in enumerate(list(records)):
            if i >= most or at > attempt.upto:
                del records[at]
        drops = self.retention.pass_over(self.directory.log.known(), list(records.values()))
        stores = {}
        copies = {}
        for at, record in records.items():
            if at not in drops:
                stores[at] = {node: attempt.store_name(node, at) for node in lock.nodes}
                copies[at] = {
                    name: value for name, value in record.details.items() if name != "timing"
                }
        self._records, self._encoding = records, encoding
        self._open = SaveOrder(
            self.directory.path,
            self.directory.files,
            lock.run,
            attempt.number,
            attempt.label,
            stores,
            copies,
            drops,
        )
        return self._open

    def commit(self, order: SaveOrder, written: Written) -> Committed:
        """Record the longest prefix of an order that is whole; and retire others by policy.

        One ``commit`` entry of the log does it, or a few if the group is very large. What is left is
        abandoned. Raises CommitConflictError, and records nothing, if another run has taken the
        directory over; what is wrong with the first position if nothing can be recorded; and
        CheckpointWriteError if it is unknown whether anything was recorded.
        """
        recorded: list[Position] = []
        with writing(self.directory.path, f"epoch {order.at} could not be recorded"):
            self.directory.log.check_held()
            if not self._is_open(order):
                raise CheckpointWriteError(
                    f"The save of epoch {order.at} in {self.directory.path} was abandoned. Begin "
                    f"it again."
                )
            records, problem = self._whole_prefix(order, written)
            if not records:
                assert problem is not None
                raise problem
            self._look_for(order, records)
            for part in _alike(records, written):
                try:
                    self._append(order, part, written)
                except CheckpointWriteError as error:
                    if not recorded:
                        raise
                    problem = error
                    break
                recorded += [record.at for record in part if record.stores is not None]
        if problem is not None:
            self.abandon(order)
        else:
            self._open, self._written, self._has_failed = None, order.at, False
        return Committed(recorded, problem)

    def _whole_prefix(
        self, order: SaveOrder, written: Written
    ) -> tuple[list[Record], Exception | None]:
        """The records of what may be recorded, and what is wrong with the next one."""
        records: list[Record] = []
        for at, record in self._records.items():
            if at in order.drops:
                records.append(record)
                continue
            receipts = written.receipts.get(at, {})
            try:
                self._check_receipts(order, at, receipts, written.failure)
            except (CheckpointWriteError, DefinitionError) as error:
                # What was passed over counts only if what comes after it is recorded.
                while records and records[-1].stores is None:
                    records.pop()
                return records, error
            stores = {}
            for node in order.stores[at]:
                receipt = receipts[node]
                seconds = round(receipt.seconds, 6)
                stores[node] = Store(receipt.store, receipt.sha256, receipt.nbytes, seconds)
            records.append(structs.replace(record, stores=stores))
        return records, None

    def _check_receipts(
        self, order: SaveOrder, at: Position, receipts: Mapping[str, Receipt], failure: str
    ) -> None:
        missing = [node for node in order.stores[at] if node not in receipts]
        if missing and failure:
            raise CheckpointWriteError(failure)
        if missing:
            raise CheckpointWriteError(
                f"Epoch {at} of {order.path} cannot be recorded: expected a receipt from each of "
                f"{len(order.stores[at])} nodes, found none from {', '.join(missing[:8])}. Check "
                f"that they are placed on workers, and save again."
            )
        _check_replicas(self._encoding, at, receipts)
        _check_parts(self._encoding, at, receipts, order.path)
        for node, contents in _contents_of(receipts).items():
            for names in contents.classes.values():
                find_classes(names, f"Epoch {at} of {order.path} is not recorded. Node {node!r}")

    def _append(self, order: SaveOrder, records: Sequence[Record], written: Written) -> None:
        state = self.directory.log.known()
        last = records[-1]
        assert last.stores is not None
        contents = _contents_of(written.receipts[last.at])
        number = None
        if self._contents is not None and self._contents[1] == contents:
            number = self._contents[0]
        for record in records:
            record.contents = None if record.stores is None else number
        entry = self.retention.append(
            CommitEntry,
            begin=order.begin,
            records=list(records),
            run_number=self.held().number,
            contents=contents if number is None else {},
            retires=self.retention.choose(state, records),
            upto=self._expect_next(state, last.at),
        )
        if number is None:
            self._contents = (entry.number, contents)

    def abandon(self, order: SaveOrder) -> None:
        """Delete what an order has written and the log does not record; its names stay claimed."""
        self._has_failed = True
        if self._is_open(order):
            self._open, self._written = None, order.at
        try:
            state = self.directory.log.check_held()
        except CheckpointError as error:
            logger.warning(
                "%s: the stores of the failed save of epoch %s are not deleted: %s",
                self.directory.path,
                order.at,
                error,
            )
            return
        # A commit that seemed to fail may have been recorded. A slow worker may still write: the end
        # of this run deletes the stores once more, and so does the next run.
        names = [name for stores in order.stores.values() for name in stores.values()]
        if self.retention.sweep(state, names):
            self._abandoned.append(order)

    def abandon_all(self) -> None:
        """Abandon every order that was not committed, again if it was abandoned before."""
        orders, self._abandoned = self._abandoned, []
        if self._open is not None:
            orders.append(self._open)
        try:
            for order in orders:
                self.abandon(order)
        finally:
            self._open, self._abandoned = None, []

    def _is_open(self, order: SaveOrder) -> bool:
        known = self._open
        return known is not None and (known.begin, known.stores) == (order.begin, order.stores)

    # ---- names

    def _claim(self, first: Position) -> Attempt:
        """The attempt that may write a position; begins one unless the last one may."""
        log = self.directory.log
        state = log.check_held()
        attempt = state.attempt
        if attempt is not None and self._written == attempt.last and attempt.may_write(first):
            return attempt
        # Slow workers may still write what was abandoned, under names of the attempt before. The
        # new one has a label of its own, and what lies there is deleted once they are gone.
        attempt = log.begin(first, self._names)
        self._written = None
        return attempt

    def _expect_next(self, state: State, last: Position) -> Position | None:
        """What comes after a commit up to `last`: its names are claimed by that.

        One save as far away as the last two were, or of groups one twice as large. A wrong guess
        costs a `begin`, or cuts a group; after a crash, the names are not used again. None if that
        much is claimed already.
        """
        distance = 1
        if state.latest is not None and state.latest < last:
            distance = max(1, last.epoch - state.latest.epoch)
        if self._awaited > last or len(self._records) > 1:
            distance = 2 * max(distance, self._awaited.epoch - last.epoch)
        expected = Position(last.epoch + distance)
        if state.attempt is not None and expected <= state.attempt.upto:
            return None
        return expected

    def _retire_first(self) -> None:
        """Retire what the policy does not keep, before the next try: the disk may be full."""
        try:
            self.retention.retire()
        except CheckpointError as error:
            logger.warning("%s: nothing was retired: %s", self.directory.path, error)

    # ---- the run

    def start_run(self, names: Sequence[str]) -> None:
        """Say which names are in the directory now that this run has taken it."""
        self._names = [name for name in names if parse_store_name(name) is not None]
        self._written = self._contents = None

    def note_placement(self) -> None:
        """Say that workers have nodes which they had not before."""
        self._must_look = True

    def give_back(self) -> Position | None:
        """The position up to which names are in use, for the run's last entry; None: all claimed."""
        attempt = self.directory.log.known().attempt
        if attempt is None:
            return None
        return self._written or attempt.last or attempt.after

    def _look_for(self, order: SaveOrder, records: Sequence[Record]) -> None:
        """Raise CheckpointError unless the client sees what the workers have written.

        Once after each placement: a worker may read the client's directory, and write to another
        one that lies over it.
        """
        if not self._must_look:
            return
        files = self.directory.files
        names = order.stores[records[-1].at]
        roots = [join_path(order.path, f"{store}/{ROOT_DOCUMENT}") for store in names.values()]
        for node, is_there in zip(names, files.each(files.is_taken, roots), strict=True):
            if not is_there:
                raise CheckpointError(
                    f"{order.path} is not shared: expected to find {names[node]}, which the worker "
                    f"of node {node!r} has written, but found nothing. Use a directory that the "
                    f"client and all workers share."
                )
        self._must_look = False

    def held(self) -> RunLock:
        """The lock of the current run; raises DefinitionError if there is none."""
        if self.lock is None:
            raise DefinitionError(
                f"No run of this manager holds {self.directory.path}. Call run.start() first, as a "
                f"JobRunner does."
            )
        return self.lock


def _shared(encoding: Encoding) -> dict[str, Any]:
    """What the details say of blobs that several nodes have."""
    shared: dict[str, Any] = {}
    if encoding.replicated:
        shared[REPLICATED] = {name: list(nodes) for name, nodes in encoding.replicated.items()}
    if encoding.partitions:
        shared[PARTITIONS] = {
            name: {"axis": axis, "nodes": list(nodes)}
            for name, (axis, nodes) in encoding.partitions.items()
        }
    return shared


def _contents_of(receipts: Mapping[str, Receipt]) -> dict[str, NodeContents]:
    """What the log says of stores, so that a load can be planned without opening them."""
    return {node: receipt.contents or NodeContents() for node, receipt in receipts.items()}


def _alike(records: Sequence[Record], written: Written) -> Iterator[list[Record]]:
    """Divide records between entries, each of which has one say on what stores contain.

    What was passed over goes with what comes after it. Usually there is one entry.
    """
    part: list[Record] = []
    of_part: dict[str, NodeContents] = {}
    next_ones: list[Record] = []
    for record in records:
        next_ones.append(record)
        if record.stores is None:
            continue
        contents = _contents_of(written.receipts[record.at])
        if part and contents != of_part:
            yield part
            part = []
        part += next_ones
        of_part, next_ones = contents, []
    yield part


@contextlib.contextmanager
def writing(path: str, what: str) -> Iterator[None]:
    """Raise CheckpointWriteError if the storage fails."""
    try:
        yield
    except CheckpointError as error:
        if type(error) is not CheckpointError:
            raise
        # The log cannot be read now, so it cannot be written either.
        raise CheckpointWriteError(str(error)) from error
    except (NotADirectoryError, FileExistsError) as error:
        raise CheckpointWriteError(
            f"{path} cannot be a checkpoint directory: it is a file, or in a file. Name another "
            f"directory."
        ) from error
    except OSError as error:
        raise CheckpointWriteError(
            f"{path}: {what}: {type(error).__name__}: {error}. Earlier epochs are still "
            f"recorded. Repair the storage and run again."
        ) from error


_REPLIES = msgspec.json.Decoder(Reply)


def read_receipts(
    replies: Mapping[str, Any], order: SaveOrder, placement: Mapping[str, str]
) -> Written:
    """What workers have written together, from their replies, by address.

    Each worker gives receipts of its own nodes, as `placement` says, for the stores of the order.
    """
    receipts: dict[Position, dict[str, Receipt]] = {at: {} for at in order.stores}
    failures = []
    for address, data in replies.items():
        try:
            reply = _REPLIES.decode(data)
            failures.append(reply.failure)
            if len(reply.receipts) > len(order.stores):
                raise ValueError(f"they are of {len(reply.receipts)} epochs")
            known: dict[str, NodeContents | None] = {}
            for at, by_node in zip(order.stores, reply.receipts, strict=False):
                for node, receipt in by_node.items():
                    if placement.get(node) != address:
                        raise ValueError(f"node {node!r:.80} is not on that worker")
                    if receipt.store != order.stores[at].get(node):
                        raise ValueError(f"store {receipt.store!r:.80} is not that of {node!r}")
                    receipt.contents = known[node] = receipt.contents or known.get(node)
                    receipts[at][node] = receipt
        except (TypeError, ValueError) as error:
            raise CheckpointWriteError(
                f"Epoch {order.at} cannot be recorded: worker {address} returned receipts that "
                f"do not fit: {error}. Check that the same version of jobrunner runs there, and "
                f"who can reach the cluster."
            ) from error
    return Written(receipts, next(filter(None, failures), ""))


def _check_replicas(encoding: Encoding, at: Position, receipts: Mapping[str, Receipt]) -> None:
    for name, nodes in encoding.replicated.items():
        first = receipts[nodes[0]].replicas.get(name)
        for node in nodes:
            if receipts[node].replicas.get(name) != first:
                raise DefinitionError(
                    f"Blob {name!r} is replicated, but at epoch {at} its value on node {node!r} "
                    f"differs from its value on node {nodes[0]!r}. Make them equal, or declare the "
                    f"blob without replicated=True."
                )


def _check_parts(
    encoding: Encoding, at: Position, receipts: Mapping[str, Receipt], path: str
) -> None:
    """Refuse parts of arrays that no other number of nodes could load."""
    for name, (axis, owners) in encoding.partitions.items():
        nodes: dict[str, list[str]] = {}
        for node in owners:
            if name in receipts[node].parts:
                nodes.setdefault(receipts[node].parts[name], []).append(node)
        # Objects with a state are joined in another way.
        if len(nodes) > 1 and any(part.endswith("]") for part in nodes):
            expected, *others = (
                f"{part} on {listed(map(repr, having), 3)}" for part, having in nodes.items()
            )
            raise DefinitionError(
                f"Epoch {at} of {path} is not recorded: the parts of blob {name!r} do "
                f"not fit together along axis {axis}: expected {expected}, found "
                f"{listed(others)}. Make them of one dtype and one shape, but for their length "
                f"along that axis, or declare the blob without partition={axis}."
            )
