"""Gives up epochs, retired by policy or set aside, and deletes or hides their stores."""

from __future__ import annotations

import datetime as dt
import math
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from jobrunner.checkpoint.epochs import Epochs
from jobrunner.checkpoint.keep_policies import (
    KeepAll,
    RetentionPolicy,
    SavedEpoch,
    find_unreported,
    needs_rows,
)
from jobrunner.checkpoint.log import (
    Claim,
    LogEntry,
    RunEntry,
    State,
    commit_in,
    store_names,
)
from jobrunner.checkpoint.storage import REMOVALS, Files, run_all
from jobrunner.checkpoint.store import RETIRED_DOCUMENT, ROOT_DOCUMENT
from jobrunner.errors import CheckpointError
from jobrunner.names import parse_store_name
from jobrunner.positions import Position
from jobrunner.texts import get_logger, printable

logger = get_logger(__name__)

_DRAIN_SECONDS = 30.0


class Retention:
    """Gives up epochs: first an entry of the log, then `sweeper` deletes or hides their stores.

    Runs on the client. Only the run that holds the directory may give up epochs.
    """

    def __init__(self, recorded: Epochs, policy: RetentionPolicy | None = None) -> None:
        self.policy = KeepAll() if policy is None else policy
        self.sweeper = Sweeper(recorded.files, recorded.path)
        self._recorded = recorded
        self._rows: dict[int, SavedEpoch] = {}  # by the number of the commit entry
        self._has_warned = False  # in this run

    def start_run(self) -> None:
        """Hide and delete the stores that earlier runs should have."""
        self._has_warned = False
        # `check_held` raises if another run has just taken over: the chores are then its own.
        chores = self._recorded.log.check_held().chores
        # Look for what exists: the log may name more stores than there are files in the world.
        there: dict[Claim, dict[str, str]] = defaultdict(dict)
        for name in self._recorded.files.list_names(self._recorded.path) if chores else ():
            if (store := parse_store_name(name)) is not None:
                there[Claim(store.epoch, store.retry)][store.node] = name
        nodes: dict[int, Collection[str]] = {}
        for claim, chore in chores.items():
            if claim not in there:
                self.sweeper.settle_removed(claim)
                continue
            own = self._find_nodes(claim, chore.source, nodes)
            if own is not None:
                stores = [name for node, name in there[claim].items() if node in own]
                self.sweeper.add(claim, chore.action, stores)

    def append(self, kind: str, body: Mapping[str, Any]) -> LogEntry:
        """Append an entry of the run, with the claims that are settled since the last one."""
        settled = [list(claim) for claim in self.sweeper.take_settled()]
        if settled:
            body = {**body, "settled": settled}
        return self._recorded.log.append(kind, body)

    def retirable(self) -> list[Position]:
        """The recorded epochs that the policy would retire now, in ascending order."""
        state = self._recorded.log.refresh()
        return self._choose(state, self.saved_epochs(state))

    def retire(self) -> list[Position]:
        """Retire the epochs that the policy does not keep, and return them in ascending order.

        Every commit does this. Their stores are deleted in the background.
        """
        is_simple = not self._recorded.log.known().recorded.has_positions
        if type(self.policy) is KeepAll and (self.policy.partial or is_simple):
            return []
        state = self._recorded.log.check_held()
        saved = self.saved_epochs(state)
        retired = self._choose(state, saved)
        if retired:
            self._warn_of_unreported(saved)
            self.give_up(state, retired, "retire", {"epochs": retired})
        return retired

    def give_up(
        self, state: State, epochs: Sequence[Position], kind: str, body: Mapping[str, Any]
    ) -> None:
        """Append the entry that gives up epochs, then hide or delete their stores."""
        named = list(self._recorded.files.each(partial(self.name_stores, state), epochs))
        self.append(kind, body)
        for claim, names in named:
            self.sweep(claim, names)

    def sweep(self, claim: Claim, stores: Sequence[str] | None) -> None:
        """Hide or delete stores that the log gives up; not if the epoch was pinned just before."""
        chore = self._recorded.log.known().chores.get(claim)
        if chore is not None and stores is not None:
            self.sweeper.add(claim, chore.action, stores)

    def name_stores(self, state: State, epoch: Position) -> tuple[Claim, list[str] | None]:
        """The claim of a recorded epoch, and the names of its stores; None if they are unknown."""
        claim = Claim(epoch, state.retries[epoch])
        nodes = self._find_nodes(claim, state.commit_number(epoch), {})
        return claim, None if nodes is None else list(store_names(nodes, *claim).values())

    def _find_nodes(
        self, claim: Claim, source: int, known: dict[int, Collection[str]]
    ) -> Collection[str] | None:
        """The nodes of a claim's stores; None if entry `source` does not name them.

        `known` are those of runs.
        """
        try:
            if source not in known:
                entry = self._recorded.log.read_entry(source)
                if not isinstance(entry, RunEntry):
                    return commit_in(entry, claim.epoch).stores
                known[source] = frozenset(entry.nodes)
            return known[source]
        except (CheckpointError, ValueError) as error:
            logger.warning(
                "%s: stores of epoch %s stay, because entry %d of the log does not name them: %s",
                self._recorded.path,
                claim.epoch,
                source,
                error,
            )
            return None

    def saved_epochs(self, state: State) -> list[SavedEpoch]:
        """What a policy sees of the recorded epochs, in ascending order."""
        recorded = state.recorded
        if needs_rows(self.policy):
            unread = [at for at, number in recorded.items() if number not in self._rows]
            # Many at once: requests to an object store take longer than all else.
            rows = self._recorded.files.each(partial(self._read_row, state), unread)
            for at, row in zip(unread, rows, strict=True):
                self._rows[recorded[at]] = row
        saved = []
        for at in sorted(recorded):
            row = self._rows.get(recorded[at], SavedEpoch(at))
            if at in state.pins:
                row = replace(row, is_pinned=True)
            saved.append(row)
        return saved

    def _choose(self, state: State, saved: Sequence[SavedEpoch]) -> list[Position]:
        kept = {state.latest, self._recorded.loaded, *state.pins}
        retired = {Position.of(at) for at in self.policy.retires(saved)}
        return sorted(at for at in retired - kept if at in state.recorded)

    def _read_row(self, state: State, at: Position) -> SavedEpoch:
        try:
            record = self._recorded.read_record(at, state.commit_number(at))
        except CheckpointError as error:
            path = self._recorded.path
            logger.warning("%s: the record of epoch %s cannot be read: %s", path, at, error)
            return SavedEpoch(at)
        metrics = record["details"].get("metrics", {})
        return SavedEpoch(at, _seconds(record["time"]), metrics)

    def _warn_of_unreported(self, saved: Sequence[SavedEpoch]) -> None:
        """Warn, once a run, if `KeepBest` keeps no epoch because none reported its metric."""
        names = find_unreported(self.policy, saved)
        if self._has_warned or not names:
            return
        self._has_warned = True
        logger.warning(
            "%s: no recorded epoch has reported %s, so KeepBest keeps none, and epochs that no "
            "other policy keeps are deleted. Reported: %s. Check the name of the metric.",
            self._recorded.path,
            " or ".join(map(repr, names)),
            name_reported(saved),
        )


