"""Retires epochs by policy, and deletes their stores and what failed saves have left.

First an entry of the log gives an epoch up. Then the `Sweeper` deletes its stores: root documents
first, durably, so that no store opens with chunks missing. A crash in between leaves stores that
count for nothing; the next run deletes them, because the log says that their names were used.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jobrunner.checkpoint.directory import Directory, EpochRecord
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
    is_histories_name,
    read_details,
)
from jobrunner.checkpoint.storage import REMOVALS, Files, join_path, run_all
from jobrunner.names import HISTORIES, ROOT_DOCUMENT, format_store_name, parse_store_name
from jobrunner.positions import Position
from jobrunner.texts import get_logger, listed

logger = get_logger(__name__)

_DRAIN_SECONDS = 30.0


class Retention:
    """Gives epochs up. Runs on the client; only the run that holds the directory may do it."""

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
        # Raises if another run has just taken over: the leftovers are then its own.
        self._directory.log.check_held()
        self.sweep(names)
        has_strangers = bool(self._directory.log.known().strangers_among(names))
        if HISTORIES in names and not has_strangers:
            self.sweep_histories()

    def sweep_histories(self) -> None:
        """Delete, in the background, the histories that no recorded or set-aside epoch has."""
        directory = self._directory
        # List first. Another run may take over at any moment, and make histories of its own: if it
        # came before the list, the log says so next, and nothing is deleted; if it comes later, its
        # histories are not in the list. The other way round, they would count as used by nobody.
        names = directory.files.list_directories(join_path(directory.path, HISTORIES))
        state = directory.log.check_held()
        if state.keeps_histories or state.strangers:
            return  # a lost entry may have had them, or stores that are not ours
        used = set(state.histories.values())
        for name in names:
            if is_histories_name(name) and name not in used:
                # First the documents of arrays: no reader sees one whose chunks are missing.
                root = join_path(HISTORIES, name)
                documents = directory.files.walk(join_path(directory.path, root))
                arrays = [path for path, _ in documents if path.endswith(ROOT_DOCUMENT)]
                self.sweeper.add([join_path(root, path.rpartition("/")[0]) for path in arrays])
                self.sweeper.add([root])

    def sweep(self, names: Iterable[str]) -> None:
        """Delete, in the background, those of these stores that count for nothing."""
        log = self._directory.log
        if log.repairs:
            return  # nobody knows what a lost entry said of a store
        stores = []
        for name in names:
            store = parse_store_name(name)
            if store is not None and log.known().is_left_over(store):
                stores.append(name)
        if stores:
            self.sweeper.add(stores)

    def append_and_sweep(self, kind: type[HolderEntry], **fields: Any) -> LogEntry:
        """Append an entry of the run; then delete, in the background, what it has retired."""
        log = self._directory.log
        state = log.known()
        epochs = fields.get("retires", fields.get("epochs", ()))
        retired = [(at, state.retries.get(at, 0)) for at in epochs if at in state.recorded]
        entry = log.append(kind, **fields)
        # It may have been pinned since the policy chose it: then it is recorded, and stays.
        nodes = log.known().nodes
        self.sweep(format_store_name(node, *key) for key in retired for node in nodes)
        return entry

    # --- what the policy says

    def choose(self, records: Sequence[Record]) -> list[Position]:
        """What the policy retires once `records` exist: recorded epochs, or some of these.

        An error of the policy is logged, and nothing is retired: the epochs are written, and what
        users' code does must not keep them from being recorded.
        """
        state = self._directory.log.known()
        positions = [*state.recorded, *(record.at for record in records)]
        has_steps = any(at.step for at in positions)
        if type(self.policy) is KeepAll and not has_steps:
            return []  # without a row for each of very many epochs
        try:
            rows = {row.at: row for row in self._saved_epochs(state)}
            for record in records:
                details = read_details(record.details)
                ended = details.ended or time.time()
                rows[record.at] = SavedEpoch(record.at, ended, details.metrics)
            return self._choose([rows[at] for at in sorted(rows)])
        except Exception as error:
            logger.warning(
                "%s: no epoch was retired after epoch %s: %s: %s",
                self._directory.path,
                records[-1].at,
                type(error).__name__,
                error,
            )
            return []

    def retirable(self) -> list[Position]:
        """The recorded epochs that the policy would retire now, in ascending order."""
        return self._choose(self._saved_epochs(self._directory.log.refresh()))

    def retire(self) -> list[Position]:
        """Retire the epochs that the policy does not keep, and return them in ascending order.

        Their stores are deleted in the background.
        """
        self._directory.log.check_held()
        retired = self.retirable()
        if retired:
            self.append_and_sweep(RetireEntry, epochs=retired)
        return retired

    def _choose(self, saved: Sequence[SavedEpoch]) -> list[Position]:
        """What the policy retires of these epochs, but for the newest and the one loaded last."""
        retired = {Position.of(at) for at in self.policy.retires(saved)}
        retired -= {self._directory.loaded, *(row.at for row in saved[-1:])}
        chosen = [row.at for row in saved if row.at in retired and not row.is_pinned]
        if chosen:
            self._warn_of_unreported(saved)
        return chosen

    def _saved_epochs(self, state: State) -> list[SavedEpoch]:
        """What the policy sees of the recorded epochs, in ascending order."""
        recorded = state.recorded
        if reads_records(self.policy):
            unread = [at for at, number in recorded.items() if (at, number) not in self._rows]
            for at, record in self._directory.records(unread, state):
                row = SavedEpoch(at)
                if isinstance(record, EpochRecord):
                    details = record.details
                    row = SavedEpoch(at, details.ended or math.nan, details.metrics)
                self._rows[at, recorded[at]] = row
        saved = []
        for at, number in recorded.items():
            row = self._rows.get((at, number), SavedEpoch(at))
            if at in state.pins:
                row = replace(row, is_pinned=True)
            saved.append(row)
        return saved

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


class Sweeper:
    """Deletes stores in a thread, after the log gave them up.

    Failures are logged, and the next run tries again. The thread ends when it has nothing to do.
    """

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path
        self._waiting: list[Sequence[str]] = []
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
        while True:
            with self._changed:
                if not self._waiting:
                    # Under the lock, so that `add` knows whether the thread runs.
                    self._thread = None
                    self._changed.notify_all()
                    return
                stores = self._waiting.pop(0)
            try:
                failures = self._delete(stores)
            except BaseException as error:  # without a thread, nothing would ever tell `drain`
                failures = dict.fromkeys(stores, error)
            if failures:
                logger.warning(
                    "%s: %s could not be deleted; the next run tries again: %s",
                    self._path,
                    listed(failures, 3),
                    next(iter(failures.values())),
                )

    def _delete(self, stores: Sequence[str]) -> dict[str, BaseException]:
        """Delete stores, and return which could not be deleted, and why."""
        # One sync of a file system may take long, so all stores share it. What hinders the deletion
        # of one store, such as its owner, hinders no other.
        failures: dict[str, BaseException] = {}
        changed = []

        def delete_document(store: str) -> None:
            root = join_path(self._path, store)
            try:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    self._files.remove_file(join_path(root, ROOT_DOCUMENT))
                # A process may have deleted it and died before that was durable.
                if self._files.is_taken(root):
                    changed.append(root)
            except OSError as error:
                failures[store] = error

        def delete_rest(store: str) -> None:
            try:
                self._files.remove_tree(join_path(self._path, store))
            except OSError as error:
                failures[store] = error

        with self._files.making_durable(self._path, (), changed):
            list(self._files.each(delete_document, stores))
        removals = [partial(delete_rest, store) for store in stores if store not in failures]
        run_all(removals, max(REMOVALS, self._files.lookups), 0)
        return failures
