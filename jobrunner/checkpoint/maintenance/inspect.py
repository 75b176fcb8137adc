"""Explains every object in a checkpoint directory from the log. Changes nothing."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

from jobrunner.checkpoint.directory import Directory
from jobrunner.checkpoint.log import (
    RUNS_DIRECTORY,
    CommitEntry,
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
    parse_file_name,
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
_UNSURE = "The log is damaged, so nothing is known about this store. Repair the log first."


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


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A store that an entry has recorded, perhaps one of several of its epoch."""

    at: Position
    commit: int  # number of the last entry that records it
    store: Store


@dataclass(slots=True)
class _History:
    """All stores that the log has recorded, and what became of them."""

    state: State = field(default_factory=State)
    stores: dict[str, _Recorded] = field(default_factory=dict)
    """By the store's name."""
    ends: dict[tuple[Position, int], LogEntry] = field(default_factory=dict)
    """Epoch, and the number of an entry with its record -> the entry that made it count no more."""
    nodes: dict[int, list[str]] = field(default_factory=dict)
    """By the number of the ``run`` entry."""

    def take_in(self, entry: LogEntry) -> None:
        """Apply the next entry."""
        recorded = self.state.recorded
        touched = {*given_up_by(entry, recorded), *_recorded_by(entry)}
        former = {at: recorded[at] for at in touched if at in recorded}
        self.state.apply(entry)
        for at, commit in former.items():
            # An epoch that is pinned stays, whatever the entry retires.
            if recorded.get(at) != commit:
                self.ends[at, commit] = entry
        if isinstance(entry, RunEntry):
            self.nodes[entry.number] = entry.nodes
        if isinstance(entry, CommitEntry):
            for record in entry.records:
                for store in (record.stores or {}).values():
                    self.stores[store.name] = _Recorded(record.at, entry.number, store)

    def is_pending(self, store: StoreName) -> bool:
        """Whether an attempt may have left the store that a run has not cleaned up yet."""
        attempts = [*self.state.attempts]
        if self.state.attempt is not None:
            attempts.append(self.state.attempt)
        for attempt in attempts:
            nodes = self.nodes.get(attempt.run, ())
            if store.node in nodes and attempt.may_have_left(store.epoch, store.retry):
                return True
        return False

    def is_claimed(self, store: StoreName) -> bool:
        """Whether any attempt may have had this name."""
        is_node = any(store.node in nodes for nodes in self.nodes.values())
        return is_node and self.state.has_claimed(store.epoch, store.retry)


def inspect_directory(directory: Directory) -> list[Finding]:
    """Explain every object in a checkpoint directory whose log is in files, in order of paths.

    Also runs while a run uses the directory. Compares the sizes and documents of recorded stores
    with the record; only `Loader.verify` reads every byte. Raises CheckpointError if the directory
    cannot be read.
    """
    with reading(directory):
        return _inspect(directory)


def _inspect(directory: Directory) -> list[Finding]:
    findings: list[Finding] = []
    # List before the log is read: a store that a run claims in between is no stray.
    names = directory.files.list_names(directory.path)
    history = _History()
    is_whole = True
    for finding, entry in _inspect_log(directory):
        findings.append(finding)
        if entry is None:
            is_whole = is_whole and finding.status != "damaged"
        elif is_whole:
            try:
                history.take_in(entry)
            except CheckpointCorruptError as error:
                findings[-1] = Finding(finding.path, "damaged", str(error))
                is_whole = False
    is_whole = is_whole and not history.state.is_unsure
    stores: list[tuple[str, StoreName]] = []
    for name in names:
        store = parse_store_name(name)
        if name == RUNS_DIRECTORY:
            findings += _inspect_runs(directory, history.state)
        elif store is not None and is_whole:
            stores.append((name, store))
        elif store is not None:
            findings.append(Finding(name, "damaged", _UNSURE))
        elif name != LOG_DIRECTORY:
            findings.append(Finding(name, "stray", _UNKNOWN))

    def explain(named: tuple[str, StoreName]) -> list[Finding]:
        return list(_explain_store(directory, history, *named))

    findings += itertools.chain.from_iterable(directory.files.each(explain, stores))
    if is_whole:
        findings += _find_missing(history, {*names, *directory.files.list_names(directory.path)})
    return sorted(findings, key=lambda finding: finding.path)


