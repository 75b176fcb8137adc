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
    is_histories_name,
    parse_file_name,
)
from jobrunner.checkpoint.maintenance.repair_plan import reading_storage
from jobrunner.checkpoint.storage import join_path
from jobrunner.errors import CheckpointCorruptError
from jobrunner.names import HISTORIES, LOG_DIRECTORY, StoreName, parse_store_name
from jobrunner.positions import Position

FileStatus = Literal["live", "pending", "aside", "stray", "damaged"]

Explained = tuple[FileStatus, str]
"""Status and explanation."""

_UNKNOWN: Explained = ("stray", "Not a name that jobrunner uses.")
_LOG_FILES: dict[str, Explained] = {
    "state": ("live", "The state of the log, for a quicker start."),
    "temporary": (
        "pending",
        "A process is writing this file, or died doing so; a later run removes it.",
    ),
    "damaged": ("aside", "A damaged entry, as a repair found it. Nothing reads it."),
}
_HEARTBEAT: Explained = (
    "pending",
    "Heartbeat of a run; once that has ended, the next run removes it.",
)
_NO_LOG: Explained = (
    "damaged",
    "The log is damaged, so nothing is known about this store. Repair it first.",
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One object in a directory, and why it is there."""

    path: str
    """Relative to the directory, with ``/``."""
    status: FileStatus
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
    explanations: dict[str, Explained] = {}
    with reading_storage(directory):
        # List before the log is read: a store that a run claims in between is no stray.
        names = directory.files.list_names(directory.path)
        state, stores = _inspect_log(directory, explanations)
        statuses = {status for status, _ in explanations.values()}
        is_whole = not state.is_unsure and "damaged" not in statuses
        for name in directory.files.list_names(join_path(directory.path, RUNS_DIRECTORY)):
            explanations[f"{RUNS_DIRECTORY}/{name}"] = _HEARTBEAT
        for name in names:
            store = parse_store_name(name)
            if name in (LOG_DIRECTORY, RUNS_DIRECTORY):
                continue
            if name == HISTORIES and is_whole:
                explanations |= _inspect_histories(directory, state)
            elif store is None:
                explanations[name] = _UNKNOWN
            elif not is_whole:
                explanations[name] = _NO_LOG
            else:
                explanations[name] = _explain_store(directory, state, store)
        if is_whole:
            recorded = []
            for name, (at, number) in stores.items():
                if state.recorded.get(at) == number:
                    recorded.append(name)
            for name in set(recorded).difference(directory.find_whole(recorded)):
                at, _ = stores[name]
                text = f"Epoch {at} is recorded, but this store of it is missing, or cut."
                explanations[name] = "damaged", text
    return [Finding(path, status, text) for path, (status, text) in sorted(explanations.items())]


def _inspect_log(
    directory: Directory, explanations: dict[str, Explained]
) -> tuple[State, dict[str, tuple[Position, int]]]:
    """Explain the files of the log; apply the entries up to the first damaged one.

    Returns the state, and the position and entry of each store that they have recorded.
    """
    state = State()
    stores: dict[str, tuple[Position, int]] = {}
    handler = FileMetadataHandler(directory.files)
    handler.set_params(directory.path, ())
    for name in directory.files.list_names(join_path(directory.path, LOG_DIRECTORY)):
        file = parse_file_name(name)
        if file is None:
            explanations[f"{LOG_DIRECTORY}/{name}"] = _UNKNOWN
        elif file.kind != "entry":
            explanations[f"{LOG_DIRECTORY}/{name}"] = _LOG_FILES[file.kind]
    try:
        handler.last_number()
    except CheckpointCorruptError as error:
        explanations[os.path.relpath(error.path, directory.path)] = "damaged", str(error)
        return state, stores
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
            explanations[path] = "damaged", text
            continue
        explanations[path] = "live", f"{entry.kind} of run {entry.run[:8]}, {entry.time}"
        if isinstance(entry, CommitEntry):
            for record in entry.records:
                for store in record.all_stores.values():
                    stores[store.name] = record.at, entry.number
    return state, stores


def _inspect_histories(directory: Directory, state: State) -> dict[str, Explained]:
    """Explain the directories of histories; those of recorded epochs that are gone are damaged."""
    explanations: dict[str, Explained] = {}
    path = join_path(directory.path, HISTORIES)
    present = directory.files.list_directories(path)
    live: set[str] = set()
    aside: set[str] = set()
    for key, name in state.histories.items():
        if state.is_recorded(key):
            live.add(name)
        else:
            aside.add(name)
    for name in {*directory.files.list_names(path), *live}:
        status: FileStatus = "live"
        text = "Histories of recorded epochs."
        if not is_histories_name(name):
            status, text = _UNKNOWN
        elif name in live and name not in present:
            status = "damaged"
            text = "The histories of a recorded epoch: expected a directory, found none."
        elif name not in live and name in aside:
            status, text = "aside", "Histories of epochs that were set aside."
        elif name not in live:
            status = "pending"
            text = "Histories of no recorded epoch: a run writes them, or a later one deletes them."
        explanations[join_path(HISTORIES, name)] = status, text
    return explanations


def _explain_store(directory: Directory, state: State, store: StoreName) -> Explained:
    at = store.epoch
    if state.is_recorded(store.key):
        return "live", f"Epoch {at} of node {store.node!r}."
    if store.key in state.aside:
        text = "Set aside, when a run went back, or by a repair."
        if at not in state.recorded:
            text += f" To record it again, run `jobrunner restore {directory.path} {at}`."
        return "aside", text
    if state.is_left_over(store):
        return "pending", (
            f"Retired, or begun for epoch {at} and not recorded: a run is writing or deleting it, "
            f"or the next one deletes it."
        )
    return "stray", (
        "No entry of the log claims this name: another program made it, or the newest entries are "
        "lost. jobrunner does not touch it, and saves avoid its name."
    )
