"""A run's hold on the log: reads it, appends to it, and notices when another run takes over."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from jobrunner.checkpoint.log.handler import (
    MetadataHandler,
    each_entry,
    read_entry,
    read_on,
    read_state,
)
from jobrunner.checkpoint.log.state import STATE_INTERVAL, Entry, State, make_entry
from jobrunner.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointWriteError,
    CommitConflictError,
)


class Journal:
    """Appends entries at the log's end, as long as this run holds the directory.

    Parameters
    ----------
    handler : MetadataHandler
    path : str
        The checkpoint directory, for messages.

    Notes
    -----
    Runs on the client. Each append goes to the number after the last that this journal has read.
    Whoever finds it taken reads on: an entry ``run`` by another means that this run is over.
    """

    def __init__(self, handler: MetadataHandler, path: str) -> None:
        self._handler = handler
        self._path = path
        self._state: State | None = None
        self._run: str | None = None
        self._lock = threading.RLock()

    def refresh(self) -> State:
        """What the log says now.

        Raises
        ------
        CheckpointCorruptError
            An entry is damaged or missing.
        CheckpointError
            The log cannot be read; only nothing there at all counts as an empty one.
        """
        with self._lock, self._reading():
            if self._state is None:
                self._state = read_state(self._handler)
            else:
                read_on(self._handler, self._state)
            return self._state

    def known(self) -> State:
        """What the log said when it was last read or appended to; reads only if it never was."""
        return self.refresh() if self._state is None else self._state

    def read_entry(self, number: int) -> Entry:
        """Entry `number`, which must exist."""
        with self._reading():
            return read_entry(self._handler, number)

    def read_entries(self) -> Iterator[Entry]:
        """All entries that can be read, in order, read as they are asked for."""
        with self._reading():
            for _, entry in each_entry(self._handler):
                if not isinstance(entry, CheckpointCorruptError):
                    yield entry

    def take(self, run: str, body: Mapping[str, Any], judge: Callable[[State], None]) -> int:
        """Take the directory for `run`.

        Parameters
        ----------
        run : str
        body : mapping
            Of the ``run`` entry.
        judge : callable
            Told the state, raises if whoever holds the directory must not be interrupted.

        Returns
        -------
        int
            Number of the ``run`` entry.

        Raises
        ------
        CheckpointWriteError
            The entry could not be appended.
        """
        with self._lock:
            while True:
                state = self.refresh()
                judged = state.number
                judge(state)
                # Judging may have taken a while.
                if self.refresh().number == judged and self._append_state_if_due(run):
                    entry = make_entry(self.known().number + 1, "run", run, body)
                    if self._append(entry):
                        self._run = run
                        return int(entry["number"])

    def append(self, kind: str, body: Mapping[str, Any]) -> Entry:
        """Append an entry of this run.

        Returns
        -------
        Entry
            As it is in the log, durably.

        Raises
        ------
        CommitConflictError
            Another run has taken the directory over, and nothing was appended.
        CheckpointWriteError
            It is not known whether the entry is there; the next `refresh` tells.
        """
        with self._lock:
            if self._run is None:
                raise CommitConflictError(
                    f"No run of this manager holds {self._path}: start_run comes first."
                )
            while True:
                self._check_held()
                if self._append_state_if_due(self._run):
                    entry = make_entry(self.known().number + 1, kind, self._run, body)
                    if self._append(entry):
                        return entry

    def note(self, kind: str, decide: Callable[[State], Mapping[str, Any] | None]) -> Entry | None:
        """Append an entry that needs no hold on the directory, whoever has it.

        Parameters
        ----------
        kind : "pin" or "unpin"
        decide : callable
            Told what the log says, gives the entry's body, or None where there is nothing to
            append; asked again whenever others' entries come in between.

        Returns
        -------
        Entry or None
            As it is in the log, durably.

        Raises
        ------
        CheckpointWriteError
            It is not known whether the entry is there; the next `refresh` tells.
        """
        run = self._run or uuid.uuid4().hex
        with self._lock:
            while (body := decide(self.refresh())) is not None:
                if self._append_state_if_due(run):
                    entry = make_entry(self.known().number + 1, kind, run, body)
                    if self._append(entry):
                        return entry
            return None

    def leave(self) -> None:
        """Hold the directory no longer; appends nothing."""
        self._run = None

    def check_held(self) -> State:
        """What the log says now, provided that this run still holds the directory."""
        with self._lock:
            self.refresh()
            self._check_held()
            return self.known()

    def _check_held(self) -> None:
        holder = self.known().run
        if holder is None or holder["run"] != self._run:
            by = "" if holder is None else f" ({describe_holder(holder)})"
            raise CommitConflictError(
                f"Another run{by} has taken {self._path} over from this one, which must not write "
                f"there any more. What this run had recorded stays; let the other one go on, or "
                f"stop it and run again."
            )

    def _append_state_if_due(self, run: str) -> bool:
        """Append a full state where one is due; False if others came in between."""
        state = self.known()
        if state.number < 0 or (state.number + 1) % STATE_INTERVAL:
            return True
        body = {"state": state.to_json()}
        return self._append(make_entry(state.number + 1, "state", run, body))

    def _append(self, entry: Entry) -> bool:
        """Whether `entry` is in the log now; if not, what is there instead has been read."""
        state = self.known()
        # Nothing is written that could not be read again.
        with_entry = state.after(entry)
        try:
            if entry["kind"] == "commit":
                created = self._handler.write(entry["epoch"], entry)
            else:
                created = self._handler.append(entry)
        except Exception as error:
            raise CheckpointWriteError(
                f"{self._path}: entry {entry['number']} ({entry['kind']}) could not be appended "
                f"to the log: {type(error).__name__}: {error}. What was recorded before still is; "
                f"mend the storage and run again."
            ) from error
        if created:
            self._state = with_entry
            return True
        with self._reading():
            found = read_on(self._handler, state)
        if not found:
            raise CheckpointWriteError(
                f"{self._path}: the metadata handler {type(self._handler).__name__} says that "
                f"entry {entry['number']} of the log is taken, and shows none. Try it with "
                f"jobrunner.testing.contracts."
            )
        # An append whose answer was lost finds its own entry.
        return any(other["id"] == entry["id"] for other in found)

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
                f"{self._path}: the log cannot be read: {type(error).__name__}: {error}. That is "
                f"not the same as no checkpoint: nothing is done before it can be read."
            ) from error


def describe_holder(run: Entry) -> str:
    """Who a ``run`` entry is by, for people."""
    process = run.get("process", {})
    return f"process {process.get('pid')} on {process.get('host')}, since {run['time']}"
