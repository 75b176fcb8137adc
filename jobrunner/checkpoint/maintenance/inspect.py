"""Explains every object in a checkpoint directory from the log. Changes nothing."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jobrunner.checkpoint.commits import SAVE_REQUEST
from jobrunner.checkpoint.epochs import Epochs
from jobrunner.checkpoint.log import (
    ENTRY_NAME,
    LOG_DIRECTORY,
    RUNS_DIRECTORY,
    TEMPORARY_NAME,
    AnyEntry,
    BeginEntry,
    Claim,
    CommitEntry,
    GapEntry,
    RepairEntry,
    RetireEntry,
    RewindEntry,
    RunEntry,
    State,
    StateEntry,
    StoreRecord,
    commits_in,
    decode_entry,
    entry_to_json,
    given_up_by,
    is_known_dead,
    mend_bit,
    parse_entry,
)
from jobrunner.checkpoint.storage import Files
from jobrunner.checkpoint.store import MANIFEST, RETIRED_DOCUMENT, ROOT_DOCUMENT, StoreReader
from jobrunner.errors import CheckpointCorruptError, CheckpointError
from jobrunner.names import StoreName, parse_store_name

Status = Literal["live", "pending", "aside", "stray", "damaged"]

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
    ended: dict[Claim, AnyEntry] = field(default_factory=dict)
    recorded: dict[int, Claim] = field(default_factory=dict)
    commits: dict[Claim, CommitEntry] = field(default_factory=dict)
    run_nodes: list[str] = field(default_factory=list)

    def take_in(self, entry: AnyEntry) -> None:
        """Apply the next entry."""
        if isinstance(entry, CommitEntry) and entry.epoch in self.recorded:
            self._end(entry.epoch, entry)
        self.state.apply(entry)
        self.note(entry)
        if isinstance(entry, CommitEntry):
            self.recorded[entry.epoch] = Claim(entry.epoch, entry.retry)
        elif isinstance(entry, RetireEntry | RewindEntry):
            for epoch in given_up_by(entry, self.recorded):
                if epoch not in self.state.recorded:
                    self._end(epoch, entry)

    def note(self, entry: AnyEntry) -> None:
        """Note what an entry says by itself, in case entries before it are missing."""
        if isinstance(entry, RunEntry):
            self.run_nodes = entry.nodes
        elif isinstance(entry, BeginEntry):
            self.nodes[Claim(entry.epoch, entry.retry)] = set(self.run_nodes)
        for commit in commits_in(entry):
            claim = Claim(commit.epoch, commit.retry)
            self.commits[claim] = commit
            self.nodes[claim] = set(commit.stores)

    def restart(self, entry: AnyEntry) -> None:
        """Start again at a full state or a repair, because entries before it are missing."""
        self.state.restart(entry)
        self.note(entry)
        retries = self.state.retries
        self.recorded = {epoch: Claim(epoch, retries[epoch]) for epoch in self.state.recorded}

    def _end(self, epoch: int, entry: AnyEntry) -> None:
        self.ended[self.recorded.pop(epoch)] = entry


def inspect_directory(directory: Epochs) -> list[Finding]:
    """Explain every object in a checkpoint directory whose log is in files, in order of paths.

    Also runs while a run uses the directory. Compares the sizes and manifests of recorded stores
    with the record; only `Loader.verify` reads every byte. Raises only if the directory cannot be
    read.
    """
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
                history.restart(entry)
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
        found += _find_missing(history, [*names, *directory.files.list_names(directory.path)])
    return sorted(found, key=lambda finding: finding.path)


def _replaced_by(finding: Finding, entry: AnyEntry) -> Finding:
    if finding.status != "damaged":
        return finding
    why = f"Damaged or lost; entry {entry.number} replaces it. It stays as it is."
    return Finding(finding.path, "aside", why)


def _inspect_log(directory: Epochs) -> Iterator[tuple[Finding, AnyEntry | None]]:
    files, root = directory.files, os.path.join(directory.path, LOG_DIRECTORY)

    def path_of(number: int) -> str:
        return os.path.join(root, f"{number:010d}.json")

    numbers: list[int] = []
    for name in files.list_names(root):
        match = ENTRY_NAME.fullmatch(name)
        if match and name == os.path.basename(path_of(int(match[1]))):
            numbers.append(int(match[1]))
        elif TEMPORARY_NAME.fullmatch(name):
            why = "A process is writing this entry, or died doing so; a later run removes it."
            yield Finding(f"{LOG_DIRECTORY}/{name}", "pending", why), None
        else:
            yield Finding(f"{LOG_DIRECTORY}/{name}", "stray", _UNKNOWN), None
    for number, listed, data in _read_files(files, path_of, sorted(numbers)):
        path, full = f"{LOG_DIRECTORY}/{number:010d}.json", path_of(number)
        if data is None:
            why = f"Missing, like all before {listed:010d}.json. {_advice(directory)}"
            yield Finding(path, "damaged", why), None
            continue
        try:
            entry = parse_entry(decode_entry(data, number, full), full)
        except CheckpointCorruptError as error:
            mended = mend_bit(data)
            if mended is None:
                yield Finding(path, "damaged", str(error)), None
            else:
                why = "One bit is wrong; jobrunner corrects it when it reads the entry."
                entry = parse_entry(decode_entry(mended, number, full), full)
                yield Finding(path, "damaged", why), entry
            continue
        if isinstance(entry, GapEntry):
            why = f"Stands for an entry that was lost. {_advice(directory)}"
            yield Finding(path, "damaged", why), None
        else:
            yield Finding(path, "live", _explain_entry(entry)), entry


def _read_files(
    files: Files, path_of: Callable[[int], str], numbers: Sequence[int]
) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield each number, the next listed number from there on, and the content.

    Of successive missing entries yields only the first.
    """
    number = 0
    reads = files.each(files.read_if_there, map(path_of, numbers))
    for listed, data in zip(numbers, reads, strict=True):
        # An entry may have been written after the listing.
        while number < listed:
            found = files.read_if_there(path_of(number))
            yield number, listed, found
            number = listed if found is None else number + 1
        yield listed, listed, data
        number = listed + 1


