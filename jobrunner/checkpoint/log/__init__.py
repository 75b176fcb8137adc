"""Which epochs exist."""

from __future__ import annotations

from jobrunner.checkpoint.log.entry_file import decode_entry, mend_bit, read_content
from jobrunner.checkpoint.log.handler import (
    ENTRY_NAME,
    LOG_DIRECTORY,
    TEMPORARY_NAME,
    FileMetadataHandler,
    MetadataHandler,
    each_entry,
    read_state,
)
from jobrunner.checkpoint.log.heartbeat import (
    HEARTBEAT,
    RUNS_DIRECTORY,
    Patience,
    is_known_dead,
    left_by_the_dead,
    own_process,
    refuse_if_alive,
)
from jobrunner.checkpoint.log.run_lock import Hold
from jobrunner.checkpoint.log.state import (
    RESTARTS,
    STATE_INTERVAL,
    Claim,
    Entry,
    State,
    commit_in,
    commits_in,
    given_up_by,
    loose_json,
    make_entry,
    moment_of,
    nodes_of,
    store_names,
    strict_json,
)
from jobrunner.checkpoint.log.writer import Journal, describe_holder

__all__ = [
    "ENTRY_NAME",
    "HEARTBEAT",
    "LOG_DIRECTORY",
    "RESTARTS",
    "RUNS_DIRECTORY",
    "STATE_INTERVAL",
    "TEMPORARY_NAME",
    "Claim",
    "Entry",
    "FileMetadataHandler",
    "Hold",
    "Journal",
    "MetadataHandler",
    "Patience",
    "State",
    "commit_in",
    "commits_in",
    "decode_entry",
    "describe_holder",
    "each_entry",
    "given_up_by",
    "is_known_dead",
    "left_by_the_dead",
    "loose_json",
    "make_entry",
    "mend_bit",
    "moment_of",
    "nodes_of",
    "own_process",
    "read_content",
    "read_state",
    "refuse_if_alive",
    "store_names",
    "strict_json",
]