Action = Literal["delete", "hide"]


class Sweeper:
    """Hides and deletes stores in a thread, one claim after another, after the log gave them up.

    A claim is settled once its stores are durably hidden or gone. Failures are logged, and the
    next run tries again. The thread ends when it has nothing to do.
    """

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path
        self._waiting: deque[tuple[Claim, Action, Sequence[str], bool]] = deque()
        self._removed: list[Claim] = []
        self._settled: list[Claim] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(
        self, claim: Claim, action: Action, stores: Sequence[str], *, is_final: bool = True
    ) -> None:
        """Hide, or hide and delete, the stores of a claim; settle it if `is_final`.

        It is not final while a slow worker may still write the stores.
        """
        with self._changed:
            self._waiting.append((claim, action, stores, is_final))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="jobrunner-sweeper", daemon=True
                )
                self._thread.start()

    def settle_removed(self, claim: Claim) -> None:
        """Settle a claim whose stores are gone, once that is durable."""
        with self._changed:
            self._removed.append(claim)

    def settle(self, claim: Claim) -> None:
        """Settle a claim whose stores were never written."""
        with self._changed:
            self._settled.append(claim)

    def confirm(self) -> None:
        """Make the last deletions durable; the sweep of each claim does so for those before."""
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
            self._settle_removed(removed)

    def take_settled(self) -> list[Claim]:
        """The claims that were settled since the last call."""
        with self._changed:
            settled, self._settled = self._settled, []
            return settled

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
            claim, action, stores, is_final = self._waiting.popleft()
            removed = list(self._removed)
        try:
            self._hide(stores, bool(removed))
            self._settle_removed(removed)
            if action == "delete":
                roots = [os.path.join(self._path, store) for store in stores]
                removals = [partial(self._files.remove_tree, root) for root in roots]
                run_all(removals, max(REMOVALS, self._files.lookups), 0)
        except OSError as error:
            logger.warning(
                "%s: stores of epoch %s could not be %s; the next run tries again: %s",
                self._path,
                claim.epoch,
                "deleted" if action == "delete" else "hidden",
                error,
            )
        else:
            if is_final:
                with self._changed:
                    (self._removed if action == "delete" else self._settled).append(claim)
        return True

    def _settle_removed(self, removed: Sequence[Claim]) -> None:
        done = set(removed)
        with self._changed:
            self._removed = [claim for claim in self._removed if claim not in done]
            self._settled += removed

    def _hide(self, stores: Sequence[str], has_removed: bool) -> None:
        """Hide stores durably, so that no store opens with chunks missing once files are deleted.

        Also makes earlier deletions durable.
        """
        changed = [self._path] if has_removed else []

        def hide(root: str) -> None:
            retired = os.path.join(root, RETIRED_DOCUMENT)
            try:
                self._files.rename(os.path.join(root, ROOT_DOCUMENT), retired)
            except (FileNotFoundError, NotADirectoryError):
                # A process may have renamed it and died before that was durable.
                if not self._files.is_taken(retired):
                    return
            changed.append(root)

        with self._files.durable(self._path, (), changed):
            list(self._files.each(hide, [os.path.join(self._path, store) for store in stores]))


def name_reported(saved: Sequence[SavedEpoch]) -> str:
    """The names of all metrics that recorded epochs have reported, for a message."""
    names = set[str]()
    for row in saved:
        names.update(row.metrics)
    return printable(", ".join(sorted(names)), kept="") or "none"


def _seconds(time: str) -> float:
    """The time of an entry in Unix seconds; NaN if it is none."""
    try:
        return dt.datetime.fromisoformat(time).timestamp()
    except (ValueError, OverflowError):
        return math.nan