def _inspect_log(directory: Directory) -> Iterator[tuple[Finding, LogEntry | None]]:
    handler = FileMetadataHandler(directory.files)
    handler.set_params(directory.path, ())
    numbers: set[int] = set()
    for name in directory.files.list_names(join_path(directory.path, LOG_DIRECTORY)):
        path = f"{LOG_DIRECTORY}/{name}"
        file = parse_file_name(name)
        if file is None:
            yield Finding(path, "stray", _UNKNOWN), None
        elif file.kind == "entry":
            numbers.add(file.number)
        elif file.kind == "state":
            yield Finding(path, "live", "A state of the log, for a quicker start."), None
        elif file.kind == "temporary":
            text = "A process is writing this file, or died doing so; a later run removes it."
            yield Finding(path, "pending", text), None
        else:
            text = "A damaged entry, as a repair found it. Nothing reads it."
            yield Finding(path, "aside", text), None
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
        value = getattr(entry, name, None)
        if value not in ("", None, []):
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
            text = "Heartbeat of an earlier run; the next run removes it."
        elif is_known_dead(holder.process, name):
            text = f"Heartbeat of the last run ({holder}), which is dead."
        else:
            text = f"Heartbeat of the run that holds the directory ({holder})."
        yield Finding(f"{RUNS_DIRECTORY}/{name}", "pending", text)


def _explain_store(
    directory: Directory, history: _History, name: str, store: StoreName
) -> Iterator[Finding]:
    state = history.state
    recorded = history.stores.get(name)
    if recorded is None:
        yield _explain_unrecorded(history, name, store)
        return
    at = recorded.at
    end = history.ends.get((at, recorded.commit))
    if end is None:
        yield from _inspect_recorded(directory, name, at, recorded.store)
        return
    text = _explain_end(at, end)
    if any((item.at, item.commit) == (at, recorded.commit) for item in state.given_up):
        yield Finding(name, "pending", f"{text} This run or the next deletes it.")
    elif isinstance(end, RewindEntry) or at in _recorded_by(end):
        advice = f"To record it again, run `jobrunner restore {directory.path} {at}`."
        if at in state.recorded:
            advice = f"Epoch {at} was recorded again since: nothing needs to be done."
        yield Finding(name, "aside", f"{text} {advice}")
    else:
        yield Finding(name, "stray", f"{text} It was deleted, but exists again. Remove it.")


def _recorded_by(entry: LogEntry) -> list[Position]:
    return [record.at for record in entry.records] if isinstance(entry, CommitEntry) else []


def _explain_unrecorded(history: _History, name: str, store: StoreName) -> Finding:
    if history.is_pending(store):
        return Finding(
            name,
            "pending",
            f"Begun for epoch {store.epoch} and not recorded: a run is writing it, or died doing "
            f"so, and the next run deletes it.",
        )
    if history.is_claimed(store):
        text = "Its save was abandoned. It was deleted, but exists again. Remove it."
        return Finding(name, "stray", text)
    return Finding(
        name,
        "stray",
        "No entry of the log claims this name: another program made it, or the newest entries are "
        "lost. jobrunner does not touch it, and saves avoid its name.",
    )


def _explain_end(at: Position, end: LogEntry) -> str:
    if at in _recorded_by(end):
        return f"Saved again by entry {end.number}."
    if not isinstance(end, RewindEntry):
        return f"Retired by the retention policy (entry {end.number})."
    reason = end.reason or "no reason given"
    return f"Set aside by entry {end.number}: {clip(reason.rstrip('.'), _LONGEST)}."


def _inspect_recorded(
    directory: Directory, name: str, epoch: Position, recorded: Store
) -> Iterator[Finding]:
    """Compare the files of a recorded store and their sizes with its document."""
    reader = StoreReader(directory.files, directory.path, name, recorded.sha256)
    try:
        document = reader.read_document()
        listed = {path: size for path, (size, _) in document.files().items()}
        for path, content in document.zarr_documents().items():
            listed[path] = len(content)
    except CheckpointError as error:
        yield Finding(name, "damaged", str(error))
        return
    sizes = dict(directory.files.walk(reader.root))
    is_damaged = False
    for path, expected in listed.items():
        size = sizes.pop(path, None)
        if size == expected:
            continue
        is_damaged = True
        content_text = f"{size} bytes"
        if size is None:
            content_text = "missing"
        elif size < 0:
            content_text = "no file"
        text = f"Part of recorded epoch {epoch}: expected {expected} bytes, found {content_text}."
        yield Finding(f"{name}/{path}", "damaged", text)
    sizes.pop(ROOT_DOCUMENT, None)
    for path in sizes:
        text = f"Not in the document of this store of epoch {epoch}. jobrunner never reads it."
        yield Finding(f"{name}/{path}", "stray", text)
    if not is_damaged:
        text = f"Epoch {epoch} of node {document.node!r}, {len(listed) + 1} files."
        yield Finding(name, "live", text)


def _find_missing(history: _History, names: Collection[str]) -> Iterator[Finding]:
    for name, recorded in history.stores.items():
        if name not in names and (recorded.at, recorded.commit) not in history.ends:
            text = f"Epoch {recorded.at} is recorded, but this store of it is missing."
            yield Finding(name, "damaged", text)
