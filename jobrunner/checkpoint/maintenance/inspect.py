"""Explains every object in a checkpoint directory from the log. Changes nothing."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET

from jobrunner.checkpoint.directory import Directory
from jobrunner.checkpoint.log import (
    RUNS_DIRECTORY,
    Attempt,
    CommitEntry,
    EndEntry,
    FileMetadataHandler,
    LogEntry,
    LostEntry,
    RewindEntry,
    RunEntry,
    State,
    Store,
    each_entry,
    given_up_by,
    is_known_dead,
)
from jobrunner.checkpoint.maintenance.repair import reading
from jobrunner.checkpoint.storage import join_path
from jobrunner.checkpoint.store import StoreReader
from jobrunner.errors import CheckpointCorruptError, CheckpointError
from jobrunner.json_output import with_json_positions
from jobrunner.names import LOG_DIRECTORY, ROOT_DOCUMENT, StoreName, parse_store_name
from jobrunner.positions import Position
from jobrunner.texts import clip

Status = Literal["live", "pending", "aside", "stray", "damaged"]

_LONGEST = 1000  # characters of what an entry says
_UNKNOWN = "Not a name that jobrunner uses."


@dataclass(frozen=True, slots=True)
class Finding:
    """One object in a directory, and why it is there."""

    path: str
    """Relative to the directory, with ``/``."""
    status: Status
    """``live``: part of the log or of a recorded checkpoint. ``pending``: a run uses it, or the
    next one removes it. ``aside``: not in use, but not deleted: a hidden store, or a damaged entry
    of the log that a later one replaces. ``stray``: no entry of the log claims it, and jobrunner
    never touches it. ``damaged``: missing, or not what was written."""
    explanation: str


@dataclass(slots=True)
class _Fate:
    """A store that an entry has recorded, and what became of it."""

    at: Position
    store: Store
    commit: int  # number of the entry that records it, or did last
    ended: LogEntry | None = None  # the entry by which it is not recorded any more


@dataclass(slots=True)
class _History:
    """All stores that the log names or may have left, and what became of each."""

    state: State = field(default_factory=State)
    fates: dict[str, _Fate] = field(default_factory=dict)
    """By the store's name."""
    by_epoch: dict[Position, list[_Fate]] = field(default_factory=dict)
    live: dict[Position, int] = field(default_factory=dict)
    """Recorded epoch -> number of the entry that records it."""
    attempts: dict[int, Attempt] = field(default_factory=dict)
    """All there were, by the number of their ``begin``, as they were last."""
    nodes: dict[int, list[str]] = field(default_factory=dict)
    """By the number of the ``run`` entry."""

    def take_in(self, entry: LogEntry) -> None:
        """Apply the next entry."""
        state = self.state
        touched = [*given_up_by(entry, self.live), *_recorded_by(entry)]
        state.apply(entry)
        for at in touched:
            # It may have been pinned, and then an entry that retires it has no effect.
            if state.recorded.get(at) != self.live.get(at):
                self.live.pop(at, None)
                for fate in self.by_epoch.get(at, ()):
                    fate.ended = fate.ended or entry
        if isinstance(entry, RunEntry):
            self.nodes[entry.number] = entry.nodes
        if isinstance(entry, CommitEntry):
            for record in entry.records:
                for store in (record.stores or {}).values():
                    fate = _Fate(record.at, store, entry.number)
                    self.fates[store.name] = fate
                    self.by_epoch.setdefault(record.at, []).append(fate)
                if record.at in state.recorded:
                    self.live[record.at] = entry.number
        if state.attempt is not None:
            self.attempts[state.attempt.number] = state.attempt
        elif isinstance(entry, EndEntry) and entry.upto is not None and self.attempts:
            # It gives names back that no worker was told to use.
            last = self.attempts[max(self.attempts)]
            upto = min(last.upto, entry.upto)
            self.attempts[last.number] = msgspec.structs.replace(last, upto=upto)

    def attempt_at(self, store: StoreName) -> Attempt | None:
        """The attempt that may have written a store with this name."""
        for attempt in self.attempts.values():
            is_named_so = store.retry == attempt.label_of(store.epoch)
            may_be = is_named_so and store.epoch <= attempt.upto
            if may_be and store.node in self.nodes.get(attempt.run, ()):
                return attempt
        return None


