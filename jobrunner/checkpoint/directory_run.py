"""A run's use of its directory: takes it, records epochs in it, sets some aside, releases it.

Runs on the client; `worker_save` runs on the workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import msgspec

from jobrunner.checkpoint.directory import Directory
from jobrunner.checkpoint.encoding import REGISTERED_CODECS, find_classes
from jobrunner.checkpoint.history_writer import make_groups
from jobrunner.checkpoint.log import (
    PARTITIONS,
    REPLICATED,
    Claim,
    CommitEntry,
    DoneEntry,
    EndEntry,
    FileMetadataHandler,
    NodeContents,
    Patience,
    Record,
    RetireEntry,
    RewindEntry,
    RunLock,
    Status,
    Store,
    read_beat,
)
from jobrunner.checkpoint.node_capture import Encoding
from jobrunner.checkpoint.past_epochs import as_json
from jobrunner.checkpoint.retention import Retention
from jobrunner.checkpoint.storage import join_path, write_remedy
from jobrunner.checkpoint.worker_save import Receipt, SaveOrder, Written
from jobrunner.define import ArrayOptions
from jobrunner.errors import (
    CheckpointError,
    CheckpointWriteError,
    CommitConflictError,
    DefinitionError,
)
from jobrunner.names import HISTORIES, check_distinct, parse_store_name
from jobrunner.positions import Position
from jobrunner.texts import get_logger, listed

logger = get_logger(__name__)

_MOST_STORES = 20_000
"""In an order: its entry of the log takes some megabytes then."""

_LEAST_BEAT_SECONDS = 0.1

Receipts = Mapping[str, Receipt]
"""By node."""

Contents = dict[str, NodeContents]
"""By node, what the log says of stores, so that a load can be planned without opening them."""


class Committed(NamedTuple):
    """What has become of an order."""

    recorded: dict[Position, Receipts]  # in order; what is passed over is not among them
    problem: Exception | None  # why later positions of the order are not


@dataclass(frozen=True, slots=True)
class _Group:
    """An order that was neither committed nor abandoned, and what only the client must know of it."""

    order: SaveOrder
    encoding: Encoding
    wanted: Position
    """The newest position that was to be ordered."""


@dataclass(frozen=True, slots=True)
class _Whole:
    """A position that may be recorded."""

    receipts: Receipts
    contents: Contents
    """Positions whose stores have the same in them share this object."""


@dataclass(slots=True)
class _Placement:
    """What is known as long as the nodes stay on their workers."""

    histories: str = ""
    """The directory of histories to which these workers append; empty: none yet."""
    must_look: bool = True
    """Whether the client has not yet seen what they write."""


@dataclass(slots=True)
class _Stay:
    """What is known from the `start` of a run to its `end`."""

    names: Sequence[str] = ()
    """The stores in the directory when the run took it."""
    placement: _Placement = field(default_factory=_Placement)
    group: _Group | None = None
    has_failed: bool = False
    """Whether the newest order was abandoned: workers may have used the names of the claim."""
    contents: Contents = field(default_factory=dict)
    """What the stores recorded last have in them."""
    contents_number: int | None = None
    """Of the entry that says so."""
    abandoned: list[str] = field(default_factory=list)
    """Stores that slow workers may still write."""


@dataclass(eq=False)
class DirectoryRun:
    """A run that holds the directory, from `start` to `end`; one run at a time.

    A group of positions costs one entry of the log: its ``commit`` records them, retires others by
    policy, and claims the names of what is expected next. Only where no earlier entry has claimed
    the names of a group, a ``claim`` comes before it.
    """

    directory: Directory
    retention: Retention
    default_options: ArrayOptions
    delete_on_success: bool
    take_over: bool
    patience: Patience | None = None
    """How long a silent run counts as alive, if not as configured."""
    lock: RunLock | None = field(default=None, init=False)
    """Of the current run."""
    _stay: _Stay = field(default_factory=_Stay, init=False)

    # ---- the run

    def start(
        self,
        nodes: Sequence[str],
        info: Mapping[str, Any],
        status: Callable[[], Status] | None = None,
    ) -> None:
        """Take the directory, with a ``run`` entry in the log, for a run that saves `nodes`.

        `info` is JSON for that entry; `Directory.info_of` returns it. `status`, which another thread
        calls, says for the heartbeat how far the run is. Stores that earlier runs did not commit
        are deleted in the background. Raises CommitConflictError if another run holds
        the directory and is alive, and CheckpointWriteError if it cannot be created or written.
        """
        directory = self.directory
        if self.lock is not None:
            raise DefinitionError(
                f"This checkpoint manager already serves a run in {self.directory.path}. Wait until "
                f"that run ends, or make another manager for another directory."
            )
        if directory.only_node is not None and tuple(nodes) != (directory.only_node,):
            raise DefinitionError(
                f"This CheckpointManager saves one node, {directory.only_node!r}, and the job "
                f"checkpoints {', '.join(map(repr, nodes)) or 'none'}. Use a "
                f"MultiNodeCheckpointManager, or Job(nodes_to_checkpoint=[...])."
            )
        check_distinct(nodes, "node")
        directory.handler.set_params(directory.path, tuple(nodes))
        from jobrunner.config import get_number  # imports Dask, which reading does not need

        beat_seconds = max(_LEAST_BEAT_SECONDS, get_number("checkpoint.heartbeat-seconds"))
        patience = self.patience or Patience(get_number("checkpoint.silence-seconds"))
        path = directory.path
        lock = RunLock(directory.files, path, directory.log, nodes, beat_seconds, status)
        try:
            with writing(directory, "the directory could not be locked"):
                info = {**info, **self._last_beat()}
                lock.take(as_json(info, "info"), patience, take_over=self.take_over)
            self.lock = lock
            directory.is_taken, directory.loaded = True, None
            with writing(directory, "leftovers of earlier runs could not be removed"):
                # After the `run` entry: whatever is there was not written for this run.
                names = directory.files.list_names(path)
                self._stay = _Stay([name for name in names if parse_store_name(name) is not None])
                self.retention.start_run(names)
                lock.remove_traces_of_others()
                if isinstance(directory.handler, FileMetadataHandler):
                    directory.handler.remove_leftovers(lock.number)
        except BaseException:
            # Also on Ctrl-C: a run that did not begin must not look alive to the next one.
            if self.lock is None:
                lock.leave()
            elif directory.log.repairs:
                self.leave()  # an `end` entry would say that the log is repaired, which it is not
            else:
                self.end()
            raise

    def _last_beat(self) -> dict[str, Any]:
        """When the run before was seen last, if it did not end: its heartbeat will be removed."""
        before = self.directory.log.known()
        holder = before.holder
        if holder is None or before.is_ended:
            return {}
        try:
            beat = read_beat(self.directory.files, self.directory.path, holder.run)
        except (OSError, CheckpointError):
            return {}
        return {"seen": {holder.run: beat.time}}

    def end(self, outcome: Mapping[str, Any] | None = None) -> None:
        """Abandon open saves and release the directory, so that another run may take it at once.

        `outcome` is what the ``end`` entry says of the run. Every run calls this at its end, also
        after a failure. Raises nothing, and waits half a minute at most for deletions.
        """
        if self.lock is None:
            return
        try:
            if self._stay.group is not None:
                self.abandon(self._stay.group.order)
            if self._stay.abandoned:
                self._delete(self._stay.abandoned)
            if not self.retention.sweeper.drain():
                logger.warning(
                    "%s: some stores are not deleted yet; the next run deletes them.",
                    self.directory.path,
                )
            # An entry must not follow those of another directory.
            claim = self.directory.log.check_held().claim
            # It gives the names back that no worker was told to use.
            upto = None
            if claim is not None and not self._stay.has_failed:
                upto = claim.last or claim.after
            self.retention.append_and_sweep(EndEntry, upto=upto, **outcome or {})
        except CheckpointError as error:
            logger.warning(
                "%s: the end of the run could not be recorded: %s", self.directory.path, error
            )
        finally:
            self.leave()

    def leave(self) -> None:
        """Leave the directory as a run that was killed does, but without its heartbeat."""
        if self.lock is not None:
            self.lock.leave()
            self.lock = None
            self.directory.is_taken, self.directory.loaded = False, None

    def held(self) -> RunLock:
        """The lock of the current run; raises DefinitionError if there is none."""
        if self.lock is None:
            raise DefinitionError(
                f"No run of this manager holds {self.directory.path}. Call run.start() first, as a "
                f"JobRunner does."
            )
        return self.lock

    def probe(self) -> Callable[[Mapping[str, Any]], Any]:
        """Make the probe that shows whether workers share the directory; picklable.

        Call it on every worker with its workspaces, and pass the answers to `check_probe`.
        """
        with writing(self.directory, "the probe for the workers could not be written"):
            probe = self.held().probe
            self.directory.files.put(probe.path, probe.token)
            # With histories of its own: workers of before may still write to the others.
            self._stay.placement = _Placement()
            return probe

    def check_probe(self, answers: Mapping[str, Any]) -> None:
        """Check the answers to `probe`, by address of the worker.

        Raises CheckpointError if a worker sees another directory under that path, and
        CheckpointWriteError if it cannot read there.
        """
        for worker, problem in answers.items():
            if problem is not None:
                raise type(problem)(
                    f"Worker {worker} cannot use the checkpoint directory {self.directory.path}: "
                    f"{problem}"
                )

    def rewind(self, epoch: Position | None, reason: str) -> None:
        """Set aside every epoch after `epoch`, or all if None; their stores stay.

        `reason` is for people who read the log.
        """
        latest = self.directory.log.check_held().latest
        self.directory.loaded = epoch
        if latest is not None and (epoch is None or latest > epoch):
            self.retention.append_and_sweep(RewindEntry, after=epoch, reason=reason)

    def set_aside(self, epoch: Position, reason: str) -> None:
        """Set one damaged epoch aside; its stores stay."""
        self.directory.check_recorded(epoch, self.directory.log.check_held())
        self.retention.append_and_sweep(RewindEntry, only=epoch, reason=reason)

    def finish(self, epoch: Position) -> None:
        """Record that the job ended after `epoch`, exit group included; see `delete_on_success`."""
        self.directory.log.check_held()
        self.retention.append_and_sweep(DoneEntry, epoch=epoch)
        if self.delete_on_success:
            self.retention.append_and_sweep(RetireEntry, epochs=self.directory.log.refresh().epochs)
            self.retention.sweep_histories()

    def prove_appending(self) -> None:
        """Raise CheckpointWriteError if the storage cannot append to files, as histories need it."""
        with writing(self.directory, "histories could not be begun"):
            self.held().prove_appending()

    def encoding(self) -> Encoding:
        """How the blobs of the run's nodes are encoded, as far as the manager says."""
        nodes = self.held().nodes
        return Encoding(
            nodes,
            tuple(REGISTERED_CODECS.values()),
            self.directory.allow_pickle,
            default=self.default_options,
            busy=frozenset(nodes),
        )

    # ---- a group

    def order(
        self, group: Mapping[Position, Mapping[str, Any]], encoding: Encoding | None = None
    ) -> SaveOrder:
        """Decide what is written of positions, in ascending order, and claim names for their stores.

        `group` has the details of each record, which may contain NaN and infinities.

        The order may be of the first ones only: those whose names an earlier commit has claimed. Let
        the `SaveQueue` of every worker write them, then call `commit` with what they answer, or else
        `abandon`.

        Raises CommitConflictError if another run has taken the directory over, and
        CheckpointWriteError if the claim could not be recorded.
        """
        lock, encoding = self.held(), encoding or self.encoding()
        first, shared = min(group), _shared(encoding)
        if self._stay.group is not None:
            self.abandon(self._stay.group.order)
        if self._stay.has_failed:
            try:
                self.retention.retire()  # the disk may be full
            except CheckpointError as error:
                logger.warning("%s: nothing was retired: %s", self.directory.path, error)
        # The disk needs room for the epochs that are kept and one group, even if deletion is slow.
        self.retention.sweeper.drain()
        with writing(self.directory, f"the save of epoch {first} could not be begun"):
            claim = self._claim(first)
        if encoding.histories and not self._stay.placement.histories:
            self._stay.placement.histories = self.make_histories(encoding.histories)
        histories = self._stay.placement.histories
        # A group that is larger than expected is cut: another claim would give its epochs other names.
        most = 1 + _MOST_STORES // (1 + len(lock.nodes))
        records: dict[Position, Record] = {}
        for at, described in list(group.items())[:most]:
            if at <= claim.upto:
                details = as_json({**described, **shared}, "details")
                records[at] = Record(at, None, histories, details=details)
        stores = {}
        for at in records.keys() - self.retention.choose(list(records.values())):
            stores[at] = {node: claim.store_name(node, at) for node in lock.nodes}
        directory = self.directory
        order = SaveOrder(
            directory.path,
            directory.files,
            lock.run,
            claim.number,
            records,
            dict(sorted(stores.items())),
        )
        self._stay.group = _Group(order, encoding, max(group))
        return order

    def _claim(self, first: Position) -> Claim:
        """The claim by which a position may be written: the last one, or else a new one."""
        claim = self.directory.log.check_held().claim
        if claim is None or self._stay.has_failed or not claim.may_write(first):
            # Slow workers may still write what was abandoned, under names of the claim before. The
            # new one has a retry number of its own, and what lies there is deleted once they are gone.
            claim = self.directory.log.claim(first, self._stay.names)
            self._stay.has_failed = False
        return claim

    def make_histories(self, blobs: Collection[str]) -> str:
        """Make a directory for histories of these blobs, and return its name."""
        directory, number, count = self.directory, self.held().number, 0
        with writing(directory, "the directory of histories could not be made"):
            # Another log, which is lost, may have had an entry of this number.
            present = directory.files.list_names(join_path(directory.path, HISTORIES))
            while f"{number}.{count}" in present:
                count += 1
            name = f"{number}.{count}"
            make_groups(directory.files, directory.path, name, blobs)
        return name

    def commit(self, order: SaveOrder, written: Written) -> Committed:
        """Record the longest prefix of an order that is whole; and retire others by policy.

        One ``commit`` entry of the log does it, or a few if stores contain different blobs. What is
        left is abandoned. Raises CommitConflictError, and records nothing, if another run has taken
        the directory over; what is wrong with the first position if nothing can be recorded; and
        CheckpointWriteError if it is unknown what was recorded.
        """
        with writing(self.directory, f"epoch {order.at} could not be recorded"):
            self.directory.log.check_held()
            group = self._stay.group
            if group is None or group.order is not order:
                raise CheckpointWriteError(
                    f"The save of epoch {order.at} in {self.directory.path} was abandoned. Begin "
                    f"it again."
                )
            prefix, problem = self._check_prefix(group, written)
            if problem is not None and not prefix:
                raise problem
            last = max(prefix)
            self._look_for(order.stores[last])
            # Each entry has one say on what stores contain. What was passed over goes with what
            # comes after it, and counts only if that is recorded.
            records: list[Record] = []
            passed_over: list[Record] = []
            contents = next(iter(prefix.values())).contents
            for at, record in order.records.items():
                if at > last:
                    break
                if at not in prefix:
                    passed_over.append(record)
                    continue
                whole = prefix[at]
                if whole.contents is not contents:
                    self._append(group, records, contents)
                    records, contents = [], whole.contents
                stores = {}
                for node, receipt in whole.receipts.items():
                    seconds = round(receipt.seconds, 6)
                    stores[node] = Store(receipt.store, receipt.sha256, receipt.nbytes, seconds)
                records += [*passed_over, msgspec.structs.replace(record, stores=stores)]
                passed_over = []
            self._append(group, records, contents)
        if problem is not None:
            self.abandon(order)
        self._stay.group = None
        return Committed({at: whole.receipts for at, whole in prefix.items()}, problem)

    def _check_prefix(
        self, group: _Group, written: Written
    ) -> tuple[dict[Position, _Whole], Exception | None]:
        """What may be recorded, and what is wrong with the next position."""
        order = group.order
        prefix: dict[Position, _Whole] = {}
        contents: Contents = {}
        answers = iter(written.receipts)
        for at, stores in order.stores.items():
            receipts = next(answers, {})
            try:
                missing = [node for node in stores if node not in receipts]
                if missing:
                    raise CheckpointWriteError(
                        written.failure
                        or f"Epoch {at} of {order.path} cannot be recorded: expected a receipt from "
                        f"each of {len(stores)} nodes, found none from {listed(missing, 8)}. Check "
                        f"that they are placed on workers, and save again."
                    )
                _check_replicas(group.encoding, at, receipts)
                _check_parts(group.encoding, at, receipts, order.path)
            except (CheckpointWriteError, DefinitionError) as error:
                return prefix, error
            changed: Contents = {}
            for node, receipt in receipts.items():
                if receipt.contents is not None:
                    changed[node] = receipt.contents
            if changed:
                contents = {**contents, **changed}
            prefix[at] = _Whole(receipts, contents)
        return prefix, None

    def _append(self, group: _Group, records: Sequence[Record], contents: Contents) -> None:
        """Record positions, of which the last has stores."""
        state, last, stay = self.directory.log.known(), records[-1].at, self._stay
        number = stay.contents_number
        news: Contents = {}
        if number is None or contents != stay.contents:
            number, news = None, contents
            where = f"Epoch {last} of {self.directory.path} is not recorded. It"
            for store in contents.values():
                find_classes(chain(*store.classes.values()), where)
        for record in records:
            if record.stores is not None:
                record.contents = number
        # What comes next is as far away as the last two saves were, or of groups twice as far. A
        # wrong guess costs a `claim`, or cuts a group; after a crash, the names are not used again.
        distance = max(1, last.epoch - (state.latest or last).epoch)
        if len(group.order.records) > 1 or group.wanted > last:
            distance = 2 * max(distance, group.wanted.epoch - last.epoch)
        expected = Position(last.epoch + distance)
        upto = None
        if state.claim is None or expected > state.claim.upto:
            upto = expected
        entry = self.retention.append_and_sweep(
            CommitEntry,
            claim=group.order.claim,
            records=list(records),
            run_number=self.held().number,
            contents=news,
            retires=self.retention.choose([item for item in records if item.stores is not None]),
            upto=upto,
        )
        if number is None:
            stay.contents, stay.contents_number = contents, entry.number

    def abandon(self, order: SaveOrder) -> None:
        """Delete what an order has written and the log does not record; its names stay claimed."""
        stay = self._stay
        stay.has_failed = True
        if stay.group is not None and stay.group.order is order:
            stay.group = None
        names = [name for stores in order.stores.values() for name in stores.values()]
        # A slow worker may still write: the end of this run deletes them once more, and so does the
        # next run.
        stay.abandoned += names
        self._delete(names)

    def _delete(self, names: Sequence[str]) -> None:
        try:
            self.directory.log.check_held()
        except CommitConflictError:
            pass  # which ends this run; the other one deletes them
        except CheckpointError as error:
            logger.warning(
                "%s: %s of a failed save are not deleted: %s",
                self.directory.path,
                listed(names, 3),
                error,
            )
        else:
            # A commit that seemed to fail may have been recorded: then they stay.
            self.retention.sweep(names)

    def _look_for(self, stores: Mapping[str, str]) -> None:
        """Raise CheckpointError unless the client sees what the workers have written.

        Once after each placement: a worker may read the client's directory, and write to another
        one that lies over it.
        """
        if self._stay.placement.must_look:
            whole = self.directory.find_whole(stores.values())
            for node, store in stores.items():
                if store not in whole:
                    raise CheckpointError(
                        f"{self.directory.path} is not shared: expected to find {store}, which the "
                        f"worker of node {node!r} has written, but found nothing. Use a directory "
                        f"that the client and all workers share."
                    )
            self._stay.placement.must_look = False


