"""Begins, commits and abandons saves. Runs on the client; `worker_save` runs on the workers."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import structs

from jobrunner.checkpoint.directory import Directory
from jobrunner.checkpoint.encoding import REGISTERED_CODECS, check_classes, refuse_classes
from jobrunner.checkpoint.history import as_json
from jobrunner.checkpoint.loader import PARTITIONS, REPLICATED
from jobrunner.checkpoint.log import (
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
from jobrunner.checkpoint.store import Receipt
from jobrunner.checkpoint.worker_save import BlobEncoder, Claim, SaveOrder
from jobrunner.define import ArrayOptions
from jobrunner.errors import CheckpointError, CheckpointWriteError, DefinitionError
from jobrunner.names import ROOT_DOCUMENT, parse_store_name
from jobrunner.positions import Position
from jobrunner.texts import get_logger, listed

logger = get_logger(__name__)


@dataclass(eq=False)
class Commits:
    """The saves of the run that holds the directory.

    A save costs one entry of the log: its ``commit`` records the epoch, retires others by policy,
    and claims the names of the save that is expected next. Only where no earlier entry has claimed
    its names, a ``begin`` comes before it.
    """

    directory: Directory
    retention: Retention
    default_options: ArrayOptions
    allow_pickle: bool
    lock: RunLock | None = field(default=None, init=False)
    """Of the current run."""
    _open: SaveOrder | None = field(default=None, init=False)
    """The save that has begun, and was neither committed nor abandoned."""
    _abandoned: dict[Claim, SaveOrder] = field(default_factory=dict, init=False)
    _written: Position | None = field(default=None, init=False)
    """The newest position that workers may have written in the current attempt."""
    _newest: tuple[int, dict[str, tuple[str, str]]] | None = field(default=None, init=False)
    """The newest commit entry: its number, and node -> store and digest of its document."""
    _contents: tuple[int, dict[str, NodeContents]] | None = field(default=None, init=False)
    """What the stores of this run have in them, and the number of the entry that says so."""
    _names: Sequence[str] = field(default=(), init=False)
    """Those in the directory when the run took it."""
    _must_look: bool = field(default=True, init=False)
    """Whether the client has not yet seen what the workers write, as they are placed now."""
    _former_names: Mapping[str, str] = field(default_factory=dict, init=False)

    def refuse_classes(self, made: Mapping[tuple[str, str], type]) -> None:
        """Raise `DefinitionError` if no object of a class can be saved that a blob will be one of."""
        if not self.allow_pickle:
            refuse_classes(made, tuple(REGISTERED_CODECS.values()))

    def begin(
        self,
        epoch: Position,
        *,
        replicated: Mapping[str, Sequence[str]] | None = None,
        initial: Mapping[str, Collection[str]] | None = None,
        details: Mapping[str, Any] | None = None,
        array_options: Mapping[str, Mapping[str, ArrayOptions]] | None = None,
    ) -> SaveOrder:
        """Claim the names of an epoch's stores.

        Call `write` of the save on every worker with its workspaces, then `commit` with all
        receipts, or else `abandon`. For `replicated` see `SaveOrder`. `initial` names the blobs that
        each node's init tasks make: only these may contain objects that are saved by their state.
        `details` is JSON that `commit` will get, at least in part; it may contain NaN and
        infinities. A store has a copy, from which a repair rebuilds the record.

        Raises CommitConflictError if another run has taken the directory over, and
        CheckpointWriteError if the claim could not be recorded.
        """
        lock = self.held()
        shared = {name: list(nodes) for name, nodes in (replicated or {}).items()}
        stored = as_json({**(details or {}), **({REPLICATED: shared} if shared else {})}, "details")
        encoder = BlobEncoder(
            tuple(REGISTERED_CODECS.values()),
            self.allow_pickle,
            initial,
            array_options or {},
            self.default_options,
        )
        if self._open is not None:
            self.abandon(self._open)
        # The disk needs room for the epochs that are kept and one more, even if deletion is slow.
        self.retention.sweeper.drain()
        with writing(self.directory.path, f"the save of epoch {epoch} could not be begun"):
            attempt = self._claim(epoch)
        self._open = SaveOrder(
            self.directory.path,
            lock.run,
            Claim(epoch, attempt.number, attempt.label),
            {node: attempt.store_name(node, epoch) for node in lock.nodes},
            encoder,
            self.directory.files,
            self._former(),
            shared,
            stored,
        )
        return self._open

    def _claim(self, epoch: Position) -> Attempt:
        """The attempt that may write the epoch's stores; begins one unless the last one may."""
        log = self.directory.log
        state = log.check_held()
        attempt = state.attempt
        if attempt is not None and self._written == attempt.last:
            is_later = attempt.last is None or epoch > attempt.last
            if is_later and epoch <= attempt.upto:
                return attempt
        # Slow workers may still write what was abandoned, under names of the attempt before. The
        # new one has a label of its own, and what lies there is deleted once they are gone.
        nodes = self.held().nodes
        taken = set()
        label = 0
        for name in self._names:
            store = parse_store_name(name)
            if store is None or store.node not in nodes:
                continue
            # No entry has claimed these names, so the stores are not ours: they stay.
            if store.retry > state.label:
                label = max(label, store.retry)
            elif not store.retry and (state.upto is None or store.epoch > state.upto):
                taken.add(store.epoch)
        swept = state.swept(self.retention.sweeper.deleted)
        attempt = log.begin(epoch, occupied=taken, label=label, swept=swept)
        self._written = None
        return attempt

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

    def name_former(self, names: Mapping[str, str]) -> None:
        """Say what nodes are called in the newest checkpoint, if not as now: its chunks are linked."""
        self._former_names, self._newest = names, None

    def _former(self) -> dict[str, tuple[str, str]]:
        """Node -> its newest recorded store and digest; the next one may link unchanged chunks."""
        state = self.directory.log.known()  # as of the claim: reading again could fail
        latest = state.latest
        if latest is None:
            return {}
        number = state.recorded[latest]
        if self._newest is None or self._newest[0] != number:
            try:
                stores = self.directory.record(latest).stores
            except CheckpointError as error:
                logger.info("Nothing is linked to epoch %s: %s", latest, error)
                stores = {}
            newest = {}
            for node in self.held().nodes:
                store = stores.get(self._former_names.get(node, node))
                if store is not None:
                    newest[node] = (store.name, store.sha256)
            self._newest = (number, newest)
        return self._newest[1]

    def commit(
        self, save: SaveOrder, receipts: Mapping[str, Receipt], details: Mapping[str, Any]
    ) -> None:
        """Record an epoch, and retire others by policy, with one ``commit`` entry of the log.

        `details` is JSON for the record; it may contain NaN and infinities. Raises
        CommitConflictError, and does not record the epoch, if another run has taken the directory
        over, and CheckpointWriteError if a receipt is missing, or if it is unknown whether the
        epoch was recorded.
        """
        missing = [node for node in save.stores if node not in receipts]
        if missing:
            raise CheckpointWriteError(
                f"Epoch {save.epoch} of {self.directory.path} cannot be recorded: expected a "
                f"receipt from each of {len(save.stores)} nodes, found none from "
                f"{', '.join(missing[:8])}. Check that they are placed on workers, and save again."
            )
        _check_replicas(save, receipts)
        _check_parts(save, receipts)
        for node, receipt in receipts.items():
            if receipt.classes:
                where = (
                    f"Epoch {save.epoch} of {self.directory.path} is not recorded. Node {node!r}"
                )
                check_classes(receipt.classes, where)
        if save.replicated:
            details = {**details, REPLICATED: save.replicated}
        stores = {}
        contents = {}
        for node in save.stores:
            receipt = receipts[node]
            seconds = round(receipt.seconds, 6)
            stores[node] = Store(receipt.store, receipt.sha256, receipt.nbytes, seconds)
            contents[node] = _contents_of(receipt)
        record = Record(save.epoch, stores, details=as_json(details, "details"))
        if self._contents is not None and self._contents[1] == contents:
            record.contents = self._contents[0]
        with writing(self.directory.path, f"epoch {save.epoch} could not be recorded"):
            state = self.directory.log.check_held()
            if not self._is_open(save):
                raise CheckpointWriteError(
                    f"The save of epoch {save.epoch} in {self.directory.path} was abandoned. Begin "
                    f"it again."
                )
            self._look_for(save)
            entry = self.retention.append(
                CommitEntry,
                begin=save.claim.begin,
                records=[record],
                run_number=self.held().number,
                contents=contents if record.contents is None else {},
                retires=self.retention.choose(state, record),
                upto=_expect_next(state, save.epoch),
            )
        # The epoch is recorded: nothing that fails below may raise.
        newest = {node: (store.name, store.sha256) for node, store in stores.items()}
        self._newest, self._former_names = (entry.number, newest), {}
        if record.contents is None:
            self._contents = (entry.number, contents)
        self._open, self._written = None, save.epoch

    def abandon(self, save: SaveOrder) -> None:
        """Delete the stores of a failed save, if possible; their names stay claimed."""
        if self._is_open(save):
            self._open, self._written = None, save.epoch
        try:
            state = self.directory.log.check_held()
        except CheckpointError as error:
            logger.warning(
                "%s: the stores of the failed save of epoch %s are not deleted: %s",
                self.directory.path,
                save.epoch,
                error,
            )
            return
        # A commit that seemed to fail may have been recorded.
        for attempt in (state.attempt, *state.attempts):
            if attempt is None or attempt.number != save.claim.begin:
                continue
            if attempt.last is None or save.epoch > attempt.last:
                # A slow worker may still write. The end of this run sweeps the stores once more,
                # and so does the next run.
                self._abandoned[save.claim] = save
                self.retention.sweeper.add(None, list(save.stores.values()))
        self.retention.sweep_new()

    def _look_for(self, save: SaveOrder) -> None:
        """Raise CheckpointError unless the client sees what the workers have written.

        Once after each placement: a worker may read the client's directory, and write to another
        one that lies over it.
        """
        if not self._must_look:
            return
        path, files = self.directory.path, self.directory.files
        roots = {
            node: join_path(path, f"{store}/{ROOT_DOCUMENT}") for node, store in save.stores.items()
        }
        for node, is_there in zip(roots, files.each(files.is_taken, roots.values()), strict=True):
            if not is_there:
                raise CheckpointError(
                    f"{path} is not shared: expected to find {save.stores[node]}, which the worker "
                    f"of node {node!r} has written, but found nothing. Use a directory that the "
                    f"client and all workers share."
                )
        self._must_look = False

    def forget(self, save: SaveOrder) -> None:
        """Drop a save that no worker was told to write; the next one may have its names."""
        if self._is_open(save):
            self._open = None

    def _is_open(self, save: SaveOrder) -> bool:
        return self._open is not None and self._open.claim == save.claim

    def abandon_all(self) -> None:
        """Abandon every save that was not committed, again if it was abandoned before."""
        saves = list(self._abandoned.values())
        if self._open is not None:
            saves.append(self._open)
        try:
            for save in saves:
                self.abandon(save)
        finally:
            self._open, self._abandoned = None, {}

    def held(self) -> RunLock:
        """The lock of the current run; raises DefinitionError if there is none."""
        if self.lock is None:
            raise DefinitionError(
                f"No run of this manager holds {self.directory.path}. Call run.start() first, as a "
                f"JobRunner does."
            )
        return self.lock