def inspect_directory(directory: Directory) -> list[Finding]:
    """Explain every object in a checkpoint directory whose log is in files, in order of paths.

    Also runs while a run uses the directory. Compares the sizes and documents of recorded stores
    with the record; only `Loader.verify` reads every byte. Raises CheckpointError if the directory
    cannot be read.
    """
    with reading(directory):
        return _inspect(directory)


def _inspect(directory: Directory) -> list[Finding]:
    found: list[Finding] = []
    # List before the log is read: a store that a run claims in between is no stray.
    names = directory.files.list_names(directory.path)
    history = _History()
    is_whole = True
    for finding, entry in _inspect_log(directory):
        found.append(finding)
        if entry is None:
            is_whole = is_whole and finding.status != "damaged"
        elif is_whole:
            try:
                history.take_in(entry)
            except CheckpointCorruptError as error:
                found[-1] = Finding(finding.path, "damaged", str(error))
                is_whole = False
    is_whole = is_whole and not history.state.is_unsure
    stores: list[tuple[str, StoreName]] = []
    for name in names:
        if name == LOG_DIRECTORY:
            continue
        if name == RUNS_DIRECTORY:
            found += _inspect_runs(directory, history.state)
        elif (store := parse_store_name(name)) is None:
            found.append(Finding(name, "stray", _UNKNOWN))
        elif not is_whole:
            why = "The log is damaged, so nothing is known about this store. Repair the log first."
            found.append(Finding(name, "damaged", why))
        else:
            stores.append((name, store))

    def explain(named: tuple[str, StoreName]) -> list[Finding]:
        return list(_explain_store(directory, history, *named))

    found += itertools.chain.from_iterable(directory.files.each(explain, stores))
    if is_whole:
        found += _find_missing(history, {*names, *directory.files.list_names(directory.path)})
    return sorted(found, key=lambda finding: finding.path)


def _inspect_log(directory: Directory) -> Iterator[tuple[Finding, LogEntry | None]]:
    handler = FileMetadataHandler(directory.files)
    handler.set_params(directory.path, ())
    numbers: set[int] = set()
    for name in directory.files.list_names(join_path(directory.path, LOG_DIRECTORY)):
        path = f"{LOG_DIRECTORY}/{name}"
        number = handler.number_in(name)
        if number is not None:
            numbers.add(number)
        elif handler.is_state(name):
            yield Finding(path, "live", "A state of the log, for a quicker start."), None
        elif handler.is_temporary(name):
            why = "A process is writing this file, or died doing so; a later run removes it."
            yield Finding(path, "pending", why), None
        elif name.endswith(".json.damaged"):
            why = "A damaged entry, as a repair found it. Nothing reads it."
            yield Finding(path, "aside", why), None
        else:
            yield Finding(path, "stray", _UNKNOWN), None
    try:
        handler.last_number()
    except CheckpointCorruptError as error:
        yield Finding(os.path.relpath(error.path, directory.path), "damaged", str(error)), None
        return
    for number, entry in each_entry(handler):
        path = f"{LOG_DIRECTORY}/{os.path.basename(handler.path_of(number))}"
        if isinstance(entry, CheckpointCorruptError):
            missing = f"Missing, although a later entry exists. {_advice(directory)}"
            yield Finding(path, "damaged", str(entry) if number in numbers else missing), None
        elif isinstance(entry, LostEntry):
            yield Finding(path, "live", "Stands for an entry that was lost."), entry
        else:
            yield Finding(path, "live", _explain_entry(entry)), entry


def _advice(directory: Directory) -> str:
    return (
        f"Restore it from a copy, or run `jobrunner fsck {directory.path} --repair`, which records "
        f"what can be proven without it."
    )


def _explain_entry(entry: LogEntry) -> str:
    words = [f"{entry.kind} of run {entry.run[:8]}, {entry.time}"]
    for name in ("epoch", "epochs", "retires", "upto", "after", "only", "reason", "label"):
        value = getattr(entry, name, UNSET)
        if value is not UNSET and value not in ("", None, []):
            text = json.dumps(with_json_positions(value))
            words.append(f"{name} {clip(text, _LONGEST)}")
    if isinstance(entry, CommitEntry):
        epochs = json.dumps([record.at.to_json() for record in entry.records])
        words.append(f"records {clip(epochs, _LONGEST)}")
    return ", ".join(words)


