"""A checkpoint directory: which epochs its log records, their pins, and where their stores lie."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import compress
from typing import Any

from jobrunner.checkpoint.keep_policies import SavedEpoch, name_reported, rank
from jobrunner.checkpoint.log import (
    CommitEntry,
    Details,
    FileMetadataHandler,
    LogWriter,
    LostEntry,
    MetadataHandler,
    NodeContents,
    PinEntry,
    RunEntry,
    State,
    Store,
    UnpinEntry,
    check_info,
    is_known_dead,
    loose_json,
    read_details,
    record_in,
)
from jobrunner.checkpoint.storage import Files, absolute_path, files_of, join_path
from jobrunner.errors import CheckpointCorruptError, CheckpointNotFoundError
from jobrunner.names import ROOT_DOCUMENT, format_store_name, parse_store_name
from jobrunner.positions import BEST, EpochLike, Position, PublicPosition, format_ranges, name_step
from jobrunner.texts import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """A recorded epoch, or a position within one.

    Attributes
    ----------
    at : Position
        What it contains.
    number : int
        Of the log entry that recorded it.
    time : str
        When it was recorded, in ISO 8601, UTC.
    run : str
        The name of the run that recorded it.
    run_number : int or None
        Of the log entry with which that run began; None if it is unknown.
    stores : mapping of str to Store
        Node -> ``name``, ``sha256`` (of its document), ``nbytes`` and ``seconds``.
    details : Details
        What the run said of it: ``metrics``, ``metadata``, ``stopped_by`` and more.
    """

    at: Position
    number: int
    time: str
    run: str
    run_number: int | None
    stores: Mapping[str, Store]
    details: Details
    histories: str
    """The name of the directory in which its histories lie; empty if it has none."""
    contents_number: int
    """Of the log entry that says what the stores have in them."""
    contents: Mapping[str, NodeContents] | None = None
    """That, by node, once it was read."""

    @property
    def epoch(self) -> PublicPosition:
        """An int after a whole epoch, else a `Position`."""
        return self.at.public

    @property
    def nbytes(self) -> int:
        """The size of all stores."""
        return sum(store.nbytes for store in self.stores.values())

    @property
    def seconds(self) -> float:
        """How long the save took. Nodes save at the same time, so the slowest one counts."""
        return max((store.seconds for store in self.stores.values()), default=0.0)

    @property
    def name(self) -> str:
        """The epoch, and the step if it was saved within one, for a message."""
        at = self.at
        if not at.step:
            return f"epoch {at}"
        noun = "epoch" if at.epoch == 1 else "epochs"
        step = name_step(at.step, self.details.steps_per_epoch)
        return f"epoch {at} ({at.epoch} whole {noun} and {step})"


class Directory:
    """A directory as a manager sees it.

    What its log says is a `State`, to be taken once and passed down. Methods that get none take one
    themselves.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata_handler: MetadataHandler | None = None,
        files: Files | None = None,
        *,
        allow_pickle: bool = False,
    ) -> None:
        self.path = absolute_path(path)
        self.files = files_of(self.path, files)
        if metadata_handler is None:
            metadata_handler = FileMetadataHandler(self.files)
        self.handler = metadata_handler
        self.handler.set_params(self.path, ())
        self.log = LogWriter(self.handler, self.path)
        self.allow_pickle = allow_pickle
        self.only_node: str | None = None  # the node of a `CheckpointManager`
        self.loaded: Position | None = None  # by the current run, last; retention keeps it
        self.is_taken = False  # by a run of this manager

    def snapshot(self) -> State:
        """What the log says now; later entries do not change it."""
        return self.log.snapshot()

    # --- records

    def resolve(self, epoch: EpochLike, snapshot: State | None = None) -> Position:
        """Look up what a caller names: an epoch, a position, "latest" or "best:METRIC".

        Raises CheckpointNotFoundError if "latest" or "best" names nothing recorded; the epochs that
        are named otherwise need not be recorded.
        """
        if epoch == "latest":
            latest = (snapshot or self.snapshot()).latest
            if latest is None:
                raise CheckpointNotFoundError(f"No epoch is recorded in {self.path}.")
            return latest
        best = BEST.fullmatch(epoch) if isinstance(epoch, str) else None
        if best is None:
            return Position.of(epoch)
        saved = []
        for at, record in self.records(snapshot=snapshot):
            if isinstance(record, EpochRecord):
                saved.append(SavedEpoch(at, metrics=record.details.metrics))
        ranked = rank(best["metric"], best["mode"], saved)
        if not ranked:
            raise CheckpointNotFoundError(
                f"No recorded epoch of {self.path} has a number for {best['metric']!r}. Reported: "
                f"{name_reported(saved)}. Check the name of the metric."
            )
        return ranked[0].at

    def record(self, epoch: Position, snapshot: State | None = None) -> EpochRecord:
        """The record of an epoch; raises CheckpointNotFoundError if there is none."""
        snapshot = snapshot or self.snapshot()
        self.check_recorded(epoch, snapshot)
        return self.read_record(epoch, snapshot.recorded[epoch])

    def records(
        self, epochs: Iterable[Position] | None = None, snapshot: State | None = None
    ) -> Iterator[tuple[Position, EpochRecord | CheckpointCorruptError]]:
        """Each of these epochs, by default all, with its record, or why it cannot be read."""
        snapshot = snapshot or self.snapshot()
        positions = list(snapshot.recorded if epochs is None else epochs)
        for epoch in positions:
            self.check_recorded(epoch, snapshot)

        def read(epoch: Position) -> EpochRecord | CheckpointCorruptError:
            try:
                return self.read_record(epoch, snapshot.recorded[epoch])
            except CheckpointCorruptError as error:
                return error

        return zip(positions, self.files.each(read, positions), strict=True)

    def read_record(self, epoch: Position, number: int) -> EpochRecord:
        """Read the record of an epoch from entry `number` of the log; raises CheckpointCorruptError."""
        commit = self.log.read_entry(number)
        try:
            record = record_in(commit, epoch)
            assert isinstance(commit, CommitEntry)
            details = read_details(record.details)
        except (ValueError, RecursionError) as error:
            raise CheckpointCorruptError(
                f"{self.path}: entry {number} of the log is not a valid record of epoch {epoch}: "
                f"{error}. Restore the entry from a copy, or run `jobrunner fsck {self.path} "
                f"--repair` to rebuild the record."
            ) from error
        stores = dict(record.stores or {})
        if self.only_node is not None:
            stores = {node: stores[node] for node in stores if node == self.only_node}
        return EpochRecord(
            epoch,
            number,
            commit.time,
            commit.run,
            commit.run_number,
            stores,
            details,
            record.histories,
            number if record.contents is None else record.contents,
        )

    def check_recorded(self, epoch: Position, facts: State) -> None:
        """Raise CheckpointNotFoundError, with what to do, unless the epoch is recorded."""
        if epoch in facts.recorded:
            return
        remedy = "Choose one of these, or 'latest'."
        if epoch in self.unclaimed():
            remedy = (
                f"The directory contains stores of it, so the log must have lost its entry: "
                f"`jobrunner fsck {self.path}` shows them, and --repair records them again."
            )
        raise CheckpointNotFoundError(
            f"Epoch {epoch} of {self.path} is not recorded; recorded epochs: "
            f"{format_ranges(facts.epochs)}. {remedy}"
        )

    @contextmanager
    def reading(self, epoch: Position) -> Iterator[None]:
        """Raise CheckpointNotFoundError for damage if the epoch was retired while it was read."""
        try:
            yield
        except CheckpointCorruptError as error:
            if epoch in self.snapshot().recorded:
                raise
            raise CheckpointNotFoundError(
                f"Epoch {epoch} of {self.path} was retired while it was read. Read a later one."
            ) from error

    def info_of(self, run_number: int | None) -> Mapping[str, Any]:
        """What a run logged in its ``run`` entry, of that number; empty if the entry is lost."""
        entry = None
        with suppress(CheckpointCorruptError):
            entry = None if run_number is None else self.log.read_entry(run_number)
        info: Mapping[str, Any] = {}
        if isinstance(entry, RunEntry):
            with suppress(ValueError, RecursionError):
                info = check_info(loose_json(entry.info))
        return info

    def plan_of(self, run_number: int | None) -> Mapping[str, Any] | None:
        """The plan of a run, as it described it when it began; None if it is unknown."""
        plan: Mapping[str, Any] | None = self.info_of(run_number).get("plan")
        return plan or None

    def verify_log(self) -> list[int]:
        """Check every entry of the log; returns the numbers of those that a repair has replaced.

        Raises CheckpointCorruptError if an entry is missing, damaged or contradicts those before it.
        """
        entries = self.log.read_entries(is_strict=True)
        return [entry.number for entry in entries if isinstance(entry, LostEntry)]

    # --- who uses it

    def held_by(self, snapshot: State) -> str | None:
        """The other run that holds the directory and may be alive, described for people."""
        holder = snapshot.holder
        if self.is_taken or holder is None or snapshot.is_ended:
            return None
        return None if is_known_dead(holder.process, holder.run) else str(holder)

    def pin(self, epoch: Position, label: str) -> None:
        """See `MultiNodeCheckpointManager.pin`."""
        self._note(PinEntry, epoch, label, lambda labels: label not in labels)

    def unpin(self, epoch: Position, label: str | None = None) -> bool:
        """See `MultiNodeCheckpointManager.unpin`."""
        return self._note(
            UnpinEntry, epoch, label, lambda labels: bool(labels) and label in (None, *labels)
        )

    def _note(
        self,
        kind: type[PinEntry | UnpinEntry],
        epoch: Position,
        label: str | None,
        is_new: Callable[[Collection[str]], bool],
    ) -> bool:
        """Append an entry if it says something new of the labels of a recorded epoch."""

        def decide(state: State) -> Mapping[str, Any] | None:
            self.check_recorded(epoch, state)
            has_news = is_new(state.pins.get(epoch, ()))
            return {"epoch": epoch, "label": label} if has_news else None

        return self.log.note(kind, decide) is not None

    def watch(
        self, after: Position | None, poll_seconds: float, timeout_seconds: float | None
    ) -> Iterator[Position]:
        """See `MultiNodeCheckpointManager.watch`."""
        # A group has one entry; within it, epochs follow each other.
        newest = (-1, Position(0))
        if after is not None:
            snapshot = self.snapshot()
            self.check_recorded(after, snapshot)
            newest = (snapshot.recorded[after], after)
        last_news = time.monotonic()
        while True:
            snapshot = self.snapshot()
            recorded = sorted((number, at) for at, number in snapshot.recorded.items())
            if recorded and recorded[-1] > newest:
                for item in recorded:
                    if item > newest:
                        newest = item
                        yield item[1]
                last_news = time.monotonic()
                continue  # the reader may have been slow: look again at once
            seconds = poll_seconds
            if timeout_seconds is not None:
                seconds = min(seconds, last_news + timeout_seconds - time.monotonic())
            if seconds <= 0 or (snapshot.holder is not None and snapshot.is_ended):
                return
            time.sleep(seconds)

    # --- stores

    def next_store(self, node: str, epoch: Position) -> str:
        """The path of the store of a node at an epoch: the recorded one, or else the next."""
        snapshot = self.snapshot()
        if epoch in snapshot.recorded:
            record = self.record(epoch, snapshot)
            if node in record.stores:
                return join_path(self.path, record.stores[node].name)
        claim = snapshot.claim
        if claim is not None and claim.may_write(epoch):
            return join_path(self.path, claim.store_name(node, epoch))
        retry = 0
        if snapshot.has_claimed((epoch, 0)):
            retry = snapshot.last_retry + 1
        return join_path(self.path, format_store_name(node, epoch, retry))

    def unclaimed(self, snapshot: State | None = None) -> list[Position]:
        """The epochs of stores that exist and that no entry of the log claims, in ascending order.

        Runs claim every store before they write it. So the log, or its newest entries, must be
        lost. Reads names, no stores.
        """
        names = self.files.list_names(self.path)  # first: what a run uses now, it has claimed
        state = snapshot or self.snapshot()
        unclaimed = {}
        for name in names:
            store = parse_store_name(name)
            if store is not None and not state.has_claimed(store.key):
                unclaimed[name] = store.epoch
        if unclaimed and snapshot is not None:
            return self.unclaimed()  # a run may have claimed these names since then
        return sorted({unclaimed[name] for name in self.find_whole(unclaimed)})

    def find_whole(self, names: Collection[str]) -> list[str]:
        """Those of the named stores that have their root document, which is written last."""
        documents = [join_path(self.path, f"{name}/{ROOT_DOCUMENT}") for name in names]
        are_whole = self.files.each(self.files.is_taken, documents)
        return list(compress(names, are_whole))
