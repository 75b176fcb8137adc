"""Retires epochs by policy, and deletes their stores and what attempts have left."""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jobrunner.checkpoint.directory import Directory
from jobrunner.checkpoint.keep_policies import (
    KeepAll,
    RetentionPolicy,
    SavedEpoch,
    find_unreported,
    name_reported,
    reads_records,
)
from jobrunner.checkpoint.log import (
    Attempt,
    GivenUp,
    HolderEntry,
    LogEntry,
    Record,
    RetireEntry,
    RunEntry,
    State,
    read_details,
    record_in,
)
from jobrunner.checkpoint.storage import REMOVALS, Files, join_path, run_all
from jobrunner.errors import CheckpointError
from jobrunner.names import ROOT_DOCUMENT, parse_store_name
from jobrunner.positions import Position
from jobrunner.texts import get_logger, listed

logger = get_logger(__name__)

_DRAIN_SECONDS = 30.0


class Retention:
    """Gives up epochs: first an entry of the log, then `sweeper` deletes their stores.

    Runs on the client. Only the run that holds the directory may give up epochs.
    """

    def __init__(self, directory: Directory, policy: RetentionPolicy | None = None) -> None:
        self.policy = KeepAll() if policy is None else policy
        self.sweeper = Sweeper(directory.files, directory.path)
        self._directory = directory
        # By epoch and the number of its commit entry.
        self._rows: dict[tuple[Position, int], SavedEpoch] = {}
        self._has_warned = False  # in this run

    def start_run(self, names: Sequence[str]) -> None:
        """Delete the stores that earlier runs should have; `names` are those in the directory."""
        self._has_warned = False
        self.sweeper.forget()
        # `check_held` raises if another run has just taken over: the leftovers are then its own.
        state = self._directory.log.check_held()
        leftovers = state.chores
        # A repair does not know what a lost entry said of these.
        if not leftovers or self._directory.log.repairs:
            return
        # Look for what exists: the log may name more stores than there are files in the world.
        there: dict[Position, list[str]] = defaultdict(list)
        for name in names:
            store = parse_store_name(name)
            if store is not None:
                there[store.epoch].append(name)
        for item in leftovers:
            stores: list[str] | None = []
            if isinstance(item, Attempt):
                stores = self._find_left(item, there)
            elif item.at in there:
                stores = self._find_stores(item.at, item.commit)
            if stores is not None:
                self.sweeper.add(item, stores)

    def _find_left(self, attempt: Attempt, there: Mapping[Position, list[str]]) -> list[str] | None:
        """The stores that an attempt has left; None if nothing tells whose they are."""
        try:
            entry = self._directory.log.read_entry(attempt.run)
        except CheckpointError as error:
            logger.warning(
                "%s: what attempt %d has left stays, because the entry of its run is lost: %s",
                self._directory.path,
                attempt.number,
                error,
            )
            return None
        nodes = entry.nodes if isinstance(entry, RunEntry) else []
        left = []
        for name in itertools.chain.from_iterable(there.values()):
            store = parse_store_name(name)
            assert store is not None
            if store.node in nodes and attempt.may_have_left(store.epoch, store.retry):
                left.append(name)
        return left

    def _find_stores(self, at: Position, commit: int) -> list[str] | None:
        """The stores that entry `commit` names for an epoch; None if it does not."""
        try:
            stores = record_in(self._directory.log.read_entry(commit), at).stores or {}
            return [store.name for store in stores.values()]
        except (CheckpointError, ValueError) as error:
            logger.warning(
                "%s: stores of epoch %s stay, because entry %d of the log does not name them: %s",
                self._directory.path,
                at,
                commit,
                error,
            )
            return None

    def append(self, kind: type[HolderEntry], **fields: Any) -> LogEntry:
        """Append an entry of the run; then delete, in the background, what was retired."""
        swept = self._directory.log.known().swept(self.sweeper.deleted)
        entry = self._directory.log.append(kind, swept=swept, **fields)
        self.sweep_new()
        return entry

    def sweep_new(self) -> None:
        """Delete the stores of epochs that were retired since the last call."""
        log = self._directory.log
        for item in () if log.repairs else log.known().given_up:
            if item not in self.sweeper.scheduled:
                stores = self._find_stores(item.at, item.commit)
                if stores is not None:
                    self.sweeper.add(item, stores)

    def pass_over(self, state: State, records: Sequence[Record]) -> list[Position]:
        """Which of these positions need not be written: the policy would retire them at once.

        It decides as if all of them were recorded; the newest is always written.
        """
        if len(records) == 1:
            return []
        group = {record.at for record in records}
        return [at for at in self._choose_after(state, records) if at in group]

    def choose(self, state: State, records: Sequence[Record]) -> list[Position]:
        """The epochs that the policy retires once `records` exist; the commit of these does it."""
        committed = {record.at for record in records if record.stores is not None}
        written = [record for record in records if record.at in committed]
        retired = self._choose_after(state, written)
        return [at for at in retired if at in state.recorded or at in committed]

    def note(self, number: int, records: Sequence[Record]) -> None:
        """Remember what the policy sees of epochs that entry `number` has just recorded."""
        if reads_records(self.policy):
            for record in records:
                self._rows[record.at, number] = _row(record)

    def _choose_after(self, state: State, records: Sequence[Record]) -> list[Position]:
        """What the policy retires after a commit of `records`.

        An error of the policy is logged, and nothing is retired: the epochs are written, and what
        users' code does must not keep them from being recorded.
        """
        if type(self.policy) is KeepAll:
            # No row for each of very many epochs: it retires positions within epochs alone.
            positions = [*state.epochs, *(record.at for record in records)]
            if self.policy.partial or not any(at.step for at in positions):
                return []
        newest = records[-1].at
        try:
            rows = {record.at: _row(record) for record in records}
            saved = [row for row in self.saved_epochs(state) if row.at not in rows]
            saved += rows.values()
            saved.sort(key=lambda row: row.at)
            retired = self._choose(saved, {newest, *state.pins})
        except Exception as error:
            logger.warning(
                "%s: no epoch was retired after epoch %s: %s: %s",
                self._directory.path,
                newest,
                type(error).__name__,
                error,
            )
            return []
        if retired:
            self._warn_of_unreported(saved)
        return retired

    def retirable(self) -> list[Position]:
        """The recorded epochs that the policy would retire now, in ascending order."""
        state = self._directory.log.refresh()
        return self._choose(self.saved_epochs(state), {state.latest, *state.pins})

    def retire(self) -> list[Position]:
        """Retire the epochs that the policy does not keep, and return them in ascending order.

        Their stores are deleted in the background.
        """
        state = self._directory.log.check_held()
        saved = self.saved_epochs(state)
        retired = self._choose(saved, {state.latest, *state.pins})
        if retired:
            self._warn_of_unreported(saved)
            self.append(RetireEntry, epochs=retired)
        return retired

    def saved_epochs(self, state: State) -> list[SavedEpoch]:
        """What a policy sees of the recorded epochs, in ascending order."""
        recorded = state.recorded
        if reads_records(self.policy):
            unread = [at for at, number in recorded.items() if (at, number) not in self._rows]
            # Many at once: requests to an object store take longer than all else.
            rows = self._directory.files.each(partial(self._read_row, state), unread)
            for at, row in zip(unread, rows, strict=True):
                self._rows[at, recorded[at]] = row
        saved = []
        for at in state.epochs:
            row = self._rows.get((at, recorded[at]), SavedEpoch(at))
            if at in state.pins:
                row = replace(row, is_pinned=True)
            saved.append(row)
        return saved

    def _choose(
        self, saved: Sequence[SavedEpoch], kept: Collection[Position | None]
    ) -> list[Position]:
        """What the policy retires of these epochs, but for some and the one that was loaded."""
        retired = {Position.of(at) for at in self.policy.retires(saved)}
        retired -= {self._directory.loaded, *kept}
        return [row.at for row in saved if row.at in retired]

    def _read_row(self, state: State, at: Position) -> SavedEpoch:
        try:
            record = self._directory.read_record(at, state.recorded[at])
        except CheckpointError as error:
            path = self._directory.path
            logger.warning("%s: the record of epoch %s cannot be read: %s", path, at, error)
            return SavedEpoch(at)
        ended = record.details.ended or _seconds(record.time)
        return SavedEpoch(at, ended, record.details.metrics)

    def _warn_of_unreported(self, saved: Sequence[SavedEpoch]) -> None:
        """Warn, once a run, if `KeepBest` keeps no epoch because none reported its metric."""
        names = find_unreported(self.policy, saved)
        if self._has_warned or not names:
            return
        self._has_warned = True
        logger.warning(
            "%s: no recorded epoch has reported %s, so KeepBest keeps none, and epochs that no "
            "other policy keeps are deleted. Reported: %s. Check the name of the metric.",
            self._directory.path,
            " or ".join(map(repr, names)),
            name_reported(saved),
        )