def _shared(encoding: Encoding) -> dict[str, Any]:
    """What the details say of blobs that several nodes have."""
    partitions = {}
    for name, (axis, nodes) in encoding.partitions.items():
        partitions[name] = {"axis": axis, "nodes": nodes}
    shared = {REPLICATED: encoding.replicated, PARTITIONS: partitions}
    return {name: blobs for name, blobs in shared.items() if blobs}


@contextlib.contextmanager
def writing(directory: Directory, problem: str) -> Iterator[None]:
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
            f"{directory.path} cannot be a checkpoint directory: it is a file, or in a file. Name another "
            f"directory."
        ) from error
    except OSError as error:
        raise CheckpointWriteError(
            f"{directory.path}: {problem}: {type(error).__name__}: {error}. "
            f"{directory.log.describe_recorded()}{write_remedy(error, directory.path)}"
        ) from error


_REPLIES = msgspec.json.Decoder(Written)


def read_receipts(
    replies: Mapping[str, Any], order: SaveOrder, placement: Mapping[str, str]
) -> Written:
    """What workers have written together, from their replies, by address.

    Each worker gives receipts of its own nodes, as `placement` says, for the stores of the order.
    """
    whole = Written([{} for _ in order.stores])
    names = list(order.stores.values())
    for address, data in replies.items():
        try:
            reply = _REPLIES.decode(data)
            for i, receipts in enumerate(reply.receipts):
                for node, receipt in receipts.items():
                    if placement.get(node) != address or names[i].get(node) != receipt.store:
                        raise ValueError(f"{receipt.store!r:.80} of {node!r:.80} was not asked for")
                whole.receipts[i].update(receipts)
            whole.failure = whole.failure or reply.failure
        except (TypeError, ValueError, IndexError) as error:
            raise CheckpointWriteError(
                f"Epoch {order.at} cannot be recorded: worker {address} returned receipts that "
                f"do not fit: {error}. Check that the same version of jobrunner runs there, and "
                f"who can reach the cluster."
            ) from error
    return whole


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
            parts = [f"{part} on {listed(map(repr, having), 3)}" for part, having in nodes.items()]
            raise DefinitionError(
                f"Epoch {at} of {path} is not recorded: the parts of blob {name!r} do "
                f"not fit together along axis {axis}: expected {parts[0]}, found "
                f"{listed(parts[1:])}. Make them of one dtype and one shape, but for their length "
                f"along that axis, or declare the blob without partition={axis}."
            )
