"""Explains every object in a checkpoint directory from the log. Changes nothing."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from jobrunner.checkpoint.directory import Directory
from jobrunner.checkpoint.log import (
    RUNS_DIRECTORY,
    CommitEntry,
    FileMetadataHandler,
    LogEntry,
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
from jobrunner.json_output import to_json
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
    next one removes it. ``aside``: not in use, but not deleted: a store that was set aside, or a
    damaged entry that a repair has kept. ``stray``: no entry of the log claims it, and jobrunner
    never touches it. ``damaged``: missing, or not what was written."""
    explanation: str


@dataclass(frozen=True, slots=True)
class _RecordedStore:
    at: Position
    commit: int  # number of the last entry that records it
    store: Store


@dataclass(slots=True)
class _History:
    """What the log says of all stores that it has ever named."""

    state: State = field(default_factory=State)
    stores: dict[str, _RecordedStore] = field(default_factory=dict)
    """By the store's name."""
    rewinds: dict[tuple[Position, int], RewindEntry] = field(default_factory=dict)
    """Epoch, and the number of the entry with its record -> the entry that set it aside."""
    nodes: dict[int, list[str]] = field(default_factory=dict)
    """By the number of the ``run`` entry."""

    def take_in(self, entry: LogEntry) -> None:
        """Apply the next entry."""
        if isinstance(entry, RewindEntry):
            for at in given_up_by(entry, self.state.recorded):
                self.rewinds[at, self.state.recorded[at]] = entry
        self.state.apply(entry)
        if isinstance(entry, RunEntry):
            self.nodes[entry.number] = entry.nodes
        if isinstance(entry, CommitEntry):
            for record in entry.records:
                for store in (record.stores or {}).values():
                    self.stores[store.name] = _RecordedStore(record.at, entry.number, store)

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


def inspect_directory(directory: Directory) -> list[Finding]:
    """Explain every object in a checkpoint directory whose log is in files, in order of paths.

    Also runs while a run uses the directory. Compares the sizes and documents of recorded stores
    with the record; only `verify_record` reads every byte. Raises CheckpointError if the directory
    cannot be read.
    """
    with reading(directory):
        return sorted(_inspect(directory), key=lambda finding: finding.path)


def _inspect(directory: Directory) -> list[Finding]:
    # List before the log is read: a store that a run claims in between is no stray.
    names = directory.files.list_names(directory.path)
    history = _History()
    findings = _inspect_log(directory, history)
    is_whole = not history.state.is_unsure
    for finding in findings:
        is_whole = is_whole and finding.status != "damaged"
    stores: list[tuple[str, StoreName]] = []
    for name in names:
        store = parse_store_name(name)
        if name == RUNS_DIRECTORY:
            findings += _inspect_runs(directory, history.state)
        elif store is not None and is_whole:
            stores.append((name, store))
        elif store is not None:
            text = "The log is damaged, so nothing is known about this store. Repair the log first."
            findings.append(Finding(name, "damaged", text))
        elif name != LOG_DIRECTORY:
            findings.append(Finding(name, "stray", _UNKNOWN))

    def explain(named: tuple[str, StoreName]) -> list[Finding]:
        return _explain_store(directory, history, *named)

    findings += itertools.chain.from_iterable(directory.files.each(explain, stores))
    if is_whole:
        names += directory.files.list_names(directory.path)  # some may have been made since
        for name in history.stores.keys() - set(names):
            recorded = history.stores[name]
            if history.state.recorded.get(recorded.at) == recorded.commit:
                text = f"Epoch {recorded.at} is recorded, but this store of it is missing."
                findings.append(Finding(name, "damaged", text))
    return findings


def _inspect_log(directory: Directory, history: _History) -> list[Finding]:
    """Explain the files of the log, and take in the entries up to the first damaged one."""
    handler = FileMetadataHandler(directory.files)
    handler.set_params(directory.path, ())
    findings = []
    for name in directory.files.list_names(join_path(directory.path, LOG_DIRECTORY)):
        path = f"{LOG_DIRECTORY}/{name}"
        file = parse_file_name(name)
        if file is None:
            findings.append(Finding(path, "stray", _UNKNOWN))
        elif file.kind == "state":
            findings.append(Finding(path, "live", "A state of the log, for a quicker start."))
        elif file.kind == "temporary":
            text = "A process is writing this file, or died doing so; a later run removes it."
            findings.append(Finding(path, "pending", text))
        elif file.kind == "damaged":
            text = "A damaged entry, as a repair found it. Nothing reads it."
            findings.append(Finding(path, "aside", text))
    try:
        handler.last_number()
    except CheckpointCorruptError as error:
        path = os.path.relpath(error.path, directory.path)
        return [*findings, Finding(path, "damaged", str(error))]
    is_whole = True
    for number, entry in each_entry(handler):
        path = f"{LOG_DIRECTORY}/{os.path.basename(handler.path_of(number))}"
        try:
            if isinstance(entry, CheckpointCorruptError):
                raise entry
            if is_whole:
                history.take_in(entry)
            findings.append(Finding(path, "live", _describe_entry(entry)))
        except CheckpointCorruptError as error:
            is_whole = False
            text = (
                f"{error} Restore it from a copy, or run `jobrunner fsck {directory.path} "
                f"--repair`, which records what can be proven without it."
            )
            findings.append(Finding(path, "damaged", text))
    return findings


