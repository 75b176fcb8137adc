"""Explains every object in a checkpoint directory from the log. Changes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from jobrunner.checkpoint.directory import Directory
from jobrunner.checkpoint.log import (
    RUNS_DIRECTORY,
    CommitEntry,
    FileMetadataHandler,
    State,
    each_entry,
    is_history_label,
    parse_file_name,
)
from jobrunner.checkpoint.maintenance.repair import reading
from jobrunner.checkpoint.storage import join_path
from jobrunner.checkpoint.store import HISTORIES
from jobrunner.errors import CheckpointCorruptError
from jobrunner.names import LOG_DIRECTORY, StoreName, parse_store_name
from jobrunner.positions import Position

Status = Literal["live", "pending", "aside", "stray", "damaged"]

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


def inspect_directory(directory: Directory) -> list[Finding]:
    """Explain every object in a checkpoint directory whose log is in files, in order of paths.

    Also runs while a run uses the directory. Looks at names and reads the log; `verify_record`
    reads the stores. Raises CheckpointError if the directory cannot be read.
    """
    with reading(directory):
        # List before the log is read: a store that a run claims in between is no stray.
        names = directory.files.list_names(directory.path)
        state = State()
        stores: dict[str, tuple[Position, int]] = {}
        findings = _inspect_log(directory, state, stores)
        for name in directory.files.list_names(join_path(directory.path, RUNS_DIRECTORY)):
            text = "Heartbeat of a run; once that has ended, the next run removes it."
            findings.append(Finding(f"{RUNS_DIRECTORY}/{name}", "pending", text))
        is_whole = not state.is_unsure and all(item.status != "damaged" for item in findings)
        for name in names:
            store = parse_store_name(name)
            if name in (LOG_DIRECTORY, RUNS_DIRECTORY):
                continue
            if name == HISTORIES and is_whole:
                findings += _inspect_histories(directory, state)
            elif store is None:
                findings.append(Finding(name, "stray", _UNKNOWN))
            elif is_whole:
                findings.append(_explain_store(directory, state, name, store))
            else:
                text = "The log is damaged, so nothing is known about this store. Repair it first."
                findings.append(Finding(name, "damaged", text))
        if is_whole:
            recorded = [
                name for name in stores if state.recorded.get(stores[name][0]) == stores[name][1]
            ]
            for name in set(recorded).difference(directory.find_whole(recorded)):
                at, _ = stores[name]
                text = f"Epoch {at} is recorded, but this store of it is missing, or cut."
                findings = [item for item in findings if item.path != name]
                findings.append(Finding(name, "damaged", text))
    return sorted(findings, key=lambda finding: finding.path)


def _inspect_log(
    directory: Directory, state: State, stores: dict[str, tuple[Position, int]]
) -> list[Finding]:
    """Explain the files of the log; apply the entries up to the first damaged one.

    `stores` gets the position and the entry of each store that they have recorded.
    """
    handler = FileMetadataHandler(directory.files)
    handler.set_params(directory.path, ())
    findings = []
    for name in directory.files.list_names(join_path(directory.path, LOG_DIRECTORY)):
        path = f"{LOG_DIRECTORY}/{name}"
        file = parse_file_name(name)
        if file is None:
            findings.append(Finding(path, "stray", _UNKNOWN))
        elif file.kind == "state":
            findings.append(Finding(path, "live", "The state of the log, for a quicker start."))
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
                state.apply(entry)
        except CheckpointCorruptError as error:
            is_whole = False
            text = (
                f"{error} Restore it from a copy, or run `jobrunner fsck {directory.path} "
                f"--repair`, which records what can be proven without it."
            )
            findings.append(Finding(path, "damaged", text))
            continue
        text = f"{entry.kind} of run {entry.run[:8]}, {entry.time}"
        findings.append(Finding(path, "live", text))
        if isinstance(entry, CommitEntry):
            for record in entry.records:
                for store in (record.stores or {}).values():
                    stores[store.name] = record.at, entry.number
    return findings


def _inspect_histories(directory: Directory, state: State) -> list[Finding]:
    """Explain the directories of histories; those of recorded epochs that are gone are damaged."""
    findings = []
    path = join_path(directory.path, HISTORIES)
    present = directory.files.list_directories(path)
    live: set[str] = set()
    aside: set[str] = set()
    for key, label in state.histories.items():
        (live if state.is_recorded(key) else aside).add(label)
    for label in sorted({*directory.files.list_names(path), *live}):
        name = join_path(HISTORIES, label)
        if not is_history_label(label):
            findings.append(Finding(name, "stray", _UNKNOWN))
        elif label in live and label not in present:
            text = "The histories of a recorded epoch: expected a directory, found none."
            findings.append(Finding(name, "damaged", text))
        elif label in live:
            findings.append(Finding(name, "live", "Histories of recorded epochs."))
        elif label in aside:
            findings.append(Finding(name, "aside", "Histories of epochs that were set aside."))
        else:
            text = "Histories of no recorded epoch: a run writes them, or a later one deletes them."
            findings.append(Finding(name, "pending", text))
    return findings


def _explain_store(directory: Directory, state: State, name: str, store: StoreName) -> Finding:
    at = store.epoch
    if state.is_recorded(store.key):
        return Finding(name, "live", f"Epoch {at} of node {store.node!r}.")
    if store.key in state.aside:
        text = "Set aside, when a run went back, or by a repair."
        if at not in state.recorded:
            text += f" To record it again, run `jobrunner restore {directory.path} {at}`."
        return Finding(name, "aside", text)
    if state.is_left_over(store):
        text = (
            f"Retired, or begun for epoch {at} and not recorded: a run is writing or deleting it, "
            f"or the next one deletes it."
        )
        return Finding(name, "pending", text)
    text = (
        "No entry of the log claims this name: another program made it, or the newest entries are "
        "lost. jobrunner does not touch it, and saves avoid its name."
    )
    return Finding(name, "stray", text)
