"""Repairs a log that has lost entries: appends one entry with everything that can be proven.

Nothing else changes: damaged entries stay, and no store is touched.
"""

from __future__ import annotations

import os
import uuid

from jobrunner.checkpoint.epochs import Epochs
from jobrunner.checkpoint.log import (
    HEARTBEAT,
    RUNS_DIRECTORY,
    STATE_INTERVAL,
    EndEntry,
    FileMetadataHandler,
    Holder,
    LogEntry,
    Patience,
    RunEntry,
    entry_to_json,
    holder_of,
    is_left_behind,
    make_entry,
    own_process,
    read_process,
    refuse_if_alive,
)
from jobrunner.checkpoint.maintenance.repair_plan import Repair, file_handler, plan_repair, reading
from jobrunner.checkpoint.storage import Files
from jobrunner.errors import CheckpointWriteError, CommitConflictError


def repair_log(directory: Epochs, patience: Patience | None = None) -> Repair | None:
    """Append the entry from which the log can be read again; return None if none is necessary.

    Raises CommitConflictError if a run that is alive holds the directory or took it meanwhile, and
    CheckpointWriteError if the entry cannot be written.
    """
    repair = plan_repair(directory)
    if repair is None:
        return None
    handler = file_handler(directory)
    with reading(directory):
        _refuse_if_held(directory, repair, patience or Patience())
    run = uuid.uuid4().hex
    number = repair.last + 1
    for gap in (*repair.gaps, *([number] if number and number % STATE_INTERVAL == 0 else ())):
        _append(directory, handler, make_entry(gap, "gap", run, {}))
        number = max(number, gap + 1)
    body = {
        "state": repair.state.to_json(),
        "commits": [repair.commits[epoch] for epoch in repair.rebuilt],
        "lost": sorted(repair.lost),
        "process": own_process(),
    }
    _append(directory, handler, make_entry(number, "repair", run, body))
    directory.log.refresh()  # proves that it can be read
    return repair


def _append(directory: Epochs, handler: FileMetadataHandler, entry: LogEntry) -> None:
    try:
        is_ours = handler.append(entry_to_json(entry))
    except OSError as error:
        raise CheckpointWriteError(
            f"{directory.path}: the log could not be repaired: {type(error).__name__}: {error}. "
            f"Nothing else has changed. Repair the storage and try again."
        ) from error
    if not is_ours:
        raise CommitConflictError(
            f"{directory.path}: the log was not repaired, because another process wrote entry "
            f"{entry.number} in the meantime. Stop all runs there and try again."
        )


def _refuse_if_held(directory: Epochs, repair: Repair, patience: Patience) -> None:
    runs = {e.run: holder_of(e) for e in repair.entries.values() if isinstance(e, RunEntry)}
    ended = {entry.run for entry in repair.entries.values() if isinstance(entry, EndEntry)}
    last = max(runs.values(), key=lambda holder: holder.number, default=None)
    suspects = {} if last is None or last.run in ended else {last.run: last}
    root = os.path.join(directory.path, RUNS_DIRECTORY)
    for name in directory.files.list_names(root):
        if not is_left_behind(directory.files, os.path.join(root, name)):
            suspects[name] = runs.get(name) or _unknown_run(directory.files, root, name)
    for run in suspects.values():
        try:
            refuse_if_alive(directory.files, directory.path, run, patience)
        except CommitConflictError as error:
            raise CommitConflictError(
                f"The log of {directory.path} was not repaired, because a run that is alive holds "
                f"the directory: {run}. Stop it and try again."
            ) from error


def _unknown_run(files: Files, root: str, name: str) -> Holder:
    """A run whose entry is lost, as its heartbeat describes it."""
    path = os.path.join(root, name, HEARTBEAT)
    process = read_process(files.read(path) or b"")
    time = "an unknown time"
    return Holder(format=1, number=0, kind="run", run=name, id="", time=time, process=process)
