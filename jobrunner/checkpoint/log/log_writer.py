"""Appends a run's entries to the log, and notices when another run takes over."""

from __future__ import annotations

import datetime as dt
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, TypeVar

from jobrunner.checkpoint.log.entries import (
    FORMAT,
    ClaimEntry,
    LaterVersionError,
    LogEntry,
    PinEntry,
    RunEntry,
    UnpinEntry,
    entry_to_json,
    parse_entry,
)
from jobrunner.checkpoint.log.handler import FileMetadataHandler, MetadataHandler
from jobrunner.checkpoint.log.state import Claim, State
from jobrunner.checkpoint.storage import write_remedy
from jobrunner.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointWriteError,
    CommitConflictError,
)
from jobrunner.positions import Position
from jobrunner.texts import get_logger

logger = get_logger(__name__)

STATE_INTERVAL = 128
"""Entries after which a state is kept; with very many epochs, a 64th of their number."""

Kind = TypeVar("Kind", bound=LogEntry)


class ReplacedError(Exception):
    """The entry that was read last is no longer there: the log is another one, or older."""


class LogWriter:
    """Reads the log of `path`, and appends to it while this run holds the directory.

    Runs on the client. Each append takes the number after the last entry read. If that number is
    taken, the writer reads on: a ``run`` entry of another run ends this run's lock. `repairs`: a log
    that has lost entries can be read and written.
    """

    def __init__(self, handler: MetadataHandler, path: str, *, repairs: bool = False) -> None:
        self.handler = handler
        self.repairs = repairs
        self._path = path
        self._state: State | None = None
        self._run: str | None = None
        self._kept = -1  # the entry after which a state was kept last
        self._lock = threading.RLock()
        self._read = lru_cache(maxsize=16)(partial(read_entry, handler))

    # --- reading

    def refresh(self) -> State:
        """Read what was appended since the last call; returns the state. No log is an empty log.

        Raises CheckpointCorruptError if an entry is damaged or missing, and CheckpointError if the
        log cannot be read, or if the directory was replaced while this run holds it.
        """
        with self._lock:
            if self._state is None or self._read_on(self._state) is None:
                self._read.cache_clear()
                with self._reading():
                    self._state = read_state(self.handler)
            if self._state.is_unsure and not self.repairs:
                raise CheckpointCorruptError(
                    f"The log of {self._path} has lost entries, and its repair has not ended. Run "
                    f"`jobrunner fsck {self._path} --repair` again."
                )
            return self._state

    def _read_on(self, state: State) -> set[str] | None:
        """Read what was appended; returns the ids. None if the directory was replaced.

        Raises CheckpointError if it was replaced while this run holds it.
        """
        try:
            with self._reading():
                return read_on(self.handler, state)
        except ReplacedError as replaced:
            if self._run is None:
                return None
            raise CheckpointError(
                f"{self._path} was replaced while this run used it: expected entry {state.number} "
                f"of the log to be {state.last_id}, found {replaced.args[0] or 'no such entry'}. An "
                f"older copy may have been restored, or the storage may not be mounted. This run "
                f"writes nothing there until its own directory is back. Put it back, or start the "
                f"same command again to continue from what is there."
            ) from None

    def snapshot(self) -> State:
        """What the log says now, to be passed down; later entries do not change it."""
        with self._lock:
            return self.refresh().copy()

    def known(self) -> State:
        """The state as last read or written; reads only if there is none."""
        return self._state or self.refresh()

    def describe_recorded(self) -> str:
        """A sentence for a message of a failed write, if epochs are known to be recorded."""
        has_epochs = self._state is not None and self._state.recorded
        return "Earlier epochs are still recorded. " if has_epochs else ""

    def read_entry(self, number: int) -> LogEntry:
        """Read entry `number`, which must exist; from memory if it was one of the last read."""
        with self._reading():
            return self._read(number)

    def read_entries(self, *, is_strict: bool = False) -> Iterator[LogEntry]:
        """Iterate over all entries that are not damaged, in order; warns of others.

        Raises CheckpointCorruptError if all are damaged, or one contradicts those before it; with
        `is_strict` also if one is damaged or missing.
        """
        damage: CheckpointCorruptError | None = None
        state = State()
        with self._reading():
            for number, entry in each_entry(self.handler):
                if isinstance(entry, CheckpointCorruptError):
                    if is_strict:
                        raise entry
                    damage = damage or entry
                    continue
                if number > state.number + 1:
                    state.skip_to(number)
                state.apply(entry)
                yield entry
            if damage is not None and state.number < 0:
                raise damage
        if damage is not None:
            logger.warning(
                "%s: what damaged entries of the log said is missing: %s", self._path, damage
            )

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except LaterVersionError as error:
            raise LaterVersionError(f"{self._path}: {error}", path=error.path) from error
        except CheckpointCorruptError as error:
            text = str(error)
            if self._path not in text:
                text = f"{self._path}: {text}"
            raise CheckpointCorruptError(
                f"{text} Restore the entry from a copy, or run `jobrunner fsck "
                f"{self._path}` to see what can be proven without it and `jobrunner fsck "
                f"{self._path} --repair` to continue from that.",
                path=error.path,
            ) from error
        except (CheckpointError, ReplacedError):
            raise
        except Exception as error:
            raise CheckpointError(
                f"{self._path}: cannot read the log: {type(error).__name__}: {error}. Checkpoints "
                f"may exist, so nothing is done. Make the log readable and try again."
            ) from error

    # --- the fence

    def take(self, run: str, decide: Callable[[State], Mapping[str, Any]]) -> int:
        """Append a ``run`` entry and return its number: from then on this run holds the directory.

        `decide` gets the state and returns the entry's fields; it raises if the run that holds the
        directory must continue.
        """
        with self._lock:
            entry = self._append_decided(RunEntry, run, decide)
            assert entry is not None
            self._run = run
            return entry.number

    def append(self, kind: type[Kind], **fields: Any) -> Kind:
        """Append an entry of this run; it is durable afterwards.

        Raises CommitConflictError if another run has taken the directory over, and
        CheckpointWriteError if it is unknown whether the entry is in the log; the next `refresh`
        tells.
        """
        with self._lock:
            if self._run is None:
                raise CommitConflictError(
                    f"No run of this manager holds {self._path}: call run.start() first."
                )
            while True:
                self._held(self.known())
                entry = self._append(kind, self._run, fields)
                if entry is not None:
                    return entry

    def claim(self, upto: Position, names: Iterable[str]) -> Claim:
        """Append a ``claim``, by which stores up to `upto` may be written.

        `names` are those in the directory when the run took it. Raises like `append`.
        """
        with self._lock:
            state = self.known()
            strangers = state.strangers_among(names)
            highest = max([state.last_retry, *(retry for _, retry in strangers)])
            if self.repairs:
                highest = max(highest, state.number)  # each lost entry may have been a claim
            entry = self.append(ClaimEntry, upto=upto, retry=highest + 1, strangers=strangers)
            claim = self._held(self.known()).claim
            # If the reply to the append was lost, the writer has read on, maybe to the `run` and
            # `claim` of another run: this would be that one's, and so would the names.
            assert claim is not None
            assert claim.number == entry.number
            return claim

    def note(
        self,
        kind: type[PinEntry | UnpinEntry],
        decide: Callable[[State], Mapping[str, Any] | None],
    ) -> LogEntry | None:
        """Append a ``pin`` or ``unpin``, whichever run holds the directory; durable afterwards.

        `decide` gets the state and returns the entry's fields, or None to append nothing. It is
        called again whenever others append in between. Raises like `append`.
        """
        with self._lock:
            return self._append_decided(kind, self._run or uuid.uuid4().hex, decide)

    def leave(self) -> None:
        """Refuse further appends; appends nothing."""
        self._run = None

    def check_held(self) -> State:
        """Read on and return the state; raises CommitConflictError unless this run has the lock."""
        with self._lock:
            return self._held(self.refresh())

    def _held(self, state: State) -> State:
        holder = state.holder
        if holder is None or holder.run != self._run:
            by = "" if holder is None else f" ({holder})"
            raise CommitConflictError(
                f"Another run{by} has taken over {self._path}. This run must not write there any "
                f"more; the epochs that it recorded stay. Let the other run continue, or stop it "
                f"and start this one again."
            )
        return state

    def _append_decided(
        self, kind: type[Kind], run: str, decide: Callable[[State], Mapping[str, Any] | None]
    ) -> Kind | None:
        while True:
            state = self.refresh()
            number = state.number
            fields = decide(state)
            if fields is None:
                return None
            # It may have waited for a heartbeat, and read meanwhile what others appended: then it
            # decides anew. If others appended what nobody here has read, this entry's number is
            # taken: the append fails, reads on, and it decides anew, too.
            if self.known().number == number:
                entry = self._append(kind, run, fields)
                if entry is not None:
                    return entry

    def _append(self, kind: type[Kind], run: str, fields: Mapping[str, Any]) -> Kind | None:
        """Append an entry; None if its number was taken, and that entry is read now."""
        state = self.known()
        entry = self._make(kind, run, fields)
        tree = entry_to_json(entry)
        # Nothing is written that could not be read again.
        parse_entry(tree, f"New entry {entry.number}")
        state.check(entry)
        try:
            is_created = self.handler.append(tree)
        except Exception as error:
            raise CheckpointWriteError(
                f"{self._path}: cannot append entry {entry.number} ({entry.kind}) to the log: "
                f"{type(error).__name__}: {error}. {self.describe_recorded()}"
                f"{write_remedy(error, self._path)}"
            ) from error
        if is_created:
            logger.debug("%s: entry %d (%s) is in the log.", self._path, entry.number, entry.kind)
            state.apply(entry)
            self._keep_state(state)
            return entry
        ids = self._read_on(state)
        if ids is None:
            return None
        if not ids:
            raise CheckpointWriteError(
                f"{self._path}: the metadata handler {type(self.handler).__name__} refused entry "
                f"{entry.number} as taken, but returns no entry with that number. Test it with "
                f"jobrunner.testing.contracts."
            )
        # The number was taken. By this very entry, if the storage wrote it, lost the reply and tried
        # again by itself; else by another writer's, and the caller decides what that means.
        return entry if entry.id in ids else None

    def _make(self, kind: type[Kind], run: str, fields: Mapping[str, Any]) -> Kind:
        return make_entry(kind, self.known().number + 1, run, **fields)

    def _keep_state(self, state: State) -> None:
        handler = self.handler
        interval = max(STATE_INTERVAL, len(state.recorded) // 64)
        is_due = state.number >= self._kept + interval
        if not is_due or not isinstance(handler, FileMetadataHandler):
            return
        self._kept = state.number
        try:
            handler.keep_state(state.to_bytes())
        except Exception as error:
            # Reading takes longer without it, and nothing else.
            logger.warning("%s: the state of the log could not be kept: %s", self._path, error)


def make_entry(kind: type[Kind], number: int, run: str, **fields: Any) -> Kind:
    """Make an entry to append, with a new ``id``."""
    return kind(
        format=FORMAT,
        number=number,
        run=run,
        id=uuid.uuid4().hex,
        time=dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds"),
        **fields,
    )


def read_state(handler: MetadataHandler) -> State:
    """The state that a handler's log gives.

    Raises CheckpointCorruptError if an entry that is needed is damaged or missing.
    """
    last = handler.last_number()
    kept = None
    if isinstance(handler, FileMetadataHandler):
        kept = handler.state()
    if kept is not None:
        try:
            state = State.from_bytes(kept)
            read_on(handler, state, last)
            return state
        except (ValueError, RecursionError) as error:
            logger.warning("Reading the log without its state: %s", error)
        except ReplacedError:
            pass  # the state is of another log that was in this place, or of a part that is gone
    state = State()
    read_on(handler, state, last)
    return state


def read_on(handler: MetadataHandler, state: State, last: int = -1) -> set[str]:
    """Apply the entries after `state`, at least up to `last`, and return their ids.

    Raises ReplacedError if the entry that `state` has read last is no longer there. To look for it
    costs nothing: without it, the first request would be for an entry that does not exist.
    """
    ids: set[str] = set()
    trees = handler.entries(max(0, state.number))  # from the one that was read last
    if state.number >= 0:
        found_id = next(trees, {}).get("id")
        if found_id != state.last_id:
            raise ReplacedError(found_id)
    for number, tree in enumerate(trees, state.number + 1):
        entry = parse_entry(tree, _name(handler, number))
        state.apply(entry)
        ids.add(entry.id)
    if state.number < last:
        raise CheckpointCorruptError(
            f"{_name(handler, state.number + 1)} is missing, although entry {last} exists."
        )
    return ids


def read_entry(handler: MetadataHandler, number: int) -> LogEntry:
    """Read entry `number`; raises CheckpointCorruptError if it is missing or damaged."""
    if isinstance(handler, FileMetadataHandler):
        tree = handler.entry(number)
    else:
        tree = next(handler.entries(number), None)
    if tree is None:
        raise CheckpointCorruptError(f"{_name(handler, number)} is missing.")
    return parse_entry(tree, _name(handler, number))


def each_entry(
    handler: MetadataHandler,
) -> Iterator[tuple[int, LogEntry | CheckpointCorruptError]]:
    """Iterate over all entries with their numbers; yields errors for damaged ones."""
    last = handler.last_number()
    number = 0
    while number <= last:
        try:
            for tree in handler.entries(number):
                yield number, parse_entry(tree, _name(handler, number))
                number += 1
            if number <= last:
                yield number, CheckpointCorruptError(f"{_name(handler, number)} is missing.")
        except CheckpointCorruptError as error:
            yield number, error
        number += 1


def _name(handler: MetadataHandler, number: int) -> str:
    name = f"Entry {number} of the log"
    if isinstance(handler, FileMetadataHandler):
        name += f", {handler.path_of(number)},"
    return name
