"""The epochs that a directory records, and their pins, as the log has them."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import compress
from typing import Any, Literal

from jobrunner.checkpoint.history import read_history
from jobrunner.checkpoint.keep_policies import KeepBest, SavedEpoch, name_reported
from jobrunner.checkpoint.log import (
    EpochRecord,
    FileMetadataHandler,
    LogWriter,
    MetadataHandler,
    PinEntry,
    Snapshot,
    State,
    UnpinEntry,
    check_plan,
    is_known_dead,
    read_info,
    read_record,
)
from jobrunner.checkpoint.storage import Files, absolute_path, files_of
from jobrunner.errors import CheckpointCorruptError, CheckpointNotFoundError, DefinitionError
from jobrunner.names import ROOT_DOCUMENT, StoreName, format_store_name, parse_store_name
from jobrunner.positions import BEST, EpochLike, Position, parse_position
from jobrunner.texts import get_logger, printable

logger = get_logger(__name__)

_EPOCH_AND_LABEL = re.compile(r"\.(\d+(?:\.s\d+)?)(?:\.r(\d+))?$")


class Directory:
    """The recorded epochs of a directory; every method reads the log anew."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata_handler: MetadataHandler | None = None,
        files: Files | None = None,
    ) -> None:
        self.path = absolute_path(path)
        self.files = files_of(self.path, files)
        if metadata_handler is None:
            metadata_handler = FileMetadataHandler(self.files)
        elif not isinstance(metadata_handler, MetadataHandler):
            raise DefinitionError(
                f"metadata_handler must be a MetadataHandler; got "
                f"{type(metadata_handler).__name__}, which lacks some of its methods: set_params, "
                f"append, last_number, entries."
            )
        self.handler = metadata_handler
        self.handler.set_params(self.path, ())
        self.log = LogWriter(self.handler, self.path)
        self.only_node: str | None = None  # the node of a `CheckpointManager`
        self.loaded: Position | None = None  # by the current run, last; retention keeps it
        self._is_running = False
        self._names: Sequence[str] = ()  # in the directory when the current run took it
        self._unclaimed: list[Position] | None = None

    def mark_run(self, names: Sequence[str]) -> None:
        """Note that a run of this manager has taken the directory, which has these names."""
        self._is_running = True
        self._names = names
        self.loaded = self._unclaimed = None

    def mark_end(self) -> None:
        """Note that the run has released the directory."""
        self._is_running = False
        self._names = ()
        self.loaded = self._unclaimed = None

    def snapshot(self) -> Snapshot:
        """What the log says now, to be read once and passed down; frozen."""
        return self.log.snapshot()

    def all(self) -> list[Position]:
        """What is recorded, in ascending order."""
        return self.log.refresh().epochs

    def latest(self) -> Position | None:
        """The newest recorded epoch, if any."""
        return self.log.refresh().latest

    def resolve(self, epoch: EpochLike) -> Position:
        """Look up what a caller names: an epoch, a position, "latest" or "best:METRIC".

        Raises CheckpointNotFoundError if "latest" or "best" names nothing recorded; the epochs that
        are named otherwise need not be recorded.
        """
        if epoch == "latest":
            latest = self.latest()
            if latest is None:
                raise CheckpointNotFoundError(f"No epoch is recorded in {self.path}.")
            return latest
        best = BEST.fullmatch(epoch) if isinstance(epoch, str) else None
        if best is None:
            return Position.of(epoch)
        return self._find_best(best["metric"], "max" if best["mode"] == "max" else "min")

    def _find_best(self, metric: str, mode: Literal["min", "max"]) -> Position:
        saved = []
        for at, record in self.records():
            if isinstance(record, EpochRecord):
                saved.append(SavedEpoch(at, metrics=record.details.metrics))
        best = KeepBest(metric, mode=mode).choose(saved)
        if best is None:
            raise CheckpointNotFoundError(
                f"No recorded epoch of {self.path} has reported {metric!r}. Reported: "
                f"{name_reported(saved)}. Check the name of the metric."
            )
        return best

    def is_done(self) -> bool:
        """Whether the job ended, exit group included, after the newest recorded epoch."""
        return self.log.refresh().is_done

    def numbers(self, epochs: Iterable[Position] | None = None) -> dict[Position, int]:
        """Each of these epochs, by default all in ascending order, with its entry's number in the log."""
        state = self.log.refresh()
        numbers = {}
        for epoch in state.epochs if epochs is None else epochs:
            self.check_recorded(epoch, state)
            numbers[epoch] = state.recorded[epoch]
        return numbers

    def record(self, epoch: Position) -> EpochRecord:
        """See `MultiNodeCheckpointManager.record`."""
        state = self.log.refresh()
        self.check_recorded(epoch, state)
        return self.read_record(epoch, state.recorded[epoch])

    def records(
        self, epochs: Iterable[Position] | None = None
    ) -> Iterator[tuple[Position, EpochRecord | CheckpointCorruptError]]:
        """Each of these epochs, by default all, with its record, or why it cannot be read."""
        numbers = self.numbers(epochs)

        def read(epoch: Position) -> EpochRecord | CheckpointCorruptError:
            try:
                return self.read_record(epoch, numbers[epoch])
            except CheckpointCorruptError as error:
                return error

        return zip(numbers, self.files.each(read, numbers), strict=True)

    def read_record(self, epoch: Position, number: int) -> EpochRecord:
        """Read the record of an epoch from entry `number` of the log."""
        found = read_record(self.path, self.log.read_entry, epoch, number)
        if self.only_node is None:
            return found
        stores = {node: found.stores[node] for node in found.stores if node == self.only_node}
        contents = found.contents
        if contents is not None:
            contents = {node: contents[node] for node in stores}
        return replace(found, stores=stores, contents=contents)

    def history(self, *, set_aside: bool = False) -> list[dict[str, Any]]:
        """See `MultiNodeCheckpointManager.history`."""
        return read_history(self.log.read_entries(), set_aside=set_aside)

    def run_info(self, epoch: Position) -> Mapping[str, Any]:
        """The info that the run that recorded `epoch` logged when it began; see `info_of`."""
        return self.info_of(self.record(epoch).run_number)

    def run_plan(self, epoch: Position) -> Mapping[str, Any] | None:
        """The plan of the run that recorded `epoch`, as it described it; None if it is unknown."""
        return self.plan_of(self.record(epoch).run_number)

    def plan_of(self, run_number: int | None) -> Mapping[str, Any] | None:
        """The plan of a run, as it described it when it began; None if it is unknown."""
        plan = self.info_of(run_number).get("plan")
        try:
            return check_plan(plan) if plan else None
        except ValueError as error:
            logger.warning("%s: the plan of run %s: %s", self.path, run_number, error)
            return None

    def info_of(self, run_number: int | None) -> Mapping[str, Any]:
        """The info that a run logged in its ``run`` entry; empty if the entry is lost."""
        return read_info(self.path, self.log.read_entry, run_number)

    def held_by(self) -> str | None:
        """The other run that holds the directory and may be alive, described for people."""
        state = self.log.refresh()
        holder = state.holder
        if self._is_running or holder is None or state.is_ended:
            return None
        return None if is_known_dead(holder.process, holder.run) else str(holder)

    def unclaimed(self) -> list[Position]:
        """The epochs of stores that exist and that no entry of the log claims, in ascending order.

        Runs claim every store before they write it. So the log, or its newest entries, must be
        lost. During a run, the names are those that it began with. Reads names, no stores.
        """
        if self._unclaimed is None or not self._is_running:
            # List before the log is read: a name is claimed before it is used.
            names = self._names if self._is_running else self.files.list_names(self.path)
            state = self.log.refresh()
            suspects = []
            for name in names:
                # Far fewer names are parsed in full than there are stores.
                match = _EPOCH_AND_LABEL.search(name)
                epoch = None if match is None else parse_position(match[1])
                if match is None or epoch is None:
                    continue
                if not state.has_claimed(epoch, int(match[2] or 0)):
                    suspects.append(name)
            self._unclaimed = sorted({store.epoch for _, store in self.stores_among(suspects)})
        return self._unclaimed

    def stores_among(self, names: Iterable[str]) -> list[tuple[str, StoreName]]:
        """Those of `names` that name a whole store, perhaps hidden, each with the parsed name."""
        stores = [(name, store) for name in names if (store := parse_store_name(name)) is not None]
        return list(compress(stores, self.files.each(self._is_whole, stores)))

    def _is_whole(self, store: tuple[str, StoreName]) -> bool:
        return self.files.is_taken(os.path.join(self.path, store[0], ROOT_DOCUMENT))

    def next_store(self, node: str, epoch: Position) -> str:
        """The path of the store of a node at an epoch: the recorded one, or else the next."""
        state = self.log.refresh()
        if epoch in state.recorded:
            record = self.read_record(epoch, state.recorded[epoch])
            if node in record.stores:
                return os.path.join(self.path, record.stores[node].name)
        attempt = state.attempt
        if attempt is not None and attempt.may_have_left(epoch, attempt.label_of(epoch)):
            return os.path.join(self.path, attempt.store_name(node, epoch))
        label = state.label + 1 if state.has_claimed(epoch, 0) else 0
        return os.path.join(self.path, format_store_name(node, epoch, label))

    def pins(self) -> dict[Position, list[str]]:
        """The pinned epochs in ascending order, each with its labels."""
        return {epoch: list(labels) for epoch, labels in sorted(self.log.refresh().pins.items())}

    def pin(self, epoch: Position, label: str) -> None:
        """See `MultiNodeCheckpointManager.pin`."""

        def decide(state: State) -> Mapping[str, Any] | None:
            self.check_recorded(epoch, state)
            is_pinned = label in state.pins.get(epoch, ())
            return None if is_pinned else {"epoch": epoch, "label": label}

        self.log.note(PinEntry, decide)

    def unpin(self, epoch: Position, label: str | None = None) -> bool:
        """See `MultiNodeCheckpointManager.unpin`."""

        def decide(state: State) -> Mapping[str, Any] | None:
            self.check_recorded(epoch, state)
            labels = state.pins.get(epoch, ())
            is_pinned = bool(labels) if label is None else label in labels
            return {"epoch": epoch, "label": label} if is_pinned else None

        return self.log.note(UnpinEntry, decide) is not None

    def watch(
        self, after: Position | None, poll_seconds: float, timeout_seconds: float | None
    ) -> Iterator[Position]:
        """See `MultiNodeCheckpointManager.watch`."""
        # A group has one entry; within it, epochs follow each other.
        seen = (-1, Position(0))
        if after is not None:
            state = self.log.refresh()
            self.check_recorded(after, state)
            seen = (state.recorded[after], after)
        last_news = time.monotonic()
        while True:
            state = self.log.refresh()
            epochs = state.epochs
            first = len(epochs)
            while first and (state.recorded[epochs[first - 1]], epochs[first - 1]) > seen:
                first -= 1
            news = epochs[first:]
            if news:
                seen = (state.recorded[news[-1]], news[-1])
                yield from news
                last_news = time.monotonic()
                continue  # the reader may have been slow: look again at once
            if state.holder is not None and state.is_ended:
                return
            left = poll_seconds
            if timeout_seconds is not None:
                left = min(left, last_news + timeout_seconds - time.monotonic())
                if left <= 0:
                    return
            time.sleep(left)

    @contextmanager
    def reading(self, epoch: Position) -> Iterator[None]:
        """Raise CheckpointNotFoundError for damage if the epoch was retired while it was read."""
        try:
            yield
        except CheckpointCorruptError as error:
            if epoch in self.log.refresh().recorded:
                raise
            raise CheckpointNotFoundError(
                f"Epoch {epoch} of {self.path} was retired while it was read. Read a later one."
            ) from error

    def verify_log(self) -> list[int]:
        """Check every entry of the log; returns the numbers of those that a repair has replaced.

        Raises CheckpointCorruptError if an entry is missing, damaged or contradicts those before it.
        """
        return self.log.verify()

    def check_recorded(self, epoch: Position, state: State) -> None:
        """Raise CheckpointNotFoundError, with what to do, unless the epoch is recorded."""
        if epoch in state.recorded:
            return
        remedy = "Choose one of these, or 'latest'."
        if epoch in self.unclaimed():
            remedy = (
                f"The directory contains stores of it, so the log must have lost its entry: "
                f"`jobrunner fsck {self.path}` shows them, and --repair records them again."
            )
        raise CheckpointNotFoundError(
            f"Epoch {epoch} of {self.path} is not recorded; recorded epochs: "
            f"{name_some(state.epochs)}. {remedy}"
        )


def name_some(items: Iterable[Any]) -> str:
    """The items, for a message; of many, the first and the last few."""
    names = [*map(str, items)]
    if len(names) > 12:
        names[6:-6] = ["…"]
    return printable(", ".join(names), kept="") or "none"
