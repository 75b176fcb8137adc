"""Explains every object in a checkpoint directory from the log. Changes nothing."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

from msgspec import UNSET

from jobrunner.checkpoint.commits import SAVE_REQUEST
from jobrunner.checkpoint.epochs import Epochs
from jobrunner.checkpoint.log import (
    ENTRY_NAME,
    RUNS_DIRECTORY,
    TEMPORARY_NAME,
    BeginEntry,
    Claim,
    CommitEntry,
    FileMetadataHandler,
    GapEntry,
    LogEntry,
    RepairEntry,
    RetireEntry,
    RewindEntry,
    RunEntry,
    State,
    StateEntry,
    StoreRecord,
    commits_in,
    each_entry,
    given_up_by,
    is_known_dead,
)
from jobrunner.checkpoint.maintenance.repair_plan import reading
from jobrunner.checkpoint.store import (
    RETIRED_DOCUMENT,
    ROOT_DOCUMENT,
    StoreReader,
)
from jobrunner.errors import CheckpointCorruptError, CheckpointError
from jobrunner.json_output import with_json_positions
from jobrunner.names import LOG_DIRECTORY, StoreName, parse_store_name
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
class _History:
    """All claims of the log, and what became of each."""

    state: State = field(default_factory=State)
    nodes: dict[Claim, set[str]] = field(default_factory=dict)
    ended: dict[Claim, LogEntry] = field(default_factory=dict)
    commits: dict[Claim, CommitEntry] = field(default_factory=dict)
    run_nodes: list[str] = field(default_factory=list)

    def take_in(self, entry: LogEntry) -> None:
        """Apply the next entry."""
        epochs: Collection[Position] = ()
        if isinstance(entry, CommitEntry):
            epochs = [entry.epoch]
        elif isinstance(entry, RetireEntry | RewindEntry):
            epochs = given_up_by(entry, self.state.recorded)
        retries = self.state.retries
        claims = [Claim(epoch, retries[epoch]) for epoch in epochs if epoch in retries]
        self.state.apply(entry)
        self.note(entry)
        self.ended |= {claim: entry for claim in claims if not self.is_recorded(claim)}

    def is_recorded(self, claim: Claim) -> bool:
        return self.state.retries.get(claim.epoch) == claim.retry

    def note(self, entry: LogEntry) -> None:
        """Note what an entry says by itself, in case entries before it are missing."""
        if isinstance(entry, RunEntry):
            self.run_nodes = entry.nodes
        elif isinstance(entry, BeginEntry):
            self.nodes[Claim(entry.epoch, entry.retry)] = set(self.run_nodes)
        for commit in commits_in(entry):
            claim = Claim(commit.epoch, commit.retry)
            self.commits[claim] = commit
            self.nodes[claim] = set(commit.stores)


def inspect_directory(directory: Epochs) -> list[Finding]:
    """Explain every object in a checkpoint directory whose log is in files, in order of paths.

    Also runs while a run uses the directory. Compares the sizes and documents of recorded stores
    with the record; only `Loader.verify` reads every byte. Raises CheckpointError if the directory
    cannot be read.
    """
    with reading(directory):
        return _inspect(directory)


def _inspect(directory: Epochs) -> list[Finding]:
    found: list[Finding] = []
    # List before the log is read: a store that a run claims in between is no stray.
    names = directory.files.list_names(directory.path)
    history = _History()
    is_whole = True
    for finding, entry in _inspect_log(directory):
        found.append(finding)
        if entry is None:
            is_whole = is_whole and finding.status != "damaged"
            continue
        try:
            if isinstance(entry, RepairEntry) or (isinstance(entry, StateEntry) and not is_whole):
                history.state.restart(entry)
                history.note(entry)
                is_whole = True
                found = [_replaced_by(finding, entry) for finding in found]
            elif is_whole:
                history.take_in(entry)
            else:
                history.note(entry)
        except CheckpointCorruptError as error:
            found[-1] = Finding(finding.path, "damaged", str(error))
            is_whole = False
    stores: list[tuple[str, StoreName]] = []
    for name in names:
        if name == LOG_DIRECTORY:
            continue
        if name == RUNS_DIRECTORY:
            found += _inspect_runs(directory, history.state)
        elif name == SAVE_REQUEST:
            found.append(Finding(name, "pending", "Asks the run to save. The run removes it."))
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


def _replaced_by(finding: Finding, entry: LogEntry) -> Finding:
    if finding.status != "damaged":
        return finding
    why = f"Damaged or lost; entry {entry.number} replaces it. It stays as it is."
    return Finding(finding.path, "aside", why)


def _inspect_log(directory: Epochs) -> Iterator[tuple[Finding, LogEntry | None]]:
    handler = FileMetadataHandler(directory.files)
    handler.set_params(directory.path, ())
    numbers: set[int] = set()
    for name in directory.files.list_names(os.path.join(directory.path, LOG_DIRECTORY)):
        match = ENTRY_NAME.fullmatch(name)
        if match and name == os.path.basename(handler.path_of(int(match[1]))):
            numbers.add(int(match[1]))
        elif TEMPORARY_NAME.fullmatch(name):
            why = "A process is writing this entry, or died doing so; a later run removes it."
            yield Finding(f"{LOG_DIRECTORY}/{name}", "pending", why), None
        else:
            yield Finding(f"{LOG_DIRECTORY}/{name}", "stray", _UNKNOWN), None
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
        elif isinstance(entry, GapEntry):
            why = f"Stands for an entry that was lost. {_advice(directory)}"
            yield Finding(path, "damaged", why), None
        elif number in handler.mended:
            why = "One bit is wrong; jobrunner corrects it when it reads the entry."
            yield Finding(path, "damaged", why), entry
        else:
            yield Finding(path, "live", _explain_entry(entry)), entry


def _advice(directory: Epochs) -> str:
    return (
        f"Restore it from a copy, or run `jobrunner fsck {directory.path} --repair`, which records "
        f"what can be proven without it."
    )


def _explain_entry(entry: LogEntry) -> str:
    words = [f"{entry.kind} of run {entry.run[:8]}, {entry.time}"]
    for name in ("epoch", "retry", "epochs", "after", "only", "reason", "label"):
        value = getattr(entry, name, UNSET)
        if value is not UNSET and value != "":
            words.append(f"{name} {clip(json.dumps(with_json_positions(value)), _LONGEST)}")
    if isinstance(entry, CommitEntry) and entry.epoch.step:
        words.append(f"saved after step {entry.epoch.step}")
    return ", ".join(words)


def _inspect_runs(directory: Epochs, state: State) -> Iterator[Finding]:
    root = os.path.join(directory.path, RUNS_DIRECTORY)
    holder = state.run
    for name in sorted(directory.files.list_names(root)):
        if holder is None or state.is_ended or name != holder.run:
            why = "Heartbeat of an earlier run; the next run removes it."
        elif is_known_dead(holder.process, name):
            why = f"Heartbeat of the last run ({holder}), which is dead."
        else:
            why = f"Heartbeat of the run that holds the directory ({holder})."
        yield Finding(f"{RUNS_DIRECTORY}/{name}", "pending", why)


def _explain_store(
    directory: Epochs, history: _History, name: str, store: StoreName
) -> Iterator[Finding]:
    claim = Claim(store.epoch, store.retry)
    if store.node not in history.nodes.get(claim, ()):
        why = (
            "No entry of the log claims this name: another program made it, or the newest entries "
            "are lost. jobrunner does not touch it, and saves avoid its name."
        )
        yield Finding(name, "stray", why)
        return
    if history.is_recorded(claim):
        if claim not in history.commits:
            why = f"Epoch {claim.epoch} is recorded, but the entry with its record is lost."
            yield Finding(name, "damaged", f"{why} {_advice(directory)}")
            return
        about = history.commits[claim].stores[store.node]
        yield from _inspect_recorded(directory, name, claim.epoch, about)
        return
    chore = history.state.chores.get(claim)
    ended = history.ended.get(claim)
    if ended is None and chore is not None:
        why = (
            f"Begun for epoch {claim.epoch} and not recorded: a run is writing it, or died doing "
            f"so, and the next run deletes it."
        )
        yield Finding(name, "pending", why)
    elif chore is not None:
        doing = "deletes" if chore.action == "delete" else "hides"
        yield Finding(name, "pending", f"{_explain_end(ended)} This run or the next {doing} it.")
    elif isinstance(ended, RewindEntry) or directory.files.is_taken(
        os.path.join(directory.path, name, RETIRED_DOCUMENT)
    ):
        if claim.epoch in history.state.recorded:
            way = f"Epoch {claim.epoch} was recorded again since: nothing needs to be done."
        else:
            way = f"To record it again, run `jobrunner restore {directory.path} {claim.epoch}`."
        yield Finding(name, "aside", f"{_explain_end(ended)} {way}")
    else:
        why = f"{_explain_end(ended)} It was deleted, but exists again. Remove it."
        yield Finding(name, "stray", why)


def _explain_end(entry: LogEntry | None) -> str:
    if entry is None:
        return "Its save was abandoned."
    if isinstance(entry, CommitEntry):
        return f"Saved again by entry {entry.number}."
    if isinstance(entry, RetireEntry):
        return f"Retired by the retention policy (entry {entry.number})."
    reason = getattr(entry, "reason", "") or "no reason given"
    return f"Set aside by entry {entry.number}: {clip(reason.rstrip('.'), _LONGEST)}."


def _inspect_recorded(
    directory: Epochs, name: str, epoch: Position, about: StoreRecord
) -> Iterator[Finding]:
    """Compare the files of a recorded store and their sizes with its document."""
    reader = StoreReader(directory.files, directory.path, name, about.manifest)
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
    for claim, commit in history.commits.items():
        for node, about in commit.stores.items():
            if history.is_recorded(claim) and about.store not in there:
                why = f"Epoch {claim.epoch} of node {node!r} is recorded, but its store is missing."
                yield Finding(about.store, "damaged", why)