def _row(record: Record) -> SavedEpoch:
    details = read_details(record.details)
    return SavedEpoch(record.at, details.ended or time.time(), details.metrics)


Leftover = GivenUp | Attempt


class Sweeper:
    """Deletes stores in a thread, one leftover after another, after the log gave them up.

    A leftover is `deleted` once its stores are durably gone. Failures are logged, and the next run
    tries again. The thread ends when it has nothing to do.
    """

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path
        self._waiting: deque[tuple[Leftover | None, Sequence[str]]] = deque()
        self._removed: list[Leftover] = []  # not yet durably
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.scheduled: set[Leftover] = set()
        self.deleted: set[Leftover] = set()

    def forget(self) -> None:
        """Forget what earlier runs have deleted."""
        with self._changed:
            self.scheduled, self.deleted, self._removed = set(), set(), []

    def add(self, item: Leftover | None, stores: Sequence[str]) -> None:
        """Delete stores, which is all that is left of `item`; None: slow workers may still write."""
        with self._changed:
            if item is not None:
                self.scheduled.add(item)
                if not stores:
                    self._removed.append(item)
                    return
            self._waiting.append((item, stores))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="jobrunner-sweeper", daemon=True
                )
                self._thread.start()

    def confirm(self) -> None:
        """Make the last deletions durable; the sweep of each leftover does so for those before."""
        with self._changed:
            removed = list(self._removed)
        if removed:
            try:
                self._files.sync_path(self._path)
            except OSError as error:
                logger.warning(
                    "%s: stores that were deleted may come back after a power loss: %s",
                    self._path,
                    error,
                )
                return
            self._note_durable(removed)

    def drain(self, timeout_seconds: float | None = None) -> bool:
        """Wait until nothing is left to do, half a minute by default; False if it takes longer."""
        seconds = _DRAIN_SECONDS if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._thread is not None:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    return self._thread is None
        return True

    def _work(self) -> None:
        try:
            while self._sweep_next():
                pass
        except BaseException:
            with self._changed:
                self._thread = None
                self._changed.notify_all()
            raise

    def _sweep_next(self) -> bool:
        with self._changed:
            if not self._waiting:
                # Under the lock, so that `add` knows whether the thread runs.
                self._thread = None
                self._changed.notify_all()
                return False
            item, stores = self._waiting.popleft()
            removed = list(self._removed)
        try:
            self._remove_roots(stores, bool(removed))
            self._note_durable(removed)
            roots = [join_path(self._path, store) for store in stores]
            removals = [partial(self._files.remove_tree, root) for root in roots]
            run_all(removals, max(REMOVALS, self._files.lookups), 0)
        except OSError as error:
            logger.warning(
                "%s: %s could not be deleted; the next run tries again: %s",
                self._path,
                listed(stores, 3),
                error,
            )
        else:
            if item is not None:
                with self._changed:
                    self._removed.append(item)
        return True

    def _note_durable(self, removed: Sequence[Leftover]) -> None:
        with self._changed:
            self._removed = [item for item in self._removed if item not in removed]
            self.deleted.update(removed)

    def _remove_roots(self, stores: Sequence[str], has_removed: bool) -> None:
        """Remove root documents durably, so that no store opens with chunks missing.

        Also makes earlier deletions durable.
        """
        changed = [self._path] if has_removed else []

        def remove(root: str) -> None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._files.remove_file(join_path(root, ROOT_DOCUMENT))
            # A process may have removed it and died before that was durable.
            if self._files.is_taken(root):
                changed.append(root)

        with self._files.durable(self._path, (), changed):
            list(self._files.each(remove, [join_path(self._path, store) for store in stores]))


def _seconds(time: str) -> float:
    """The time of an entry in Unix seconds; NaN if it is none."""
    try:
        return dt.datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError):
        return math.nan
