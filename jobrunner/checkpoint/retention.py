"""Retires epochs by policy, and deletes their stores and what attempts have left."""

from __future__ import annotations

import contextlib
import datetime as dt
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
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
    HolderEntry,
    LogEntry,
    Record,
    RetireEntry,
    State,
    StoreKey,
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
        """Delete what earlier runs have left; `names` are those in the directory."""
        self._has_warned = False
        # `check_held` raises if another run has just taken over: the leftovers are then its own.
        self.sweep(self._directory.log.check_held(), names)

    def sweep(self, state: State, names: Iterable[str]) -> list[str]:
        """Delete, in the background, those of these stores that count for nothing; returns them."""
        if self._directory.log.repairs:
            return []  # it does not know what a lost entry said of a store
        left: dict[StoreKey, list[str]] = defaultdict(list)
        for name in names:
            store = parse_store_name(name)
            if store is not None and state.is_left_over(store):
                left[store.key].append(name)
        for stores in left.values():  # one after another: some may not be deletable
            self.sweeper.add(stores)
        return list(chain.from_iterable(left.values()))

    def append(self, kind: type[HolderEntry], **fields: Any) -> LogEntry:
        """Append an entry of the run; then delete, in the background, what it has retired."""
        log = self._directory.log
        before = log.known().recorded
        epochs = fields.get("retires", fields.get("epochs", ()))
        commits = {at: before[at] for at in epochs if at in before}
        entry = log.append(kind, **fields)
        for at, commit in commits.items():
            # It may have been pinned since the policy chose it: then it is recorded, and stays.
            self.sweep(log.known(), self._find_stores(at, commit))
        return entry

    def _find_stores(self, at: Position, commit: int) -> list[str]:
        """The stores that entry `commit` names for an epoch."""
        try:
            stores = record_in(self._directory.log.read_entry(commit), at).stores or {}
            return [store.name for store in stores.values()]
        except (CheckpointError, ValueError) as error:
            logger.warning(
                "%s: the next run deletes the stores of epoch %s, because entry %d of the log does "
                "not name them: %s",
                self._directory.path,
                at,
                commit,
                error,
            )
            return []

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
        return self._choose_after(
            state, [record for record in records if record.stores is not None]
        )

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


class Sweeper:
    """Deletes stores in a thread, after the log gave them up.

    Failures are logged, and the next run tries again. The thread ends when it has nothing to do.
    """

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path
        self._waiting: deque[Sequence[str]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, stores: Sequence[str]) -> None:
        """Delete stores."""
        with self._changed:
            self._waiting.append(stores)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="jobrunner-sweeper", daemon=True
                )
                self._thread.start()

    def drain(self, timeout_seconds: float | None = None) -> bool:
        """Wait until nothing is left to do, half a minute by default; False if it takes longer."""
        seconds = _DRAIN_SECONDS if timeout_seconds is None else timeout_seconds
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, seconds)

    def _work(self) -> None:
        try:
            while self._delete_next():
                pass
        except BaseException:
            # Without a thread nothing would ever tell `drain`, and each save would wait for long.
            with self._changed:
                self._thread = None
                self._changed.notify_all()
            raise

    def _delete_next(self) -> bool:
        with self._changed:
            if not self._waiting:
                # Under the lock, so that `add` knows whether the thread runs.
                self._thread = None
                self._changed.notify_all()
                return False
            stores = self._waiting.popleft()
        self._delete(stores)
        return True

    def _delete(self, stores: Sequence[str]) -> None:
        roots = [join_path(self._path, store) for store in stores]
        try:
            self._delete_documents(roots)
            removals = [partial(self._files.remove_tree, root) for root in roots]
            run_all(removals, max(REMOVALS, self._files.lookups), 0)
        except OSError as error:
            logger.warning(
                "%s: %s could not be deleted; the next run tries again: %s",
                self._path,
                listed(stores, 3),
                error,
            )

    def _delete_documents(self, roots: Sequence[str]) -> None:
        """Delete root documents durably, so that no store opens with chunks missing."""
        changed = []

        def delete(root: str) -> None:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._files.remove_file(join_path(root, ROOT_DOCUMENT))
            # A process may have deleted it and died before that was durable.
            if self._files.is_taken(root):
                changed.append(root)

        with self._files.durable(self._path, (), changed):
            list(self._files.each(delete, roots))


def _seconds(time: str) -> float:
    """The time of an entry in Unix seconds; NaN if it is none."""
    try:
        return dt.datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError):
        return math.nan