def _inspect_runs(directory: Directory, state: State) -> Iterator[Finding]:
    root = os.path.join(directory.path, RUNS_DIRECTORY)
    holder = state.holder
    for name in sorted(directory.files.list_names(root)):
        if holder is None or state.is_ended or name != holder.run:
            why = "Heartbeat of an earlier run; the next run removes it."
        elif is_known_dead(holder.process, name):
            why = f"Heartbeat of the last run ({holder}), which is dead."
        else:
            why = f"Heartbeat of the run that holds the directory ({holder})."
        yield Finding(f"{RUNS_DIRECTORY}/{name}", "pending", why)


def _explain_store(
    directory: Directory, history: _History, name: str, store: StoreName
) -> Iterator[Finding]:
    state, at = history.state, store.epoch
    fate = history.fates.get(name)
    if fate is None:
        yield _explain_unrecorded(history, name, store)
    elif fate.ended is None:
        yield from _inspect_recorded(directory, name, at, fate.store)
    elif any((item.at, item.commit) == (at, fate.commit) for item in state.given_up):
        why = f"{_explain_end(fate)} This run or the next deletes it."
        yield Finding(name, "pending", why)
    elif isinstance(fate.ended, RewindEntry) or at in _recorded_by(fate.ended):
        if at in state.recorded:
            way = f"Epoch {at} was recorded again since: nothing needs to be done."
        else:
            way = f"To record it again, run `jobrunner restore {directory.path} {at}`."
        yield Finding(name, "aside", f"{_explain_end(fate)} {way}")
    else:
        why = f"{_explain_end(fate)} It was deleted, but exists again. Remove it."
        yield Finding(name, "stray", why)


def _recorded_by(entry: LogEntry) -> list[Position]:
    return [record.at for record in entry.records] if isinstance(entry, CommitEntry) else []


def _explain_unrecorded(history: _History, name: str, store: StoreName) -> Finding:
    state = history.state
    attempt = history.attempt_at(store)
    if attempt is None:
        why = (
            "No entry of the log claims this name: another program made it, or the newest entries "
            "are lost. jobrunner does not touch it, and saves avoid its name."
        )
        return Finding(name, "stray", why)
    pending = [*state.attempts, *([state.attempt] if state.attempt is not None else [])]
    if attempt in pending:
        why = (
            f"Begun for epoch {store.epoch} and not recorded: a run is writing it, or died doing "
            f"so, and the next run deletes it."
        )
        return Finding(name, "pending", why)
    why = "Its save was abandoned. It was deleted, but exists again. Remove it."
    return Finding(name, "stray", why)


def _explain_end(fate: _Fate) -> str:
    entry = fate.ended
    assert entry is not None
    if fate.at in _recorded_by(entry):
        return f"Saved again by entry {entry.number}."
    if not isinstance(entry, RewindEntry):
        return f"Retired by the retention policy (entry {entry.number})."
    reason = entry.reason or "no reason given"
    return f"Set aside by entry {entry.number}: {clip(reason.rstrip('.'), _LONGEST)}."


def _inspect_recorded(
    directory: Directory, name: str, epoch: Position, about: Store
) -> Iterator[Finding]:
    """Compare the files of a recorded store and their sizes with its document."""
    reader = StoreReader(directory.files, directory.path, name, about.sha256)
    try:
        document = reader.read_document()
        listed = {path: size for path, (size, _) in document.files().items()}
        for path, content in document.zarr_documents().items():
            listed[path] = len(content)
    except CheckpointError as error:
        yield Finding(name, "damaged", str(error))
        return
    there = dict(directory.files.walk(reader.root))
    problems = 0
    for path, size in listed.items():
        found = there.pop(path, None)
        if found != size:
            problems += 1
            what = "missing" if found is None else "no file" if found < 0 else f"{found} bytes"
            why = f"Part of recorded epoch {epoch}: expected {size} bytes, found {what}."
            yield Finding(f"{name}/{path}", "damaged", why)
    there.pop(ROOT_DOCUMENT, None)
    for path in there:
        why = f"Not in the document of this store of epoch {epoch}. jobrunner never reads it."
        yield Finding(f"{name}/{path}", "stray", why)
    if not problems:
        why = f"Epoch {epoch} of node {document.node!r}, {len(listed) + 1} files."
        yield Finding(name, "live", why)


def _find_missing(history: _History, there: Collection[str]) -> Iterator[Finding]:
    for name, fate in history.fates.items():
        if fate.ended is None and name not in there:
            why = f"Epoch {fate.at} is recorded, but this store of it is missing."
            yield Finding(name, "damaged", why)
