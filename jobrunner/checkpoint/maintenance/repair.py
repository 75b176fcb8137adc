"""Repairs a log that has lost entries, by an ordinary run that reconciles it with the stores.

A damaged entry is kept under another name, and `lost` takes its place. Then a run takes the
directory. Epochs whose stores are gone are set aside; epochs whose stores are complete, though no
entry that is left records them, are verified byte by byte and recorded. No store is touched.
"""

from __future__ import annotations

import uuid

from jobrunner.checkpoint.directory import Directory
from jobrunner.checkpoint.directory_run import writing
from jobrunner.checkpoint.log import (
    RUNS_DIRECTORY,
    CommitEntry,
    FileMetadataHandler,
    Holder,
    LogWriter,
    LostEntry,
    MetadataHandler,
    Patience,
    RewindEntry,
    entry_to_json,
    make_entry,
    read_beat,
    refuse_if_alive,
)
from jobrunner.checkpoint.maintenance.repair_plan import Planner, Repair, reading_storage
from jobrunner.checkpoint.manager import MultiNodeCheckpointManager
from jobrunner.checkpoint.storage import join_path
from jobrunner.errors import DefinitionError


def repair_log(directory: Directory, patience: Patience | None = None) -> Repair | None:
    """Repair a log; return what was done, None if nothing is necessary.

    Raises CommitConflictError if a run that is alive holds the directory or took it meanwhile, and
    CheckpointWriteError if the log cannot be written.
    """
    handler: MetadataHandler = directory.handler
    if not isinstance(handler, FileMetadataHandler):
        raise DefinitionError(
            f"The log of {directory.path} is stored by {type(handler).__name__}. Repair it where it "
            f"is stored."
        )
    with reading_storage(directory):
        planner = Planner(directory)
        repair = planner.plan()
        if repair is None:
            return None
        # Any `run` entry may be lost: whoever has a heartbeat may be alive.
        for name in directory.files.list_names(join_path(directory.path, RUNS_DIRECTORY)):
            process = read_beat(directory.files, directory.path, name).process
            if process.pid:
                refuse_if_alive(
                    directory.files,
                    directory.path,
                    Holder(0, name, process=process),
                    patience or Patience(),
                )
    run = uuid.uuid4().hex
    with writing(directory, "the log could not be repaired"):
        for number in repair.lost:
            handler.replace(entry_to_json(make_entry(LostEntry, number, run)))
    manager = MultiNodeCheckpointManager(directory.path, handler, files=directory.files)
    manager.run.patience = patience
    manager.directory.log = LogWriter(handler, directory.path, repairs=True)
    manager.run.start([], {"command": "fsck"})
    append = manager.retention.append_and_sweep
    try:
        for at, reason in repair.given_up.items():
            append(RewindEntry, only=at, reason=reason)
        for commit in repair.rebuilt.values():
            append(CommitEntry, claim=None, **commit)
        # Lost entries may have claimed any name that is there. This sets all stores aside that are
        # not recorded. It is the last entry but one: that nobody claims a name may be all that
        # shows the next repair, if this one dies, that the log had more.
        if planner.highest is not None:
            manager.directory.log.claim(planner.highest, planner.names)
    except BaseException:
        # Without an `end`, the log stays unsure, and the next repair begins anew.
        manager.run.leave()
        raise
    manager.run.end()
    directory.log = LogWriter(handler, directory.path)  # forgets what was lost
    directory.log.refresh()  # proves that it can be read
    return repair