def _contents_of(receipt: Receipt) -> NodeContents:
    """What the log says of a store, so that a load can be planned without opening it."""
    classes = {name: list(names) for name, names in receipt.blobs.items() if names}
    return NodeContents(list(receipt.blobs), list(receipt.states), classes, dict(receipt.lengths))


def _expect_next(state: State, epoch: Position) -> Position | None:
    """What the save after that of `epoch` will be of, if saves are as far apart as the last two.

    Its names are claimed now. A wrong guess costs the next save a ``begin``; after a crash, the
    names are not used again. None if that much is claimed already.
    """
    distance = 1
    if state.latest is not None and state.latest < epoch:
        distance = max(1, epoch.epoch - state.latest.epoch)
    expected = Position(epoch.epoch + distance)
    is_claimed = state.attempt is not None and expected <= state.attempt.upto
    return None if is_claimed else expected


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


def read_receipts(
    replies: Mapping[str, Any], save: SaveOrder, placement: Mapping[str, str]
) -> dict[str, Receipt]:
    """The receipts by node, from the replies by worker.

    Each worker gives those of its own nodes, as `placement` says, for the stores claimed.
    """
    found: dict[str, Receipt] = {}
    for address, reply in replies.items():
        try:
            fields = {node: structs.asdict(receipt) for node, receipt in reply.items()}
            receipts = msgspec.convert(fields, dict[str, Receipt])
            for node, receipt in receipts.items():
                if placement.get(node) != address:
                    raise ValueError(f"node {node!r:.80} is not on that worker")
                if receipt.store != save.stores.get(node):
                    raise ValueError(f"store {receipt.store!r:.80} is not that of {node!r}")
        except (AttributeError, TypeError, ValueError) as error:
            raise CheckpointWriteError(
                f"Epoch {save.epoch} cannot be recorded: worker {address} returned receipts that "
                f"do not fit: {error}. Check that the same version of jobrunner runs there, and "
                f"who can reach the cluster."
            ) from error
        found.update(receipts)
    return found