def _advice(directory: Epochs) -> str:
    return (
        f"Restore it from a copy, or run `jobrunner fsck {directory.path} --repair`, which records "
        f"what can be proven without it."
    )


def _explain_entry(entry: AnyEntry) -> str:
    tree = entry_to_json(entry)
    words = [f"{entry.kind} of run {entry.run[:8]}, {entry.time}"]
    words += [
        f"{name} {json.dumps(tree[name])}"
        for name in ("epoch", "retry", "epochs", "after", "only", "reason", "label")
        if name in tree
    ]
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
    if history.recorded.get(claim.epoch) == claim:
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
        way = f"To record it again, run `jobrunner restore {directory.path} {claim.epoch}`."
        yield Finding(name, "aside", f"{_explain_end(ended)} {way}")
    else:
        why = f"{_explain_end(ended)} It was deleted, but exists again. Remove it."
        yield Finding(name, "stray", why)


def _explain_end(entry: AnyEntry | None) -> str:
    if entry is None:
        return "Its save was abandoned."
    if isinstance(entry, CommitEntry):
        return f"Saved again by entry {entry.number}."
    if isinstance(entry, RetireEntry):
        return f"Retired by the retention policy (entry {entry.number})."
    reason = getattr(entry, "reason", "") or "no reason given"
    return f"Set aside by entry {entry.number}: {reason.rstrip('.')}."


def _inspect_recorded(
    directory: Epochs, name: str, epoch: int, about: StoreRecord
) -> Iterator[Finding]:
    """Compare the files of a recorded store and their sizes with its manifest."""
    reader = StoreReader(directory.files, directory.path, name, about.manifest)
    try:
        manifest = reader.read_manifest()
        listed = manifest.files()
    except CheckpointError as error:
        yield Finding(name, "damaged", str(error))
        return
    expected = {path: size for path, (size, _) in listed.items()}
    there = dict(directory.files.walk(reader.root))
    problems = 0
    for path, size in expected.items():
        found = there.pop(path, None)
        if found != size:
            problems += 1
            what = "missing" if found is None else f"{found} bytes"
            why = f"Part of recorded epoch {epoch}: expected {size} bytes, found {what}."
            if found is None and path == ROOT_DOCUMENT and RETIRED_DOCUMENT in there:
                why = f"{why} It was renamed to {RETIRED_DOCUMENT}."
            yield Finding(f"{name}/{path}", "damaged", why)
    there.pop(MANIFEST, None)
    for path in there:
        why = f"Not in the manifest of this store of epoch {epoch}. jobrunner never reads it."
        yield Finding(f"{name}/{path}", "stray", why)
    if not problems:
        why = f"Epoch {epoch} of node {manifest.node!r}, {len(expected) + 1} files."
        yield Finding(name, "live", why)


def _find_missing(history: _History, there: Collection[str]) -> Iterator[Finding]:
    there = frozenset(there)
    for epoch, claim in history.recorded.items():
        stores = history.commits[claim].stores if claim in history.commits else {}
        for node, about in stores.items():
            if about.store not in there:
                why = f"Epoch {epoch} of node {node!r} is recorded, but its store is missing."
                yield Finding(about.store, "damaged", why)