def _describe_entry(entry: LogEntry) -> str:
    words = [f"{entry.kind} of run {entry.run[:8]}, {entry.time}"]
    for name in ("epoch", "epochs", "retires", "upto", "after", "only", "reason", "label"):
        value = getattr(entry, name, None)
        if value not in ("", None, []):
            words.append(f"{name} {clip(json.dumps(to_json(value)), _LONGEST)}")
    if isinstance(entry, CommitEntry):
        epochs = json.dumps([record.at.to_json() for record in entry.records])
        words.append(f"records {clip(epochs, _LONGEST)}")
    return ", ".join(words)


def _inspect_runs(directory: Directory, state: State) -> Iterator[Finding]:
    holder = state.holder
    for name in directory.files.list_names(join_path(directory.path, RUNS_DIRECTORY)):
        if holder is None or state.is_ended or name != holder.run:
            text = "Heartbeat of an earlier run; the next run removes it."
        elif is_known_dead(holder.process, name):
            text = f"Heartbeat of the last run ({holder}), which is dead."
        else:
            text = f"Heartbeat of the run that holds the directory ({holder})."
        yield Finding(f"{RUNS_DIRECTORY}/{name}", "pending", text)


def _explain_store(
    directory: Directory, history: _History, name: str, store: StoreName
) -> list[Finding]:
    state, at = history.state, store.epoch
    recorded = history.stores.get(name)
    if recorded is None:
        return [_explain_unrecorded(history, name, store)]
    if state.recorded.get(at) == recorded.commit:
        return list(_inspect_recorded(directory, name, at, recorded.store))
    if any((item.at, item.commit) == (at, recorded.commit) for item in state.given_up):
        return [Finding(name, "pending", f"Epoch {at} was retired: a run deletes this store.")]
    if at in state.recorded:
        text = f"Epoch {at} was recorded again since: nothing needs to be done."
        return [Finding(name, "aside", text)]
    rewind = history.rewinds.get((at, recorded.commit))
    if rewind is None:
        text = f"Epoch {at} was retired, and this store deleted, but it exists again. Remove it."
        return [Finding(name, "stray", text)]
    reason = clip((rewind.reason or "no reason given").rstrip("."), _LONGEST)
    text = f"Set aside by entry {rewind.number}: {reason}. To record it again, run"
    return [Finding(name, "aside", f"{text} `jobrunner restore {directory.path} {at}`.")]


def _explain_unrecorded(history: _History, name: str, store: StoreName) -> Finding:
    if history.is_pending(store):
        text = (
            f"Begun for epoch {store.epoch} and not recorded: a run is writing it, or died doing "
            f"so, and the next run deletes it."
        )
        return Finding(name, "pending", text)
    is_node = any(store.node in nodes for nodes in history.nodes.values())
    if is_node and history.state.has_claimed(store.epoch, store.retry):
        text = "Its save was abandoned. It was deleted, but exists again. Remove it."
        return Finding(name, "stray", text)
    text = (
        "No entry of the log claims this name: another program made it, or the newest entries are "
        "lost. jobrunner does not touch it, and saves avoid its name."
    )
    return Finding(name, "stray", text)


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
    sizes.pop(ROOT_DOCUMENT, None)
    is_damaged = False
    for path, expected in listed.items():
        size = sizes.pop(path, None)
        if size == expected:
            continue
        is_damaged = True
        size_text = "missing" if size is None else f"{size} bytes"
        if size is not None and size < 0:
            size_text = "no file"
        text = f"Part of recorded epoch {epoch}: expected {expected} bytes, found {size_text}."
        yield Finding(f"{name}/{path}", "damaged", text)
    for path in sizes:
        text = f"Not in the document of this store of epoch {epoch}. jobrunner never reads it."
        yield Finding(f"{name}/{path}", "stray", text)
    if not is_damaged:
        text = f"Epoch {epoch} of node {document.node!r}, {len(listed) + 1} files."
        yield Finding(name, "live", text)