def _check_replicas(save: SaveOrder, receipts: Mapping[str, Receipt]) -> None:
    for name, nodes in save.replicated.items():
        first = receipts[nodes[0]].replicas.get(name)
        for node in nodes:
            if receipts[node].replicas.get(name) != first:
                raise DefinitionError(
                    f"Blob {name!r} is replicated, but at epoch {save.epoch} its value on node "
                    f"{node!r} differs from its value on node {nodes[0]!r}. Make them equal, or "
                    f"declare the blob without replicated=True."
                )


def _check_parts(save: SaveOrder, receipts: Mapping[str, Receipt]) -> None:
    """Refuse parts of arrays that no other number of nodes could load."""
    for name, about in save.details.get(PARTITIONS, {}).items():
        nodes: dict[str, list[str]] = {}
        for node in about["nodes"]:
            if name in receipts[node].parts:
                nodes.setdefault(receipts[node].parts[name], []).append(node)
        # Objects with a state are joined in another way.
        if len(nodes) > 1 and any(found.endswith("]") for found in nodes):
            expected, *others = (
                f"{found} on {listed(map(repr, there), 3)}" for found, there in nodes.items()
            )
            raise DefinitionError(
                f"Epoch {save.epoch} of {save.path} is not recorded: the parts of blob {name!r} do "
                f"not fit together along axis {about['axis']}: expected {expected}, found "
                f"{listed(others)}. Make them of one dtype and one shape, but for their length "
                f"along that axis, or declare the blob without partition={about['axis']}."
            )
