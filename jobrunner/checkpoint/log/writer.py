"""Appends a run's entries to the log, and notices when another run takes over."""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from typing import Any

import msgspec

from jobrunner.checkpoint.log.entries import CommitEntry, LogEntry
from jobrunner.checkpoint.log.handler import (
    ReplacedError,
    each_entry,
    read_entry,
    read_on,
    read_state,
)
from jobrunner.checkpoint.log.protocol import MetadataHandler
from jobrunner.checkpoint.log.state import STATE_INTERVAL, State, entry_to_json, make_entry
from jobrunner.define import MOST_DIGITS
from jobrunner.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointWriteError,
    CommitConflictError,
)
from jobrunner.texts import get_logger

logger = get_logger(__name__)


class LogWriter:
    """Reads the log of `path`, and appends to it while this run holds the directory.

    Runs on the client. Each append takes the number after the last entry read. If that number is
    taken, the writer reads on: a ``run`` entry of another run ends this run's lock.
    """

    def __init__(self, handler: MetadataHandler, path: str) -> None:
        self._handler = handler
        self._path = path
        self._state: State | None = None
        self._run: str | None = None
        self._lock = threading.RLock()
        # A repair may have the records of many epochs.
        self._read = lru_cache(maxsize=8)(partial(read_entry, handler))

    def refresh(self) -> State:
        """Read what was appended since the last call; returns the state.

        Raises CheckpointCorruptError if an entry is damaged or missing, and CheckpointError if the
        log cannot be read, or if the directory was replaced while this run holds it. No log is an
        empty log.
        """
        with self._lock, self._reading():
            if self._state is not None:
                try:
                    read_on(self._handler, self._state, checks=True)
                except ReplacedError as replaced:
                    if self._run is not None:
                        raise self._replaced(self._state, replaced) from None
                    self._state = None
            if self._state is None:
                self._read.cache_clear()
                self._state = read_state(self._handler)
            return self._state

    def _replaced(self, state: State, replaced: ReplacedError) -> CheckpointError:
        found = "no such entry" if replaced.found is None else f"entry {replaced.found}"
        return CheckpointError(
            f"{self._path} was replaced while this run used it: expected entry {state.number} of "
            f"the log to be {state.last_id}, found {found}. An older copy may have been "
            f"restored, or the storage may not be mounted. This run writes nothing there until its own "
            f"directory is back. Put it back, or start the same command again to continue from what "
            f"is there."
        )

    def known(self) -> State:
        """The state as last read or written; reads only if there is none."""
        return self.refresh() if self._state is None else self._state

    def read_entry(self, number: int) -> LogEntry:
        """Read entry `number`, which must exist; from memory if it was one of the last read."""
        with self._reading():
            return self._read(number)

    def read_entries(self) -> Iterator[LogEntry]:
        """Iterate over all entries that are not damaged, in order; warns of others.

        Raises CheckpointCorruptError if all are damaged.
        """
        damaged: CheckpointCorruptError | None = None
        is_empty = True
        with self._reading():
            for _, entry in each_entry(self._handler):
                if isinstance(entry, CheckpointCorruptError):
                    damaged = damaged or entry
                else:
                    is_empty = False
                    yield entry
            if damaged and is_empty:
                raise damaged
        if damaged:
            logger.warning(
                "%s: what damaged entries of the log said is missing: %s", self._path, damaged
            )

    def take(self, run: str, body: Mapping[str, Any], judge: Callable[[State], None]) -> int:
        """Append a ``run`` entry and return its number.

        `judge` gets the state, and raises if the run that holds the directory must continue.
        """
        with self._lock:
            while True:
                state = self.refresh()
                judged = state.number
                judge(state)
                # Others may have appended meanwhile.
                if self.refresh().number == judged:
                    entry = self._try_append("run", run, body)
                    if entry is not None:
                        self._run = run
                        return entry.number

    def append(self, kind: str, body: Mapping[str, Any]) -> LogEntry:
        """Append an entry of this run; it is durable afterwards.

        Raises CommitConflictError if another run has taken the directory over, and
        CheckpointWriteError if it is unknown whether the entry is in the log; the next `refresh`
        tells.
        """
        with self._lock:
            if self._run is None:
                raise CommitConflictError(
                    f"No run of this manager holds {self._path}: call start_run first."
                )
            while True:
                self._held(self.known())
                entry = self._try_append(kind, self._run, body)
                if entry is not None:
                    return entry

    def note(
        self, kind: str, decide: Callable[[State], Mapping[str, Any] | None]
    ) -> LogEntry | None:
        """Append a ``pin`` or ``unpin``, whichever run holds the directory; durable afterwards.

        `decide` gets the state and returns the entry's body, or None to append nothing. It is
        called again whenever others append in between. Raises like `append`.
        """
        run = self._run or uuid.uuid4().hex
        with self._lock:
            while (body := decide(self.refresh())) is not None:
                entry = self._try_append(kind, run, body)
                if entry is not None:
                    return entry
            return None

    def leave(self) -> None:
        """Refuse further appends; appends nothing."""
        self._run = None

    def check_held(self) -> State:
        """Read on and return the state; raises CommitConflictError unless this run has the lock."""
        with self._lock:
            return self._held(self.refresh())

    def _held(self, state: State) -> State:
        holder = state.run
        if holder is None or holder.run != self._run:
            by = "" if holder is None else f" ({holder})"
            raise CommitConflictError(
                f"Another run{by} has taken over {self._path}. This run must not write there any "
                f"more; the epochs that it recorded stay. Let the other run continue, or stop it "
                f"and start this one again."
            )
        return state

    def _try_append(self, kind: str, run: str, body: Mapping[str, Any]) -> LogEntry | None:
        """Append an entry, after a full state if one is due; None if another took the number."""
        state = self.known()
        is_state_due = state.number >= 0 and (state.number + 1) % STATE_INTERVAL == 0
        if is_state_due and self._append("state", run, {"state": state.to_json()}) is None:
            return None
        return self._append(kind, run, body)

    def _make(self, kind: str, run: str, body: Mapping[str, Any]) -> LogEntry:
        return make_entry(self.known().number + 1, kind, run, body)

    def _append(self, kind: str, run: str, body: Mapping[str, Any]) -> LogEntry | None:
        """Append an entry; None if its number was taken, and that entry is read now."""
        state = self.known()
        entry = self._make(kind, run, body)
        with_entry = state.after(entry)  # raises before anything invalid is written
        tree = entry_to_json(entry)
        try:
            if isinstance(entry, CommitEntry):
                created = self._handler.write(entry.epoch.public, tree)
            else:
                created = self._handler.append(tree)
        except Exception as error:
            raise CheckpointWriteError(
                f"{self._path}: cannot append entry {entry.number} ({entry.kind}) to the log: "
                f"{type(error).__name__}: {error}. Earlier epochs are still recorded. Repair the "
                f"storage and run again."
            ) from error
        if created:
            self._state = with_entry
            return entry
        with self._reading():
            found = read_on(self._handler, state)
        if not found:
            raise CheckpointWriteError(
                f"{self._path}: the metadata handler {type(self._handler).__name__} refused entry "
                f"{entry.number} as taken, but returns no entry with that number. Test it with "
                f"jobrunner.testing.contracts."
            )
        # It may be this very entry, if the reply to an earlier try was lost.
        return entry if entry.id in found else None

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except CheckpointCorruptError as error:
            if self._path in str(error):
                raise
            raise CheckpointCorruptError(f"{self._path}: {error}", path=error.path) from error
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self._path}: cannot read the log: {type(error).__name__}: {error}. Checkpoints "
                f"may exist, so nothing is done. Make the log readable and try again."
            ) from error


_TAGS = {"$float", "$plain"}
_LARGEST = 10**MOST_DIGITS


def strict_json(value: Any) -> Any:
    """Encode NaN and infinities, which JSON does not have; raises ValueError for very long ints."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, int) and abs(value) >= _LARGEST:
        raise ValueError(f"an int has more than {MOST_DIGITS:,} digits")
    if isinstance(value, Mapping):
        plain = {key: strict_json(item) for key, item in value.items()}
        return {"$plain": plain} if len(plain) == 1 and plain.keys() <= _TAGS else plain
    if isinstance(value, list | tuple):
        return [strict_json(item) for item in value]
    return value


def loose_json(value: Any) -> Any:
    """Undo `strict_json`; returns a copy."""
    with suppress(ValueError, TypeError):  # of lone surrogates, and of what is no JSON
        if b'"$' not in msgspec.json.encode(value):
            return msgspec.to_builtins(value)  # much faster
    return _loosen(value)


def _loosen(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"$float"}:
            return float(str(value["$float"]))
        if value.keys() == {"$plain"}:
            value = value["$plain"]
        return {key: _loosen(item) for key, item in value.items()}
    return [_loosen(item) for item in value] if isinstance(value, list) else value
